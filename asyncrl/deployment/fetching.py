"""Fetches a run from its mirror (`asyncrl.deployment.mirror`): into a new directory, to resume it there, or into a
temporary one, for a command that reads a run.

Another person may have made the mirror, so it is read like a run directory that came by mail: only records and files of
checkpoints are fetched, each up to a largest size, and they are written only below the new directory. Links and other
entries are not read. A checkpoint is used after all of its files were compared with its manifest.

A resumed run gets its directory in one step, when all of its files are there. A fetch that was killed leaves a folder
`.NAME.….fetched` beside it, which may be deleted.
"""

import contextlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    Sent,
    Store,
    complete_names,
    lineage_of,
    most_bytes,
    sent_records,
    step_of_name,
    url_problem,
)
from asyncrl.deployment.resuming import LINEAGE, SAMPLES, known_lineage
from asyncrl.errors import (
    AsyncRLError,
    CheckpointDamaged,
    CheckpointError,
    CheckpointOfOtherFormat,
    ConfigError,
    FileRefused,
    RunError,
)
from asyncrl.learner.audit_records import AUDIT
from asyncrl.learner.records import RunInfo, known_info
from asyncrl.run_files import FILE_BYTES, MOST_FOLDERS, RECORD_BYTES, opened_to_append, read
from asyncrl.shown_text import redacted

logger = logging.getLogger(__name__)

STEPS = "steps.jsonl"
LONG_BYTES = 2**28
"""If a checkpoint, or all records together, have at least so many bytes, each tenth that is fetched is reported."""
_DAMAGED = (CheckpointError, FileNotFoundError, FileRefused, msgspec.MsgspecError, UnicodeError)
"""Errors of a checkpoint that cannot be used. Another error means that the storage cannot be read now."""


def is_url(run: str) -> bool:
    """Returns whether the name of a run on the command line is the URL of a mirror."""
    return re.match(r"[A-Za-z0-9+.-]+://", run) is not None


Report = Callable[[str], None]
"""Gets lines about the progress of a fetch."""


class MirroredRun:
    """The parts of a mirrored run that are fetched into `directory`, which must be new.

    The methods raise RunError, FileRefused for a name that could lead elsewhere or for a file that is too large, and
    the errors of the storage.
    """

    def __init__(self, store: Store, directory: Path, *, report: Report) -> None:
        self.directory = directory
        self._store, self._report = store, report
        self._there = store.sizes()
        self._lineage = lineage_of(store)
        self._name, self._wanted, self._done = "", 0, 0  # the current fetch, its bytes, and the bytes that have come

    @property
    def steps(self) -> list[int]:
        """The steps of the mirror's complete checkpoints, in order."""
        return sorted(map(step_of_name, complete_names(self._there)))

    def records(self, *folders: str) -> None:
        """Fetches the records, and all files below `folders`, which may be samples/ and audit/.

        audit/ is fetched after steps.jsonl: a run that lives may send both meanwhile, and the audit of the run needs a
        record in audit/ for each step in steps.jsonl.
        """
        names = [name for name in RECORDS if name in self._there]
        names += [name for folder in folders for name in sorted(self._there) if name.startswith(f"{folder}/")]
        self._begin(f"{len(names):,} records", sum(self._there[name] for name in names))
        for name in names:
            self._fetch(name, _place(self.directory, name), most=most_bytes(name))

    def checkpoint(self, step: int | None) -> Path:
        """Fetches the newest undamaged checkpoint from which the run's last incarnation may go on, or the one after
        `step` steps. Returns its directory. Raises RunError if the mirror has none, and CheckpointOfOtherFormat if
        another version of asyncrl wrote it."""
        for name in _newest_first(self._there):
            if step not in (None, step_of_name(name)):
                continue
            try:
                if (folder := self._checkpoint(name)) is not None:
                    return folder
            except CheckpointOfOtherFormat:
                raise
            except _DAMAGED as error:
                older = "" if step is not None else "; the next older checkpoint is taken, if there is one"
                logger.warning("%s in %s cannot be used (%s)%s", name, self._store.url, error, older)
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise RunError(f"{self._store.url} has {wanted} that is complete and undamaged")

    def checkpoints(self) -> None:
        """Fetches all complete checkpoints from which the run's last incarnation may go on. Raises CheckpointDamaged if
        one of them is damaged, and CheckpointOfOtherFormat if another version of asyncrl wrote one."""
        for name in _newest_first(self._there):
            try:
                self._checkpoint(name)
            except CheckpointOfOtherFormat:
                raise
            except _DAMAGED as error:
                if name in complete_names(self._store.sizes(f"{CHECKPOINTS}/{name}")):
                    raise CheckpointDamaged(
                        f"{CHECKPOINTS}/{name} in {self._store.url} is damaged ({error}): remove it there, or use the "
                        "run's own directory"
                    ) from error
                # Otherwise the run still trains, and has deleted this checkpoint meanwhile.

    def _checkpoint(self, name: str) -> Path | None:
        """Fetches a checkpoint and returns its directory. Returns None, and fetches nothing more, if its weights are of
        steps that the run has lost, or if a checkpoint of its step was fetched already."""
        folder = folder_of(self.directory / CHECKPOINTS, step_of_name(name))
        manifest = _manifest(self._store, name)
        if not self._lineage.has(manifest.version) or folder.exists():
            return None
        files = {file: entry.nbytes for file, entry in manifest.files.items()}
        files |= {MANIFEST: RECORD_BYTES, COMPLETE: RECORD_BYTES}
        sizes = {file: self._there.get(f"{CHECKPOINTS}/{name}/{file}", 0) for file in files}
        self._begin(f"checkpoint {folder.name}", sum(min(most, sizes[file]) for file, most in files.items()))
        try:
            for file, most in files.items():
                if (remote := f"{CHECKPOINTS}/{name}/{file}") not in self._there:  # e.g. below a link
                    raise FileNotFoundError(f"{file!a} is missing")
                self._fetch(remote, _place(folder, file), most=most)
            verified(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _begin(self, name: str, nbytes: int) -> None:
        """Reports what is fetched now. Raises RunError if there is no space for it."""
        self._name, self._wanted, self._done = name, nbytes, 0
        if nbytes > (free := shutil.disk_usage(self.directory).free):
            raise RunError(
                f"there is no space for {name} from {self._store.url}: that is {_mib(nbytes)}, and the disk of "
                f"{self.directory.parent} has {_mib(free)} free. Free space there, or choose another disk (TMPDIR; "
                "run.dir for asyncrl resume)"
            )
        self._report(f"fetching {name} ({_mib(nbytes)}) from {self._store.url}")

    def _fetch(self, name: str, target: Path, *, most: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened_to_append(target, inside=self.directory) as file:
            for chunk in self._store.chunks(name, most=most):
                file.write(chunk)
                before, self._done = self._done, self._done + len(chunk)
                if self._wanted >= LONG_BYTES and (tenth := 10 * self._done // self._wanted) > (
                    10 * before // self._wanted
                ):
                    self._report(f"  {self._name}: {10 * tenth} %")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def fetched(url: str, overrides: Sequence[str], *, step: int | None, report: Report) -> Path:
    """Returns the directory of the run that is mirrored at `url`: the folder runs/ in the working directory, or the
    `run.dir` of `overrides`, with the name of the run.

    If there is no such directory, fetches the records and the newest complete checkpoint into it, or the checkpoint
    after `step` steps. A directory of the same run is returned as it is, if the mirror is not ahead of it.

    Raises ConfigError if the URL cannot work, and RunError if another run or an older state is in the directory, if
    the mirror has no run with a checkpoint, or if it cannot be read.
    """
    with _reading(url):
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
            run = MirroredRun(store, staging, report=report)
            run.checkpoint(step)
            run.records(SAMPLES, AUDIT)
            _publish(staging, directory)
    return directory


@contextlib.contextmanager
def visited(url: str, fetch: Callable[[MirroredRun], object], *, report: Report) -> Iterator[Path]:
    """Yields a temporary directory of the run that is mirrored at `url`, with the parts that `fetch` fetches. Its name
    is the last part of the URL. Only this user can enter it, and it is removed when the block ends.

    It is in the folder that TMPDIR names. Raises ConfigError if the URL cannot work, and RunError if there is no mirror
    or if it cannot be read.
    """
    name = url.rstrip("/").rpartition("/")[2]
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        directory = Path(folder) / (name if name.isprintable() and name not in ("", ".", "..") else "run")
        with _reading(url):
            store = Store(url)
            _config_of(store)
            sent = sent_records(store)  # before the records: see `_cut`
            directory.mkdir()
            fetch(MirroredRun(store, directory, report=report))
            _cut(directory / STEPS, sent.get(STEPS))
        yield directory


def _cut(path: Path, sent: Sent | None) -> None:
    """Cuts steps.jsonl to its length `sent` at the end of the last pass of the mirror that sent all records. A pass
    that goes on, or that was killed, may have sent more steps, but not yet their records for the audit."""
    if sent is not None and path.exists():
        content = read(path, most=FILE_BYTES)
        # without the first condition, the mirror could enlarge the file
        if 0 <= sent.nbytes <= len(content) and xxhash.xxh3_128_hexdigest(content[: sent.nbytes]) == sent.xxh3:
            os.truncate(path, sent.nbytes)


@contextlib.contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raises ConfigError if no run can be mirrored at the URL, and RunError in place of the errors of the storage."""
    if problem := url_problem(url):
        raise ConfigError(problem)
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:  # each implementation has errors of its own
        raise RunError(
            f"{url} cannot be read ({type(error).__name__}: {redacted(str(error))}): check the URL, and the keys for "
            "the storage and their rights"
        ) from error


def _config_of(store: Store) -> bytes:
    """Returns the content of the mirror's config.yaml. Raises RunError if the URL is not a mirror."""
    if (content := store.read("config.yaml")) is None:
        raise RunError(f"{store.url} is not the mirror of a run: it has no config.yaml; give the URL of run.mirror")
    return content


def _config(store: Store, overrides: Sequence[str]) -> Config:
    """Returns the configuration of the mirrored run with the overrides. The run's own `run.dir` is ignored, because it
    would let the mirror choose a folder of this machine."""
    content = _config_of(store)
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
    if mirrored == lineage and (step := later_checkpoint(store, directory)) is not None:
        raise RunError(
            f"{directory} is older than {store.url}, which has a checkpoint of step {step}: move the directory away, "
            "and give this command again"
        )


def later_checkpoint(store: Store, directory: Path) -> int | None:
    """Returns the step of the mirror's newest complete checkpoint from which the run in `directory` may go on, if the
    directory has no complete one of this step or a later one; else None."""
    lineage = known_lineage(directory) or Lineage()
    newest = max(complete_steps(directory / CHECKPOINTS), default=-1)
    for name in _newest_first(store.sizes(CHECKPOINTS)):
        if step_of_name(name) <= newest:
            return None
        with contextlib.suppress(*_DAMAGED):
            if lineage.has(_manifest(store, name).version):
                return step_of_name(name)
    return None


def has_more_steps(store: Store, directory: Path) -> bool:
    """Returns whether a pass of the mirror has sent a longer steps.jsonl than that of `directory`, in the same
    incarnation, which only appends to it."""
    sent, lineage, steps = sent_records(store), directory / LINEAGE, directory / STEPS
    of_incarnation = sent[LINEAGE].xxh3 if LINEAGE in sent else None
    if of_incarnation != (xxhash.xxh3_128_hexdigest(read(lineage)) if lineage.exists() else None):
        return False
    return STEPS in sent and sent[STEPS].nbytes > (steps.stat().st_size if steps.exists() else 0)


@contextlib.contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    """Yields an empty folder beside `directory`, and removes it after the block if it still exists. Its name begins
    with a dot, which the name of a run cannot do, so it is not taken for the directory of a run."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".fetched", dir=directory.parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, directory: Path) -> None:
    """Renames the folder of the fetched run to `directory`. Raises RunError if it cannot, e.g. because another process
    has made that directory meanwhile."""
    try:
        staging.rename(directory)
    except OSError as error:
        raise RunError(
            f"{directory} cannot be made ({error.strerror}), e.g. because the run was fetched twice at once: give this "
            "command again"
        ) from error


def _newest_first(there: dict[str, int]) -> list[str]:
    """Returns the names of the complete checkpoints of a mirror, from the last step to the first one."""
    return sorted(complete_names(there), key=step_of_name, reverse=True)


def _manifest(store: Store, name: str) -> RunManifest:
    content = store.read(f"{CHECKPOINTS}/{name}/{MANIFEST}") or b""
    if not name.endswith(xxhash.xxh3_128_hexdigest(content)[:16]):
        raise CheckpointError(f"its {MANIFEST} is missing or has another checksum than its name says")
    return decoded(content, path=f"{store.url}/{CHECKPOINTS}/{name}")


def _place(folder: Path, name: str) -> Path:
    """Returns the path of the file `name` below `folder`. Raises FileRefused for a name that could lead elsewhere."""
    parts = name.split("/")
    if len(parts) > MOST_FOLDERS or not all(each.isprintable() and each not in ("", ".", "..") for each in parts):
        raise FileRefused(f"the mirror has a file with the name {name!a}, and no file of a run has such a name")
    return folder.joinpath(*parts)
