"""Work that takes milliseconds if there are many tokens, and must not hold up a replica's event loop then."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LOOP_TOKENS = 2**13
"""Work on this many tokens takes the event loop a few milliseconds."""


async def beside_loop(work: Callable[[], T], *, tokens: int) -> T:
    """Returns the result of `work`, which handles `tokens` tokens. More than `LOOP_TOKENS` are handled in a thread."""
    return await asyncio.to_thread(work) if tokens > LOOP_TOKENS else work()
