"""Work on many tokens leaves the event loop free."""

import threading

import pytest

from asyncrl.generation.long_work import LOOP_TOKENS, beside_loop


@pytest.mark.asyncio
async def test_only_work_on_many_tokens_runs_in_another_thread() -> None:
    assert await beside_loop(threading.get_ident, tokens=LOOP_TOKENS) == threading.get_ident()
    assert await beside_loop(threading.get_ident, tokens=LOOP_TOKENS + 1) != threading.get_ident()
