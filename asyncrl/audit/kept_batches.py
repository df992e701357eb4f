"""Reads the weights and batches of its steps that a run kept (`audit.keep_weights: all`), for checks 5 and 6 of the
audit."""

from collections.abc import Iterator

from asyncrl.audit.history import Counterexample, History, NotPossible
from asyncrl.buffer.records import Lease
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.row_checksums import row_checksums
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.saving import KeptSteps

_DECISIVE = (
    "learner.",
    "algorithm.",
    "model.",
    "generator.temperature",
    "generator.top_k",
    "generator.logprobs",
    "data_plane.",
)
"""Settings and sections on which the numbers of a step depend: the beginnings of their dotted keys."""


def kept_steps(history: History) -> KeptSteps:
    """Returns the kept weights and batches of a run. Raises NotPossible if it kept no weights."""
    kept = KeptSteps(history.directory)
    if not kept.versions():
        raise NotPossible(
            "the run kept no weights: set audit.keep_weights: all in the config of a run with a small model"
        )
    return kept


def check_same_settings(history: History) -> None:
    """Raises NotPossible if a restart of the run changed a setting on which the numbers of a step depend."""
    for key, before, after in changed_settings(history, _DECISIVE):
        raise NotPossible(f"{key} was changed from {before!r} to {after!r} when the run was resumed")


def changed_settings(history: History, among: tuple[str, ...]) -> Iterator[tuple[str, object, object]]:
    """Yields each setting that a restart of the run changed: the key, the value at the run's start, and the changed
    value. Looks only at keys that begin with a word of `among`. Starts of which no step survived do not count."""
    first, *later = (history.began[incarnation] for incarnation in sorted({s.incarnation for s in history.steps}))
    for began in later:
        for key in sorted(first.settings.keys() | began.settings.keys()):
            before, after = first.settings.get(key), began.settings.get(key)
            if before != after and key.startswith(among):
                yield key, before, after


def kept_batch(kept: KeptSteps, step: TrainedStep) -> tuple[Lease, BatchedDataDict]:
    """Returns the kept lease (the step's groups with their rewards) and the kept rows of a step. Raises NotPossible if
    they were not kept, and Counterexample if they cannot be read or are not those of the step's record."""
    try:
        found = kept.batch(Version(step.incarnation, step.step))
    except Exception as error:
        raise Counterexample(f"the kept batch of step {step.step} cannot be read: {error}") from error
    if found is None:
        raise NotPossible(f"the batch of step {step.step} was not kept")
    lease, rows = found
    recorded = [(group.group, group.attempt, sample.reward) for group in step.groups for sample in group.samples]
    own = [(group.meta.group, group.meta.attempt, reward) for group in lease.groups for reward in group.meta.rewards]
    if not len(recorded) == len(own) == rows.size:
        raise Counterexample(
            f"step {step.step} trained {len(recorded)} samples, but the kept batch has {len(own)} with {rows.size} rows"
        )
    for (group, attempt, reward), (own_group, own_attempt, own_reward) in zip(recorded, own, strict=True):
        if (group, attempt, reward) != (own_group, own_attempt, own_reward):
            raise Counterexample(
                f"step {step.step} trained group {group}.{attempt} with the reward {reward}, but the kept batch has "
                f"group {own_group}.{own_attempt} with {own_reward}"
            )
    names = [f"sample {place} of group {group.group}" for group in step.groups for place in range(len(group.samples))]
    checksums = [sample.row for group in step.groups for sample in group.samples]
    for name, recorded_row, row in zip(names, checksums, row_checksums(rows), strict=True):
        if recorded_row != row:
            raise Counterexample(
                f"{name} in the kept batch of step {step.step} has other tokens, log-probs or versions than those that "
                "were trained"
            )
    return lease, rows
