"""The mirror of a run's directory: a copy at a URL of fsspec (`run.mirror`), from which the run is resumed elsewhere.

    owner.json                    the run, and the process that writes the mirror
    lineage.json  config.yaml  …  the records of the run (`RECORDS`), and the folders samples/ and audit/
    sent.json                     size and checksum of each record that was sent
    checkpoints/step-140-9f8e…/   a complete checkpoint, with a part of the checksum of its manifest in its name
    latest.json                   the name of the newest checkpoint

A thread of the learner's process sends what is finished: records every minute, and checkpoints in order. Training never
waits for it. A pass of the thread keeps these invariants, also if the process is killed between any two calls:

- Before the first file of a checkpoint, the records of all of its steps are sent. `COMPLETE` is the last file of a
  checkpoint, and `latest.json` names it after that.
- A file below checkpoints/ never changes, because its folder is named after the checksums of all of its files. So a
  file of the right size is not sent again.
- Only one process writes the mirror: the last one that has put its token into `owner.json`. It reads `owner.json`
  before the first file and the last file of a checkpoint, after every `OWNED_BYTES` between them, and before each group
  of other files. The run's directory has the tokens of the processes that have written its mirrors (`WRITERS`). If
  `owner.json` has another token, the run was continued from another directory, and this directory is refused.

The storage must write a file whole or not at all, as object stores do. In a local folder (`file://`), files are written
under a temporary name and then renamed.
"""

import contextlib
import functools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import CHECKPOINTS, MANIFEST, folders, kept_steps
from asyncrl.common.version import Lineage
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import CheckpointSection
from asyncrl.deployment.resuming import LINEAGE, SAMPLES
from asyncrl.errors import ConfigError, FileRefused
from asyncrl.learner.audit_records import AUDIT
from asyncrl.learner.records import DATA, LOST_STEPS, EvalRecord, best_first, read_lines
from asyncrl.run_files import FILE_BYTES, RECORD_BYTES, UNREADABLE, opened, read, sizes_below
from asyncrl.shown_text import redacted

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from asyncrl.metrics.recorders import LearnerMetrics

logger = logging.getLogger(__name__)

RECORDS = (
    LINEAGE,  # first: a later process of the run must not use the number of an incarnation again
    "config.yaml",
    "run.json",
    DATA,
    "trackers.json",
    "steps.jsonl",
    "evals.jsonl",
    LOST_STEPS,
    "lost-evals.jsonl",
    "failures.json",
    "summary.json",
    "report.html",
)
"""Files of the run's directory that are sent besides samples/, audit/ and checkpoints/, in this order."""
OWNER, SENT, LATEST = "owner.json", "sent.json", "latest.json"
WRITERS = "mirror.json"
"""File of the run's directory with the tokens of the processes that have written its mirrors. It is not mirrored."""
EVERY_S = 60.0
"""Longest time between two passes if none fails, seconds."""
LOOK_S = 2.0
"""Time between two looks into the run's directory for a checkpoint that is complete and not sent yet, seconds."""
LEAST_SHARE = 20
"""Records are sent again after this multiple of the time that sending them took, if it is longer than `EVERY_S`: large
records are sent whole, and must not take more than a twentieth of the thread's time."""
RETRY_S, LONGEST_RETRY_S = 5.0, 300.0
"""First and longest wait after a pass that failed, seconds. Each failure in a row doubles the wait."""
RETRY_AT_END_S = 1.0
AUDIT_BYTES = 2**32
"""Bytes of the largest file in audit/ that is read."""
BEGIN_S = 30.0
"""Longest time that the start of the run waits for the first answer of the storage, seconds."""
CHECKPOINT_NAME = re.compile(r"step-(\d{1,15})-[0-9a-f]{16}", re.ASCII)
"""The name of a checkpoint's folder in a mirror."""
OWNED_BYTES = 2**26
"""Bytes of a checkpoint that are sent between two looks at `owner.json`. If another process has taken the mirror
meanwhile, they do no harm there, because the checkpoint is not complete without its last file."""
_PART = ".part"
_CHUNK_BYTES = 2**24


NO_STORAGE = frozenset(
    [
        "async_wrapper", "asyncwrapper", "asynclocal", "blockcache", "cached", "data", "dir", "dvc", "filecache",
        "generic", "gist", "git", "github", "http", "https", "jlab", "jupyter", "libarchive", "pyscript", "reference",
        "root", "simplecache", "tar", "wandb", "zip",
    ]
)  # fmt: skip
"""Schemes of fsspec that only read, or that need another URL inside of theirs."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
"""The extra of asyncrl that has the package for a scheme."""


def url_problem(url: str) -> str | None:
    """Returns in a sentence why no run can be mirrored at this URL on this machine; None if no reason is known. Does
    not connect to the storage."""
    from fsspec import available_protocols, get_filesystem_class

    scheme = url.partition("://")[0]
    if scheme in NO_STORAGE or scheme not in available_protocols():
        return f"{url}: asyncrl has no mirrors at {scheme}:// URLs; use e.g. s3://, gs://, az:// or file://"
    try:
        get_filesystem_class(scheme)
    except ImportError as error:  # its text names the package
        missing = f"{url}: the package for {scheme}:// URLs is missing"
        if (extra := EXTRAS.get(scheme)) is None:
            return f"{missing}: {str(error).removeprefix('Please ').rstrip('.')}"
        return (
            f"{missing}: install asyncrl with the extra {extra} (in a clone: python3 deploy/install.py --also {extra})"
        )
    return None


def check_no_run(store: "Store") -> None:
    """Raises ConfigError if the folder is the directory of a run, whose files a mirror would replace. Raises the errors
    of the storage."""
    if store.read("run.json") is not None and store.read(SENT) is None and store.read(OWNER) is None:
        raise ConfigError(
            f"run.mirror = {store.url}: this is the directory of a run and no mirror, and the mirror's files would "
            "replace those of the run; name another folder"
        )


class Owner(msgspec.Struct, frozen=True):
    """The run (its `nonce`) and the process (its random token) that write a mirror."""

    nonce: str
    process: str


class Latest(msgspec.Struct, frozen=True):
    """The newest checkpoint of a mirror."""

    checkpoint: str
    step: int


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """The size of a record in bytes, and its xxh3-128 checksum in hex."""

    nbytes: int
    xxh3: str


class Store:
    """The files below a URL of fsspec, by their names relative to it. All methods raise the errors of the
    implementation, which may be of any type. `in_place` is whether the files are on a file system of this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_place = url.startswith(("file://", "local://"))

    @functools.cached_property
    def _opened(self) -> "tuple[AbstractFileSystem, str]":
        """The file system, and the path of the URL there. Some implementations, such as sftp, connect when they are
        made."""
        from fsspec.core import url_to_fs  # takes a tenth of a second, and few runs have a mirror

        fs, base = url_to_fs(self.url, **({"auto_mkdir": True} if self.in_place else {}))
        return fs, base.rstrip("/")

    @property
    def _fs(self) -> "AbstractFileSystem":
        return self._opened[0]

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the size in bytes of each file below `folder`. Links and other entries are left out."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._at(folder).rstrip("/"), detail=True).items()
        inside = [(path.removeprefix(self._at("")), info) for path, info in found if path.startswith(self._at(""))]
        return {name: info["size"] for name, info in inside if info["type"] == "file" and not name.endswith(_PART)}

    def send(self, path: Path, name: str) -> None:
        """Copies the file `path` to `name`."""
        target = self._at(name)
        if not self.in_place:
            self._fs.put_file(str(path), target)
        else:
            self._fs.put_file(str(path), target + _PART)
            self._fs.mv(target + _PART, target)

    def write(self, name: str, content: bytes) -> None:
        target = self._at(name)
        if not self.in_place:
            self._fs.pipe_file(target, content)
        else:
            self._fs.pipe_file(target + _PART, content)
            self._fs.mv(target + _PART, target)

    def chunks(self, name: str, *, most: int) -> Iterator[bytes]:
        """Yields the content of a file. Raises FileNotFoundError, and FileRefused if it is a link or another entry, or
        has more than `most` bytes."""
        # A cached listing has the version of a file that another process has replaced since: s3fs then cannot read it.
        self._fs.invalidate_cache()
        info = self._fs.info(self._at(name))
        if info["type"] != "file" or info.get("islink"):
            raise FileRefused(f"{name!a} in {self.url} is not a regular file: put the file itself there")
        left = most
        if (info.get("size") or 0) > most:
            raise FileRefused(f"{name!a} in {self.url} has {info['size']:,} bytes, and at most {most:,} are read")
        with self._fs.open(self._at(name), "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    raise FileRefused(f"{name!a} in {self.url} has more bytes than it says: at most {most:,} are read")
                yield chunk

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file with one record; None if there is no such file. Raises FileRefused as `chunks`
        does, for a file with more than `RECORD_BYTES`."""
        try:
            if self.in_place:
                return b"".join(self.chunks(name, most=RECORD_BYTES))
            # one call in place of three; an object store has no links
            content: bytes = self._fs.cat_file(self._at(name), start=0, end=RECORD_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(content) > RECORD_BYTES:
            raise FileRefused(f"{name!a} in {self.url} is larger than {RECORD_BYTES:,} bytes")
        return content

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with its files. Does nothing if there is none. Raises PermissionError if the
        storage keeps it."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)
        # S3 answers 200 with an error for each object that it does not delete, and s3fs 2026.9 raises none of them.
        self._fs.invalidate_cache()
        if self._fs.exists(self._at(name)):
            raise PermissionError(f"{name} is still there after its deletion, which the storage may not allow")

    def _at(self, name: str) -> str:
        return f"{self._opened[1]}/{name}"


class _Interrupted(Exception):
    """A pass must end before its next write, because the mirror was emptied, or the run has ended."""


class Mirror:
    """Sends the directory of the run with this `nonce` and `lineage` to `store`, from `start` to `finish`.

    `keep` has the rules by which old checkpoints are deleted, in the mirror as in the directory. `sent` is called with
    the name and the size in bytes of each file that was sent.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        nonce: str,
        lineage: Lineage,
        keep: CheckpointSection,
        sent: Callable[[str, int], None] = lambda name, nbytes: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._path = path
        self._keep, self._lineage = keep, lineage
        self._owner = Owner(nonce, secrets.token_hex(8))
        self._clock, self._note_sent = clock, sent
        self.reading: frozenset[int] = frozenset()
        """The steps of the checkpoint that is being sent, and of the newest one that this pass will send. The keep
        rules must not delete these checkpoints meanwhile. Otherwise, if sending takes longer than `checkpoint.keep`
        intervals between saves, no checkpoint would ever be sent whole."""
        self.found = False
        """Whether this process knows the content of the mirror."""
        self._sent: dict[str, Sent] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # size and time of each record when this process sent it
        self._whole: dict[str, bool] = {}  # the mirror's checkpoints, and whether they are complete
        self._latest: str | None = None
        self._records_s, self._records_wait_s = -float("inf"), EVERY_S
        self._metrics: LearnerMetrics | None = None
        self._error, self._may_delete = "", True
        self._refusal: ConfigError | None = None
        self._begun, self._ending, self._over = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self, *, within_s: float = BEGIN_S) -> None:
        """Starts the thread. Raises ConfigError if the mirror belongs to another run, or if the run was continued
        elsewhere. If the storage does not answer within `within_s` seconds, the run goes on, and the thread tries
        again."""
        self._thread.start()
        self._begun.wait(within_s)
        if self._refusal is not None:
            raise self._refusal

    def report_to(self, metrics: "LearnerMetrics") -> None:
        """Reports each pass from now on to `metrics`."""
        self._metrics = metrics
        metrics.mirrored()

    def finish(self, *, within_s: float) -> None:
        """Waits until everything is sent, `within_s` seconds at most. Then logs what is missing."""
        self._ending.set()
        self._thread.join(within_s)
        self._over.set()
        try:
            missing = "" if self._refusal is not None else self.missing()
        except Exception as error:  # a fault of the mirror must not fail a run that has ended
            logger.error(
                "run.mirror: it is not known whether %s lacks files, because %s: %s",
                self._store.url,
                type(error).__name__,
                error,
            )
            return
        if missing:
            logger.error(
                "run.mirror: %s lacks %s, because %s. Everything is in %s; to send it: asyncrl mirror %s %s",
                self._store.url,
                missing,
                self._error or f"sending took longer than the {within_s:.0f} s that run.shutdown_grace_s left",
                self._path,
                self._path,
                self._store.url,
            )

    def _work(self) -> None:
        failures = 0
        while not self._over.is_set():
            ending = self._ending.is_set()  # read before the pass, which then sends everything
            try:
                self.pass_once(due_only=not ending)
            except ConfigError as refusal:
                logger.error("%s", refusal)
                self._refusal = refusal
                self._begun.set()
                return
            except Exception as error:  # each implementation has errors of its own, and training must go on
                self._begun.set()
                if self._over.is_set():
                    return
                failures += 1
                self._failed(error, first=failures == 1)
            else:
                self._succeeded(again=failures > 0)
                failures = 0
                if ending:
                    return
            if ending:
                self._over.wait(RETRY_AT_END_S)
            else:
                self._wait(failures)

    def _wait(self, failures: int) -> None:
        """Waits for the time of the next pass or the end of the run. If the last pass did not fail, the next one comes
        as soon as there is a checkpoint to send, or if the directory cannot be read: that pass then logs the error."""
        until_s = self._clock() + wait_s(failures)
        while (left_s := until_s - self._clock()) > 0 and not self._ending.wait(min(LOOK_S, left_s)):
            try:
                if not failures and not all(self._whole.get(name) for name in self._finished()):
                    return
            except Exception:  # the disk may have any error, and the thread must not end
                return

    def _failed(self, error: Exception, *, first: bool) -> None:
        self._error = redacted(f"{type(error).__name__}: {error}")
        if self._metrics is not None:
            self._metrics.mirror_failed()
        if first:
            logger.warning(
                "run.mirror: nothing can be sent to %s now (%s). Training goes on, and the mirror tries again; this "
                "machine has everything in %s",
                self._store.url,
                self._error,
                self._path,
            )

    def _succeeded(self, *, again: bool) -> None:
        self._error = ""
        if self._metrics is not None:
            self._metrics.mirrored()
        if again:
            logger.info("run.mirror: %s has everything again", self._store.url)

    def pass_once(self, *, due_only: bool = False) -> None:
        """Sends everything that is finished now. With `due_only`, records are left out if they were sent recently
        (`LEAST_SHARE`) and no checkpoint is to be sent.

        Raises ConfigError if another run or process writes the mirror, or if it is the directory of a run, and the
        errors of the storage.
        """
        if self.found and not self._has_owner():
            logger.warning("run.mirror: %s was emptied, so everything is sent there again", self._store.url)
            self.found = False
        changed = not self.found
        if not self.found:
            self._take()
        # Listed before the records are read, so that the records of all their steps are sent first.
        finished = self._finished()
        waiting = [step for name, (step, _) in finished.items() if not self._whole.get(name)]
        self.reading = frozenset(waiting[-1:])
        try:
            if not due_only or self._due() or waiting:
                self._send_records()
            for name, (step, folder) in finished.items():
                if self._send_checkpoint(name, step, folder):
                    self._name_latest(finished)
                    changed = True
        finally:
            self.reading = frozenset()
        if changed:
            self._name_latest(finished)
            self._delete_old(finished)

    def _take(self) -> None:
        """Takes the mirror for this process, and finds out which files it has."""
        self._sent, self._latest, self._records_s = {}, None, -float("inf")
        self._seen.clear()
        owner, writers = self._read_owner(), self._writers()
        if owner is None:
            check_no_run(self._store)
        known = owner is None or (owner.nonce == self._owner.nonce and owner.process in writers)
        if known or complete_names(self._store.sizes(CHECKPOINTS)):
            self._check_run(owner, known=known)
        else:  # the mirror is of a run that died before its first checkpoint was sent
            self._empty()
        # Written before owner.json: if this process is killed in between, the directory knows the token in owner.json.
        if self._owner.process not in writers:
            write_atomically(self._path / WRITERS, msgspec.json.encode([*writers, self._owner.process]))
        self._store.write(OWNER, msgspec.json.encode(self._owner))
        there = self._store.sizes()
        parts = [name.split("/") for name in there if name.startswith(f"{CHECKPOINTS}/")]
        names = {name[1] for name in parts if len(name) > 2 and CHECKPOINT_NAME.fullmatch(name[1])}
        self._whole = {name: f"{CHECKPOINTS}/{name}/{COMPLETE}" in there for name in names}
        sent = sent_records(self._store)
        self._sent = {name: record for name, record in sent.items() if there.get(name) == record.nbytes}
        self.found = True
        self._begun.set()

    def _empty(self) -> None:
        """Removes the records of another run from the mirror, because a machine that fetches the mirror would get them
        too. Raises ConfigError if the storage does not allow this."""
        try:
            for name in (*RECORDS, SAMPLES, AUDIT, CHECKPOINTS, SENT, LATEST):
                self._store.remove(name)
        except PermissionError as error:
            raise ConfigError(
                f"run.mirror = {self._store.url}: it has records of a run without a checkpoint, and they cannot be "
                f"deleted ({redacted(str(error))}). Name another URL, or empty this one"
            ) from error

    def _check_run(self, owner: Owner | None, *, known: bool) -> None:
        """Raises ConfigError if the mirror is of another run, or the run was continued elsewhere. `known` says whether
        the directory has the owner's token."""
        url = self._store.url
        if owner is not None and owner.nonce != self._owner.nonce:
            raise ConfigError(
                f"run.mirror = {url}: another run is mirrored there, with the nonce {owner.nonce!a}, and this one has "
                f"{self._owner.nonce!r}. To continue that run here: asyncrl resume {url}. Otherwise name another URL, "
                "or empty this one"
            )
        lineage = lineage_of(self._store)
        if lineage != self._lineage and not self._lineage.continues(lineage):
            raise ConfigError(
                f"run.mirror = {url}: the run was resumed elsewhere, as incarnation {lineage.incarnation}, and "
                f"{self._path} lacks what it has trained there. Move this directory away, and continue the run with "
                f"asyncrl resume {url}. Otherwise set run.mirror to another URL"
            )
        if not known:
            raise ConfigError(
                f"run.mirror = {url}: the run was continued elsewhere, because a process has written the mirror that "
                f"{self._path / WRITERS} does not know. Move this directory away, and continue the run with asyncrl "
                f"resume {url}. Otherwise set run.mirror to another URL"
            )

    def _writers(self) -> list[str]:
        """Returns the tokens in `WRITERS`. Each process that takes the mirror replaces the token in `owner.json`. So if
        that is one of these tokens, no process of another directory has written the mirror since."""
        try:
            return msgspec.json.decode(read(self._path / WRITERS), type=list[str])
        except UNREADABLE:
            return []

    def _check_owner(self) -> None:
        """Raises ConfigError or `_Interrupted` if this process must not write now."""
        self._check_goes_on()
        if not self._has_owner():
            raise _Interrupted(f"{OWNER} is missing, so the mirror was emptied")

    def _check_goes_on(self) -> None:
        """Raises `_Interrupted` if the run has ended."""
        if self._over.is_set():
            raise _Interrupted("the run has ended")

    def _has_owner(self) -> bool:
        """Returns whether the mirror has its `owner.json`. Raises ConfigError if another process has written it."""
        owner = self._read_owner()
        if owner is not None and owner != self._owner:
            raise ConfigError(
                f"run.mirror = {self._store.url}: another process has taken the mirror, so this run is no longer "
                "mirrored. If the run was resumed on another machine, end this one with asyncrl down"
            )
        return owner is not None

    def _read_owner(self) -> Owner | None:
        content = self._store.read(OWNER)
        return None if content is None else msgspec.json.decode(content, type=Owner)

    # --- records -----------------------------------------------------------------------------------------------------

    def records(self) -> list[str]:
        """Returns the names of the records that the directory has now, in the order in which they are sent."""
        found = [name for name in RECORDS if (self._path / name).is_file()]
        for folder in (SAMPLES, AUDIT):
            names = [name for name in _files_below(self._path / folder, inside=self._path) if ".tmp" not in name]
            # the weights of a version (`audit.keep_weights`) are sent only when all of their files exist
            complete = {name.removesuffix(COMPLETE) for name in names if name.endswith(f"/{COMPLETE}")}
            ready = [
                n for n in names if not n.startswith(f"{AUDIT}/weights/") or n.rpartition("/")[0] + "/" in complete
            ]
            found += sorted(ready, key=lambda name: (name.endswith(f"/{COMPLETE}"), name))
        return found

    def _send_records(self) -> None:
        """Sends the records that have changed, and removes those that the directory no longer has."""
        self._check_owner()
        started_s, names = self._clock(), self.records()
        before = dict(self._sent)
        for name in names:
            path = self._path / name
            if (state := _state(path)) is None or self._seen.get(name) == state:
                continue
            try:
                record = Sent(state[0], _checksum(path, inside=self._path, most=state[0]))
                if self._sent.get(name) != record:
                    self._store.send(path, name)
                    self._note_sent(name, record.nbytes)
            except FileNotFoundError:
                if path.exists():  # the error is not about this file, but is one of the storage
                    raise
                continue  # the file was moved just now
            self._sent[name], self._seen[name] = record, state
        for name in self._sent.keys() - names:
            self._remove(name)
            del self._sent[name]
            self._seen.pop(name, None)
        if self._sent != before:
            self._store.write(SENT, msgspec.json.encode(self._sent))
        self._records_s = self._clock()
        self._records_wait_s = max(EVERY_S, LEAST_SHARE * (self._records_s - started_s))

    def _due(self) -> bool:
        return self._clock() - self._records_s >= self._records_wait_s

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, tuple[int, Path]]:
        """Returns the complete checkpoints of the directory by their names in the mirror, in the order of their
        steps."""
        return dict(_named(self._path / CHECKPOINTS))

    def _send_checkpoint(self, name: str, step: int, folder: Path) -> bool:
        """Sends a checkpoint unless the mirror has it whole. Returns whether it was sent whole now. It was not if,
        before its last file was sent, the keep rules deleted it from the directory, or a save with `hf/` replaced
        it."""
        if self._whole.get(name):
            return False
        self.reading |= {step}
        remote = f"{CHECKPOINTS}/{name}"
        try:
            self._whole.setdefault(name, False)
            there = self._store.sizes(remote)
            local = sizes_below(folder)
            owned = 0
            for file in sorted(local, key=lambda each: each == COMPLETE):
                if file == COMPLETE and dict(_named(folder.parent)).get(name) is None:
                    return False
                if there.get(f"{remote}/{file}") != local[file]:
                    if owned <= 0 or file == COMPLETE:
                        self._check_owner()
                        owned = OWNED_BYTES
                    self._check_goes_on()
                    owned -= local[file]
                    self._store.send(folder / file, f"{remote}/{file}")
                    self._note_sent(f"{remote}/{file}", local[file])
                if self._due():
                    self._send_records()
        except FileNotFoundError:
            if (folder / COMPLETE).exists():  # the folder was not deleted, so the error is one of the storage
                raise
            return False
        finally:
            self.reading -= {step}
        self._whole[name] = True
        return True

    def _name_latest(self, finished: Collection[str]) -> None:
        """Writes into `latest.json` which of the directory's checkpoints that the mirror has whole is the newest."""
        newest = max((name for name in finished if self._whole.get(name)), key=step_of_name, default=None)
        if newest is not None and newest != self._latest:
            self._check_owner()
            self._store.write(LATEST, msgspec.json.encode(Latest(f"{CHECKPOINTS}/{newest}", step_of_name(newest))))
            self._latest = newest

    def _delete_old(self, finished: Collection[str]) -> None:
        """Deletes the mirror's checkpoints that the directory no longer has, unless the keep rules keep them: the
        directory of a run that was resumed from its mirror has only the newest one. If the mirror has the directory's
        checkpoint of a step whole, other checkpoints of this step are deleted too, unless they were set aside."""
        self._check_owner()
        lost = [name for folder in (self._path / CHECKPOINTS).glob("lost-*") for name, _ in _named(folder)]
        whole = sorted({step_of_name(name) for name, complete in self._whole.items() if complete})
        best: list[int] = []
        if self._keep.keep_best:
            evals = read_lines(self._path / "evals.jsonl", EvalRecord)
            ranked = best_first(evals, whole, name=self._keep.best_eval)
            best = [record.step for record in ranked[: self._keep.keep_best]]
        replaced = {step_of_name(name) for name in finished if self._whole.get(name)}
        kept = kept_steps(self._keep, whole, best=best) - replaced
        for name in self._whole.keys() - {*finished, *lost}:
            if not (self._whole[name] and step_of_name(name) in kept):
                # COMPLETE first, so that no reader takes a part of a checkpoint for a whole one
                if self._remove(f"{CHECKPOINTS}/{name}/{COMPLETE}"):
                    self._remove(f"{CHECKPOINTS}/{name}")
                del self._whole[name]

    def _remove(self, name: str) -> bool:
        """Removes a file or folder of the mirror, and returns whether this was possible. A failure is only logged, and
        only once, because a bucket may allow no deletions."""
        try:
            self._store.remove(name)
        except Exception as error:
            if self._may_delete:
                logger.warning(
                    "run.mirror: old files in %s cannot be deleted (%s: %s), so they stay there; allow deletions, or "
                    "delete them by a rule of the storage",
                    self._store.url,
                    type(error).__name__,
                    redacted(str(error)),
                )
            self._may_delete = False
            return False
        return True

    def missing(self) -> str:
        """Returns what the mirror lacks, in words; empty if it has everything. Compares the directory with what this
        process knows of the mirror, and does not ask the storage."""
        states = {name: _state(self._path / name) for name in self.records()}
        names = [name for name, state in states.items() if state is not None and self._seen.get(name) != state]
        names += [
            f"{CHECKPOINTS}/step-{step}" for name, (step, _) in self._finished().items() if not self._whole.get(name)
        ]
        shown = ", ".join(reversed(names[-3:]))
        return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def complete_names(names: Iterable[str]) -> set[str]:
    """Returns the names of the complete checkpoints among the files of a mirror."""
    parts = [name.split("/") for name in names if name.endswith(f"/{COMPLETE}")]
    complete = {each[1] for each in parts if len(each) == 3 and each[0] == CHECKPOINTS}
    return set(filter(CHECKPOINT_NAME.fullmatch, complete))


def lineage_of(store: Store) -> Lineage:
    """Returns the incarnations of the mirrored run, from its lineage.json."""
    content = store.read(LINEAGE)
    return Lineage() if content is None else msgspec.json.decode(content, type=Lineage)


def sent_records(store: Store) -> dict[str, Sent]:
    """Returns the size and checksum of each record by its name, as `SENT` has them since all records were last sent;
    none if `SENT` cannot be read."""
    try:
        return msgspec.json.decode(store.read(SENT) or b"{}", type=dict[str, Sent])
    except UNREADABLE:
        return {}


def most_bytes(name: str) -> int:
    """Returns the size in bytes up to which the record `name` is read. A larger one is refused."""
    return AUDIT_BYTES if name.startswith(f"{AUDIT}/") else FILE_BYTES


def wait_s(failures: int) -> float:
    """Returns the seconds until the next pass, after so many failures in a row."""
    return min(RETRY_S * 2 ** (failures - 1), LONGEST_RETRY_S) if failures else EVERY_S


def _named(checkpoints: Path) -> Iterator[tuple[str, tuple[int, Path]]]:
    """Yields the complete checkpoints in a folder by their names in a mirror, each with its step and its directory."""
    for step, folder in sorted(folders(checkpoints).items()):
        with contextlib.suppress(OSError):  # deleted meanwhile, or it has no manifest and cannot be resumed
            if (folder / COMPLETE).exists():
                digest = xxhash.xxh3_128_hexdigest(read(folder / MANIFEST))[:16]
                yield f"step-{step}-{digest}", (step, folder)


def step_of_name(name: str) -> int:
    """Returns the step of a checkpoint from its name in a mirror (`CHECKPOINT_NAME`)."""
    return int(name.split("-")[1])


def _state(path: Path) -> tuple[int, int] | None:
    """Returns the size and the time of a file; None if it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns


def _files_below(folder: Path, *, inside: Path) -> Iterator[str]:
    """Yields the paths relative to `inside` of the files below `folder`. Links, other entries, and files that vanish
    meanwhile are left out."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, files in os.walk(folder, onerror=failed):
        for path in (Path(place) / name for name in files):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield str(path.relative_to(inside))


def _checksum(path: Path, *, inside: Path, most: int) -> str:
    """Returns the xxh3-128 checksum of the first `most` bytes of a file."""
    digest = xxhash.xxh3_128()
    with opened(path, inside=inside) as file:
        while most and (chunk := file.read(min(most, _CHUNK_BYTES))):
            digest.update(chunk)
            most -= len(chunk)
    return digest.hexdigest()
