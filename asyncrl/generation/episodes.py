"""Episodes: the samples of a group, as the engine saw them.

An episode is a sequence of nodes. A node has the tokens that the model sampled in one go, or tokens that it read: the
prompt, the output of a tool, the text of a template. The tokens of all nodes, one after another, are exactly the
sequence that the engine saw. Only sampled tokens are trained. An answer to a prompt is the smallest episode: a node
that is read and a node that is sampled.

An agent that goes back in its conversation makes an episode of several branches. Each branch is such a sequence. All of
them are in one row, one after the other. A token that several branches contain counts as sampled in the first one only.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, groupby, takewhile
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.buffer.records import VersionSpan
from asyncrl.common.version import Version
from asyncrl.config.schema import WIDTH_KEYS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, NO_VERSION
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.environments.agents import ToolFailure
from asyncrl.environments.scores import Score
from asyncrl.errors import HandshakeError
from asyncrl.generation.interfaces import Completion, PartialCompletion, Sampled, WideColumns


class Origin(StrEnum):
    """Where the tokens of a node come from: the model, the environment, or the chat template."""

    SAMPLED = "sampled"
    ENVIRONMENT = "environment"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Tokens that were added to an episode together. A sampled node has the log-prob (nats, as sampled) and the version
    of each token, and its entries in the columns of `Config.widths`; other nodes have none of these.

    Raises HandshakeError for other numbers of entries (docs/faults.md, F25).
    """

    origin: Origin
    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    versions: Sequence[Version] = ()
    wide: WideColumns = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        needed = len(self.token_ids) if self.sampled else 0
        for name, column in self.wide.items():
            if len(column) != needed:
                raise HandshakeError(
                    f"a node of {len(self.token_ids)} tokens ({self.origin}) has {len(column)} entries in the column "
                    f"{name}; every sampled token needs one entry, and no other token may have any"
                )
        if len(self.logprobs) != needed or len(self.versions) != needed:
            raise HandshakeError(
                f"a node of {len(self.token_ids)} tokens ({self.origin}) has {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions; every sampled token needs one log-prob and one version, and no other "
                "token may have any"
            )

    @classmethod
    def of(cls, completion: Completion) -> "Node":
        """Returns the node with what the model has sampled."""
        return cls(
            origin=Origin.SAMPLED,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            wide=completion.wide,
        )

    @property
    def sampled(self) -> bool:
        return self.origin is Origin.SAMPLED


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample of a group. `text` is what is scored. `truncated` is True if a length limit ended it. `forks` has the
    number of nodes before each branch but the first."""

    nodes: tuple[Node, ...]
    text: str
    truncated: bool
    forks: tuple[int, ...] = ()

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the whole sequence, or of all branches together."""
        return sum(len(node.token_ids) for node in self.nodes)

    @cached_property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first sampled one."""
        return sum(len(node.token_ids) for node in takewhile(lambda node: not node.sampled, self.nodes))

    @cached_property
    def sampled_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.sampled_nodes)

    @property
    def sampled_nodes(self) -> Iterator[Node]:
        return (node for node in self.nodes if node.sampled)

    @cached_property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The spans of consecutive sampled tokens that have the same version."""
        return version_spans(list(chain.from_iterable(node.versions for node in self.sampled_nodes)))


def single_turn(
    prompt_ids: Sequence[int], completion: Completion, *, widths: Mapping[str, int] = MappingProxyType({})
) -> Episode:
    """Returns the episode of one answer to a prompt. `widths` has the columns with several numbers for each token that
    the answer must have, and how many numbers. Raises HandshakeError if it does not have them (docs/faults.md, F25)."""
    for name, width in widths.items():
        found = completion.wide[name].shape[1] if name in completion.wide else "no"
        if found != width:
            raise HandshakeError(
                f"the engine returned a completion that has {found} numbers for each token in the column {name}; with "
                f"generator.{WIDTH_KEYS[name]} = {width} it must have {width}"
            )
    return Episode(
        nodes=(Node(origin=Origin.ENVIRONMENT, token_ids=prompt_ids), Node.of(completion)),
        text=completion.text,
        truncated=completion.truncated,
    )


def of_branches(branches: Sequence[Episode]) -> Episode:
    """Returns one episode of several branches. Its text is that of the last branch, and it is truncated if the last
    branch is."""
    ends = list(accumulate(len(branch.nodes) for branch in branches))
    return Episode(
        nodes=tuple(chain.from_iterable(branch.nodes for branch in branches)),
        text=branches[-1].text,
        truncated=branches[-1].truncated,
        forks=tuple(ends[:-1]),
    )


def version_spans(versions: Sequence[Version]) -> tuple[VersionSpan, ...]:
    """Returns the spans of consecutive sampled tokens that have the same version.

    >>> version_spans([Version(1, 2), Version(1, 2), Version(1, 3)])
    (VersionSpan(incarnation=1, step=2, tokens=2), VersionSpan(incarnation=1, step=3, tokens=1))
    """
    runs = ((version, len([*tokens])) for version, tokens in groupby(versions))
    return tuple(VersionSpan(version.incarnation, version.step, tokens) for version, tokens in runs)


def episode_rows(episodes: Sequence[Episode], *, branches: bool = False) -> BatchedDataDict:
    """Returns the rows of G episodes, of shape [G, S]: their tokens, padded on the right. The columns `Node.wide` are
    [G, S, K], if the sampled nodes have them. With `branches`, the numbers of the tokens' branches are a column too.

    Tokens that were not sampled have log-prob 0, version NO_VERSION, mask 0 and no support. So has padding. Raises
    HandshakeError if some sampled nodes lack a column of `Node.wide` that others have, or have another K.
    """
    lengths = np.array([episode.tokens for episode in episodes], dtype=np.int64)
    positions_S = np.arange(int(lengths.max(initial=0)))
    # A mask takes the tokens of all rows one after another, so that each column is written at once.
    within_GS = positions_S < lengths[:, None]
    nodes = [node for episode in episodes for node in episode.nodes]
    sampled_GS = np.zeros(within_GS.shape, dtype=bool)
    sampled_GS[within_GS] = np.repeat([node.sampled for node in nodes], [len(node.token_ids) for node in nodes])

    def column(
        fill: float, values: npt.NDArray[Any], dtype: npt.DTypeLike, *, places: npt.NDArray[np.bool_] = sampled_GS
    ) -> torch.Tensor:
        column_GS = np.full(within_GS.shape, fill, dtype=dtype)
        column_GS[places] = values
        return torch.from_numpy(column_GS)

    sampled = [node for node in nodes if node.sampled]
    spans = [span for episode in episodes for span in episode.version_spans]
    steps = np.repeat(*np.array([(span.step, span.tokens) for span in spans], dtype=np.int64).reshape(-1, 2).T)
    token_ids = _flat([node.token_ids for node in nodes], np.int64)
    rows = BatchedDataDict(
        input_ids=column(0, token_ids, np.int64, places=within_GS),
        weight_versions=column(NO_VERSION, steps, np.int64),
        generation_logprobs=column(0, _flat([node.logprobs for node in sampled], np.float32), np.float32),
        token_mask=torch.from_numpy(sampled_GS.astype(np.float32)),
        input_lengths=torch.from_numpy(lengths),
    )
    if branches:
        numbers = [sum(place >= fork for fork in each.forks) for each in episodes for place in range(len(each.nodes))]
        of_tokens = np.repeat(numbers, [len(node.token_ids) for node in nodes])
        rows[BRANCH] = column(NO_BRANCH, of_tokens, np.int32, places=within_GS)
    for name in dict.fromkeys(name for node in sampled for name in node.wide):
        of_nodes = [node.wide[name] for node in sampled if name in node.wide]
        widths = {node.wide[name].shape[1] if name in node.wide else 0 for node in sampled if len(node.token_ids)}
        if len(widths) > 1:
            raise HandshakeError(
                f"the engine returned completions of one group that have {' and '.join(map(str, sorted(widths)))} "
                f"numbers for each token in the column {name}; with generator.{WIDTH_KEYS[name]} all must have as many"
            )
        wide_GSK = np.full((*within_GS.shape, of_nodes[0].shape[1]), PAD_VALUES.get(name, 0), of_nodes[0].dtype)
        wide_GSK[sampled_GS] = np.concatenate(of_nodes)
        rows[name] = torch.from_numpy(wide_GSK)
    return rows


def _flat(rows: Sequence[Sequence[float]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns all numbers of the rows in one array. Each row is converted by itself, so that other threads can run
    between two rows."""
    return np.concatenate([np.array(row, dtype=dtype) for row in rows]) if rows else np.empty(0, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt to generate a group, which begins with the samples of `prefix`, if there are any.

    The rollout calls `on_progress` from time to time with what the group has so far, and `on_generated` when all tokens
    of the group are sampled. An agent begins anew, and gets the answers of `prefix` for equal calls. With an agent, the
    rollout calls `on_environment` with True when the engine has no call of the group any more, and with False when it
    has one again.

    With `greedy`, each sampled token must be the most probable one, and the tokens that are not are counted.
    """

    prefix: Sequence[PartialCompletion] = ()
    on_progress: Callable[[Sampled], None] | None = None
    on_generated: Callable[[], None] = lambda: None
    on_environment: Callable[[bool], None] = lambda waits: None
    greedy: bool = False


class AgentActivity(TypedDict):
    """The activity of a group's agents, as `GeneratorMetrics.agents` takes it: the number of calls of the model for
    each sample, the number of tool calls that the model made, how long each tool call took until the agent's next call
    (seconds), the forks by reason, and the tokens by origin."""

    turns: list[int]
    tool_calls: int
    tool_seconds: list[float]
    forks: dict[str, int]
    tokens: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The episodes of a group and their scores.

    `environment_s` (seconds) is the time that the scoring took. With agents, it is the time from the start of the
    sessions to their end, minus the longest time that one of the samples waited for the engine's answers.
    `continued_tokens` is the number of tokens that an earlier attempt sampled. `activity` is what the agents of the
    group did, if it has any. `tool_failures` are their failed calls of tools. `non_greedy_tokens` is the number of
    sampled tokens that were not the most probable ones; None if the attempt was not `greedy`.
    """

    episodes: list[Episode]
    scores: list[Score]
    environment_s: float
    continued_tokens: int = 0
    activity: AgentActivity | None = None
    tool_failures: tuple[ToolFailure, ...] = ()
    non_greedy_tokens: int | None = None
