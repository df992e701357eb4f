"""Checks the folders for temporary files: Ray's, and the one of all other libraries. Makes a private one for Ray. Does
not import Ray.

Ray and vLLM make Unix sockets in these folders, and Linux limits the path of a socket to 107 bytes (unix(7)).
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import RunError

logger = logging.getLogger(__name__)

LONGEST_SOCKET = 107
"""Longest path of a socket, bytes."""
_RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path of a socket that Ray makes in its folder. The name of a session ends with a process id, and 4194304 is
the largest one of Linux."""
LONGEST_FOLDERS = {"Ray": LONGEST_SOCKET - len(_RAY_SOCKET), "vLLM": 70}
"""Longest path of the folder in which a library makes its sockets, bytes. The names of vLLM's sockets have 36
characters."""
MIN_FREE_BYTES = 64 * 2**20
"""Free space that a start requires. The logs of Ray take a few MiB; a worker that cannot write its log dies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderProblem:
    """Why a folder for temporary files cannot be used, and how to choose another one."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


def ray_folder() -> tuple[Path, str]:
    """Returns the folder below which Ray makes its folder `ray`, and the variable that names it ("" by default)."""
    for variable in ("RAY_TMPDIR", "TMPDIR"):
        if variable in os.environ:
            return Path(os.environ[variable]), variable
    return Path("/tmp"), ""


def private_folder() -> Path:
    """Returns the folder below which a Ray of this user makes its folder `ray`. It may not exist yet.

    Ray lets every user of the machine write to its folder (mode 0777), where another user could replace a socket, and
    the logs of its workers may quote prompts. So no other user may enter the folder above it. The folder of
    `ray_folder` is returned if only this user can enter it, else the folder `asyncrl-UID` in it.
    """
    folder, _ = ray_folder()
    return folder if _is_private(folder) else folder / f"asyncrl-{os.getuid()}"


def make_private_folder() -> Path:
    """Makes the folder of `private_folder` and returns it. Raises RunError if it cannot be made, is not a folder, or
    belongs to another user.

    A folder whose mode cannot be set, or which another user could rename, is used as it is, with a warning.
    """
    base, _ = ray_folder()
    folder = private_folder()
    if folder == base:
        return folder
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        pass
    except OSError as error:
        raise RunError(f"{folder} cannot be made ({error.strerror}): set RAY_TMPDIR to a folder of yours") from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(
            f"{folder}, in which Ray would make its sockets, belongs to user {found.st_uid} or is not a folder: set "
            "RAY_TMPDIR to a folder that only you can enter, or remove it"
        )
    if reason := _why_open(folder):
        logger.warning(
            "other users of this machine can read and change Ray's files in %s (%s); set RAY_TMPDIR to a folder that "
            "only you can enter",
            folder,
            reason,
        )
    return folder


def _why_open(folder: Path) -> str | None:
    """Sets the mode of a folder of this user to 0700. Returns why another user can still enter it, or can put another
    folder in its place; None if no user can."""
    try:
        folder.chmod(0o700)
    except OSError as error:
        return error.strerror
    if not _is_private(folder):
        return "its file system ignores modes"
    above = folder.parent.stat()
    if above.st_uid not in (0, os.getuid()):
        return f"{folder.parent} is of another user, who can rename it"
    others = 0o002 if above.st_gid == os.getgid() else 0o022  # the group is often that of this user alone
    if above.st_mode & others and not above.st_mode & stat.S_ISVTX:
        return f"every user with the right to write in {folder.parent} can rename it, because that has no sticky bit"
    return None


def _is_private(folder: Path) -> bool:
    """Returns whether `folder` belongs to this user, and no other user has any right on it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def temporary_folder_problems(*, ray: bool = True, vllm: bool = True) -> list[FolderProblem]:
    """Returns the first problem of the folder in which Ray starts on this machine (with `ray`), and the first one of
    the folder of vLLM's sockets (with `vllm`). A folder without a problem gives none.

    If Ray and vLLM use the same folder, only one problem of it is returned.
    """
    uses: list[tuple[str, Path, str]] = []
    if ray:
        uses.append(("Ray", *ray_folder()))
    if vllm:
        # Python ignores a TMPDIR in which it cannot create a file.
        folder = Path(tempfile.gettempdir())
        uses.append(("vLLM", folder, "TMPDIR" if os.environ.get("TMPDIR") else ""))
    seen: set[Path] = set()
    problems = []
    for user, folder, variable in uses:
        found = next(_problems(user, folder, variable), None)
        if found is not None and folder not in seen:
            seen.add(folder)
            problems.append(found)
    return problems


def _problems(user: str, folder: Path, variable: str) -> Iterator[FolderProblem]:
    named = f"{variable} = {folder}" if variable else f"the folder for temporary files, {folder}"
    choose = "set RAY_TMPDIR (for Ray) or TMPDIR (for all programs)" if user == "Ray" else "set TMPDIR"
    used = private_folder() if user == "Ray" else folder
    size, below = len(os.fsencode(folder)), len(os.fsencode(used)) - len(os.fsencode(folder))
    longest = LONGEST_FOLDERS[user] - below
    if size > longest:
        close = f", or chmod 700 {folder}" if size <= LONGEST_FOLDERS[user] else ""
        yield FolderProblem(
            what=f"{named}: has {size} bytes, so {user} cannot make its sockets there (at most {longest})",
            fix=f"{choose} to a shorter path, such as /tmp{close}",
        )
    if not folder.is_absolute():
        yield FolderProblem(what=f"{named}: is not an absolute path", fix=f"{choose} to an absolute path, such as /tmp")
    target = used / "ray" if user == "Ray" else folder
    existing = next((each for each in (target, *target.parents) if os.path.lexists(each)), target)
    elsewhere = f"{choose} to a folder of yours on a disk with space"
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        yield FolderProblem(
            what=f"{named}: {user} cannot write there ({existing}: {error.strerror})",
            fix=elsewhere,
        )
        return
    disk = os.statvfs(existing)
    if (free := disk.f_bavail * disk.f_frsize) < MIN_FREE_BYTES:
        yield FolderProblem(
            what=f"{named}: has {free / 2**20:.0f} MiB free, and {user} needs {MIN_FREE_BYTES / 2**20:.0f} MiB",
            fix=f"delete files there, or {elsewhere}",
        )
