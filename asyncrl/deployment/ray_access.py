"""Who can reach a Ray: whoever can, can run code on it. A Ray of our own listens on this machine alone, and asks
everyone for a token."""

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import ray_constants

from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TOKEN = Path(".ray") / "auth_token"
"""Below the home directory: where Ray looks for its token when no variable names one."""


def require_token() -> None:
    """Sees to it that the Ray that this process starts asks for a token, one that only this user can read.

    Ray switches its token on by itself for a Ray that `ray.init` starts, unless `RAY_AUTH_MODE` says otherwise, and
    writes a new one readable for everybody: so the file is made here. RunError when the environment forbids tokens, or
    when there is no place for one.
    """
    # Ray prints how to switch its token off, which a Ray of our own never does
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise RunError(
            f"RAY_AUTH_MODE = {mode!r}: a Ray of our own asks for a token, for whoever reaches a Ray without one runs "
            "code on it; unset it, or set ray.address to a cluster that you answer for"
        )
    token, named = os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH")
    if token:
        if not token.strip():
            raise RunError("RAY_AUTH_TOKEN is blank: set it to a token (openssl rand -hex 32), or unset it")
        return
    path = Path(named) if named else Path.home() / TOKEN
    if named and not path.is_file():
        raise RunError(f"RAY_AUTH_TOKEN_PATH = {named!r}: there is no such file; put a token into it, or unset it")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _write_new(path)
        elif path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            logger.warning("others on this machine may read Ray's token: chmod 600 %s", path)
    except OSError as error:
        raise RunError(
            f"Ray's token cannot be kept in {path} ({error.strerror}); set RAY_AUTH_TOKEN to one of your own "
            "(openssl rand -hex 32), or RAY_AUTH_TOKEN_PATH to a file that holds it"
        ) from error


def _write_new(path: Path) -> None:
    """Whole or not at all, and whoever comes second takes the first one's: two runs may start at once."""
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
    """Within it, 127.0.0.1 means just that to `ray.init`.

    Otherwise Ray puts the machine's outward address in its place, where clusters of several machines are possible: its
    daemons would listen on every network, and a Ray that does not could not be joined. It has no option for it on
    Linux, hence its own switch for the other systems.
    """
    several_machines = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_machines


def check_own_address(address: str) -> None:
    """Ends the Ray that was just started, with RunError, if it took another address than this machine's own."""
    if address.rpartition(":")[0] != LOOPBACK:
        ray.shutdown()
        raise RunError(
            f"Ray was asked to listen at {LOOPBACK} and listens at {address}: this release of Ray ({ray.__version__}) "
            "cannot be kept from the network; install the one that constraints.txt names"
        )


def is_token_refused(error: BaseException) -> bool:
    """Whether Ray could not be joined for want of the right token: it says so only in the text of a cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ray.exceptions.AuthenticationError) or "InvalidAuthToken" in str(cause):
            return True
        cause = cause.__cause__
    return False


def warn_of_open_cluster(address: str) -> None:
    """Once it is joined: if we had no token to show, it asks nobody for one."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "the Ray cluster at %s asks for no token: whoever reaches it runs code on it. Make one "
            "(`ray get-auth-token --generate`), then start the cluster again",
            address,
        )
