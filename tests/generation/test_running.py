"""The waits for the ends of rollouts: a call serves all rollouts that end within its wait, and the last one at once."""

import asyncio

import pytest

from asyncrl.generation.generator import RunningRollouts

LONG_S = 3600.0


def nothing() -> None: ...


@pytest.mark.asyncio
async def test_the_wait_for_more_ends_is_over_when_the_last_rollout_has_ended() -> None:
    running, stops = RunningRollouts(), {key: asyncio.Event() for key in "ab"}
    for key, stop in stops.items():
        running.start(key, stop.wait(), ended=nothing)
    waits = asyncio.create_task(running.more_ends(wait_s=LONG_S))
    stops["a"].set()
    while "a" in running:
        await asyncio.sleep(0)
    assert not waits.done(), "another rollout may still end"
    stops["b"].set()
    async with asyncio.timeout(60):
        await waits
    await running.more_ends(wait_s=LONG_S)


@pytest.mark.asyncio
async def test_the_wait_for_more_ends_takes_no_longer_than_it_may() -> None:
    running = RunningRollouts()
    running.start("a", asyncio.Event().wait(), ended=nothing)
    async with asyncio.timeout(60):
        await running.more_ends(wait_s=0.01)
        await running.more_ends(wait_s=-1.0)
    await running.cancel_all()
    assert not running


@pytest.mark.asyncio
async def test_a_free_slot_is_waited_for_until_a_rollout_ends_or_the_replica_drains() -> None:
    running, stop = RunningRollouts(), asyncio.Event()
    running.start("a", stop.wait(), ended=nothing)
    for end in (stop.set, running.wake):
        waits = asyncio.create_task(running.next_end())
        await asyncio.sleep(0)
        assert not waits.done()
        end()
        async with asyncio.timeout(60):
            await waits
    assert not running.cancel("a"), "it has ended"


@pytest.mark.asyncio
async def test_a_rollout_waits_for_its_environment_until_it_is_generated_or_ends() -> None:
    running, stops = RunningRollouts(), {key: asyncio.Event() for key in "ab"}
    for key, stop in stops.items():
        running.start(key, stop.wait(), ended=nothing)
        running.waits_for_environment(key, True)
    running.waits_for_environment("another", True)
    assert running.in_environment == 2, "one that does not run is not counted"
    running.waits_for_environment("a", False)
    assert running.in_environment == 1
    running.waits_for_environment("a", True)
    running.generated("a")
    assert running.in_environment == 1
    stops["b"].set()
    while "b" in running:
        await asyncio.sleep(0)
    assert running.in_environment == 0
    await running.cancel_all()


@pytest.mark.asyncio
@pytest.mark.parametrize("begun", [True, False])
async def test_a_rollout_that_is_cancelled_takes_no_slot_also_if_it_had_not_begun(begun: bool) -> None:
    running, ended = RunningRollouts(), list[int]()
    running.start("0.0", asyncio.Event().wait(), ended=lambda: ended.append(running.generating))
    assert running.generating == 1
    if begun:
        await asyncio.sleep(0)
    assert running.cancel("0.0")
    await running.cancel_all()
    assert (running.generating, ended) == (0, [0])
