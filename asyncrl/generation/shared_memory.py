"""Cleans up after a killed engine: its processes, and its shared-memory segments in /dev/shm.

A pid alone does not identify a process: another node has other processes with the same pids, and a node uses a pid
again after its process has ended. So a process is known by its node, its pid and its start time.
"""

import contextlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil
import xxhash

SHARED_MEMORY = Path("/dev/shm")
ADAPTERS = "asyncrl-lora-"
"""Prefix of the folders with the adapters of an engine."""
_NAMES = re.compile(rf"psm_[0-9a-f]{{8}}|asyncrl-weights-[0-9a-f]{{16}}|{ADAPTERS}[0-9a-f]{{32}}", re.ASCII)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class EngineProcesses(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of an engine, and the names of their segments and folders in /dev/shm.

    `node` is the `node_id` of the engine. `started` maps the pid of each process to its start, in clock ticks since the
    boot of the machine. A change of the wall clock does not change these.
    """

    node: str
    started: dict[int, int]
    shared_memory: list[str]

    @classmethod
    def of(cls, processes: Sequence[psutil.Process], *, also: Sequence[str] = ()) -> "EngineProcesses":
        """Returns the description of living processes of this node. `also` are names in /dev/shm that they will use
        later."""
        return cls(
            node=node_id(),
            started={process.pid: _start_of(process.pid) for process in processes},
            shared_memory=[*segments_of(processes), *also],
        )

    @property
    def here(self) -> bool:
        """Whether the engine is on this node."""
        return self.node == node_id()


def node_id() -> str:
    """Returns a name for the place within which a pid names one process: the host, its boot, and its namespace of pids.

    The containers of one machine may have the same host name, but they have namespaces of their own. A system that does
    not show its boot or its namespaces (some sandboxes) is known by its host name only.
    """
    parts = [socket.gethostname()]
    if boot := boot_id():
        parts.append(boot)
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def boot_id() -> str | None:
    """Returns the name of this boot of the machine; None on a system that does not show it."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return None


def staged_weights(run: str, *, cluster: str) -> str:
    """Returns the name of the file in /dev/shm by which the replicas of a run on this node find the memory for staged
    weights that they share. Replicas in another namespace of pids, as in another container, have another file."""
    where = f"{node_id()} {cluster} {run}"
    return f"asyncrl-weights-{xxhash.xxh3_64_hexdigest(where.encode())}"


def segments_of(processes: Iterable[psutil.Process]) -> list[str]:
    """Returns the names of the segments of Python's shared memory (`psm_…`) that the processes map."""
    mapped = {Path(region.path) for process in processes for region in process.memory_maps(grouped=True)}
    return sorted(path.name for path in mapped if path.parent == SHARED_MEMORY and path.name.startswith("psm_"))


def removable(name: str) -> Path | None:
    """Returns the path of the segment or folder `name` in /dev/shm, if asyncrl may remove it; else None.

    It must exist, be this user's, and have the name and the type of what Python's shared memory or asyncrl makes there.
    The name is not trusted: it may come from a message, or from the run.json of a received run directory.
    """
    path = SHARED_MEMORY / name
    try:
        found = path.lstat() if _NAMES.fullmatch(name) else None
    except OSError:
        return None
    if found is None or found.st_uid != os.getuid():
        return None
    is_kind = stat.S_ISDIR if name.startswith(ADAPTERS) else stat.S_ISREG
    return path if is_kind(found.st_mode) else None


def sweep_shared_memory(names: Iterable[str]) -> None:
    """Removes segments and folders by name. Ignores names that are not `removable`, such as those that are gone."""
    for path in filter(None, map(removable, names)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def reap(engine: EngineProcesses, *, timeout_s: float) -> None:
    """Waits up to `timeout_s` for an engine's processes to end, kills the others, and removes their `shared_memory`.

    Does nothing for an engine of another node: there its processes end with the process group of their Ray worker.
    """
    if not engine.here:
        return
    left = []
    for pid, started in engine.started.items():
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # the process may have exited already
            process = psutil.Process(pid)  # before a signal, psutil checks that this is still the same process
            if _start_of(pid) == started:
                left.append(process)
    for process in psutil.wait_procs(left, timeout=timeout_s)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sweep_shared_memory(engine.shared_memory)


def _start_of(pid: int) -> int:
    """Returns when a process started, in clock ticks since the boot. Raises OSError if there is no such process."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19])  # field 22 in proc(5); the third field is the first one after the name
