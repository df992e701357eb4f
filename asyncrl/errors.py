"""Every error that asyncrl raises on purpose, in one tree.

AsyncRLError
├── ConfigError                what a user set cannot be run
├── DatasetError               a dataset row cannot be used (F33)
├── RunError                   the run as a whole cannot start or go on
│   ├── RunLocked              someone else holds the run's directory or name (F35)
│   ├── RunMismatch            a deployment attaches with another config than the run's
│   ├── HandshakeError         the pools disagree on tokenizer, vocabulary or log-probs (F25)
│   ├── GeneratorPoolExhausted fewer live replicas than `generator.min_replicas`
│   ├── RunEnded               the run that was to be watched is over, as it should be
│   ├── StallError             nothing moved within `run.stall_timeout_s` (F5)
│   ├── PlacementError         Ray has no room for a process within the deadline
│   ├── ActorGone              the process behind a call has ended
│   │   └── RowsLost           rows died with the process that kept them (F37)
│   ├── CallTimeout            a call of another process took longer than its limit
│   ├── CallRefused            the ranks cannot use the arguments of a call; they go on
│   │   ├── MissingColumns     rows lack what a loss reads; nothing was trained
│   │   ├── ImpreciseColumns   log-probs in half precision that a loss adds up over sequences
│   │   ├── LossFailed         a loss function raised, or returned no scalar and metrics
│   │   └── Offloaded          the model is off its devices for a refit, and was not brought back
│   ├── NonFiniteError         too many non-finite steps in a row (F21)
│   └── StalenessViolation     a token older than the limit reached a batch: our bug
├── RolloutError               one rollout failed; every one is INFRA or DATA
│   ├── InfraError             retried elsewhere, bounded by `buffer.max_attempts`
│   └── DataError              counted; `generator.max_data_failures` in a row stop the run
├── CheckpointError            a checkpoint cannot be written or loaded
│   ├── CheckpointIncomplete   its save did not end, or files of it are gone (F7)
│   └── CheckpointMismatch     a name, shape or dtype is not the live model's
└── WeightError                a weight update cannot be applied
    ├── ManifestMismatch       a name, shape or dtype differs, or a checksum is wrong (F12)
    ├── VersionRegression      the version is older than the one that is loaded (F13)
    ├── TornReplica            half an update was applied; the replica stays paused (F11)
    ├── ParityError            the engine's log-probs are not the learner's
    ├── ManifestVoid           the bytes of a manifest died with the process that published them
    ├── CollectiveError        a peer of the weights' process group is dead, missing or late
    └── UpdateRefused          another peer refused what was to be sent; the group stays

Messages name the key or value, the limit and the mend.
"""

from collections.abc import Sequence
from enum import StrEnum


class AsyncRLError(Exception):
    """Base of every error that asyncrl raises on purpose."""


class ConfigError(AsyncRLError):
    """What a user set cannot be run. `key` is the dotted path of the field, empty for a rule over several."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_config_error, (str(self), self.key)


def _rebuild_config_error(message: str, key: str) -> ConfigError:
    return ConfigError(message, key=key)


class DatasetError(AsyncRLError):
    """A dataset row cannot be used; the message names the file and the row's number, from 1."""


class RunError(AsyncRLError):
    """The run as a whole cannot start or go on."""


class RunLocked(RunError):
    """Someone else holds the run's directory or name; the message names the holder."""


class RunMismatch(RunError):
    """A deployment attaches with a shared config key that differs from the run's."""


class HandshakeError(RunError):
    """The pools disagree on tokenizer, vocabulary or the shape of log-probs."""


class GeneratorPoolExhausted(RunError):
    """Fewer live replicas than `generator.min_replicas`."""


class RunEnded(RunError):
    """A run that was to be watched is over: it lists no endpoints any more."""


class StallError(RunError):
    """Nothing moved within `run.stall_timeout_s`."""


class ActorGone(RunError):
    """The process behind a call has ended."""


class CallTimeout(RunError, TimeoutError):
    """A call of another process took longer than its limit."""


class RowsLost(ActorGone):
    """Rows died with the process that kept them, or are out of reach. `sample_ids` names them."""

    def __init__(self, message: str, *, sample_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rows_lost, (str(self), self.sample_ids)


def _rebuild_rows_lost(message: str, sample_ids: tuple[str, ...]) -> RowsLost:
    return RowsLost(message, sample_ids=sample_ids)


class PlacementError(RunError):
    """Ray has no room for a process within `ray.placement_timeout_s`."""


class CallRefused(RunError):
    """The ranks cannot use the arguments of a call. The next call can go on, and no rank has changed anything but what
    LossFailed says."""


class MissingColumns(CallRefused):
    """Rows lack columns that a call reads. No pass was made."""


class ImpreciseColumns(CallRefused):
    """A loss adds up log-probs over sequences and got them in half precision. The message names column and dtype."""


class LossFailed(CallRefused):
    """A loss function raised an error, or returned something other than a scalar and a dict of numbers.

    The update of that loss was not applied on any rank. Updates of the same call before it were.
    """


class Offloaded(CallRefused):
    """Model or optimizer are off the ranks' devices; `prepare_for_training` brings them back."""


class NonFiniteError(RunError):
    """`learner.max_nonfinite_steps` steps in a row had a non-finite loss or gradient."""


class StalenessViolation(RunError):
    """A token older than the limit of its ticket reached a batch. The proof says that this cannot happen."""


class FailureClass(StrEnum):
    """Whether a failed rollout is worth another attempt. Unknown failures are DATA, so that bugs are loud."""

    INFRA = "infra"
    DATA = "data"


class RolloutError(AsyncRLError):
    """One rollout failed. `reason` is a short label from a bounded set, fit for a metric. `completion` is the text of
    the completion that could not be scored; it is empty when the failure is not of one completion."""

    failure_class: FailureClass

    def __init__(self, message: str, *, reason: str, completion: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.completion = completion

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_rollout_error, (type(self), str(self), self.reason, self.completion)


def _rebuild_rollout_error(cls: type[RolloutError], message: str, reason: str, completion: str) -> RolloutError:
    return cls(message, reason=reason, completion=completion)


class InfraError(RolloutError):
    """The machine's fault: another attempt may succeed."""

    failure_class = FailureClass.INFRA


class DataError(RolloutError):
    """The prompt's, the environment's or our own fault: another attempt would fail alike."""

    failure_class = FailureClass.DATA


class CheckpointError(AsyncRLError):
    """A checkpoint cannot be written or loaded. What was loaded before is unchanged."""


class CheckpointIncomplete(CheckpointError):
    """A directory without the marker of a finished save, or without a file that the marker speaks of."""


class CheckpointMismatch(CheckpointError):
    """A tensor's name, shape or dtype is not the live one's, or two directories are not of one save."""


class WeightError(AsyncRLError):
    """A weight update cannot be applied."""


class ManifestMismatch(WeightError):
    """A parameter's name, shape or dtype differs, or a bucket's checksum is wrong. Nothing was applied."""


class VersionRegression(WeightError):
    """The version is older than the one that is loaded, within one incarnation."""


class TornReplica(WeightError):
    """Half an update was applied: the replica stays paused until a whole one is."""


class ParityError(WeightError):
    """The engine's log-probs differ from the learner's by more than `weights.parity_tolerance_nats`."""


class ManifestVoid(WeightError):
    """The bytes of a manifest died with the process that published them."""


class CollectiveError(WeightError):
    """A peer of the weights' process group is dead, missing or late: the group is closed. Nothing was applied."""


class UpdateRefused(WeightError):
    """Another peer refused an update before anyone applied a byte of it; the process group stays usable."""


REFUSALS = (CallRefused, RowsLost, StalenessViolation, WeightError, CheckpointError)
"""Errors that a model's rank answers with instead of failing. All ranks raise them together, or they leave the process
group whole: the next call can go on."""
