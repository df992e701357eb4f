"""Starts a command again after its process has died, or after an error that a restart may fix.

`supervise` forks before Ray or torch is imported. The child runs the command. The parent has no other work than to
start the next child, so it stays alive when the child is killed or runs out of memory. The command in each child
decides whether it may restart the run (`preflight.check_restart`), because only the command knows the configuration.
Children that die before they can decide end the command after `EARLY_DEATHS` of them in a row.

`report_death` does the same for a command that its user starts again: its parent only turns the death of its child into
the exit code `RESTART_MENDS`.
"""

import contextlib
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from asyncrl.errors import INTERRUPTED, SAME_SIGNAL_S, Terminated
from asyncrl.parent_death import die_with

RESTART_MENDS = 75
"""Exit code of a command after an error that a restart may fix (EX_TEMPFAIL of sysexits.h)."""
WINDOW_S = 3600.0
"""`run.max_restarts` limits the restarts within this time, seconds."""
EARLY_DEATHS = 5
"""After this number of children in a row that died within `EARLY_S` seconds of their start, no other is started."""
EARLY_S = 5.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_earlier_end = ""
"""How the process before this one, which ran the same command, ended; empty in the first process."""
_started_s: tuple[float, ...] = ()
"""The times at which the command was started again, on the monotonic clock. The last one is the start of this process.
Empty in the first process."""


def restarts() -> int:
    """Returns how often the command was started again within the last `WINDOW_S` seconds; 0 in the first process."""
    return sum(time.monotonic() - started_s <= WINDOW_S for started_s in _started_s)


def earlier_end() -> str:
    """Returns in words how the process before this one, which ran the same command, ended; empty in the first
    process."""
    return _earlier_end


_begun = mmap.mmap(-1, 2**16)
"""The path of the run's directory after `mark_begun`, else zeros. The memory is shared with the processes that are
forked later, so it outlives the child."""
_on_purpose = mmap.mmap(-1, 1)
"""1 after `ends_on_purpose`. The parent reads it after the child has ended."""
_no_other = mmap.mmap(-1, 1)
"""1 after `starts_no_other`. The parent reads it after the child has ended."""


def mark_begun(directory: Path) -> None:
    """Records that this command has begun or resumed its run in `directory`. The next processes of the command resume
    that run."""
    _begun[:] = os.fsencode(directory).ljust(len(_begun), b"\0")


def begun_before() -> bool:
    """Returns whether an earlier process of this command has begun or resumed the run."""
    return begun_directory() is not None


def begun_directory() -> Path | None:
    """Returns the directory of the run that an earlier process of this command has begun or resumed; None if there is
    none. The path is the one that `mark_begun` got."""
    return Path(os.fsdecode(bytes(_begun[:]).rstrip(b"\0"))) if restarts() and _begun[0] else None


def ends_on_purpose() -> None:
    """Records for the parent process that this one is about to exit on purpose. A child that ends without this record
    is started again."""
    _on_purpose[0] = 1


def starts_no_other() -> None:
    """Records for the parent process that it starts no other child, however this one ends. A process that was asked to
    end calls this: `asyncrl down` signals the child and not the parent, which ignores SIGINT if a shell started it in
    the background. A process whose run has finished, and which trains the next run of a sweep, calls it too."""
    _no_other[0] = 1


def sigterm_ends() -> None:
    """Makes SIGTERM raise Terminated in this process and its children, until `run_until_done` handles signals. Until
    then the command has trained nothing, and it ends as after an error. The same signal within `SAME_SIGNAL_S` seconds
    counts once. A later one ends the process at once, with the exit code `INTERRUPTED`."""
    asked_s: float | None = None

    def ends(_: int, __: FrameType | None) -> None:
        nonlocal asked_s
        signal.alarm(0)  # cancels the alarm with which Ray's handler would abort the process after 3 s
        if asked_s is None:
            asked_s = time.monotonic()
            starts_no_other()
            os.write(2, b"ended by SIGTERM\n")  # not `print`, because the signal may have interrupted a `print`
            raise Terminated
        if time.monotonic() - asked_s >= SAME_SIGNAL_S:
            os._exit(INTERRUPTED)

    signal.signal(signal.SIGTERM, ends)


def sigterm_kills() -> None:
    """Makes SIGTERM kill this process as without a handler, and the parent process then starts no other child."""

    def ends(number: int, _: FrameType | None) -> None:
        starts_no_other()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, ends)


def supervise() -> None:
    """Returns in a child process, which runs the command. This process waits for it and then exits with its exit code.

    The child calls `ends_on_purpose` right before it exits on purpose. The next child is started, and `supervise`
    returns there, if a child has ended without that call (it was killed, or a library ended it), or has the exit code
    `RESTART_MENDS`. SIGTERM, SIGINT and SIGHUP are passed on to the child. After one of them, no child is started, and
    none after `starts_no_other` of the child, or after `EARLY_DEATHS` children in a row that died within `EARLY_S`
    seconds.

    Must be called in the main thread, before any other thread was started.
    """
    global _earlier_end, _started_s
    ending = _ending_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    early_deaths = 0
    while True:
        started_s = time.monotonic()
        if (ended := _child(ending, before)) is None:
            return
        code, asked = ended
        on_purpose = bool(_on_purpose[0])
        if asked or _no_other[0] or (on_purpose and code != RESTART_MENDS):
            _exit(code)
        _earlier_end = "with an error" if on_purpose else f"by {_how(code)}"
        now_s = time.monotonic()
        early_deaths = 0 if on_purpose or now_s - started_s > EARLY_S else early_deaths + 1
        if early_deaths == EARLY_DEATHS:
            print(
                f"the command died {EARLY_DEATHS} times in a row within {EARLY_S:g} s of its start, the last time by "
                f"{_how(code)}; it is not started again",
                file=sys.stderr,
                flush=True,
            )
            _exit(code)
        _started_s += (now_s,)


def report_death() -> None:
    """Returns in a child process, which runs the command. This process waits for it and then exits with its exit code.

    If the child ends without a call of `ends_on_purpose` or a signal from outside, it was killed, or Ray has ended it:
    Ray calls `_exit(1)` in a process that has not reached the head of its cluster for 60 s. This process then prints
    this, and exits with `RESTART_MENDS`. A crash, such as SIGSEGV, keeps its code: the next process may crash too. Must
    be called as `supervise`.
    """
    ending = _ending_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    if (ended := _child(ending, before)) is None:
        return
    code, asked = ended
    if asked or _no_other[0] or _on_purpose[0] or (code < 0 and code != -signal.SIGKILL):
        _exit(code)
    print(
        f"the process of this command was ended by {_how(code)}, and has not ended itself: it was killed, or Ray has "
        "ended it because it did not reach the head of its cluster for 60 s. If the head was lost, start the cluster "
        f"again, and then this command (exit code {RESTART_MENDS})",
        file=sys.stderr,
        flush=True,
    )
    _exit(RESTART_MENDS)


def _ending_signals() -> set[signal.Signals]:
    # A signal that is ignored (SIGHUP, under nohup) would still be reported to `sigwait` while it is blocked.
    return {number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN}


def _child(ending: set[signal.Signals], before: set[int | signal.Signals]) -> tuple[int, bool] | None:
    """Forks. Returns None in the child, whose signal mask is `before`. In this process, waits until the child has
    ended, and returns its exit code (negative for a signal), and whether one of the signals `ending` has arrived."""
    parent = os.getpid()
    _on_purpose[0] = 0
    child = os.fork()
    if child == 0:
        # A process group of its own: a signal to the group of the terminal, or from `timeout`, reaches this process
        # once, by its parent. Two would end it at once.
        os.setpgid(0, 0)
        die_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    status, asked = _wait(child, ending)
    return os.waitstatus_to_exitcode(status), asked


def _exit(code: int) -> NoReturn:
    """Exits without flushing: the child has written all output, and the buffers that were copied at the fork must not
    be written again."""
    os._exit(code if code >= 0 else 128 - code)


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _wait(child: int, ending: set[signal.Signals]) -> tuple[int, bool]:
    """Waits until `child` has ended, and passes signals on to it. Returns its wait status, and whether there was a
    signal."""
    asked = False
    while True:
        number = signal.sigwait({*ending, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            asked = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        # Signals of one number are merged, so each wake-up looks at the child.
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, asked
