"""Sends weights through files in a folder that the learner and all generators can reach, such as a network disk.

Each bucket is one file in the format of safetensors, in a folder with the version's name. The file's name has the
bucket's checksum. The learner deletes the files of a version that the weight store does not offer any more.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyncrl.common.version import Version
from asyncrl.errors import FetchFailed, ManifestVoid
from asyncrl.run_files import names
from asyncrl.weights.manifest import Bytes
from asyncrl.weights.transports.interfaces import Shipment, StoresBytes

_BYTES = "bytes"
_OWN_NAME = re.compile(r"\d+-[0-9a-f]{32}\.(?:safetensors|unfinished)", re.ASCII)
_READABLE = 0o644  # safetensors makes its files readable only for their owner


class FilesystemTransport(StoresBytes):
    """The handle of a bucket is the path of its file in `folder`, which belongs to one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def send(self, sent: Shipment) -> list[Any]:
        folder = self._folder / str(sent.version)
        folder.mkdir(parents=True, exist_ok=True)
        # Two ranks may send equal bytes, but not for the same offset, so no two files have the same name.
        paths = [folder / f"{bucket.pieces[0].offset}-{bucket.checksum}.safetensors" for bucket in sent.described]
        for path, part in zip(paths, sent.parts, strict=True):
            unfinished = path.with_suffix(".unfinished")
            save_file({_BYTES: part}, unfinished)
            unfinished.chmod(_READABLE)
            unfinished.replace(path)
        return [str(path) for path in paths]

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_read, Path(handle))
        except TimeoutError as error:
            raise FetchFailed(
                f"reading weights from {handle} took longer than weights.load_timeout_s; look at the disk of "
                "weights.folder, or raise the limit"
            ) from error
        except (OSError, SafetensorError) as error:
            raise ManifestVoid(
                f"the file {handle} with published weights cannot be read ({error}); check that weights.folder is a "
                "folder that the learner and all generators share"
            ) from error

    def delete(self, which: Callable[[Version], bool]) -> None:
        for folder in self._folder.glob("*.*"):
            with contextlib.suppress(ValueError):
                if which(Version.parse(folder.name)):
                    _remove(folder)
        with contextlib.suppress(OSError):  # it has other versions, or does not exist
            self._folder.rmdir()


def _remove(folder: Path) -> None:
    """Removes the files that a transport writes, and the folder if it has no others: `weights.folder` may be a folder
    with files of another program, whose names look like versions (`3.11`)."""
    with contextlib.suppress(OSError):
        for name in names(folder, inside=folder.parent):
            if _OWN_NAME.fullmatch(name):
                (folder / name).unlink()
        folder.rmdir()


def _read(path: Path) -> Bytes:
    with safe_open(path, framework="np") as file:
        data: Bytes = file.get_tensor(_BYTES)
        return data
