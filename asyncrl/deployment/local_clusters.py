"""This user's Ray clusters on this machine: which one a run joins if its address is not given, and their token.

A cluster that asyncrl starts gets a variable in its environment that names the command and the run. Only the same user
can read the variable, and it vanishes with the cluster. So two heads, and two users of a machine, do not disturb each
other.
Processes connect to a cluster with a token. Does not import Ray, which reads the environment once.
"""

import contextlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.deployment.temporary_folders import ray_folder
from asyncrl.errors import RunError
from asyncrl.run_files import opened

logger = logging.getLogger(__name__)

STARTED_FOR = "ASYNCRL_RAY_OF"
"""Variable in the environment of a cluster that asyncrl started: the command and the directory of the run."""
HEAD = "head"
AUDIT = "audit"
"""Two of the commands that start a cluster. Other commands may join that of a head. The cluster of an audit computes
steps of its run again, and no other command may join it."""
TOKEN = Path(".ray") / "auth_token"
"""Path below the home directory where Ray looks for its token if no environment variable gives one."""
_ADDRESS_FILE = "ray_current_cluster"
"""File in Ray's folder to which `ray start` writes the address of its cluster."""
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
    """Marks the cluster that the block starts, by the variable `STARTED_FOR` in its environment: `command` has started
    it for the run in `directory`."""
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
    """Returns the clusters of this user with a node on this machine, one for each address, without those of audits."""
    found: dict[str, LocalCluster] = {}
    for process in psutil.process_iter(["name", "uids"]):
        uids = process.info["uids"]
        if process.info["name"] != "raylet" or uids is None or uids.real != os.getuid():
            continue
        with contextlib.suppress(psutil.Error):  # the process has just ended
            address = _GCS_ADDRESS.search(" ".join(process.cmdline()))
            command, _, directory = process.environ().get(STARTED_FOR, "").partition(" ")
            folder, _, run = directory.rpartition("/")
            if address is not None and command != AUDIT:
                cluster = LocalCluster(address=address[1], pid=process.pid, command=command, run=run, folder=folder)
                found.setdefault(cluster.address, cluster)
    return list(found.values())


def noted_address() -> str | None:
    """Returns the address that the last `ray start` wrote to a file in Ray's folder. The processes of that cluster may
    be in another container, where `own_clusters` does not see them. None if there is no such file, or if its owner is
    neither this user nor root."""
    try:
        with opened(ray_folder()[0] / "ray" / _ADDRESS_FILE) as noted:
            mine = os.fstat(noted.fileno()).st_uid in (os.getuid(), 0)
            return noted.read(_LONGEST_ADDRESS).decode().strip() or None if mine else None
    except (OSError, ValueError):
        return None


def cluster_of(run: str, clusters: Sequence[LocalCluster], *, folder: str) -> LocalCluster | None:
    """Returns the cluster that the run `run` in `folder` joins without an address; None if there is none.

    It is the cluster that asyncrl started for this run, or for a run of its name in another folder. If there is none,
    it is the only cluster that `asyncrl head` of another run or another program, such as `ray start`, has started:
    never one that another run has started for itself. Raises RunError if several clusters are possible.
    """
    named = [cluster for cluster in clusters if cluster.run == run]
    mine = [cluster for cluster in named if cluster.folder == folder] or named
    possible = mine or [cluster for cluster in clusters if cluster.command in ("", HEAD)]
    if len(possible) > 1:
        listed = "\n".join(f"  {cluster}" for cluster in possible)
        raise RunError(
            f"{len(possible)} Ray clusters on this machine can be the run's, and "
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


def use_ray_token(*, own: bool = False) -> None:
    """Makes Ray use the user's token, if there is one. Call it before ray is imported.

    Ray uses the token by itself for the address `auto`, but not for other addresses. `own` is for a cluster that this
    process starts: its token need not exist yet, because `require_token` creates it. For such a cluster, Ray would turn
    tokens on by itself, but would print a hint on how to turn them off.
    """
    known = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if own or known or (Path.home() / TOKEN).is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def require_token() -> None:
    """Makes sure that a Ray cluster that this process starts requires a token that only this user can read.

    `ray.init` turns tokens on by itself unless `RAY_AUTH_MODE` forbids it. But it writes a new token file that all
    users can read, so this function creates the file. Raises RunError if the environment forbids tokens or gives a
    token that is blank or not there, if other users can read the file, or if the token cannot be stored.
    """
    # Ray prints a hint on how to turn tokens off. It is hidden, because our clusters always require a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise RunError(
            f"RAY_AUTH_MODE = {mode!r}: asyncrl starts Ray only with a token, because every process that can connect "
            "to a Ray without one can run code on it; unset RAY_AUTH_MODE, or set ray.address to a cluster for whose "
            "security you are responsible"
        )
    token, named = os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token:
        if not token.strip():
            raise RunError("RAY_AUTH_TOKEN is blank; set it to a token (openssl rand -hex 32), or unset it")
        return
    path = _token_file()
    if named and not path.is_file():
        raise RunError(
            f"RAY_AUTH_TOKEN_PATH = {named!r}: there is no such file; write a token to it, or unset the variable"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path)
    except OSError as error:
        raise RunError(
            f"Ray's token cannot be stored in {path} ({error.strerror}); set RAY_AUTH_TOKEN to a token (openssl rand "
            "-hex 32), or set RAY_AUTH_TOKEN_PATH to a file with a token"
        ) from error
    check_token_file()


def check_token_file() -> None:
    """Raises RunError if Ray takes its token from a file that other users have any right on: with the token, they can
    run code as this user. With the usual umask, Ray's command that generates a token makes such a file. A file that
    another user owns may be readable by its group: Kubernetes gives a volume with a secret to root and to the pod's
    group."""
    path = _token_file()
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_MODE", "token") != "token" or not path.is_file():
        return
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IRWXO or (mode & stat.S_IRWXG and found.st_uid == os.getuid()):
        raise RunError(
            f"Ray's token in {path} has mode {mode:04o}, so other users can use it to run code as you; run `chmod 600 "
            f"{path}`, or, where modes cannot be set, put the token into RAY_AUTH_TOKEN. If others may have read it, "
            "make a new one"
        )


def _token_file() -> Path:
    """Returns the file in which Ray looks for its token if RAY_AUTH_TOKEN is not set. It may not exist."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / TOKEN


def _write_new(path: Path) -> None:
    """Writes a new token to `path` atomically. If another process has written one meanwhile, that token stays.

    Two runs may start at the same time, and both must use the same token.
    """
    unnamed = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unnamed, path)
    finally:
        unnamed.unlink()
