"""Runs blocking calls in threads that do not keep their process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

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
