"""The history of a run, from the audit's records of all incarnations (starts of the learner).

The *surviving* steps made the weights of the newest incarnation. Other steps were lost when the run was resumed from an
earlier checkpoint: no later weights are made from theirs (`asyncrl.common.version`), and their prompts were trained
again.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from asyncrl.audit.comparisons import PlainComputation
from asyncrl.buffer.ledger import LedgerEntry
from asyncrl.common.version import Lineage, Version
from asyncrl.deployment.resuming import LINEAGE
from asyncrl.errors import RunError
from asyncrl.learner.audit_records import (
    AUDIT,
    Began,
    Ended,
    PublishedVersion,
    ReadRecords,
    TrainedStep,
    read_records,
)
from asyncrl.learner.records import ForkPoint, RunInfo, StepRecord, known_info, read_lines
from asyncrl.run_files import UNREADABLE, names, read

# The outcome of one check of the audit, and the errors that a check raises if it does not pass.


class Verdict(StrEnum):
    """The result of a check. NOT_POSSIBLE: the run did not write what the check needs, or this machine cannot run
    the check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the check `name`. `detail` says what was checked, or has the first counterexample, or the reason
    why the check is not possible. `witnessed` has the numbers of check 6; None for other checks, and if check 6 could
    not compute them."""

    name: str
    verdict: Verdict
    detail: str
    witnessed: PlainComputation | None = None

    def __str__(self) -> str:
        return f"{self.verdict.upper() if self.verdict is Verdict.FAILED else self.verdict}: {self.name}: {self.detail}"


class Counterexample(RunError):
    """A check has failed. The text is the first contradiction that it found in the run's files."""


class NotPossible(RunError):
    """A check cannot be made: the run did not write what the check needs, or this machine cannot run it. The text is
    the reason."""


_NAME = re.compile(r"steps-(\d+)\.msgpack")


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of the run in `directory`.

    `steps` are the surviving steps, which made the newest weights, in the order of the records. `lost` are the steps
    that a restart has undone. `began` has the start of each incarnation that wrote records, by its number. `end` is the
    end of the run; None if the newest incarnation still runs or was killed. `forked_from` is the checkpoint of another
    run with whose weights this run began; None if there is none. `published` has all publications, also those that a
    restart lost. `damage` says which record cannot be read or is missing (the first one of several); None if there is
    none.
    """

    directory: Path
    lineage: Lineage
    began: dict[int, Began]
    steps: tuple[TrainedStep, ...]
    lost: tuple[TrainedStep, ...]
    published: tuple[PublishedVersion, ...]
    end: Ended | None
    forked_from: ForkPoint | None
    damage: str | None

    @property
    def settings(self) -> dict[str, object]:
        """The settings that all processes of the run share, by dotted key, in the newest incarnation that wrote
        records."""
        return self.began[max(self.began)].settings

    @property
    def last_ledger(self) -> LedgerEntry:
        """The newest entry of the ledger, which counts the groups by how they ended: that of the end of the run if it
        is recorded, else that of the last surviving step."""
        return self.steps[-1].ledger if self.end is None else self.end.ledger

    def require_steps(self) -> None:
        """Raises NotPossible if there is no surviving step, and Counterexample if records are damaged."""
        if self.damage is not None:
            raise Counterexample(self.damage)
        if not self.steps:
            raise NotPossible("no step was trained yet")

    def weights(self) -> dict[Version, dict[str, int]]:
        """Returns the digests of each version's weights by kind of digest, also of versions that a restart lost. Raises
        Counterexample if two steps recorded different digests of a version."""
        found: dict[Version, dict[str, int]] = {}
        for step in (*self.lost, *self.steps):
            first, made = Version(step.incarnation, step.step), {step.digest_kind: step.after}
            for version, digests in ((first, step.digests_before), (step.made, made)):
                known = found.setdefault(version, dict(digests))
                for kind, digest in digests.items():
                    if known.setdefault(kind, digest) != digest:
                        raise Counterexample(
                            f"version {version} has two digests, {known[kind]:016x} and {digest:016x}: a step did not "
                            "start from the weights that the step before it made"
                        )
        return found

    def digests(self) -> dict[int, dict[str, int]]:
        """Returns the digests of the surviving steps' weights by kind of digest. The outer key is the number of the
        step that begins with the weights: the weights before step 3 and those after step 2 have the key 3."""
        before = {step.step: step.digests_before for step in self.steps}
        return before | {step.step + 1: {step.digest_kind: step.after} for step in self.steps}


def read_history(directory: Path) -> History:
    """Reads the records of a run, which may still be running. Raises RunError if it has none."""
    # read before the records: steps that a live run adds in between would otherwise have a line, but no record
    lines, unreadable = _trained_lines(directory)
    files = {
        int(match[1]): directory / AUDIT / name
        for name in names(directory / AUDIT, inside=directory)
        if (match := _NAME.fullmatch(name)) is not None
    }
    read = {incarnation: read_records(files[incarnation]) for incarnation in sorted(files)}
    began = {incarnation: found.began for incarnation, found in read.items() if found.began is not None}
    damages = [found.damage for found in read.values() if found.damage is not None]
    if not began and not damages:
        raise RunError(
            f"{directory} has no records for the audit in {AUDIT}/: the run has not prepared its model yet, or it was "
            "trained by a version of asyncrl without the audit"
        )
    lineage = max((_known(directory), *(found.lineage for found in began.values())), key=lambda each: each.incarnation)
    records = [record for found in read.values() for record in found.records]
    steps = [record for record in records if isinstance(record, TrainedStep)]
    last = read[max(read)].records
    end = last[-1] if last and max(read) == lineage.incarnation else None
    survived = {step.step for step in steps if lineage.has(step.made)}
    info = known_info(directory)
    damages += unreadable + _cut(info, lines, survived, newest=read.get(lineage.incarnation))
    return History(
        directory=directory,
        lineage=lineage,
        began=began,
        steps=tuple(step for step in steps if lineage.has(step.made)),
        lost=tuple(step for step in steps if not lineage.has(step.made)),
        published=tuple(record for record in records if isinstance(record, PublishedVersion)),
        end=end if isinstance(end, Ended) else None,
        forked_from=None if info is None else info.forked_from,
        damage=damages[0] if damages else None,
    )


def _trained_lines(directory: Path) -> tuple[list[int], list[str]]:
    """Returns the numbers of the trained steps in steps.jsonl, and a list with the reason why the file cannot be read;
    the list is empty if it can."""
    try:
        return [line.step for line in read_lines(directory / "steps.jsonl", StepRecord) if line.trained], []
    except RunError as error:
        return [], [str(error)]


def _cut(
    info: RunInfo | None, lines: Sequence[int], steps: Collection[int], *, newest: ReadRecords | None
) -> list[str]:
    """Returns in words the signs that the end of the audit's records was cut off.

    A step has its line in steps.jsonl before its record for the audit, so a killed run can lack the last record only.
    `info` is run.json of the run; None if it cannot be read. `lines` are the trained steps in steps.jsonl, and `steps`
    the surviving ones in the records. `newest` are the records of the newest incarnation; None if it has none.
    """
    state = "running" if info is None else info.state
    killed = state in ("running", "died")
    lacking = [step for step in lines if step not in steps and not (step == lines[-1] and state != "finished")]
    found = [f"steps.jsonl has step {lacking[0]}, but {AUDIT}/ has no record of it"] if lacking else []
    if newest is not None and newest.torn and not killed:
        found.append(f"the last record in {AUDIT}/ is incomplete, but by run.json the run has {state}")
    ended = newest is not None and bool(newest.records) and isinstance(newest.records[-1], Ended)
    if state == "finished" and not ended:
        found.append(f"by run.json the run has finished, but {AUDIT}/ has no record of its end")
    return found


def _known(directory: Path) -> Lineage:
    """Returns the lineage (which incarnation began from which version) that the newest start of the run recorded; that
    of a run without a restart if this file cannot be read. The newest incarnation may not have written a record for the
    audit yet."""
    try:
        return msgspec.json.decode(read(directory / LINEAGE), type=Lineage)
    except UNREADABLE:
        return Lineage()
