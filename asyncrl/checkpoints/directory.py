"""The checkpoint of a run after one step: a directory that is complete and verified, or is not used.

    checkpoints/step-140/
      hf/              weights that vLLM and transformers load (`checkpoint.hf`)
      policy/ critic/  weights and optimizer, written by the ranks (`asyncrl.ranks.sharded_checkpoint`)
      buffer.msgpack   the buffer and the position in the prompts at the ack of the step (`RunSnapshot`)
      rows/            rows of the groups that were ready
      manifest.json    the run and the version of the checkpoint, and each file with size and checksum
      COMPLETE         written last

A save that ends early leaves `step-140.tmp`, which is never read. All parts of a checkpoint have the state of the same
moment.
"""

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
import xxhash

import asyncrl
from asyncrl import complete_directory
from asyncrl.atomic_write import write_atomically
from asyncrl.common.version import Lineage, Version
from asyncrl.config.schema import CheckpointSection
from asyncrl.errors import CheckpointDamaged, CheckpointError, CheckpointOfOtherFormat
from asyncrl.run_files import UNREADABLE, names, opened, read, sizes_below

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's directory."""
MANIFEST = "manifest.json"
HF = "hf"
"""Folder of a checkpoint with weights that vLLM and transformers load. A run that fails may save only this folder."""
SCHEMA = 3
"""Number of the format of all files of a checkpoint. It changes when another version of asyncrl could not read a
checkpoint, or would misread it. docs/compatibility.md lists the formats, and tests/checkpoints/kept_run has an example
of each file."""
_NAME = re.compile(r"step-(\d{1,15})(\.replaced)?", re.ASCII)
_WRITER = re.compile(r"[0-9A-Za-z.+-]{1,40}", re.ASCII)
_CHUNK_BYTES = 2**24


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a file in bytes, and its xxh3-128 checksum in hex."""

    nbytes: int
    xxh3: str


class RunManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a checkpoint, and the run that it belongs to.

    `nonce` identifies the run. The learner had `version` and `lineage` at the checkpoint. `settings` has the
    settings that all deployments of the run share, by dotted key. `most_branches` is the largest number of branches of
    an episode (`Config.most_branches`).

    `packages` has the versions of the packages of the run that wrote the checkpoint. `files` lists all files except the
    manifest itself and `COMPLETE`, by their path in the checkpoint.
    """

    schema: int = SCHEMA
    nonce: str
    version: Version
    lineage: Lineage
    settings: dict[str, object]
    packages: dict[str, str]
    most_branches: int = 1
    files: dict[str, FileEntry] = {}


class _Format(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a manifest that every version of asyncrl reads and writes."""

    schema: int
    packages: dict[str, str] = {}


def folder_of(checkpoints: Path, step: int) -> Path:
    """Returns the directory of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step}"


def write(path: Path, manifest: RunManifest, *, fill: Callable[[Path], None]) -> None:
    """Writes the checkpoint at `path`. `fill` writes all of its files but the manifest into the folder that it gets.

    Raises CheckpointError if something other than a checkpoint is at `path`, and the errors of `fill`. Then there is no
    new checkpoint.
    """
    complete_directory.prepare(path)
    unfinished = complete_directory.unfinished(path)
    fill(unfinished)
    files = {name: _entry(unfinished / name, inside=unfinished) for name in sizes_below(unfinished)}
    encoded = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(manifest, files=files)), indent=2)
    write_atomically(unfinished / MANIFEST, encoded)
    complete_directory.finish(path, save_id=str(manifest.version))
    complete_directory.publish(path)


def verified(path: Path) -> RunManifest:
    """Returns the manifest of the checkpoint at `path` after all files that it lists were compared with it.

    Raises CheckpointIncomplete if its save did not end, CheckpointOfOtherFormat as `decoded` does, and
    CheckpointDamaged, which names the file, if a file differs from the manifest, if the manifest cannot be read, or if
    it does not list a file of tensors that would be loaded.
    """
    complete_directory.complete(path)
    try:
        manifest = decoded(read(path / MANIFEST), path=str(path))
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{path / MANIFEST} cannot be read ({error})") from error
    for name in sizes_below(path):
        if name.endswith(".safetensors") and name not in manifest.files and not name.startswith(f"{HF}/"):
            raise CheckpointDamaged(
                f"{path / name} is not in {MANIFEST}, so asyncrl has not written it: remove it, or load an earlier "
                "checkpoint"
            )
    for name, expected in manifest.files.items():
        if not name.isprintable():
            raise CheckpointDamaged(f"{path / MANIFEST} lists {name!a}, and no file of a checkpoint has such a name")
        try:
            found = _entry(path / name, inside=path, most=expected.nbytes)
        except OSError as error:
            raise CheckpointDamaged(f"{path / name} cannot be read ({error})") from error
        if found != expected:
            raise CheckpointDamaged(
                f"{path / name} has {found.nbytes} bytes with the checksum {found.xxh3}, but the manifest says "
                f"{expected.nbytes} and {expected.xxh3}"
            )
    return manifest


def decoded(manifest: bytes, *, path: str) -> RunManifest:
    """Returns the manifest of the checkpoint at `path`, which may be in a mirror. Raises CheckpointOfOtherFormat if its
    format has another number than `SCHEMA`, and ValueError if the bytes are not a manifest."""
    written = msgspec.json.decode(manifest, type=_Format)
    if written.schema != SCHEMA:
        writer = written.packages.get("asyncrl", "")
        known = writer if _WRITER.fullmatch(writer) else "of an unknown version"
        raise CheckpointOfOtherFormat(
            f"asyncrl {known} wrote the checkpoint {path} in format {written.schema}, and asyncrl "
            f"{asyncrl.__version__} reads only format {SCHEMA}: resume the run with the version that wrote it, or "
            f"begin a new one, whose model.path can be the folder {HF} of the checkpoint"
        )
    return msgspec.json.decode(manifest, type=RunManifest)


def newest(checkpoints: Path, *, lineage: Lineage | None = None) -> tuple[Path, RunManifest] | None:
    """Returns the newest checkpoint that is complete and undamaged; None if there is none.

    A damaged checkpoint is skipped with a warning. Two others are skipped without a warning: a checkpoint whose save
    did not end, and one of a version from which the run did not go on, because a later incarnation in `lineage` began
    at an earlier version.

    Raises CheckpointOfOtherFormat for a checkpoint that another version of asyncrl wrote: to go back to an older one
    would silently lose its steps.
    """
    for _, path in sorted(folders(checkpoints).items(), reverse=True):
        try:
            manifest = verified(path)
        except CheckpointDamaged as error:
            logger.warning("%s; the next older checkpoint is used instead, if there is one", error)
        except CheckpointOfOtherFormat:
            raise
        except CheckpointError:
            continue
        else:
            if lineage is None or lineage.has(manifest.version):
                return path, manifest
    return None


def complete_steps(checkpoints: Path) -> list[int]:
    """Returns the steps of the complete checkpoints, in order. Their files are not compared with their manifests."""
    return sorted(step for step, path in folders(checkpoints).items() if (path / complete_directory.COMPLETE).exists())


def kept_steps(keep: CheckpointSection, steps: Collection[int], *, best: Collection[int]) -> set[int]:
    """Returns the steps whose checkpoints stay, of those with a complete checkpoint: the newest `checkpoint.keep`, the
    multiples of `checkpoint.keep_every`, and `best`.

    >>> sorted(kept_steps(CheckpointSection(keep=2, keep_every=100), [50, 100, 150, 160, 170], best=[50]))
    [50, 100, 160, 170]
    """
    spaced = [step for step in steps if keep.keep_every and step % keep.keep_every == 0]
    return {*sorted(steps)[-keep.keep :], *spaced, *best}


def put_back(checkpoints: Path) -> None:
    """Moves old checkpoints back to their paths if a save was killed while it replaced them. No other process may write
    to `checkpoints` meanwhile."""
    for step in folders(checkpoints):
        complete_directory.put_back(folder_of(checkpoints, step))


def folders(checkpoints: Path) -> Mapping[int, Path]:
    """Returns the directories of checkpoints by their step, also of incomplete ones. If a save was killed while it
    replaced one, returns the old directory."""
    found = names(checkpoints, inside=checkpoints.parent)
    steps = {int(match[1]) for name in found if (match := _NAME.fullmatch(name))}
    return {step: complete_directory.published(folder_of(checkpoints, step)) for step in steps}


def _entry(path: Path, *, inside: Path, most: int | None = None) -> FileEntry:
    """Returns the size and the checksum of a file. The checksum is of the first `most` bytes at most."""
    digest = xxhash.xxh3_128()
    with opened(path, inside=inside) as file:
        nbytes = os.fstat(file.fileno()).st_size
        left = nbytes if most is None else min(most, nbytes)
        while chunk := file.read(min(left, _CHUNK_BYTES)):
            digest.update(chunk)
            left -= len(chunk)
    return FileEntry(nbytes=nbytes, xxh3=digest.hexdigest())
