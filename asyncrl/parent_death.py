"""Makes a process end when its parent process ends, even if the process is busy at that moment."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when the process `parent_pid`, which started it, ends.

    If the parent has already ended, this process ends at once. Otherwise the kernel sends SIGKILL when the *thread*
    that started this process ends, so that thread must live as long as the parent. The setting survives `exec`. Child
    processes do not inherit it: each child must call this function. On other systems than Linux, this function only
    checks whether the parent has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call of prctl, so no signal will come
        os._exit(0)
