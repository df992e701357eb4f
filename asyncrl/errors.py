"""All errors that asyncrl raises on purpose, in one tree, and the exit codes of commands that a signal has ended.

A code such as (F33) is the number of a fault in docs/faults.md.

AsyncRLError
├── ConfigError                the run cannot use a value of the configuration
├── DatasetError               a row of a dataset is not usable (F33)
├── RunError                   the whole run cannot start or cannot go on
│   ├── RunLocked              another process holds the run's directory or name (F35)
│   ├── FileRefused            an entry of a run directory is not a file that a run writes
│   ├── ClusterElsewhere       a run directory names a Ray cluster of which this machine is not a node
│   ├── AnotherRun             a run on a cluster has the name of a run directory, but is another run
│   ├── LearnerNotRestored     a new learner would continue a run without the weights that the run has trained
│   ├── Fenced                 another learner has taken over the run of this learner
│   ├── RunMismatch            a deployment tries to join a run with other settings, prompts or versions of packages
│   ├── HandshakeError         the pools disagree on tokenizer, vocabulary or the shape of log-probs (F25)
│   ├── GeneratorPoolExhausted fewer live replicas than `generator.min_replicas`
│   ├── RunEnded               `asyncrl down` ended the run, or another run took the directory that a command watches
│   ├── StallError             no progress within `run.stall_timeout_s` (F5)
│   ├── ReplicaFailed          a replica of the generator pool cannot go on
│   │   ├── EngineDied         a process of its engine has ended
│   │   ├── EngineStuck        its engine generates no token
│   │   └── Quarantined        the coordinator gives the replica no tickets any more
│   ├── PlacementError         Ray had no resources for a process before the deadline
│   ├── ActorGone              the process that serves a call has ended
│   │   └── RowsLost           rows are lost, because the process that stored them has ended (F37)
│   ├── CallTimeout            a call to another process took longer than its limit
│   │   ├── ActorUnreachable   an actor cannot be reached at the moment; its process may live
│   │   └── ClusterUnreachable no Ray cluster answers at the address, because its head was lost or does not run yet
│   ├── CallRefused            the ranks cannot use the arguments of a call; the ranks stay usable
│   │   ├── MissingColumns     the rows lack columns that a loss reads; no training step was made
│   │   ├── ImpreciseColumns   a loss sums log-probs over sequences, and the log-probs have half precision
│   │   ├── LossFailed         a loss function raised an error, or did not return a scalar and metrics
│   │   ├── WitnessFailed      an update or an evaluation is not the one that the configuration describes
│   │   └── Offloaded          the model was moved off its devices for a refit and was not moved back
│   ├── NonFiniteError         too many consecutive steps with a non-finite loss or gradient (F21)
│   └── StalenessViolation     a token older than the limit reached a batch; this is a bug of asyncrl
├── RolloutError               one rollout failed; each failure is INFRA or DATA
│   ├── InfraError             tried again, if possible on another replica, for `buffer.max_attempts` attempts in all
│   └── DataError              not tried again; `generator.max_data_failures` consecutive ones stop the run
├── CheckpointError            a checkpoint cannot be written or loaded
│   ├── CheckpointIncomplete   the directory has no marker of a finished save (F7)
│   ├── CheckpointDamaged      a file of a finished save is missing, cannot be read or has changed
│   ├── CheckpointOfOtherFormat  another version of asyncrl wrote it in a format that this version does not read
│   └── CheckpointMismatch     a tensor's name, shape or dtype differs, or folders are of different saves
└── WeightError                a weight update cannot be applied
    ├── ManifestMismatch       a name, shape or dtype differs (F12)
    │   └── WeightsDamaged     bytes arrived damaged (F12)
    ├── VersionRegression      a version is older than the one that was loaded or published before (F13)
    ├── VersionConflict        a version was published again with other bytes
    ├── TornReplica            only part of an update was applied; the replica stays paused (F11)
    ├── ParityError            the engine's log-probs differ from the learner's log-probs
    │   └── FirstParityError   they differ for the first weights of an engine
    ├── ManifestVoid           the bytes of the weights are lost, because the process that published them has ended
    ├── FetchFailed            the bytes of a version did not arrive in time, or there was no memory for them
    ├── CollectiveError        a peer of the weights' process group is dead, missing or did not answer in time
    └── UpdateRefused          another peer refused the update before the transfer; the process group stays usable

Each message names the key or value, the limit, and what the user can do.
"""

import copyreg
import math
from collections.abc import Sequence
from enum import StrEnum


class AsyncRLError(Exception):
    """Base class of every error that asyncrl raises on purpose. Errors cross processes with all their attributes.

    `restart_mends` is True if a restart of the run from its checkpoint may succeed: a process or a connection failed,
    and the cause is not in the configuration, the data or the code.
    """

    restart_mends = False

    def __reduce__(self) -> tuple[object, ...]:
        # Python would call the class with the message only, and some classes require keywords.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(AsyncRLError):
    """A value of the configuration cannot be used. The message names its field by the dotted path."""


class DatasetError(AsyncRLError):
    """A dataset cannot be used, or one of its rows: then the message names the number of the row, counted from 1."""


class RunError(AsyncRLError):
    """The whole run cannot start or cannot go on."""


class RunLocked(RunError):
    """Another process holds the run's directory or name. The message names that process, or says that the processes of
    an earlier run of this name are still ending."""


class FileRefused(RunError, OSError):
    """An entry of a run directory or of a mirror is not a regular file or folder (but a link, a pipe, a device), is
    outside of the directory, is too large, or is in too many folders. It was not read or written."""


class ClusterElsewhere(RunError):
    """A run directory names a Ray cluster of which this machine is not a node. No token was sent to that cluster."""


class AnotherRun(RunError):
    """The run on a Ray cluster has the name of a run directory, but another nonce than the run.json of that directory.
    So it is another run."""


class LearnerNotRestored(RunError):
    """A new learner would continue a run, but it does not restore a checkpoint with the weights that the run has
    trained so far. Or the run has ended already."""


class Fenced(RunError):
    """Another learner has taken over the run. The learner that gets this error must end."""


class RunMismatch(RunError):
    """A deployment tries to join a run, but a shared configuration key, its prompts or the version of a package differ
    from the run's."""


class HandshakeError(RunError):
    """The learner and the generators disagree on the tokenizer, the vocabulary or the shape of log-probs."""


class GeneratorPoolExhausted(RunError):
    """A generator deployment has fewer live replicas than `generator.min_replicas`. It has given up the missing ones,
    or could not start them again within `generator.replace_timeout_s`."""

    restart_mends = True


class RunEnded(RunError):
    """`asyncrl down` ended the run of this learner. Or a command watches a run, and another run has taken its
    directory."""


class StallError(RunError):
    """The run made no progress within `run.stall_timeout_s`, or an evaluation failed in all of its attempts or found no
    live replica."""

    restart_mends = True


class ReplicaFailed(RunError):
    """A replica of the generator pool cannot go on. Its deployment starts it again."""

    restart_mends = True


class EngineDied(ReplicaFailed):
    """A process of the replica's engine has ended."""


class EngineStuck(ReplicaFailed):
    """The replica's engine generated no token for `generator.stall_timeout_s` while rollouts ran, and then none for a
    test request within the same time."""


class Quarantined(ReplicaFailed):
    """The coordinator gives the replica no tickets any more: `generator.max_infra_failures` of its rollouts failed in a
    row, or it was replaced."""


class ActorGone(RunError):
    """The process that serves a call has ended."""

    restart_mends = True


class CallTimeout(RunError, TimeoutError):
    """A call to another process took longer than its limit."""

    restart_mends = True


class ActorUnreachable(CallTimeout):
    """An actor cannot be reached at the moment. Its process may live."""


class ClusterUnreachable(CallTimeout):
    """No Ray cluster answers at the address. Its head was lost, or was not started yet, or the address is wrong."""


class RowsLost(ActorGone):
    """Rows are lost, because the process that stored them has ended or cannot be reached. `sample_ids` has the ids of
    these rows."""

    def __init__(self, message: str, *, sample_ids: Sequence[str]) -> None:
        super().__init__(message)
        self.sample_ids = tuple(sample_ids)


class PlacementError(RunError):
    """Ray had no resources for a process within `ray.placement_timeout_s`, or TransferQueue did not start in time."""


class CallRefused(RunError):
    """The ranks cannot use the arguments of a call. The ranks accept the next call, and no rank has changed its state.
    There is one exception: if the loss of a later update of a call raises `LossFailed`, the updates before it were
    applied."""


class MissingColumns(CallRefused):
    """The rows lack columns that the call reads. The call is refused before any forward or backward pass."""


class ImpreciseColumns(CallRefused):
    """A loss sums log-probs over whole sequences, but the log-probs have half precision. The message names the column
    and its dtype."""


class LossFailed(CallRefused):
    """A loss function raised an error, or it did not return a scalar and a dict of numbers. A lack of memory inside a
    loss is a RunError instead, which ends the ranks.

    The optimizer update of that loss was not applied on any rank. Earlier updates of the same call were applied.
    """


class WitnessFailed(CallRefused):
    """The witness (`asyncrl.witness`), which computes updates a second time by a plain path, found that an update is
    not the one that the configuration describes. The text names the check, the token or the tensor, and both numbers.
    If a check on the ranks failed, the optimizer update was not applied on any rank. The learner's own checks (counts,
    learning rate, β, prompts) come after the update.

    Also raised if an evaluation that must be greedy has generated tokens that are not the most probable ones. The text
    then has the number of these tokens."""


class Offloaded(CallRefused):
    """The model or the optimizer is not on the ranks' devices. Call `prepare_for_training` to load it back."""


class NonFiniteError(RunError):
    """`learner.max_nonfinite_steps` consecutive steps had a non-finite loss or gradient."""


class StalenessViolation(RunError):
    """A token of a committed group or of a batch is older than the limit of its ticket, a token of a batch is newer
    than the learner's weights, or a group is late for its deadline. The proof in docs/guarantees.md says that this
    cannot happen in a run, so in a run it is a bug of asyncrl."""


class FailureClass(StrEnum):
    """Says whether a failed rollout is tried again: INFRA is, DATA is not. An unknown failure is DATA, so that a bug
    becomes visible and is not hidden by retries."""

    INFRA = "infra"
    DATA = "data"


class RolloutError(AsyncRLError):
    """One rollout failed. `reason` is a short label from a bounded set, so that it can be the label of a metric.
    `completion` is the text of the completion that could not be scored. It is empty if the failure does not belong to
    one completion. `error` is the type of the error that reward code raised, such as `ValueError`; empty for others."""

    failure_class: FailureClass

    def __init__(self, message: str, *, reason: str, completion: str = "", error: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.completion = completion
        self.error = error


class InfraError(RolloutError):
    """A machine or a process failed. Another attempt may succeed."""

    failure_class = FailureClass.INFRA


class DataError(RolloutError):
    """The prompt, the environment or asyncrl itself caused the failure. Another attempt would fail in the same way."""

    failure_class = FailureClass.DATA


class CheckpointError(AsyncRLError):
    """A checkpoint cannot be written or loaded. The model that was loaded before is unchanged."""


class CheckpointIncomplete(CheckpointError):
    """The directory has no marker of a finished save."""


class CheckpointDamaged(CheckpointError):
    """A file of a complete checkpoint is missing, cannot be read, or differs from what was written."""


class CheckpointOfOtherFormat(CheckpointError):
    """Another version of asyncrl wrote the checkpoint in a format that this version does not read
    (docs/compatibility.md)."""


class CheckpointMismatch(CheckpointError):
    """A tensor's name, shape or dtype differs from the live model, or two directories belong to different saves."""


class WeightError(AsyncRLError):
    """A weight update cannot be applied."""


class ManifestMismatch(WeightError):
    """A parameter's name, shape or dtype differs, or the buckets do not make up the weights. No weight was changed."""


class WeightsDamaged(ManifestMismatch):
    """The bytes of a version have another size or checksum than the manifest says. Nothing was applied. The bytes can
    be fetched again."""


class VersionRegression(WeightError):
    """A version of the weights is older than the one that the replica has loaded, or than the newest published one. It
    has fewer steps, or is of an earlier incarnation of the learner."""


class VersionConflict(WeightError):
    """A version was published again with other bytes."""


class TornReplica(WeightError):
    """Only part of an update was applied. The replica stays paused until a complete update is applied."""

    restart_mends = True


class ParityError(WeightError):
    """The engine's log-probs or its live weights are not those of the learner (`weights.parity_*`)."""


class FirstParityError(ParityError):
    """For the first weights that an engine has loaded since its start, engine and learner compute different log-probs.
    `nats` is the largest difference. It is NaN if the number is not known."""

    def __init__(self, message: str, *, nats: float = math.nan) -> None:
        super().__init__(message)
        self.nats = nats


class ManifestVoid(WeightError):
    """The bytes of the weights are lost: the process that published the manifest has ended, or their file in
    `weights.folder` cannot be read."""

    restart_mends = True


class FetchFailed(WeightError):
    """The bytes of a version did not arrive within `weights.load_timeout_s`, or there was no memory for them."""


class CollectiveError(WeightError):
    """A peer of the weights' process group is dead, missing or did not answer in time. The group is closed, and no
    weight was changed."""

    restart_mends = True


class UpdateRefused(WeightError):
    """Another peer refused the update before any peer applied a byte of it. The process group stays usable."""


REFUSALS = (CallRefused, RowsLost, StalenessViolation, WeightError, CheckpointError)
"""Errors that a rank returns from a call while its process keeps running. Either all ranks raise such an error
together, or the error leaves the process group intact. In both cases the ranks accept the next call."""


INTERRUPTED = 130
"""Exit code (128 + SIGINT) of a process that a second signal ends, or that was asked to end before it had trained a
step and does not end within `run.shutdown_grace_s`."""
PREEMPTED = 76
"""Exit code of a command that SIGTERM ended cleanly before the run's last step: the same command continues the run."""
SAME_SIGNAL_S = 1.0
"""Signals within this time after the first one are no second signal, seconds. `ray job stop`, systemd, Slurm and
`timeout` signal each process of a command, and the command's parent passes the signal on to a child that has received
it already."""


class Terminated(SystemExit):
    """SIGTERM has come before a command had installed the handlers for a clean end of its run, and ends the command.
    The exit code is `PREEMPTED`."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)
