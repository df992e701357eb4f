"""The rollouts that run on a replica take a slot each until they have ended."""

import asyncio

import pytest

from asyncrl.generation.generator import RunningRollouts


async def waits_for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
@pytest.mark.parametrize("begun", [True, False])
async def test_a_rollout_that_is_cancelled_takes_no_slot_also_if_it_had_not_begun(begun: bool) -> None:
    running, ended = RunningRollouts(), list[int]()
    running.start("0.0", waits_for_ever(), ended=lambda: ended.append(running.generating))
    assert running.generating == 1
    if begun:
        await asyncio.sleep(0)
    assert running.cancel("0.0")
    await running.cancel_all()
    assert (running.generating, ended) == (0, [0])
