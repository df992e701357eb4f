"""The engine interface that a rollout uses, and the interface of an engine pool that a synchronous loop uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from asyncrl.common.version import Version
from asyncrl.data.specs import GenerationDatumSpec, GenerationOutputSpec, verify_right_padding
from asyncrl.weights.manifest import Manifest, ReadBack
from asyncrl.weights.staging import StagedWeights

if TYPE_CHECKING:
    import ray

    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.metrics.vllm_counters import PromptTokens

__all__ = [
    "Completion",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "InferenceEngine",
    "LoadTimes",
    "PartialCompletion",
    "Sampled",
    "all_succeeded",
    "verify_right_padding",
]

WideColumns = Mapping[str, npt.NDArray[Any]]
"""The columns `asyncrl.data.specs.WIDE_FIELDS` of some sampled tokens, by name, [tokens, K]. A column is missing if the
run does not have it (`Config.widths`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCompletion:
    """The tokens of a completion so far.

    `token_ids`, `logprobs` (nats, as sampled) and `versions` have one entry for each token. `truncated` is True if the
    length limit has ended the completion; only a `finished` completion can be truncated. `wide` has several numbers for
    each token: the support with `generator.top_k`, and the most likely tokens with `generator.logprobs`.

    A sample of an agent has the tokens of all its answers one after another. `calls` has for each token the id of the
    call that it answers. `ends` has at the last token of an answer its state (1 not finished, 2 finished, 3 finished at
    the length limit), and 0 at the other tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    finished: bool = False
    truncated: bool = False
    wide: WideColumns = field(default_factory=dict, compare=False)
    calls: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def part(self, start: int, end: int, *, finished: bool, truncated: bool = False) -> PartialCompletion:
        """Returns the tokens from `start` to `end` as a completion of their own, without `calls` and `ends`."""
        return PartialCompletion(
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            versions=self.versions[start:end],
            finished=finished,
            truncated=truncated,
            wide={name: column[start:end] for name, column in self.wide.items()},
        )


def concatenated(parts: Iterable[WideColumns]) -> WideColumns:
    """Joins the columns of the parts of a completion, in order. A part may lack a column only if it has no tokens, or
    if the run does not have the column."""
    found: dict[str, list[npt.NDArray[Any]]] = {}
    for part in parts:
        for name, column in part.items():
            found.setdefault(name, []).append(column)
    return {name: np.concatenate(columns) for name, columns in found.items()}


NOTHING = PartialCompletion(token_ids=[], logprobs=[], versions=[])
"""A completion without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(PartialCompletion):
    """One sampled continuation of a prompt, which is finished. An engine returns `text` without special tokens. A
    rollout adds them with `environment.special_tokens: keep`. `non_greedy_tokens` is the number of its tokens that were
    not the most probable ones; None if they were not counted."""

    text: str
    truncated: bool  # without a default, so that every engine has to set it
    finished: bool = True
    non_greedy_tokens: int | None = None


class Sampled(Protocol):
    """The tokens that an engine has sampled so far of the completions of one call."""

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each completion so far, including those of its prefix."""
        ...

    def partial(self) -> list[PartialCompletion] | None:
        """Returns a copy of all completions as they are now. Returns None if the engine does not know a completion yet,
        or has ended one and not reported it yet: the versions of its tokens are then unknown. Try again later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds that one weight update took to pause generation, to load the weights, and to resume generation."""

    pause_s: float
    load_s: float
    resume_s: float


class InferenceEngine(Protocol):
    """An engine whose weights can be replaced between two decoding steps."""

    @property
    def prompt_tokens(self) -> PromptTokens:
        """The number of prompt tokens of all requests so far, and of those that came from the prefix cache."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        seed: int | None,
        temperature: float,
        max_tokens: int,
        stop: Sequence[str] = (),
        prefix: Sequence[PartialCompletion] = (),
        on_progress: Callable[[Sampled], None] | None = None,
        count_non_greedy: bool = False,
    ) -> list[Completion]:
        """Returns n completions of one prompt, its children. Child i samples with seed + i; with None, from random
        numbers of the engine. Temperature 0 is greedy, and `seed` must be None then. Other temperatures sample with
        `generator.top_k`, `top_p` and `min_p`, and completions have the columns of `Config.widths`.

        A completion ends when its text contains one of `stop` or of `generator.stop`. The tokens of the stop string
        are the last tokens of the completion. The engine calls `on_progress` from time to time with what it has sampled
        so far. Cancelling the call ends its requests in the engine.

        With a `prefix`, which has one entry for each child, the completions begin with its tokens and keep their
        log-probs and versions. A child with a finished entry is complete; any other samples with the seed of
        `asyncrl.generation.prefixes.seed_of`. `max_tokens` includes the prefix.

        With `count_non_greedy`, completions have their `non_greedy_tokens`, without those of a prefix. At temperature 0
        this number must be 0.
        """
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns the log-probs of tokens[1:] given their prefixes, at temperature 1, under the current weights only:
        no KV cache of earlier weights is used."""
        ...

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        """Applies a whole version, which is staged and verified, between two decoding steps, and labels every later
        token with it. If the version is an adapter (`model.lora`), generation does not pause: running requests keep
        their adapter and its label, and later ones have the new one.

        Calls `on_paused` when the current decoding step has ended and generation has paused, or before the first
        request may begin with a new adapter. Raises TornReplica when the update fails after it has begun: then the
        engine stays paused until a later `load` succeeds.
        """
        ...

    async def read_back(self, manifest: Manifest, staged: StagedWeights) -> ReadBack:
        """Compares samples of the live parameters with the bytes of the version that was loaded last, which are still
        staged. Compares nothing if the version is an adapter."""
        ...

    async def abort(self) -> None:
        """Ends every running request."""
        ...

    async def died(self) -> str:
        """Waits until the engine has died. Returns the cause."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine and every process that it started."""
        ...


def all_succeeded(answers: Iterable[object]) -> bool:
    """Returns True if there is at least one answer and every answer is True. None does not count as success.

    >>> all_succeeded([True, True]), all_succeeded([True, None]), all_succeeded([])
    (True, False, False)
    """
    found = list(answers)
    return bool(found) and all(answer is True for answer in found)


class GenerationInterface(ABC):
    """A pool of engines that continue prompts and take weights from a `ColocatablePolicyInterface`.

    Calls block, except those that return references. A method that returns a bool returns True if there is at least one
    engine and every engine has succeeded. An engine whose last update is incomplete raises TornReplica instead of
    generating, until a whole update has been applied.
    """

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int | None = None
    ) -> list[ray.ObjectRef[bool]]:
        """Lets every engine join the process group at `ip`:`port`, with ranks after the `train_world_size` training
        ranks. Returns at once. The references are ready when all ranks have joined; they raise CollectiveError after
        `weights.load_timeout_s`."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Continues the rows of a `GenerationDatumSpec` and returns a `GenerationOutputSpec` in the same order. Raises
        ValueError if the rows are not right-padded."""

    @abstractmethod
    def generate_async(
        self, data: BatchedDataDict, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict], None]:
        """Yields (index of a row, its output as a batch of one row) as rows finish. Closing the iterator aborts the
        rows that have not finished."""

    @abstractmethod
    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Brings weights ("weights"), KV cache ("kv_cache") or both (None) back to the engines' devices. The tag
        "weights" also discards an incomplete update by shared memory: the next group of tensors begins a new one."""

    @abstractmethod
    def finish_generation(self) -> bool:
        """Frees the engines' devices for training, as far as the platform can, and drops the KV caches."""

    @abstractmethod
    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> bool:
        """Compares the parameters that the policy's `prepare_refit_info` lists with those of the engines' model. Call
        it once, before the first transfer. Raises ManifestMismatch when a name, shape or dtype differs."""

    @abstractmethod
    def update_weights_from_collective(self) -> list[ray.ObjectRef[bool]]:
        """Lets every engine receive one broadcast and apply it. Returns at once.

        A version with the number of the loaded one is applied too, because a policy may send other weights under the
        same number. The references raise VersionRegression for an older version.
        """

    @abstractmethod
    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """Lets every engine apply one group of tensors, whose handles the policy's `get_weights_ipc_handles` returned.
        The first group of a refit begins an update, and the last group completes it. The engines do not generate
        between the two."""

    @abstractmethod
    def invalidate_kv_cache(self) -> bool:
        """Drops the KV caches: no prefix computed so far is used for a later request."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the engines. Returns True if every engine shut down without an error or a timeout. It may be called more
        than once, and when engines are already dead."""
