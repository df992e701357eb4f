"""Checks the folders for temporary files: Ray's, and the one of all other libraries. Does not import Ray.

Ray and vLLM make Unix sockets there, and Linux limits the path of a socket to 107 bytes (unix(7)).
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


def close_to_others(folder: Path) -> None:
    """Removes the rights of all other users on the session folder of a Ray that this process started.

    Ray lets every user of the machine write there (mode 0777), and the logs of its workers may quote prompts. A folder
    in which no mode can be set is left as it is, with a warning.
    """
    try:
        folder.chmod(0o700)
    except OSError as error:
        logger.warning(
            "other users of this machine can read and change Ray's files in %s (%s); set RAY_TMPDIR to a folder that "
            "only you can enter",
            folder,
            error.strerror,
        )


def temporary_folder_problems(*, ray: bool = True, vllm: bool = True) -> list[FolderProblem]:
    """Returns the problems of the folder in which Ray starts on this machine, and of the folder of vLLM's sockets.

    If one folder has both uses, its problem is returned once.
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
    size, longest = len(os.fsencode(folder)), LONGEST_FOLDERS[user]
    if size > longest:
        yield FolderProblem(
            what=f"{named}: has {size} bytes, so {user} cannot make its sockets there (at most {longest})",
            fix=f"{choose} to a shorter path, such as /tmp",
        )
    if not folder.is_absolute():
        yield FolderProblem(what=f"{named}: is not an absolute path", fix=f"{choose} to an absolute path, such as /tmp")
    target = folder / "ray" if user == "Ray" else folder
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
