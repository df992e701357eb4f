"""What vLLM's processes leave in /dev/shm when they are killed, found by what they map and removed by name."""

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
