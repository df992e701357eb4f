"""Fetches a run from its mirror (`asyncrl.deployment.mirror`) into a new directory, to resume it there.

Another person may have made the mirror, so it is read like a run directory that came by mail: a file is written only
below the new directory, under a name with which a record or a file of a checkpoint may begin, and has a largest size.
Links and other entries are not read. A checkpoint is used after all of its files were compared with its manifest.

The run gets its directory in one step, when all of its files are there. A fetch that was killed leaves a folder
`.NAME.….fetched` beside it, which may be deleted.
"""

import contextlib
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from asyncrl.checkpoints.directory import (
    CHECKPOINTS,
    MANIFEST,
    RunManifest,
    complete_steps,
    decoded,
    folder_of,
    verified,
)
from asyncrl.common.version import Lineage
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import RUNS
from asyncrl.deployment.mirror import (
    OWNER,
    RECORDS,
    WRITERS,
    Owner,
    Store,
    complete_names,
    lineage_of,
    step_of_name,
    url_problem,
)
from asyncrl.deployment.resuming import SAMPLES, known_lineage
from asyncrl.errors import (
    AsyncRLError,
    CheckpointError,
    CheckpointOfOtherFormat,
    ConfigError,
    FileRefused,
    RunError,
)
from asyncrl.learner.audit_records import AUDIT
from asyncrl.learner.records import RunInfo, known_info
from asyncrl.run_files import FILE_BYTES, MOST_FOLDERS, RECORD_BYTES, opened_to_append
from asyncrl.shown_text import redacted

logger = logging.getLogger(__name__)

AUDIT_BYTES = 2**32
"""Largest file in audit/."""
_DAMAGED = (CheckpointError, FileNotFoundError, FileRefused, msgspec.MsgspecError, UnicodeError)
"""Errors of a checkpoint that cannot be used. Another error means that the storage cannot be read now."""


def is_url(run: str) -> bool:
    """Returns whether the name of a run on the command line is the URL of a mirror."""
    return re.match(r"[A-Za-z0-9+.-]+://", run) is not None


def fetched(url: str, overrides: Sequence[str], *, step: int | None) -> Path:
    """Returns the directory of the run that is mirrored at `url`: the folder runs/ in the working directory, or the
    `run.dir` of `overrides`, with the name of the run.

    If there is no such directory, fetches the records and the newest complete checkpoint into it, or the checkpoint
    after `step` steps. A directory of the same run is returned as it is, if the mirror is not ahead of it.

    Raises ConfigError if the URL cannot work, and RunError if another run or an older state is in the directory, if
    the mirror has no run with a checkpoint, or if it cannot be read.
    """
    if problem := url_problem(url):
        raise ConfigError(problem)
    try:
        store = Store(url)
        config = _config(store, overrides)
        directory = config.run.dir / config.run.name
        if directory.exists() and any(directory.iterdir()):
            _check_same(store, directory)
            return directory
        with _staging(directory) as staging:
            owner = store.read(OWNER)  # first: if another process takes the mirror meanwhile, this directory is refused
            if owner is not None:
                writers = [msgspec.json.decode(owner, type=Owner).process]
                (staging / WRITERS).write_bytes(msgspec.json.encode(writers))
            there = store.sizes()
            _fetch_checkpoint(store, there, staging, step=step)
            _fetch_records(store, there, staging)
            _publish(staging, directory)
        return directory
    except AsyncRLError:
        raise
    except Exception as error:  # each implementation has errors of its own
        raise RunError(
            f"{url} cannot be read ({type(error).__name__}: {redacted(str(error))}): check the URL, and the keys for "
            "the storage and their rights"
        ) from error


def _config(store: Store, overrides: Sequence[str]) -> Config:
    """Returns the configuration of the mirrored run with the overrides. `run.dir` of the run itself does not count,
    because it would let the mirror choose a folder of this machine."""
    if (content := store.read("config.yaml")) is None:
        raise RunError(f"{store.url} is not the mirror of a run: it has no config.yaml; give the URL of run.mirror")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(content)
        return load_config([path, {"run": {"dir": str(RUNS)}}], overrides)


def _check_same(store: Store, directory: Path) -> None:
    """Raises RunError if `directory` has another run than the mirror, or if the mirror is ahead of it: with an
    incarnation that the directory lacks, or, in the same incarnation, with a later checkpoint."""
    here, there = known_info(directory), msgspec.json.decode(store.read("run.json") or b"", type=RunInfo)
    if here is None or here.nonce != there.nonce:
        raise RunError(
            f"{directory} exists, and is not of the run that is mirrored at {store.url}: move it away, or set run.name "
            "or run.dir"
        )
    lineage = known_lineage(directory) or Lineage()
    if (mirrored := lineage_of(store)) != lineage and not lineage.continues(mirrored):
        raise RunError(
            f"{directory} is older than {store.url}: the run was resumed elsewhere, as incarnation "
            f"{mirrored.incarnation}, and here it is at incarnation {lineage.incarnation}. Move the directory away, "
            "and give this command again"
        )
    if mirrored != lineage:
        return
    steps = complete_steps(directory / CHECKPOINTS)
    for name in _newest_first(store.sizes()):
        if step_of_name(name) <= max(steps, default=-1):
            return
        with contextlib.suppress(*_DAMAGED):
            if lineage.has(_manifest(store, name).version):
                raise RunError(
                    f"{directory} is older than {store.url}, which has a checkpoint of step {step_of_name(name)}: move "
                    "the directory away, and give this command again"
                )


@contextlib.contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """Yields an empty folder beside `directory`, and removes what is left of it. The name of a run cannot begin with a
    dot, so it is not the directory of another run."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".fetched", dir=directory.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, directory: Path) -> None:
    """Gives the fetched run its directory. Raises RunError if another process has made it meanwhile."""
    try:
        staging.rename(directory)
    except OSError as error:
        raise RunError(
            f"{directory} cannot be made ({error.strerror}), e.g. because the run was fetched twice at once: give this "
            "command again"
        ) from error


def _fetch_checkpoint(store: Store, there: dict[str, int], staging: Path, *, step: int | None) -> None:
    """Fetches the newest undamaged checkpoint from which the live incarnation of the run may go on."""
    lineage = lineage_of(store)
    for name in _newest_first(there):
        if step not in (None, step_of_name(name)):
            continue
        folder = folder_of(staging / CHECKPOINTS, step_of_name(name))
        try:
            manifest = _manifest(store, name)
            if not lineage.has(manifest.version):
                continue
            sizes = {file: entry.nbytes for file, entry in manifest.files.items()}
            for file, most in {**sizes, MANIFEST: RECORD_BYTES, COMPLETE: RECORD_BYTES}.items():
                if (remote := f"{CHECKPOINTS}/{name}/{file}") not in there:  # e.g. below a link
                    raise FileNotFoundError(f"{file!a} is missing")
                _fetch(store, remote, _place(folder, file), inside=staging, most=most)
            verified(folder)
        except CheckpointOfOtherFormat:
            raise
        except _DAMAGED as error:
            logger.warning("%s in %s cannot be used (%s); the next older checkpoint is taken", name, store.url, error)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return
    wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    raise RunError(f"{store.url} has {wanted} that is complete and undamaged, so the run cannot be resumed from it")


def _newest_first(there: dict[str, int]) -> list[str]:
    """Returns the names of the complete checkpoints of a mirror, from the last step to the first one."""
    return sorted(complete_names(there), key=step_of_name, reverse=True)


def _manifest(store: Store, name: str) -> RunManifest:
    content = store.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") or b""
    if not name.endswith(xxhash.xxh3_128_hexdigest(content)[:16]):
        raise CheckpointError(f"its {MANIFEST} is missing or has another checksum than its name says")
    return decoded(content, path=f"{store.url}/{CHECKPOINTS}/{name}")


def _fetch_records(store: Store, there: dict[str, int], staging: Path) -> None:
    for name in there:
        folder = name.partition("/")[0]
        if name in RECORDS or (folder in (SAMPLES, AUDIT) and name != folder):
            most = AUDIT_BYTES if folder == AUDIT else FILE_BYTES
            _fetch(store, name, _place(staging, name), inside=staging, most=most)


def _place(folder: Path, name: str) -> Path:
    """Returns the path of the file `name` below `folder`. Raises FileRefused for a name that could lead elsewhere."""
    parts = name.split("/")
    if len(parts) > MOST_FOLDERS or not all(each.isprintable() and each not in ("", ".", "..") for each in parts):
        raise FileRefused(f"the mirror has a file with the name {name!a}, and no file of a run has such a name")
    return folder.joinpath(*parts)


def _fetch(store: Store, name: str, target: Path, *, inside: Path, most: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with opened_to_append(target, inside=inside) as file:
        for chunk in store.chunks(name, most=most):
            file.write(chunk)
