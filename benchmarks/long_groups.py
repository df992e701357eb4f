"""Measures for how long a long finished group holds up a replica's event loop.

    python benchmarks/long_groups.py --samples 16 --tokens 32768

The completions are taken from vLLM's outputs and decoded, and the rows, the metadata and the checksums of the scored
group are built, as a replica does it, while a second task of the event loop wakes every half millisecond. The script
prints the longest time between two of its wake-ups, the sum of what exceeds half a millisecond, and the time until the
group is built: the medians of some repetitions. The same is measured with the group built on the event loop.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan

from asyncrl.buffer.records import Ticket
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.generation.episodes import Played, single_turn
from asyncrl.generation.interfaces import NOTHING, Completion
from asyncrl.generation.long_work import beside_loop
from asyncrl.generation.rollout import FinishedGroup, finished_group
from asyncrl.generation.vllm_sampled import Child

TICK_S = 0.0005
REPEATS = 9


def outputs_of(samples: int, tokens: int) -> list[CompletionOutput]:
    """Returns vLLM's outputs of a group whose weights were updated in the middle of each sample."""
    ids = [2 + token % 90 for token in range(tokens)]
    places, half = [*range(tokens)], tokens // 2
    return [
        CompletionOutput(
            index=index, text="", token_ids=ids, cumulative_logprob=None, finish_reason="stop",
            logprobs=FlatLogprobs(places, [place + 1 for place in places], ids, [-0.5] * tokens, [1] * tokens),
            weight_versions=[WeightVersionSpan("1.0", 0, half), WeightVersionSpan("1.1", half, tokens)],
        )
        for index in range(samples)
    ]  # fmt: skip


def group_of(outputs: Sequence[CompletionOutput], tokenizer: Any) -> FinishedGroup:
    ticket = Ticket(
        group=0, attempt=0, task=Task(question="q", prompt="q", answer="a"), seed=0, version=Version(1, 0),
        max_staleness_versions=4, replica="a",
    )  # fmt: skip
    samples = [Child(NOTHING).ended(output) for output in outputs]
    completions = [
        Completion(
            token_ids=sample.token_ids, logprobs=sample.logprobs, versions=sample.versions, truncated=False,
            text=tokenizer.decode(sample.token_ids, skip_special_tokens=True),
        )
        for sample in samples
    ]  # fmt: skip
    episodes = [single_turn([1] * 64, completion) for completion in completions]
    played = Played(episodes=episodes, scores=[0.0] * len(outputs), environment_s=0.0)
    return finished_group(ticket, played, config=Config(), replica="a")


async def gaps(work: Callable[[], Awaitable[object]]) -> tuple[float, float, float]:
    """Returns the longest wait of a second task beyond `TICK_S`, the sum of its waits, and the time of `work`."""
    waits: list[float] = []

    async def tick() -> None:
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            waits.append(time.perf_counter() - began_s - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    waits.clear()
    began_s = time.perf_counter()
    await work()
    seconds = time.perf_counter() - began_s
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return max(waits), sum(waits), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32768)
    arguments = parser.parse_args()
    outputs = outputs_of(arguments.samples, arguments.tokens)
    tokenizer = build_tokenizer(max_length=arguments.tokens)

    async def on_loop() -> None:
        group_of(outputs, tokenizer)

    async def beside() -> None:
        await beside_loop(lambda: group_of(outputs, tokenizer), tokens=arguments.samples * arguments.tokens)

    for name, work in (("on the event loop", on_loop), ("as a replica does it", beside)):
        runs = [asyncio.run(gaps(work)) for _ in range(REPEATS)]
        longest, waited, seconds = map(statistics.median, zip(*runs, strict=True))
        print(
            f"{name}: longest wait {longest * 1e3:.1f} ms, all waits {waited * 1e3:.1f} ms, built after "
            f"{seconds * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
