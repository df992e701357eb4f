"""The Ray clusters of this user on this machine, and which one a run joins if its address is not given.

A cluster that asyncrl starts gets a variable in its environment that names the command and the run. Only the same user
can read it, and it is gone when the cluster is. So two heads, and two users of a machine, do not disturb each other.
Does not import Ray.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.errors import RunError
from asyncrl.run_files import opened

STARTED_FOR = "ASYNCRL_RAY_OF"
"""Variable in the environment of a cluster that asyncrl started: the command and the directory of the run."""
HEAD = "head"
_LONGEST_ADDRESS = 300
"""Bytes that are read of the file with the address of the last `ray start`."""
_GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """A Ray cluster with a node on this machine. `pid` is the process id of this node's raylet.

    `command` is the command of asyncrl that started the cluster, `run` the name of its run, and `folder` the folder of
    the run's directory. All are empty for a cluster that another program started, such as `ray start`.
    """

    address: str
    pid: int
    command: str = ""
    run: str = ""
    folder: str = ""

    def __str__(self) -> str:
        of = f"`asyncrl {self.command}` of run {self.run}" if self.run else "not started by asyncrl"
        return f"{self.address} ({of}, raylet with pid {self.pid})"


@contextlib.contextmanager
def started_for(command: str, directory: Path) -> Iterator[None]:
    """Marks the cluster that the block starts: `command` starts it for the run in `directory`."""
    before = os.environ.get(STARTED_FOR)
    os.environ[STARTED_FOR] = f"{command} {directory.resolve()}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[STARTED_FOR]
        else:
            os.environ[STARTED_FOR] = before


def own_clusters() -> list[LocalCluster]:
    """Returns the clusters of this user with a node on this machine, one for each address."""
    found: dict[str, LocalCluster] = {}
    for process in psutil.process_iter(["name", "uids"]):
        uids = process.info["uids"]
        if process.info["name"] != "raylet" or uids is None or uids.real != os.getuid():
            continue
        with contextlib.suppress(psutil.Error):  # it has just ended
            address = _GCS_ADDRESS.search(" ".join(process.cmdline()))
            command, _, directory = process.environ().get(STARTED_FOR, "").partition(" ")
            folder, _, run = directory.rpartition("/")
            if address is not None:
                cluster = LocalCluster(address=address[1], pid=process.pid, command=command, run=run, folder=folder)
                found.setdefault(cluster.address, cluster)
    return list(found.values())


def noted_address(file: Path) -> str | None:
    """Returns the address that `ray start` wrote to `file`, as in another container. None if there is no such file, or
    if neither this user nor root has written it."""
    try:
        with opened(file) as noted:
            mine = os.fstat(noted.fileno()).st_uid in (os.getuid(), 0)
            return noted.read(_LONGEST_ADDRESS).decode().strip() or None if mine else None
    except (OSError, ValueError):
        return None


def cluster_of(run: str, clusters: Sequence[LocalCluster], *, folder: str) -> LocalCluster | None:
    """Returns the cluster that the run `run` in `folder` joins without an address; None if there is none.

    It is the cluster that asyncrl started for this run, or for one of its name in another folder. Otherwise it is the
    only other cluster, but never one that `asyncrl up` or a program started for itself. Raises RunError if several
    clusters are possible.
    """
    named = [cluster for cluster in clusters if cluster.run == run]
    mine = [cluster for cluster in named if cluster.folder == folder] or named
    possible = mine or [cluster for cluster in clusters if cluster.command in ("", HEAD)]
    if len(possible) > 1:
        listed = "\n".join(f"  {cluster}" for cluster in possible)
        raise RunError(
            f"{len(possible)} Ray clusters run on this machine, and "
            f"{'several were' if mine else 'none was'} started for run {run}; set ray.address or --address to one of "
            f"them, or start one with `asyncrl head -c FILE`:\n{listed}"
        )
    return possible[0] if possible else None


def check_no_head(directory: Path, clusters: Sequence[LocalCluster]) -> list[str]:
    """Returns a note for each head of another run on this machine. Raises RunError if the run in `directory` has a
    cluster."""
    run, folder = directory.name, str(directory.parent.resolve())
    notes = []
    for cluster in clusters:
        if (cluster.run, cluster.folder) == (run, folder):
            raise RunError(
                f"run {run} has a Ray cluster on this machine already: {cluster}; use it, end the command that "
                "started it, or choose another run.name"
            )
        if cluster.command == HEAD:
            notes.append(f"another head runs on this machine: {cluster}; each run joins its own")
    return notes
