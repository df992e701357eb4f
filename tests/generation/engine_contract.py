"""The contract of every `InferenceEngine`. Unit tests run it on the fake engine, integration tests on vLLM."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from asyncrl.common.version import Version
from asyncrl.generation.interfaces import Completion, InferenceEngine, PartialCompletion, Sampled
from asyncrl.generation.prefixes import seed_of

PROMPT = [40, 41, 42, 43]
PARITY_NATS = 1e-4
"""The default of `weights.parity_tolerance_nats` for float32. Engine and trainer add numbers in different orders."""
MAX_TOKENS = 12


class Load(Protocol):
    """Loads weights under the given step that differ from all earlier weights."""

    async def __call__(self, step: int, *, on_paused: Callable[[], None] | None = None) -> None: ...


async def sample(
    engine: InferenceEngine,
    *,
    n: int,
    seed: int | None,
    temperature: float = 1.0,
    stop: Sequence[str] = (),
    prefix: Sequence[PartialCompletion] = (),
) -> list[Completion]:
    return await engine.generate(
        PROMPT, n=n, seed=seed, temperature=temperature, max_tokens=MAX_TOKENS, stop=stop, prefix=prefix
    )


async def every_token_has_a_log_prob_and_the_version_that_sampled_it(engine: InferenceEngine, load: Load) -> None:
    await load(3)
    for completion in await sample(engine, n=4, seed=8):
        assert 0 < len(completion.token_ids) <= MAX_TOKENS
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.versions == [Version(1, 3)] * len(completion.token_ids)
        assert all(logprob <= 0.0 for logprob in completion.logprobs)


async def child_i_samples_with_seed_plus_i(engine: InferenceEngine, load: Load) -> None:
    await load(4)
    together = await sample(engine, n=3, seed=16)
    alone = [(await sample(engine, n=1, seed=16 + child))[0] for child in range(3)]
    assert together == alone
    assert len({tuple(completion.token_ids) for completion in together}) > 1


async def greedy_answers_repeat(engine: InferenceEngine, load: Load) -> None:
    await load(5)
    first, second = [await sample(engine, n=1, seed=None, temperature=0.0) for _ in range(2)]
    assert first == second


async def only_sampled_answers_have_tokens_that_are_not_the_most_probable_ones(
    engine: InferenceEngine, load: Load
) -> None:
    await load(5)
    both = [engine.generate(PROMPT, n=1, seed=None, temperature=0.0, max_tokens=MAX_TOKENS, count_non_greedy=True)]
    both += [engine.generate(PROMPT, n=4, seed=8, temperature=1.0, max_tokens=MAX_TOKENS, count_non_greedy=True)]
    greedy, sampled = await asyncio.gather(*both)  # in the same decoding steps
    assert [each.non_greedy_tokens for each in greedy] == [0]
    assert any(each.non_greedy_tokens for each in sampled)
    assert all((each.non_greedy_tokens or 0) <= len(each.token_ids) for each in sampled)
    [uncounted] = await sample(engine, n=1, seed=None, temperature=0.0)
    assert (uncounted.non_greedy_tokens, uncounted.token_ids) == (None, greedy[0].token_ids)
    assert uncounted.logprobs == greedy[0].logprobs


async def truncated_says_that_the_length_limit_ended_it(engine: InferenceEngine, load: Load) -> None:
    await load(6)
    completions = [c for seed in range(0, 64, 8) for c in await sample(engine, n=8, seed=seed)]
    for completion in completions:
        assert completion.truncated is (len(completion.token_ids) == MAX_TOKENS and completion.token_ids[-1] != 1)


async def a_stop_text_ends_a_completion_with_its_tokens(engine: InferenceEngine, load: Load) -> None:
    await load(6)
    [free] = await sample(engine, n=1, seed=None, temperature=0.0)
    stop = free.text[-1]
    [stopped] = await sample(engine, n=1, seed=None, temperature=0.0, stop=[stop])
    assert stopped.token_ids == free.token_ids[: free.text.index(stop) + 1]
    assert not stopped.truncated


async def progress_counts_the_tokens_of_all_completions(engine: InferenceEngine, load: Load) -> None:
    await load(6)
    reported: list[int] = []
    partial: list[list[PartialCompletion]] = []

    def report(sampled: Sampled) -> None:
        reported.append(sum(sampled.lengths))
        if (samples := sampled.partial()) is not None:
            partial.append(samples)

    sampling = {"n": 3, "seed": 9, "temperature": 1.0, "max_tokens": MAX_TOKENS}
    completions = await engine.generate(PROMPT, **sampling, on_progress=report)  # type: ignore[arg-type]
    assert reported == sorted(reported)
    assert reported[-1] == sum(len(completion.token_ids) for completion in completions)
    assert 0 < reported[0] < reported[-1], "it is reported before the end"
    assert any(0 < len(sample.token_ids) < MAX_TOKENS for samples in partial for sample in samples)
    for samples in partial:
        for sample, completion in zip(samples, completions, strict=True):
            tokens = len(sample.token_ids)
            assert sample.token_ids == completion.token_ids[:tokens]
            assert sample.logprobs == completion.logprobs[:tokens]
            assert sample.versions == completion.versions[:tokens]
            if sample.finished:
                assert (tokens, sample.truncated) == (len(completion.token_ids), completion.truncated)


async def a_prefix_is_continued_with_the_seeds_of_its_length(engine: InferenceEngine, load: Load) -> None:
    await load(6)
    seed = 9
    whole = await sample(engine, n=3, seed=seed)
    while min(len(completion.token_ids) for completion in whole) < 6:
        seed += 3
        whole = await sample(engine, n=3, seed=seed)
    begun = [_first(whole[0], 4), _first(whole[1], 0), _first(whole[2], len(whole[2].token_ids))]
    await load(7)
    calls = [await sample(engine, n=3, seed=seed, prefix=begun) for _ in range(2)]
    assert calls[0] == calls[1]
    for before, after in zip(begun, calls[0], strict=True):
        known = len(before.token_ids)
        assert after.token_ids[:known] == before.token_ids
        assert after.logprobs[:known] == before.logprobs
        assert after.versions == before.versions + [Version(1, 7)] * (len(after.token_ids) - known)
        scores = (await engine.score(PROMPT + after.token_ids))[len(PROMPT) - 1 :]
        differences = [abs(a - b) for a, b in zip(scores[known:], after.logprobs[known:], strict=True)]
        assert max(differences, default=0.0) < PARITY_NATS
    continued, anew, done = calls[0]
    assert len(continued.token_ids) > 4
    assert anew == (await sample(engine, n=3, seed=seed))[1], "without tokens, a child starts with its own seed"
    assert (done.token_ids, done.text, done.truncated) == (whole[2].token_ids, whole[2].text, whole[2].truncated)
    alone = await engine.generate(
        PROMPT + begun[0].token_ids, n=1, seed=seed_of(seed, 0, 4), temperature=1.0, max_tokens=MAX_TOKENS - 4
    )
    assert continued.token_ids == begun[0].token_ids + alone[0].token_ids


async def a_stop_text_that_begins_in_the_prefix_ends_the_completion(engine: InferenceEngine, load: Load) -> None:
    for step in range(60, 80):
        await load(step)
        [free] = await sample(engine, n=1, seed=None, temperature=0.0)
        if len(free.text) > 2:
            break
    stop = free.text[:2]
    before = _first(free, 1)
    [stopped] = await sample(engine, n=1, seed=None, temperature=0.0, stop=[stop], prefix=[before])
    assert stopped.token_ids == free.token_ids[:2]
    assert len(stopped.logprobs) == len(stopped.versions) == 2
    assert not stopped.truncated


def _first(completion: Completion, tokens: int) -> PartialCompletion:
    finished = tokens == len(completion.token_ids)
    return PartialCompletion(
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        versions=completion.versions[:tokens],
        finished=finished,
        truncated=finished and completion.truncated,
    )


async def score_gives_one_log_prob_for_every_token_but_the_first(engine: InferenceEngine, load: Load) -> None:
    await load(7)
    scores = await engine.score(PROMPT)
    assert len(scores) == len(PROMPT) - 1
    assert all(score < 0.0 for score in scores)


async def sampled_log_probs_are_those_that_score_gives(engine: InferenceEngine, load: Load) -> None:
    await load(8)
    for completion in await sample(engine, n=2, seed=24):
        scores = await engine.score(PROMPT + completion.token_ids)
        differences = [abs(a - b) for a, b in zip(scores[len(PROMPT) - 1 :], completion.logprobs, strict=True)]
        assert max(differences) < PARITY_NATS


async def f14_f15_an_update_in_the_middle_of_sequences_splits_their_versions(
    engine: InferenceEngine, load: Load
) -> None:
    await load(10)
    pending = asyncio.gather(*[sample(engine, n=8, seed=8 * index) for index in range(16)])
    for step in range(11, 15):
        await load(step)
    completions = [completion for group in await pending for completion in group]
    assert any(len(set(completion.versions)) > 1 for completion in completions), "no update during a running sequence"
    for completion in completions:
        steps = [version.step for version in completion.versions]
        assert steps == sorted(steps)
        assert set(steps) <= set(range(10, 15))
    last = await sample(engine, n=2, seed=8)
    assert {version.step for completion in last for version in completion.versions} == {14}


async def a_load_says_once_that_generation_stands_still(engine: InferenceEngine, load: Load) -> None:
    await load(15)
    pending = asyncio.gather(*[sample(engine, n=4, seed=4 * index) for index in range(4)])
    paused: list[int] = []
    for step in range(16, 19):
        await load(step, on_paused=lambda step=step: paused.append(step))  # type: ignore[misc]
    await pending
    assert paused == [16, 17, 18]


async def aborted_requests_fail_and_leave_the_engine_usable(engine: InferenceEngine, load: Load) -> None:
    await load(20)
    pending = [asyncio.create_task(sample(engine, n=8, seed=8 * index)) for index in range(8)]
    while not getattr(engine, "running", True):
        await asyncio.sleep(0)
    await engine.abort()
    await asyncio.gather(*pending, return_exceptions=True)
    assert len(await sample(engine, n=1, seed=0)) == 1


CONTRACT = [
    every_token_has_a_log_prob_and_the_version_that_sampled_it,
    child_i_samples_with_seed_plus_i,
    greedy_answers_repeat,
    only_sampled_answers_have_tokens_that_are_not_the_most_probable_ones,
    truncated_says_that_the_length_limit_ended_it,
    a_stop_text_ends_a_completion_with_its_tokens,
    progress_counts_the_tokens_of_all_completions,
    a_prefix_is_continued_with_the_seeds_of_its_length,
    a_stop_text_that_begins_in_the_prefix_ends_the_completion,
    score_gives_one_log_prob_for_every_token_but_the_first,
    sampled_log_probs_are_those_that_score_gives,
    f14_f15_an_update_in_the_middle_of_sequences_splits_their_versions,
    a_load_says_once_that_generation_stands_still,
    aborted_requests_fail_and_leave_the_engine_usable,
]
