"""Opens the files of a run directory safely: another person may have made it, for example one that came by mail.

    read(run / "run.json")                                   the content of a file of the directory
    read(run / "samples" / "step-1.jsonl", inside=run)       the content of a file in a folder of the directory
    names(run / "samples", inside=run)                       the names of the files and folders in a folder
    check_plain(run)                                         raises an error if the directory has a link or a pipe

`inside` is the directory that the user named; its own path may have symbolic links. Below it, every part of a path is
opened relative to the part before it. Nothing is read or written outside of the directory, because no symbolic link
and no `..` is followed. Only regular files are opened, without waiting: a named pipe would block its reader, and a
device may have no end. `read` refuses a file that is larger than its limit.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from asyncrl.errors import FileRefused

RECORD_BYTES = 2**24
"""Bytes of the largest file that is read as one record, such as run.json or the manifest of a checkpoint, and of the
longest line of a file with a record in each line."""
FILE_BYTES = 2**30
"""Bytes of the largest file with many records or rows that is read, such as steps.jsonl or buffer.msgpack."""
MOST_FOLDERS = 50
"""Largest number of folders between a run directory and a file in it. Python cannot remove much deeper folders."""
UNREADABLE = (OSError, ValueError, RecursionError, MemoryError)
"""Errors of a file that cannot be opened or decoded: it is missing or refused, is not UTF-8 or not a record, or is
nested too deeply. An error of msgspec is a ValueError."""
OF_DAMAGED_FILES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of code that uses the content of a damaged file, for example a number that is too large for a float."""

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def opened(path: Path, *, inside: Path | None = None) -> BinaryIO:
    """Opens a regular file to read it. `inside` is the run directory that must contain the file, at any depth; default:
    the file's own folder.

    Raises FileNotFoundError, FileRefused if it is not a regular file inside of the directory, or another OSError.
    """
    return os.fdopen(_open(path, os.O_RDONLY, inside=inside), "rb")


def opened_to_append(path: Path, *, inside: Path | None = None, buffering: int = -1) -> BinaryIO:
    """Opens a regular file to append to it, and creates it if there is none. Unless `buffering` is 0, the file can be
    read too. Raises the errors of `opened`, but not FileNotFoundError for the file itself."""
    descriptor = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, inside=inside)
    return os.fdopen(descriptor, "ab" if buffering == 0 else "a+b", buffering)


def read(path: Path, *, inside: Path | None = None, most: int = RECORD_BYTES) -> bytes:
    """Returns the content of a regular file of at most `most` bytes. Raises the errors of `opened`, and FileRefused for
    a larger file."""
    with opened(path, inside=inside) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise FileRefused(
                f"{_named(path)} has {size:,} bytes, and at most {most:,} are read: asyncrl does not write such a "
                "large file; look at it, and remove it if it is not a file of the run"
            )
        return file.read(most)


def names(folder: Path, *, inside: Path | None = None) -> list[str]:
    """Returns the sorted names of the regular files and folders in `folder`; none if there is no such folder. Symbolic
    links, pipes and devices are left out. With `inside`, raises FileRefused if `folder` or a folder between the two is
    a link or not a folder."""
    try:
        with _folder(folder, inside=inside) as at:
            place = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
            try:
                with os.scandir(place) as entries:
                    return sorted(each.name for each in entries if _is_plain(each))
            finally:
                os.close(place)
    except FileNotFoundError:
        return []


def sizes_below(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file below `folder`, at any depth, by its path relative to `folder`. Raises
    FileRefused if an entry is neither a regular file nor a folder, or has more than `MOST_FOLDERS` folders above it."""
    found: dict[str, int] = {}
    folders = [(folder, 0)]
    while folders:
        place, above = folders.pop()
        if above > MOST_FOLDERS:
            raise FileRefused(f"{_named(folder)} has more than {MOST_FOLDERS} folders inside each other: remove them")
        with os.scandir(place) as entries:
            for each in entries:
                if not _is_plain(each):
                    raise _refused(Path(each.path), each.stat(follow_symlinks=False))
                if each.is_dir(follow_symlinks=False):
                    folders.append((Path(each.path), above + 1))
                else:
                    found[os.path.relpath(each.path, folder)] = each.stat(follow_symlinks=False).st_size
    return dict(sorted(found.items()))


def check_plain(directory: Path, *, except_for: Sequence[str] = ()) -> None:
    """Raises FileRefused if an entry of the directory or of one of its folders, at any depth, is not a regular file or
    a folder. `except_for` has the names of folders in `directory` that other programs write. Their entries are not
    checked."""
    with os.scandir(directory) as entries:
        for each in entries:
            if not _is_plain(each):
                raise _refused(Path(each.path), each.stat(follow_symlinks=False))
            if each.is_dir(follow_symlinks=False) and each.name not in except_for:
                sizes_below(Path(each.path))


def _open(path: Path, flags: int, *, inside: Path | None) -> int:
    """Opens `path` with `flags` and returns its descriptor. Follows no link below `inside`, and raises FileRefused if
    `path` is not a regular file."""
    with _folder(path.parent, inside=inside) as at:
        try:
            with contextlib.suppress(FileNotFoundError):  # `os.open` then creates the file, or raises the error
                _check(path, os.stat(path.name, dir_fd=at, follow_symlinks=False))
            descriptor = os.open(path.name, flags | _FLAGS, 0o666, dir_fd=at)
        except FileRefused:
            raise
        except OSError as error:
            error.filename = str(path)
            raise
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def _folder(folder: Path, *, inside: Path | None) -> Iterator[int]:
    """Yields a descriptor of `folder`, which must be `inside` or a folder below it. Raises FileRefused if it is not, or
    if a part of the path below `inside` is a link."""
    inside = folder if inside is None else inside
    if not folder.is_relative_to(inside) or ".." in (parts := folder.relative_to(inside).parts):
        raise FileRefused(
            f"{_named(folder)} is not inside of {_named(inside)}: a run directory names only its own files"
        )
    at, place = os.open(inside, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), inside
    try:
        for name in parts:
            place = place / name
            _check(place, os.stat(name, dir_fd=at, follow_symlinks=False), wanted=stat.S_ISDIR)
            below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _check(path: Path, found: os.stat_result, *, wanted: object = stat.S_ISREG) -> None:
    assert callable(wanted)
    if not wanted(found.st_mode):
        raise _refused(path, found)


def _refused(path: Path, found: os.stat_result) -> FileRefused:
    kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "a file in place of a folder")
    return FileRefused(
        f"{_named(path)} is {kind}: in a run directory, asyncrl uses only regular files and folders, and follows no "
        "link; put the file itself there, or remove it"
    )


def _named(path: Path) -> str:
    """Returns a path for an error: in one line, also if a name has a line break."""
    return str(path) if str(path).isprintable() else ascii(str(path))
