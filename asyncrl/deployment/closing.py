"""A run that is asked to end: run.json says so at once, and before its first step it ends within its grace.

What may hang then is start-up: a model that is being built in a thread, calls of Ray that know no deadline. A run that
has trained gets the time that its step and its weights need; each of their waits has a deadline of its own.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncrl.deployment.launch import INTERRUPTED
from asyncrl.deployment.run_dir import RunDir

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Stopped(Exception):
    """The run was asked to end while it started."""


async def unless_stopped(stop: asyncio.Event, work: Awaitable[Result]) -> Result:
    """Result of `work`; cancels it and raises Stopped when `stop` is set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait(), name="stopping")
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return await working
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def asked_to_end(run_dir: RunDir, grace_s: float) -> None:
    """Call it at the first signal."""
    run_dir.asked_to_end()
    # A thread, because what hangs may hold the event loop.
    timer = threading.Timer(grace_s, give_up, [run_dir, grace_s])
    timer.daemon = True
    timer.start()


def ended_at_once(run_dir: RunDir) -> None:
    """Call it at the second signal, before the process ends."""
    if not run_dir.closed:
        run_dir.close(state="stopped", reason=f"ended at once by a second signal, after {run_dir.steps_written} steps")


def give_up(run_dir: RunDir, grace_s: float, *, leave: Callable[[int], object] = os._exit) -> None:
    """Ends the process if the run is still closing and has trained nothing; Ray's daemons end with it."""
    if run_dir.closed or run_dir.steps_written:
        return
    reason = f"asked to end before the first step, and not closed within run.shutdown_grace_s = {grace_s:g} s"
    logger.error("%s: ending at once", reason)
    try:
        run_dir.close(state="failed", reason=reason)
    finally:
        leave(INTERRUPTED)
