"""Tasks of an event loop that end with a block, at a signal, or at the error of another task."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class Stopped(Exception):
    """A signal or another command asked the run to end."""


async def cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels these tasks and waits until they have ended. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(work: Awaitable[Result], *, name: str | None = None) -> "AsyncIterator[asyncio.Future[Result]]":
    """Runs `work` as a task beside the block. When the block ends, cancels the task and waits until it has ended."""
    task = asyncio.ensure_future(work)
    if name is not None and isinstance(task, asyncio.Task):
        task.set_name(name)
    try:
        yield task
    finally:
        await cancelled(task)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If `stop` is set first, cancels `work` and raises Stopped."""
    async with running(work) as working, running(stop.wait()) as stopping:
        first: tuple[asyncio.Future[Any], ...] = (working, stopping)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return await working


async def check_stop(stop: asyncio.Event) -> None:
    """Raises Stopped if `stop` is set, also if a signal came while a call blocked the event loop."""
    await asyncio.sleep(0)  # after a signal, the loop sets `stop` before it comes back here
    if stop.is_set():
        raise Stopped


async def unless_one_fails(beside: Collection["asyncio.Future[None]"], work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. If a task of `beside` fails first, cancels `work` and raises the task's error.

    The tasks of `beside` are not cancelled. A task of `beside` that ends without an error is ignored.
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


# Runs blocking calls in threads that do not keep their process alive.

Answer = TypeVar("Answer")


def in_daemon(call: Callable[[], Answer], *, name: str) -> Future[Answer]:
    """Starts a call in a daemon thread, and returns its future: a call that hangs can be abandoned."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
