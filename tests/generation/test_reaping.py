"""The processes that a dead engine leaves on its node are ended, whatever state they are in."""

import subprocess
import sys

import psutil
import pytest

from asyncrl.generation.shared_memory import EngineProcesses, reap


@pytest.mark.fault("F2")
def test_an_engine_that_ends_while_it_is_reaped_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    reap(EngineProcesses(pids=[ended.pid], shared_memory=[]), timeout_s=60.0)
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)  # as if the process had ended just now
    reap(EngineProcesses(pids=[ended.pid], shared_memory=[]), timeout_s=60.0)


def test_a_process_that_took_an_engines_pid_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        reap(EngineProcesses(pids=[other.pid], shared_memory=[]), timeout_s=60.0)
        assert other.poll() is None
        other.kill()
