"""What a rollout needs from an inference engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.buffer.records import Version
from asyncrl.weights.manifest import Manifest


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
        self, prompt_ids: Sequence[int], *, n: int, seed: int | None, temperature: float, max_tokens: int
    ) -> list[Completion]:
        """n completions of one prompt; child i samples with seed + i. Temperature 0 is greedy and takes no seed."""
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
