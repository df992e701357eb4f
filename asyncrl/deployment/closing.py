"""Work that ends in order when a signal asks the run to end, and the time that this takes."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")

LEAVE_S = 10.0
"""Part of `run.shutdown_grace_s` that stays reserved for the last actions of a run, after its waits have ended: the end
of engines, ranks and Ray. 10 s were measured for the quickstart on 2 cores."""


class Stopped(Exception):
    """A signal asked the run to end during its start."""


@asynccontextmanager
async def running(work: Awaitable[Result], *, name: str | None = None) -> "AsyncIterator[asyncio.Future[Result]]":
    """Runs `work` as a task beside the block. When the block ends, cancels the task and waits until it has ended."""
    task = asyncio.ensure_future(work)
    if name is not None and isinstance(task, asyncio.Task):
        task.set_name(name)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If `stop` is set first, cancels `work` and raises Stopped."""
    async with running(work) as working, running(stop.wait()) as stopping:
        first: tuple[asyncio.Future[Any], ...] = (working, stopping)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return await working


async def check_stop(stop: asyncio.Event) -> None:
    """Raises Stopped if a signal asked the run to end, also if it came while a call blocked the event loop."""
    await asyncio.sleep(0)  # the loop sets `stop` before it comes back here
    if stop.is_set():
        raise Stopped


async def unless_one_fails(beside: Collection["asyncio.Future[None]"], work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If a task of `beside` fails first, cancels `work` and raises the task's error.

    The tasks of `beside` are not cancelled. One that ends without an error is ignored.
    """
    async with running(work) as working:
        watched: set[asyncio.Future[Any]] = set(beside)
        while not working.done():
            await asyncio.wait(watched | {working}, return_when=asyncio.FIRST_COMPLETED)
            ended = {task for task in watched if task.done()}
            if not working.done():
                for task in ended:
                    task.result()
            watched -= ended
        return await working


def short_grace(grace_s: float, *, step_s: float, save_s: float | None) -> str | None:
    """Returns a warning if a run that is asked to end needs longer than its grace, else None.

    `step_s` is the duration of the last step, and `save_s` that of the saves to come; None if it is not known.

    >>> short_grace(20, step_s=6.0, save_s=3.0)
    >>> (short_grace(20, step_s=6.0, save_s=30.0) or "").partition(", but")[0]
    'the run needs about 46 s to end: 6 s for its step, 30 s for its checkpoint and 10 s to close'
    """
    needed_s = step_s + (save_s or 0.0) + LEAVE_S
    if needed_s <= grace_s:
        return None
    save = "an unknown time for its checkpoint" if save_s is None else f"{save_s:.0f} s for its checkpoint"
    return (
        f"the run needs about {needed_s:.0f} s to end: {step_s:.0f} s for its step, {save} and {LEAVE_S:.0f} s to "
        f"close, but run.shutdown_grace_s = {grace_s:g} s. If it is killed before, the steps since its newest "
        "checkpoint are lost, and a resumed run trains them again. Set run.shutdown_grace_s to "
        f"{math.ceil(needed_s)} or more, and "
        "give the process this time (Docker: stop_grace_period, Kubernetes: terminationGracePeriodSeconds, Slurm: "
        "KillWait)"
    )
