"""An inference engine without a model, for tests of the code around an engine. It passes `engine_contract.py` as vLLM
does.

A token is a function of the seed, the prefix and the weights' version. Only those at temperature 0 count as the most
probable ones. Generation waits at `gate` before every token,
so that a test can act in the middle of a sequence. `score` returns values of `log_prob_of`, and so the probe compares
them.
"""

import asyncio
import dataclasses
import zlib
from collections.abc import Callable, Sequence

from asyncrl.common.version import Version
from asyncrl.errors import InfraError, TornReplica
from asyncrl.generation.interfaces import Completion, LoadTimes, PartialCompletion, Sampled
from asyncrl.generation.prefixes import seed_of
from asyncrl.metrics.vllm_counters import PromptTokens
from asyncrl.weights.manifest import Manifest, ReadBack
from asyncrl.weights.staging import StagedWeights

EOS = 1
LETTERS = 26


def log_prob_of(token: int, version: Version | None) -> float:
    """Returns a fixed function of token and version. Any function would do."""
    step = -1 if version is None else version.step
    return -1.0 - zlib.crc32(f"{token},{step}".encode()) % 1000 / 1000


@dataclasses.dataclass
class FakeSampled:
    """Implements `Sampled`."""

    samples: list[PartialCompletion]

    @property
    def lengths(self) -> list[int]:
        return [len(sample.token_ids) for sample in self.samples]

    def partial(self) -> list[PartialCompletion]:
        return [_copy(sample) for sample in self.samples]


class FakeEngine:
    """Implements `InferenceEngine`."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.tokens = 0
        """The number of tokens that it has sampled."""
        self.dead = asyncio.Event()
        self.loads: list[Version] = []
        self.fail_next_load: Exception | None = None
        self.score_error_nats = 0.0
        self._paused = asyncio.Event()
        self._paused.set()
        self.aborts = 0
        self.prefixes: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.ends_one_in = 5
        self.live = ReadBack(alike=frozenset({"w"}))
        self.prompt_tokens = PromptTokens(all=0, cached=0)

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
        self.prefixes += [sample.token_ids for sample in prefix]
        self.prompts.append(list(prompt_ids))
        begun = [_copy(sample) for sample in prefix] or [_nothing() for _ in range(n)]
        so_far = FakeSampled(begun)
        samples = [
            self._sample(
                list(prompt_ids),
                0 if temperature == 0.0 else seed_of(seed or 0, child, len(sample.token_ids)),
                max_tokens,
                stop,
                so_far,
                child,
                on_progress,
            )
            for child, sample in enumerate(begun)
        ]
        completions = await asyncio.gather(*samples)
        if not count_non_greedy:
            return list(completions)
        return [
            dataclasses.replace(each, non_greedy_tokens=0 if temperature == 0.0 else len(each.token_ids))
            for each in completions
        ]

    async def _sample(
        self,
        prompt: list[int],
        seed: int,
        max_tokens: int,
        stop: Sequence[str],
        so_far: "FakeSampled",
        child: int,
        on_progress: Callable[[Sampled], None] | None,
    ) -> Completion:
        sample = so_far.samples[child]
        tokens, logprobs, versions = sample.token_ids, sample.logprobs, sample.versions
        aborts = self.aborts
        self.running += 1
        try:
            while not sample.finished and len(tokens) < max_tokens and not _ended(tokens, stop):
                await self.gate.wait()
                await self._paused.wait()
                await asyncio.sleep(0)
                if self.dead.is_set():
                    raise InfraError("the engine is dead", reason="engine")
                if aborts != self.aborts:
                    raise InfraError("the request was aborted", reason="aborted")
                assert self.version is not None, "a request came before the first version"
                draw = zlib.crc32(repr((seed, prompt + tokens, self.version.step)).encode())
                token = EOS if draw % self.ends_one_in == 0 else 2 + draw % LETTERS
                tokens.append(token)
                self.tokens += 1
                logprobs.append(log_prob_of(token, self.version))
                versions.append(self.version)
                if on_progress is not None:
                    on_progress(so_far)
        finally:
            self.running -= 1
        so_far.samples[child] = dataclasses.replace(sample, finished=True, truncated=not _ended(tokens, stop))
        return Completion(
            token_ids=tokens,
            logprobs=logprobs,
            versions=versions,
            text=_text(tokens),
            truncated=not _ended(tokens, stop),
        )

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [log_prob_of(token, self.version) + self.score_error_nats for token in tokens[1:]]

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        self._paused.clear()
        await asyncio.sleep(0)
        if on_paused is not None:
            on_paused()
        if self.fail_next_load is not None:
            error, self.fail_next_load = self.fail_next_load, None
            raise TornReplica(str(error)) from error
        self.version = manifest.version
        self.loads.append(manifest.version)
        self._paused.set()
        return LoadTimes(pause_s=0.0, load_s=0.0, resume_s=0.0)

    async def read_back(self, manifest: Manifest, staged: StagedWeights) -> ReadBack:
        return self.live

    async def abort(self) -> None:
        self.aborts += 1
        self._paused.set()
        await asyncio.sleep(0)

    async def died(self) -> str:
        await self.dead.wait()
        return "killed by a test"

    def die(self) -> None:
        """Ends the engine: its requests fail, those that run and those that come."""
        self.dead.set()
        self.gate.set()
        self._paused.set()

    async def shutdown(self) -> None:
        await self.abort()


def _nothing() -> PartialCompletion:
    return PartialCompletion(token_ids=[], logprobs=[], versions=[])


def _copy(sample: PartialCompletion) -> PartialCompletion:
    return dataclasses.replace(
        sample, token_ids=[*sample.token_ids], logprobs=[*sample.logprobs], versions=[*sample.versions]
    )


def _text(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token - 2) for token in tokens if token != EOS)


def _ended(tokens: Sequence[int], stop: Sequence[str]) -> bool:
    return bool(tokens) and (tokens[-1] == EOS or any(text in _text(tokens) for text in stop))
