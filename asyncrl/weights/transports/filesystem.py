"""Sends weights through files in a folder that the learner and all generators can reach, such as a network disk.

Each bucket is one file in the format of safetensors, in a folder with the version's name. The file's name has the
bucket's checksum. A rank keeps the files of its newest versions, as many as the weight store keeps and the next one.
"""

import asyncio
import contextlib
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyncrl.common.version import Version
from asyncrl.errors import FetchTimeout, ManifestVoid
from asyncrl.weights.manifest import Bucket, Bytes
from asyncrl.weights.publisher import Snapshot

KEPT_VERSIONS = 3
_BYTES = "bytes"


class FilesystemTransport:
    """Implements `Transport`. The handle of a bucket is the path of its file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def send(self, snapshot: Snapshot, described: tuple[Bucket, ...], version: Version) -> list[Any]:
        folder = self._folder / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{bucket.checksum}.safetensors" for bucket in described]
        for path, data in zip(paths, snapshot.buckets, strict=True):
            unfinished = path.with_suffix(".unfinished")
            save_file({_BYTES: data}, unfinished)
            unfinished.replace(path)
        self._keep(KEPT_VERSIONS)
        return [str(path) for path in paths]

    async def receive(self, handle: Any, *, timeout_s: float) -> Bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_read, Path(handle))
        except TimeoutError as error:
            raise FetchTimeout(
                f"reading weights from {handle} took longer than weights.load_timeout_s = {timeout_s:g} s; look at "
                "the disk of weights.folder, or raise the limit"
            ) from error
        except (OSError, SafetensorError) as error:
            raise ManifestVoid(
                f"the file {handle} with published weights cannot be read ({error}); check that weights.folder is a "
                "folder that the learner and all generators share"
            ) from error

    def close(self) -> None:
        self._keep(0)
        with contextlib.suppress(OSError):  # it may be a folder of the user, with other files
            self._folder.rmdir()

    def _keep(self, versions: int) -> None:
        """Deletes the files of all but the newest versions."""
        found = []
        for folder in self._folder.glob("*.*"):
            with contextlib.suppress(ValueError):
                found.append((Version.parse(folder.name), folder))
        for _, folder in sorted(found)[: max(0, len(found) - versions)]:
            shutil.rmtree(folder, ignore_errors=True)  # another rank may delete it too


def _read(path: Path) -> Bytes:
    with safe_open(path, framework="np") as file:
        data: Bytes = file.get_tensor(_BYTES)
        return data
