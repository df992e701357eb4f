"""Cleans up after a killed engine: its processes, and its shared-memory segments in /dev/shm."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import psutil

SHARED_MEMORY = Path("/dev/shm")


class EngineProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of an engine's processes on its node, and the names of their segments in /dev/shm."""

    pids: list[int]
    shared_memory: list[str]


def segments_of(processes: Iterable[psutil.Process]) -> list[str]:
    """Returns the names of the shared-memory segments that the processes map."""
    mapped = {Path(region.path) for process in processes for region in process.memory_maps(grouped=True)}
    return sorted(path.name for path in mapped if path.parent == SHARED_MEMORY and path.name.startswith("psm_"))


def sweep_shared_memory(names: Iterable[str]) -> None:
    """Removes segments by name. Ignores names that no longer exist."""
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def reap(engine: EngineProcesses, *, timeout_s: float) -> None:
    """Waits for an engine's processes, kills the ones that remain, and removes their shared-memory segments.

    Acts on this node only. On other nodes the engine's processes end with the process group of their Ray worker.
    """
    ours = []
    for pid in engine.pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # the process may have exited already
            process = psutil.Process(pid)
            if process.name().startswith("VLLM"):
                ours.append(process)
    for process in psutil.wait_procs(ours, timeout=timeout_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sweep_shared_memory(engine.shared_memory)
