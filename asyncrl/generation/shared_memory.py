"""What an engine leaves behind when it is killed: its processes, and what they map of /dev/shm."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def segments_of(processes: Iterable[psutil.Process]) -> list[str]:
    """Names of the shared-memory segments that the processes map."""
    mapped = {Path(region.path) for process in processes for region in process.memory_maps(grouped=True)}
    return sorted(path.name for path in mapped if path.parent == SHARED_MEMORY and path.name.startswith("psm_"))


def sweep_shared_memory(names: Iterable[str]) -> None:
    """Removes segments by name; those that are gone already are fine."""
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def reap(pids: Iterable[int], *, segments: Iterable[str], timeout_s: float) -> None:
    """Waits for an engine's processes, ends those that stay, and sweeps their shared memory.

    Only on this node: elsewhere the engine's processes end with their Ray worker's process group.
    """
    ours = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # an engine that lost its replica ends at any moment
            process = psutil.Process(pid)
            if process.name().startswith("VLLM"):
                ours.append(process)
    for process in psutil.wait_procs(ours, timeout=timeout_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sweep_shared_memory(segments)
