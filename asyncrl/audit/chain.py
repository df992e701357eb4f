"""Check 4 of the audit: each step began with the weights that the step before it made, equal weights were published
with equal bytes, and the weights that the run kept (`audit.keep_weights`) and those in checkpoints are the weights of
their versions. The check compares digests of the weights, and checksums of the rows in checkpoints."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file

from asyncrl.audit.history import Counterexample, History, NotPossible
from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps, folder_of, verified
from asyncrl.checkpoints.run import POLICY, ROWS
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.row_checksums import row_checksums
from asyncrl.errors import CheckpointError, CheckpointOfOtherFormat
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.saving import KeptSteps
from asyncrl.ranks.digest import KINDS, combined, tensor_digest
from asyncrl.run_files import names


def chain_holds(history: History) -> str:
    """Check 4: the surviving steps (those that no restart has undone) are numbered without a gap, each started from the
    weights that the step before it made, versions were published in their order and equal weights with equal bytes, and
    every checkpoint of a surviving step and every kept version has the recorded weights. Such a checkpoint also has the
    rows that later steps trained."""
    for number, step in enumerate(history.steps):
        if step.step != number:
            raise Counterexample(f"the record of step {step.step} stands where step {number} is expected")
        if number:
            _check_link(history.steps[number - 1], step)
    published = _check_published(history)
    saved = _check_checkpoints(history)
    _check_kept(history)
    first, last = history.steps[0], history.steps[-1]
    start = "" if history.forked_from is None else f"the fork began with the digest {first.before:016x}, and "
    return (
        f"{len(history.steps)} steps follow each other; {published} publications are in the order of their versions, "
        f"and equal weights have equal bytes; {saved} checkpoints have the weights of their versions; {start}the "
        f"digest after step {last.step} is {last.after:016x}"
    )


def _check_link(last: TrainedStep, step: TrainedStep) -> None:
    """Raises Counterexample if `step` did not start from the weights that `last`, the step before it, made. Compares
    digests of the kind that `last` recorded. After a restart on another kind of device, `step` records its other
    digests in another kind (`asyncrl.ranks.digest.KINDS`)."""
    before = step.digests_before.get(last.digest_kind)
    if before is None:
        raise Counterexample(
            f"step {step.step} has a digest of the kind {step.digest_kind} only, and step {last.step} has one of the "
            f"kind {last.digest_kind}, so nothing shows from which weights step {step.step} started; the first step "
            "after a restart must have both kinds"
        )
    if before != last.after:
        raise Counterexample(
            f"step {step.step} started from weights with the digest {before:016x}, but step {last.step} made "
            f"{last.after:016x}"
        )


def _check_published(history: History) -> int:
    """Raises Counterexample if versions were not published in their order, or if equal weights were published with
    different bytes. Two versions have equal weights if, for example, a restart publishes those of its checkpoint again.
    Returns the number of publications."""
    weights = history.weights()
    contents: dict[tuple[str, int], tuple[Version, str]] = {}  # by kind and digest
    newest: Version | None = None
    for publication in history.published:
        if newest is not None and publication.version <= newest:
            raise Counterexample(f"version {publication.version} was published after version {newest}")
        newest = publication.version
        # a version without a digest is skipped: no step that made it or began with it was recorded
        for digest in weights.get(publication.version, {}).items():
            version, content = contents.setdefault(digest, (publication.version, publication.digest))
            if content != publication.digest:
                raise Counterexample(
                    f"versions {version} and {publication.version} have equal weights, but were published with the "
                    f"digests {content} and {publication.digest}"
                )
    return len(history.published)


def _check_checkpoints(history: History) -> int:
    """Compares the weights and rows in the checkpoints of surviving steps with those that the steps recorded. Returns
    the number of these checkpoints. Raises Counterexample for a difference or a damaged checkpoint, and NotPossible for
    one that another version of asyncrl wrote."""
    rows = {
        f"{group.group}.{group.attempt}": [sample.row for sample in group.samples]
        for step in history.steps
        for group in step.groups
    }
    digests, compared = history.digests(), 0
    checkpoints = history.directory / CHECKPOINTS
    for step in complete_steps(checkpoints):
        path = folder_of(checkpoints, step)
        try:
            manifest = verified(path)
        except CheckpointOfOtherFormat as error:
            raise NotPossible(str(error)) from error
        except (CheckpointError, FileNotFoundError) as error:
            if not path.exists():  # the run still trains, and has just deleted this checkpoint
                continue
            raise Counterexample(str(error)) from error
        if manifest.version.step != step:
            raise Counterexample(f"{path} is a checkpoint of version {manifest.version}, not of step {step}")
        if not history.lineage.has(manifest.version) or step not in digests:
            continue
        for kind, wanted in digests[step].items():
            if (found := saved_digest(path / POLICY / "weights", kind)) != wanted:
                raise Counterexample(
                    f"{path} has weights with the digest {found:016x}, but step {step - 1} made {wanted:016x}"
                )
        _check_rows(path / ROWS, rows)
        compared += 1
    return compared


def _check_kept(history: History) -> None:
    """Compares the digests of the weights that the run kept (`audit.keep_weights`) with those that the steps
    recorded."""
    kept, weights = KeptSteps(history.directory), history.weights()
    for version in kept.versions():
        path = kept.weights_path(version)
        for kind, wanted in weights.get(version, {}).items():
            if (found := saved_digest(path, kind)) != wanted:
                raise Counterexample(
                    f"{path} has the digest {found:016x}, but the recorded one of {version} is {wanted:016x}"
                )


def _check_rows(folder: Path, trained: dict[str, list[int]]) -> None:
    """Compares the rows in a checkpoint with the rows that a later step trained. The rows are those of the finished
    groups that waited for training. `trained` has the checksums of the trained rows by `group.attempt`."""
    for path in _tensor_files(folder):
        wanted = trained.get(path.stem)
        if wanted is not None and row_checksums(BatchedDataDict(load_file(path))) != wanted:
            raise Counterexample(f"{path} has other rows of group {path.stem} than those that were trained")


def saved_digest(weights: Path, kind: str) -> int:
    """Returns the digest, of the kind `kind`, of the weights that ranks saved in the folder `weights`
    (`asyncrl.ranks.shard_files`). Raises NotPossible for a kind that this version of asyncrl does not have."""
    check_kind(kind)
    return combined(_parts(weights / "state", kind))


def check_kind(kind: str) -> None:
    """Raises NotPossible for a kind of digest that this version of asyncrl does not have."""
    if kind not in KINDS:
        raise NotPossible(f"the run has digests of the kind {kind!r}, and this version of asyncrl has {KINDS}")


def _parts(state: Path, kind: str) -> Iterable[int]:
    for path in _tensor_files(state):
        with safe_open(path, framework="pt") as file:
            places = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118 - the file is not a mapping
                start = places.get(name, {}).get("saved_offsets", [0])
                yield tensor_digest(name, file.get_tensor(name), start=start[0] if start else 0, kind=kind)


def _tensor_files(folder: Path) -> list[Path]:
    return [folder / name for name in names(folder, inside=folder.parent) if name.endswith(".safetensors")]
