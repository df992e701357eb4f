"""The token with which processes connect to a Ray cluster. Does not import ray, which reads the environment once."""

import contextlib
import logging
import os
import secrets
import stat
from pathlib import Path

from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

TOKEN = Path(".ray") / "auth_token"
"""Path below the home directory where Ray looks for its token if no environment variable gives one."""


def use_ray_token(*, own: bool = False) -> None:
    """Makes Ray use the user's token, if there is one. Call it before ray is imported.

    Ray uses the token by itself for the address `auto`, but not for other addresses. `own` is for a cluster that this
    process starts. Its token is created if there is none. Ray would use it without this function too, but would print
    a hint on how to turn tokens off.
    """
    known = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if own or known or (Path.home() / TOKEN).is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


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
