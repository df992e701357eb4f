"""What a dead engine leaves on its node is ended and removed, in whatever state it is, and nothing else is."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import psutil
import pytest

from asyncrl.generation import shared_memory
from asyncrl.generation.shared_memory import SHARED_MEMORY, EngineProcesses, node_id, reap, staged_weights


@pytest.fixture
def process() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as waits:
        yield waits
        if waits.poll() is None:
            waits.kill()


@pytest.fixture
def segment() -> Iterator[str]:
    memory = SharedMemory(create=True, size=16)
    yield memory.name
    memory.close()
    with contextlib.suppress(FileNotFoundError):  # the test removed it
        memory.unlink()


def ends_by_itself(process: psutil.Popen) -> bool:
    """Returns whether the process was not killed. A signal takes some time to end a process."""
    process.communicate(b"\n", timeout=60)
    return bool(process.returncode == 0)


def description_of(process: psutil.Popen, *segments: str) -> EngineProcesses:
    described = EngineProcesses.of([psutil.Process(process.pid)])
    return msgspec.structs.replace(described, shared_memory=list(segments))


@pytest.mark.fault("F2")
def test_what_an_engine_left_on_this_node_is_ended_and_removed(process: psutil.Popen, segment: str) -> None:
    reap(description_of(process, segment), timeout_s=0.0)
    assert process.wait(60) == -signal.SIGKILL
    assert not (SHARED_MEMORY / segment).exists()


@pytest.mark.fault("F2")
def test_a_process_of_this_node_is_left_alone_when_an_engine_of_another_node_is_reaped(
    process: psutil.Popen, segment: str
) -> None:
    remote = msgspec.structs.replace(description_of(process, segment), node="another node")
    reap(remote, timeout_s=0.0)
    assert ends_by_itself(process)
    assert (SHARED_MEMORY / segment).exists()
    assert not remote.here


@pytest.mark.fault("F2")
def test_a_process_that_took_the_pid_of_an_engine_is_left_alone(process: psutil.Popen) -> None:
    [(pid, started)] = description_of(process).started.items()
    earlier = EngineProcesses(node=node_id(), started={pid: started - 1}, shared_memory=[])
    reap(earlier, timeout_s=0.0)
    assert ends_by_itself(process)


@pytest.mark.fault("F2")
def test_an_engine_that_ends_while_it_is_reaped_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as ended:
        described = EngineProcesses.of([psutil.Process(ended.pid)])
        ended.communicate(b"\n", timeout=60)
    reap(described, timeout_s=60.0)
    monkeypatch.setattr(psutil.Process, "__init__", lambda process, pid: None)  # as if it had ended just now
    reap(described, timeout_s=60.0)


def test_containers_with_one_host_name_are_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    here = node_id()
    assert node_id() == here
    monkeypatch.setattr(shared_memory.os, "readlink", lambda path: "pid:[2]")
    assert node_id() != here


def test_replicas_share_staged_weights_if_they_are_of_one_run_and_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    own = staged_weights("a", cluster="10.0.0.1:6379")
    assert staged_weights("a", cluster="10.0.0.1:6379") == own
    others = {staged_weights("b", cluster="10.0.0.1:6379"), staged_weights("a", cluster="10.0.0.1:6380")}
    monkeypatch.setattr(shared_memory.os, "readlink", lambda path: "pid:[2]")
    others.add(staged_weights("a", cluster="10.0.0.1:6379"))
    assert len(others | {own}) == 4


def test_another_machine_with_the_same_host_name_is_another_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = node_id()
    (tmp_path / "boot_id").write_text("another-boot\n")
    monkeypatch.setattr(shared_memory, "_BOOT_ID", tmp_path / "boot_id")
    assert node_id() != here
