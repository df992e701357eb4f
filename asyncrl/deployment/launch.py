"""Code that the commands `up`, `learner`, `generator` and `head` share: the log of a process, and signals.

The first SIGTERM, SIGINT or SIGHUP asks for a clean end. A second SIGTERM or SIGINT ends the process at once.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INTERRUPTED = 130
"""Exit code (128 + SIGINT) of a process that a second signal ends, or whose start does not end within the grace."""
AT_ONCE_S = 2.0
"""Time that a second signal leaves for the last actions before the process exits, seconds."""

Result = TypeVar("Result")


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`. The live view replaces `sys.stderr`, so that lines appear above the view."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def log_to(path: Path | None) -> Iterator[None]:
    """Writes all log records of the block to `path`, and warnings also to stderr. Without a path, all go to stderr.

    An error that leaves the block is written to `path` with its traceback. The command prints it on stderr.
    """
    handlers: list[logging.Handler] = [_Stderr()]
    if path is not None:
        handlers[0].setLevel(logging.WARNING)
        handlers.append(logging.FileHandler(path))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.addHandler(handler)
    try:
        yield
    except Exception as error:
        if path is not None:
            handlers[0].setLevel(logging.CRITICAL + 1)
            logger.error("ended by an error", exc_info=error)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            try:
                handler.close()
            except OSError as error:  # the disk is full; this must not hide the error that ended the run
                logger.error("the log %s is incomplete: %s", path, error)


def run_until_done(
    main: Callable[[asyncio.Event], Awaitable[Result]],
    *,
    asked: Callable[[], None] = lambda: None,
    at_once: Sequence[Callable[[], None]] = (),
) -> Result:
    """Runs `main(stop)` and returns its result. The first SIGTERM, SIGINT or SIGHUP calls `asked` and sets `stop`.

    A second SIGTERM or SIGINT calls each function of `at_once` and then exits the process. A closed terminal sends
    SIGHUP. It never counts as the second signal, because the kernel and the shell may both send one. If the process was
    started with SIGHUP ignored (`nohup`), SIGHUP stays ignored.
    """

    async def supervised() -> Result:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        seen: list[signal.Signals] = []

        def on_signal(number: signal.Signals) -> None:
            if number != signal.SIGHUP:
                seen.append(number)
            if len(seen) > 1:
                _end_at_once(at_once)
            if not stop.is_set():
                logger.warning("ending cleanly; a second signal ends the process at once")
                asked()
                stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, on_signal, number)
        return await main(stop)

    return asyncio.run(supervised())


def _end_at_once(at_once: Sequence[Callable[[], None]]) -> None:
    # The process must also exit if a disk or a terminal blocks the functions below.
    timer = threading.Timer(AT_ONCE_S, os._exit, [INTERRUPTED])
    timer.daemon = True
    timer.start()
    try:
        logger.warning("second signal: the process exits now")
        for last_move in at_once:
            last_move()
    finally:
        os._exit(INTERRUPTED)
