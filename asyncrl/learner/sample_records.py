"""The records of samples: the numbers of each logged sample, and its texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from asyncrl.buffer.records import LeasedGroup
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config
from asyncrl.data.answer_text import AnswerText
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, NO_VERSION
from asyncrl.learner.records import SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Decodes token ids. `tokens` keeps the special tokens. The second argument of the others is the name of a part of
    `data.mixture`: `answer` returns a completion in the form in which the reward of this part gets it, and
    `last_answer` the last answer of an episode with tools in this form; None if the part has no `environment.tools`."""

    tokens: Callable[[Sequence[int]], str]
    answer: Callable[[Sequence[int], str], str]
    last_answer: Callable[[Sequence[int], str], str | None] = lambda token_ids, part: None

    @classmethod
    def of(cls, tokenizer: Any, config: Config) -> "Texts":
        """Returns the decoders of a run, from its tokenizer and its configuration."""
        text, parts = AnswerText(tokenizer, stops=config.generator.stop), part_configs(config)

        def answer(token_ids: Sequence[int], part: str) -> str:
            environment = parts[part].environment
            if environment.plays_agents:  # an episode has several turns, and tokens that the model read in between
                return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))
            return text(token_ids, special_tokens=environment.special_tokens)

        def last_answer(token_ids: Sequence[int], part: str) -> str | None:
            # The parser of tool calls needs the special tokens, so the reward gets those outside of tool calls too.
            return text(token_ids, special_tokens="keep") if parts[part].environment.has_tools else None

        return cls(
            tokens=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
            answer=answer,
            last_answer=last_answer,
        )


SAMPLE_COLUMNS = ("input_ids", "weight_versions", "token_mask", "sample_mask", "advantages")
"""The columns of rows that `sample_record` needs. It also reads `branch_ids` and the log-probs, if the rows have
them."""


def sample_record(
    leased: LeasedGroup,
    task: Task,
    rows: BatchedDataDict,
    *,
    step: int,
    row: int,
    sample: int,
    texts: Texts,
) -> SampleRecord:
    """Returns the full record of sample number `sample` of the group `leased`, whose task is `task`. The sample's data
    is row `row` of `rows`.

    `rows` needs `SAMPLE_COLUMNS`. When there is one advantage per token, the record keeps their mean over the
    completion. If the group's deadline was extended (`staleness.on_deadline: mask`), tokens older than its limit are
    not trained: the ranks mask them (`asyncrl.ranks.batching`). The record contains `generation_logprobs` and
    `prev_logprobs` when `rows` has these columns.
    """
    prompt, tokens = leased.meta.prompt_tokens, leased.meta.completion_tokens[sample]
    cut = slice(prompt, leased.meta.row_tokens[sample])
    advantage = rows["advantages"][row]
    if advantage.ndim:
        advantage = advantage[cut].sum() / max(tokens, 1)
    versions_S = rows["weight_versions"][row, cut]
    trained_S = (rows["token_mask"][row, cut] > 0) & (rows["sample_mask"][row] > 0)
    if leased.extended:
        trained_S &= versions_S >= step - leased.max_staleness_versions
    versions = versions_S.tolist()
    sampled = [version for version in versions if version != NO_VERSION]
    answered = turns(versions)
    last_S = rows["input_ids"][row, cut][-answered[-1][1] :] if answered and answered[-1][1] else []
    spans = tuple((version, len([*run])) for version, run in groupby(sampled))
    logprobs = {
        name: tuple(rows[name][row, cut].tolist()) for name in ("generation_logprobs", "prev_logprobs") if name in rows
    }
    return SampleRecord(
        step=step,
        group=leased.meta.group,
        row=task.row,
        part=task.part,
        prompt=task.prompt,
        metadata=task.metadata,
        rendered_prompt=texts.tokens(rows["input_ids"][row, :prompt].tolist()),
        completion=texts.answer(rows["input_ids"][row, cut].tolist(), task.part),
        tokens=tuple(texts.tokens([token]) for token in rows["input_ids"][row, cut].tolist()),
        answer=task.answer,
        reward=leased.meta.rewards[sample],
        components={name: values[sample] for name, values in leased.meta.components.items()},
        advantage=float(advantage),
        version_spans=spans,
        scored=texts.last_answer([int(token) for token in last_S], task.part),
        turns=answered if leased.meta.read_tokens else (),
        forks=forks(rows[BRANCH][row, cut]) if BRANCH in rows else (),
        trained_spans=tuple((trained, len([*run])) for trained, run in groupby(trained_S.tolist())),
        staleness_versions=step - min(sampled, default=step),
        truncated=leased.meta.truncated[sample],
        **logprobs,
    )


def forks(branch_ids_S: torch.Tensor) -> tuple[int, ...]:
    """Returns the indices of the tokens at which a branch of the episode begins, without the first branch.

    >>> forks(torch.tensor([0, 0, 1, 1]))
    (2,)
    """
    return tuple(((branch_ids_S.diff() != 0).nonzero().flatten() + 1).tolist())


def turns(versions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the turns of an episode after its prompt: pairs of the number of tokens that the model read (from a tool
    or a user), and the number of tokens that it then sampled. A token that was read has no version.

    >>> turns([3, 3, NO_VERSION, 4])
    ((0, 2), (1, 1))
    """
    found: list[tuple[int, int]] = []
    for sampled, run in groupby(version != NO_VERSION for version in versions):
        length = len([*run])
        if sampled and found and not found[-1][1]:
            found[-1] = (found[-1][0], length)
        else:
            found.append((0, length) if sampled else (length, 0))
    return tuple(found)
