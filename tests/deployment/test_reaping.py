"""What a dead replica leaves on its node is ended, whatever it is just doing."""

import subprocess
import sys

import psutil
import pytest

from asyncrl.deployment.generators import _reap
from asyncrl.generation.actor import ReplicaProcesses


def processes(*pids: int) -> ReplicaProcesses:
    return ReplicaProcesses(pids=list(pids), shared_memory=[], metrics_address="")


def test_f2_an_engine_that_ends_while_it_is_reaped_does_not_end_the_deployment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    _reap(processes(ended.pid))
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: True)  # it was there a moment ago
    _reap(processes(ended.pid))


def test_a_process_that_took_an_engines_pid_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as other:
        _reap(processes(other.pid))
        assert other.poll() is None
        other.kill()


def test_a_replica_that_never_started_leaves_nothing_to_reap() -> None:
    _reap(None)
