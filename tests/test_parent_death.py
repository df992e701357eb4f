"""A process that has called `die_with` ends when its parent is killed, and not before. It need not do anything
itself."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow

CHILD = """
import os, sys
from asyncrl.parent_death import die_with
die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdin=subprocess.PIPE)
child.wait()
"""


def test_it_ends_when_its_parent_is_killed() -> None:
    # The parent holds the other end of the child's stdin, which is closed when the parent dies. The child is suspended,
    # so that it cannot end by reading the end of stdin.
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert child.is_running()
        child.suspend()
        os.kill(parent.pid, signal.SIGKILL)
        assert psutil.wait_procs([child], timeout=60)[1] == []


def test_it_ends_at_once_when_its_parent_was_gone_before() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(gone.pid)], stdin=subprocess.PIPE, capture_output=False,
        stdout=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, b"")
