"""Runs work that takes milliseconds for many tokens in a thread, so that it does not hold up a replica's event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOP_TOKENS = 2**13
"""Work on this many tokens takes the event loop a few milliseconds."""


async def beside_loop(work: Callable[[], T], *, tokens: int) -> T:
    """Returns the result of `work`, which handles `tokens` tokens and runs in a thread if they exceed `LOOP_TOKENS`."""
    return await asyncio.to_thread(work) if tokens > LOOP_TOKENS else work()
