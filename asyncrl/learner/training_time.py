"""Splits a run's wall time: the share in which steps were trained, called the effective training time ratio (ETTR), and
the parts of the rest.

The ratio is that of Kokolis et al. 2024, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(arXiv:2410.21680): the productive runtime of a run divided by its wall time over all of its jobs. They leave out of the
productive runtime the training that a failure lost and that was repeated, and the time of each start until the run
trains.

    ETTR = Σ t_i / (T − T_0),  over the steps i that count

- T_0 is the first start of the run, and T is its end, or now if it goes on (`RunInfo.wall_s`). A run on another host
  may have died unseen, so a reader of its directory takes its last record as T.
- A step counts if it was trained, and if the run did not go back to a checkpoint before it. A step that was trained
  twice counts once: the record of its first training is in the file `LOST_STEPS`.
- t_i is the time from the end of the record before until the end of step i. It includes the wait for groups, the
  publication of weights and the saves: their shares are in the learner's seconds by state. For the first step of a
  process of the learner, t_i begins with its lease. The time before it is the start: imports, the model, the first
  weights and evaluation, and the wait for the first groups.

A step that has not ended at T does not count yet. All time between two processes of a run counts as lost, also if a
person stopped the run in the evening and resumed it in the morning: the records do not say why a run was not running.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.learner.records import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTime:
    """The wall time of a run, seconds, and its parts.

    `wall_s` is the time since the first start. `trained_s` is the time of the steps that count. `starting_s` is the
    time of the starts of those processes whose steps count. `again_s` is the time of the steps that were lost and
    trained again.
    """

    wall_s: float
    trained_s: float = 0.0
    starting_s: float = 0.0
    again_s: float = 0.0

    @property
    def ratio(self) -> float:
        """The effective training time ratio, from 0 to 1.

        >>> TrainingTime(wall_s=600.0, trained_s=450.0, starting_s=90.0).ratio
        0.75
        """
        # the clock may be set back after the last step
        return min(1.0, self.trained_s / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def other_s(self) -> float:
        """The rest of the time: no process of the learner lived; or a process lived that ended before it had trained a
        step that counts; or the learner skipped steps, or closed the run."""
        return max(0.0, self.wall_s - self.trained_s - self.starting_s - self.again_s)


def training_time(steps: Sequence[StepRecord], *, lost: Sequence[StepRecord] = (), wall_s: float) -> TrainingTime:
    """Returns the parts of the `wall_s` seconds of a run with the records `steps`. `lost` are the records of the steps
    that were trained again (`LOST_STEPS`)."""
    spans = list(_spans(steps))

    def part(spans_s: Iterable[float]) -> float:
        # no part may be larger than the whole, also if the clock was set back or another program wrote the records
        return min(wall_s, max(0.0, sum(spans_s)))

    return TrainingTime(
        wall_s=wall_s,
        trained_s=part(span.step_s for span in spans if span.trained),
        starting_s=part(span.starting_s for span in spans),
        again_s=part(span.step_s for span in _spans(lost) if span.trained),
    )


class _Span(NamedTuple):
    """The time of a step, seconds, and of the start before it: 0 unless it is the first step of a process."""

    step_s: float
    starting_s: float
    trained: bool


def _spans(records: Sequence[StepRecord]) -> Iterator[_Span]:
    """Yields the times of the records.

    A process of the learner continues `wall_s` from the record of its checkpoint, and adds its start to the seconds of
    the state `starting`, which do not grow afterwards. In `LOST_STEPS` the records of several losses follow each other,
    so a record may not come right after that of the step before. Of its step, only the time since the lease is then
    known (`duration_s`).
    """
    before: StepRecord | None = None
    for record in records:
        since_s = record.wall_s - (0.0 if before is None else before.wall_s)
        if before is not None and before.version_after == record.step and _started_s(before) == _started_s(record):
            yield _Span(since_s, 0.0, record.trained)
        else:
            yield _Span(record.duration_s, since_s - record.duration_s, record.trained)
        before = record


def _started_s(record: StepRecord) -> float:
    return record.learner_state_s.get("starting", 0.0)
