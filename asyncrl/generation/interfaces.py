"""What a rollout needs from an inference engine, and what a synchronous loop needs from a pool of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.buffer.records import Version
from asyncrl.data.specs import GenerationDatumSpec, GenerationOutputSpec, verify_right_padding
from asyncrl.weights.manifest import Manifest

if TYPE_CHECKING:
    import ray

    from asyncrl.data.batched_data_dict import BatchedDataDict

__all__ = [
    "Completion",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "InferenceEngine",
    "LoadTimes",
    "all_succeeded",
    "verify_right_padding",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled continuation. Per token: its id, the log-prob it was sampled with (nats), and its version.

    `truncated` says that the length limit ended it. `text` has no special tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Version]
    text: str
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds of one weight update: `pause` until the engine stood still, `load`, `resume`."""

    pause_s: float
    load_s: float
    resume_s: float


class InferenceEngine(Protocol):
    """An engine whose weights can be replaced between two decoding steps."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        n: int,
        seed: int | None,
        temperature: float,
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """n completions of one prompt; child i samples with seed + i. Temperature 0 is greedy and takes no seed.

        A text of `stop` ends a completion, as those of `generator.stop` do; its tokens are the completion's last."""
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Temperature-1 log-probs of tokens[1:] given their prefixes, from the current weights alone."""
        ...

    async def load(
        self, manifest: Manifest, buckets: Sequence[memoryview], *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        """Applies a whole version between decoding steps and labels every later token with it.

        Calls `on_paused` when the decoding step in progress has ended and generation stands still.
        TornReplica when it failed half way: the engine stays paused until a later `load` succeeds.
        """
        ...

    async def abort(self) -> None:
        """Ends every running request."""
        ...

    async def shutdown(self) -> None:
        """Ends the engine and every process it started."""
        ...


def all_succeeded(answers: Iterable[object]) -> bool:
    """Whether there is an answer, and every one is True: nobody's None is a success, and neither is nobody.

    >>> all_succeeded([True, True]), all_succeeded([True, None]), all_succeeded([])
    (True, False, False)
    """
    found = list(answers)
    return bool(found) and all(answer is True for answer in found)


class GenerationInterface(ABC):
    """Engines that continue prompts and take weights from a `ColocatablePolicyInterface`. Calls block, but those that
    return references.

    A method that returns a bool says what all engines have done: True from every one, of which there is at least one.
    An engine that holds half an update raises TornReplica instead of generating; a whole update mends it.
    """

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int | None = None
    ) -> list[ray.ObjectRef[bool]]:
        """Every engine joins the process group at `ip`:`port`, after the `train_world_size` ranks that train. Returns
        at once; the references are done when all have come, or with CollectiveError after `weights.load_timeout_s`."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """`GenerationOutputSpec` of the rows of a `GenerationDatumSpec`, in their order. ValueError when they are not
        right-padded."""

    @abstractmethod
    def generate_async(
        self, data: BatchedDataDict, greedy: bool = False
    ) -> AsyncGenerator[tuple[int, BatchedDataDict], None]:
        """(index of a row, its output as a batch of one) as rows finish. What is not waited for is aborted."""

    @abstractmethod
    def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """The engines hold what `tags` name, `weights`, `kv_cache` or both (None), on their devices. With `weights`,
        half an update by shared memory is forgotten, and the next group begins another."""

    @abstractmethod
    def finish_generation(self) -> bool:
        """The engines' devices are free for training, as far as the platform can, and no KV cache is kept."""

    @abstractmethod
    def prepare_refit_info(self, state_dict_info: Mapping[str, Any]) -> bool:
        """Compares what the policy's `prepare_refit_info` says with the engines' model, once, before the first
        transfer. ManifestMismatch when a name, shape or dtype differs."""

    @abstractmethod
    def update_weights_from_collective(self) -> list[ray.ObjectRef[bool]]:
        """Every engine takes part in one broadcast, and applies it, also when it has that version: whoever numbers them
        anew sends other weights. VersionRegression for an older one. Returns at once."""

    @abstractmethod
    def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
        """Every engine applies one group of `get_weights_ipc_handles`. The first group of a refit opens an update, and
        the one that completes it lets the engine go on; in between it generates nothing."""

    @abstractmethod
    def invalidate_kv_cache(self) -> bool:
        """No prefix that was computed until now serves a later request."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the engines; idempotent, and dead ones do no harm. Whether all of them left in order."""
