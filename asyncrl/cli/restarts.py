"""Starts a command again that was killed, or that failed with an error that another start mends.

`supervise` forks before Ray or torch is imported. The child runs the command. The parent has no other work than to
start the next child, so it stays alive when the child is killed or runs out of memory. The command in each child
decides whether it may restart the run (`check_restart`), because only the command knows the configuration.
"""

import contextlib
import os
import signal
import time
from collections import deque

from asyncrl.parent_death import die_with

RESTART_MENDS = 75
"""Exit code of a command that failed with an error that another start mends (EX_TEMPFAIL of sysexits.h)."""
WINDOW_S = 3600.0
"""`run.max_restarts` limits the restarts within this time, seconds."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_restarts = 0


def restarts() -> int:
    """Returns how often the command was started again within the last `WINDOW_S` seconds, this process included; 0 in
    the first process."""
    return _restarts


def supervise() -> None:
    """Returns in a child process, which runs the command. This process waits for it and then exits with its exit code.

    If a signal killed the child, or if its exit code is `RESTART_MENDS`, the next child is started, and `supervise`
    returns there. SIGTERM, SIGINT and SIGHUP are passed on to the child. After one of them, no child is started.

    Must be called in the main thread, before any other thread was started.
    """
    # A signal that is ignored (SIGHUP, under nohup) would still be reported to `sigwait` while it is blocked.
    ending = {number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ending, signal.SIGCHLD})
    starts: deque[float] = deque()
    while True:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            # A process group of its own: a signal to the group of the terminal, or from `timeout`, reaches this process
            # once, by its parent. Two would end it at once.
            os.setpgid(0, 0)
            die_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            global _restarts
            _restarts = len(starts)
            return
        status, asked = _wait(child, ending)
        code = os.waitstatus_to_exitcode(status)
        if asked or (code >= 0 and code != RESTART_MENDS):
            _exit(code if code >= 0 else 128 - code)
        now_s = time.monotonic()
        starts.append(now_s)
        while now_s - starts[0] > WINDOW_S:
            starts.popleft()


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


def _exit(code: int) -> None:
    # The child has written all output. Flushing buffers that were copied at the fork would repeat a part of it.
    os._exit(code)
