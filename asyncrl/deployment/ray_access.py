"""Restricts access to Ray, because every process that can connect to a Ray cluster can run code on it.

A Ray cluster that this process starts listens only on this machine and requires a token.
"""

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._common.utils import reset_ray_address
from ray._private import ray_constants, utils

from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TOKEN = Path(".ray") / "auth_token"
"""Path below the home directory where Ray looks for its token if no environment variable gives one."""


def require_token() -> None:
    """Makes sure that a Ray cluster that this process starts requires a token that only this user can read.

    `ray.init` turns tokens on by itself unless `RAY_AUTH_MODE` forbids it. But it writes a new token file that all
    users can read, so this function creates the file. Raises RunError if the environment forbids tokens, or if the
    token cannot be stored.
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
    path = Path(named) if named else Path.home() / TOKEN
    if named and not path.is_file():
        raise RunError(
            f"RAY_AUTH_TOKEN_PATH = {named!r}: there is no such file; write a token to it, or unset the variable"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path)
        elif path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("other users of this machine can read Ray's token; run: chmod 600 %s", path)
    except OSError as error:
        raise RunError(
            f"Ray's token cannot be stored in {path} ({error.strerror}); set RAY_AUTH_TOKEN to a token (openssl rand "
            "-hex 32), or set RAY_AUTH_TOKEN_PATH to a file with a token"
        ) from error


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


@contextlib.contextmanager
def loopback_stays_loopback() -> Iterator[None]:
    """Makes `ray.init` use the address 127.0.0.1 unchanged within the block.

    On systems where Ray supports clusters of several machines, Ray replaces 127.0.0.1 by the machine's external
    address. Its daemons would then listen on every network, and a Ray at 127.0.0.1 could not be joined. Ray has no
    option for this on Linux. So this function changes the constant with which Ray turns multi-machine clusters off on
    other systems.
    """
    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_machines


def check_own_address(address: str) -> None:
    """Checks that the Ray that was just started listens at 127.0.0.1. If not, ends it and raises RunError."""
    if address.rpartition(":")[0] != LOOPBACK:
        ray.shutdown()
        raise RunError(
            f"Ray was asked to listen at {LOOPBACK} but listens at {address}: this release of Ray ({ray.__version__}) "
            "is open to the network; install the release that constraints.txt names"
        )


@contextlib.contextmanager
def advertised(address: str) -> Iterator[None]:
    """Within it, `auto` means the Ray at `address` for every process of this machine, as after `ray start --head`.

    Without the file that Ray reads for this, `auto` means any Ray that runs here.
    """
    utils.write_ray_address(address)
    try:
        yield
    finally:
        if utils.read_ray_address() == address:
            reset_ray_address()


def is_token_refused(error: BaseException) -> bool:
    """Returns whether Ray refused the connection because the token is missing or wrong.

    Ray reports this only in the text of an error in the chain of causes.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(cause):
            return True
        cause = cause.__cause__
    return False


def warn_of_open_cluster(address: str) -> None:
    """Warns that the cluster requires no token. Call it after joining: the cluster accepted us without a token."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the Ray cluster at %s requires no token, so every process that can connect to it can run code on it. "
            "Create a token (`ray get-auth-token --generate`), then start the cluster again",
            address,
        )
