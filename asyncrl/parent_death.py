"""Processes that end when their parent ends, whatever they do at that moment."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ends this process when the process `parent_pid`, which started it, ends; at once if that has ended already.

    The kernel sends SIGKILL. It does so when the *thread* that started this process ends, so that thread must live as
    long as the parent. The setting survives `exec`, and is not inherited by child processes: each has to call this.
    Elsewhere than on Linux only the check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before prctl, and no signal will come
        os._exit(0)
