"""The process of a run: its log, its signals, and the thread in which the run works while the main thread attends.

The commands `up`, `learner`, `generator` and `head` use `run_until_done`, and `asyncrl.run` uses `attended_run`. In a
command, the first SIGTERM, SIGINT or SIGHUP asks for a clean end. If the command owns the run directory, run.json
records this request immediately. A second SIGTERM or SIGINT ends the process at once. Within `SAME_SIGNAL_S` seconds of
the first one there is no second one.

A command that owns the run directory (`up`, `learner`) ends within `run.shutdown_grace_s` if this process has not
trained a step, also in a resumed run. Its start may hang, because a model may be built in a thread and some calls of
Ray have no deadline. If it has trained a step, it gets the time to finish the current step and save the weights,
because each of these waits has its own deadline.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import INTERRUPTED, SAME_SIGNAL_S
from asyncrl.log_files import LOG_BYTES, LOG_FILES
from asyncrl.shown_text import LogForm, log_formatter

logger = logging.getLogger(__name__)

AT_ONCE_S = 2.0
"""Time that a second signal leaves for the last actions before the process exits, seconds."""
_WAKE_EVERY_S = 0.5
"""Longest wait of the main thread, seconds. A signal that arrives right before a wait does not interrupt it: Python
calls the handler after the wait."""

Result = TypeVar("Result")


class _Stderr(logging.Handler):
    """Writes to the current `sys.stderr`. The live view replaces `sys.stderr`, so that lines appear above the view."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def log_to(path: Path | None, *, form: LogForm = "text") -> Iterator[None]:
    """Writes the log records of the block, from level INFO on, to `path`, and those from WARNING on also to stderr.
    Without a path, all go to stderr.

    A log that has reached `LOG_BYTES` is renamed to `.1`, an older one to `.2`, and so on. `LOG_FILES` renamed ones are
    kept.

    An error that leaves the block is written to `path` with its traceback. The command prints it on stderr.
    """
    handlers: list[logging.Handler] = [_Stderr()]
    if path is not None:
        handlers[0].setLevel(logging.WARNING)
        handlers.append(
            RotatingFileHandler(
                path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8", errors="backslashreplace"
            )
        )
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(log_formatter(form))
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
    main: Callable[[asyncio.Event], Coroutine[Any, Any, Result]],
    *,
    asked: Callable[[signal.Signals], None] = lambda _: None,
    at_once: Sequence[Callable[[], None]] = (),
) -> Result:
    """Runs `main(stop)` and returns its result. The first SIGTERM, SIGINT or SIGHUP calls `asked` with the signal and
    sets `stop`.

    The second SIGTERM or SIGINT calls each function of `at_once` and then exits the process. Within `SAME_SIGNAL_S`
    seconds of the first one there is no second one. SIGHUP, which a closed terminal sends, asks for a clean end, but
    counts neither as the first nor as the second of these two signals, because the kernel and the shell may both send
    it. If the process was started with SIGHUP ignored (`nohup`), SIGHUP stays ignored.

    `main` runs in a thread of its own, and the calling thread, which must be the main thread, handles the signals. So
    they are handled too while `main` blocks its event loop: starting Ray and importing torch take seconds.
    """
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    outcome: Future[Result] = Future()
    hung_up, first_s = False, math.inf

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal hung_up, first_s
        signal.alarm(0)  # cancels the alarm with which Ray's handler would abort the process after 3 s
        now_s = time.monotonic()
        first = not hung_up and first_s == math.inf
        if number == signal.SIGHUP:
            hung_up = True
        elif now_s - first_s >= SAME_SIGNAL_S:
            _end_at_once(at_once)
        else:
            first_s = min(first_s, now_s)
        if first:
            logger.warning("ending cleanly; a second signal, at least a second later, ends the process at once")
            asked(signal.Signals(number))
            with contextlib.suppress(RuntimeError):  # the loop is closed, because `main` has just ended
                loop.call_soon_threadsafe(stop.set)

    def work() -> None:
        _run_in(loop, main(stop), outcome)
        # The kernel kills Ray's daemons when the thread that started them ends (PR_SET_PDEATHSIG). Ray itself ends them
        # cleanly when the process exits, so this thread must live until then.
        threading.Event().wait()

    with contextlib.ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                handlers.callback(signal.signal, number, signal.signal(number, on_signal) or signal.SIG_DFL)
        threading.Thread(target=work, name="asyncrl", daemon=True).start()
        while not outcome.done():
            with contextlib.suppress(TimeoutError):  # an error of `main` is raised below
                outcome.exception(timeout=_WAKE_EVERY_S)
            _take_sigterm_back()
    return outcome.result()


def _take_sigterm_back() -> None:
    """Installs this process's handler of SIGTERM again. Does nothing outside of the main thread.

    When another thread calls `ray.init`, Ray's C++ code installs a handler of which Python does not know. Ray's handler
    calls Python's, but also sets an alarm that aborts the process after 3 s. Our handlers cancel it by
    `signal.alarm(0)`.
    """
    ours = signal.getsignal(signal.SIGTERM)
    if callable(ours) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, ours)


def _run_in(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Result], outcome: "Future[Result]") -> None:
    """Runs `main` in `loop`, closes the loop, and sets the outcome."""
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result = runner.run(main)
    except BaseException as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def _end_at_once(at_once: Sequence[Callable[[], None]]) -> None:
    # The process must also exit if a disk or a terminal blocks the functions below.
    _later(AT_ONCE_S, os._exit, INTERRUPTED)
    try:
        logger.warning("second signal: the process exits now")
        for last_move in at_once:
            last_move()
    finally:
        os._exit(INTERRUPTED)


def _later(after_s: float, call: Callable[..., object], *arguments: object) -> None:
    """Calls `call` after `after_s` seconds in a thread, because the event loop or the main thread may hang."""
    timer = threading.Timer(after_s, call, [*arguments])
    timer.daemon = True
    timer.start()


def asked_to_end(run_dir: RunDir, grace_s: float, number: signal.Signals) -> None:
    """Records the request to end, and starts the timer that calls `give_up` after `grace_s` seconds. `number` is the
    first signal."""
    run_dir.asked_to_end(number.name, from_outside=number is signal.SIGTERM)
    _later(grace_s, give_up, run_dir, grace_s)


def ended_at_once(run_dir: RunDir) -> None:
    """Records that a second signal ended the run, if the run has not closed."""
    if not run_dir.closed:
        run_dir.close(state="stopped", reason=f"ended at once by a second signal, after {run_dir.steps_written} steps")


def give_up(run_dir: RunDir, grace_s: float, *, leave: Callable[[int], object] = os._exit) -> None:
    """Records the run as failed and exits the process, if the run has not closed and this process has trained no step.
    A timer calls this `grace_s` seconds after the request to end. Ray's daemons end with the process."""
    if run_dir.closed or run_dir.steps_written:
        return
    reason = (
        "asked to end before this process had trained a step, and not closed within run.shutdown_grace_s = "
        f"{grace_s:g} s"
    )
    logger.error("%s: the process exits now", reason)
    try:
        run_dir.close(state="failed", reason=reason)
    finally:
        leave(INTERRUPTED)


# --- a run from Python ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM raise KeyboardInterrupt within the block, as Ctrl-C does.

    Does nothing if SIGTERM has a handler already, or outside of the main thread, where Python allows no handler.
    """
    with contextlib.ExitStack() as after:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            after.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.alarm(0)  # cancels the alarm with which Ray's handler would abort the process after 3 s
    raise KeyboardInterrupt(signal.Signals(number))


def attended_run(
    training: Callable[[asyncio.Event], Coroutine[Any, Any, Result]],
    *,
    calls: "SimpleQueue[Callable[[], object] | None]",
    run_dir: RunDir,
) -> tuple[Result | None, BaseException | None]:
    """Runs `training` in a thread of its own, and makes the queued calls in this thread until the training has ended.

    Returns the result of `training`, and what interrupted this thread: an error of a call, or KeyboardInterrupt. After
    an interruption, first waits until the training has ended cleanly. Raises the error of the training. Raises a second
    KeyboardInterrupt without waiting.
    """
    import ray

    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    outcome: Future[Result] = Future()

    def work() -> None:
        _run_in(loop, training(stop), outcome)
        try:
            ray.shutdown(wait_for_processes=True)  # the next run of this process starts a Ray of its own
        finally:
            calls.put(None)

    interruption: BaseException | None = None
    try:
        threading.Thread(target=work, name="asyncrl.run", daemon=True).start()
        for call in _until_ended(calls):
            call()
    except BaseException as error:
        interruption = error
        try:
            by = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else signal.SIGINT
            name = "an error of a callback" if isinstance(error, Exception) else by.name
            run_dir.asked_to_end(name, from_outside=by is signal.SIGTERM)
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the training has just ended
                loop.call_soon_threadsafe(stop.set)
            for _ in _until_ended(calls):  # the calls that are left are not made
                pass
        except KeyboardInterrupt:
            ended_at_once(run_dir)
            raise
    return outcome.result(), interruption


def _until_ended(calls: "SimpleQueue[Callable[[], object] | None]") -> Iterator[Callable[[], object]]:
    """Yields the calls in the queue until it gets None, which says that the training has ended."""
    while True:
        try:
            call = calls.get(timeout=_WAKE_EVERY_S)
        except Empty:
            _take_sigterm_back()
            continue
        if call is None:
            return
        yield call
