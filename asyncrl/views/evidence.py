"""Cuts the records of a run into the windows that the rules of the health notes compare.

A rule compares the last steps with the first ones, or looks for the step since which something holds. All windows have
trained steps only.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.learner.records import EvalRecord, StepRecord, largest, mean
from asyncrl.views.setting import Setting

RECENT_STEPS = 20
"""The live view, and rules that look at the recent steps, cover this many last steps. Some numbers cover them in all
views, such as the share of groups with equal rewards."""
TREND_STEPS = 200
"""Rules about a trend look at this many last steps: the live view is made twice a second, also in a long run."""
BLOCK_STEPS = 5
"""A mean over this many steps is one point of a trend, so that after ten steps the last point can be compared with the
first one."""
NEAR_HIGHEST = 0.1
"""A mean reward counts as the highest reward if it is below it by at most this share of the range of the run's
rewards."""
FORGIVEN_STEPS = 2
"""So many steps in a row without the fault are needed to end it, because a single step has few samples."""

Number = Callable[[StepRecord], float | None]


class Level(NamedTuple):
    """The mean of some steps, and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The records of a run and its setting.

    - `steps` are all steps, `evals` all evaluations.
    - `recent` are the trained ones of the last `RECENT_STEPS` steps, `trend` those of the last `TREND_STEPS`.
    - `first` and `last` are the first and the last `BLOCK_STEPS` trained steps of the run. Both are empty while they
      would have a step in common.
    - `groups` maps the fates of groups to their numbers, `failures` the reasons of failed groups.
    """

    setting: Setting
    steps: Sequence[StepRecord]
    evals: Sequence[EvalRecord]
    recent: Sequence[StepRecord]
    trend: Sequence[StepRecord]
    first: Sequence[StepRecord]
    last: Sequence[StepRecord]
    groups: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def all_trained(self) -> int:
        """The number of trained steps."""
        return self.steps[-1].version_after - self.steps[0].step if self.steps else 0

    @property
    def samples(self) -> int:
        """The number of samples that the recent steps trained."""
        return sum(record.trained_samples for record in self.recent)

    def recent_mean(self, number: str) -> float | None:
        """Returns the mean of a number over the recent steps."""
        return mean([record.number(number) for record in self.recent])

    def improves(self, *, least: float) -> bool:
        """Returns whether the mean reward of the last steps is above the one of the first steps by at least the share
        `least` of the range of rewards."""
        start = mean([record.reward_mean for record in self.first])
        now = mean([record.reward_mean for record in self.last])
        low, high = self._range
        return start is not None and now is not None and high > low and now - start >= least * (high - low)

    @property
    def at_highest_reward(self) -> float | None:
        """The highest reward of the run, if the mean reward of the recent steps is within `NEAR_HIGHEST` of it. None
        for a run in which all rewards were equal: then no reward is known to be lower than others."""
        low, high = self._range
        now = mean([record.reward_mean for record in self.recent])
        if now is None or not high > low:
            return None
        return high if high - now <= NEAR_HIGHEST * (high - low) else None

    @property
    def _range(self) -> tuple[float, float]:
        """The lowest and the highest reward of the run; NaN if there is none."""
        highest = largest([record.reward_max for record in self.steps])
        lowest = largest([-record.reward_min for record in self.steps if record.reward_min is not None])
        return math.nan if lowest is None else -lowest, math.nan if highest is None else highest


def evidence_of(
    steps: Sequence[StepRecord],
    evals: Sequence[EvalRecord] = (),
    *,
    setting: Setting,
    groups: Mapping[str, float] | None = None,
    failures: Mapping[str, int] | None = None,
) -> Evidence:
    """Returns the evidence of the records of a run."""
    trend = [record for record in steps[-TREND_STEPS:] if record.trained]
    trained = itertools.islice((record for record in steps if record.trained), BLOCK_STEPS)
    first, last = list(trained), trend[-BLOCK_STEPS:]
    apart = len(first) == len(last) == BLOCK_STEPS and last[0].step > first[-1].step
    return Evidence(
        setting=setting,
        steps=steps,
        evals=evals,
        recent=[record for record in steps[-RECENT_STEPS:] if record.trained],
        trend=trend,
        first=first if apart else (),
        last=last if apart else (),
        groups=groups or {},
        failures=failures or {},
    )


def since(steps: Sequence[StepRecord], holds: Callable[[StepRecord], bool | None]) -> int | None:
    """Returns the step since which `holds` is true, without an interruption of `FORGIVEN_STEPS` steps. `holds` returns
    None for a step that has no such number, which does not count. Returns None if no step holds, or if the last
    `FORGIVEN_STEPS` steps that count do not.

    The steps before the first one of `steps` are not known, so the answer may be that step.
    """
    found, missed = None, 0
    for record in reversed(steps):
        held = holds(record) if record.trained else None
        if held:
            found, missed = record.step, 0
        elif held is False:
            missed += 1
            if missed == FORGIVEN_STEPS:
                break
    return found


def level(steps: Sequence[StepRecord], number: Number) -> Level | None:
    """Returns the mean of a number over steps, and its standard error. None if fewer than three steps have it."""
    values = [value for record in steps if (value := number(record)) is not None and math.isfinite(value)]
    if len(values) < 3:
        return None
    return Level(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def distance(one: Level, other: Level) -> float:
    """Returns how far `other` is above `one`, in standard errors of the difference.

    >>> distance(Level(4.0, 0.3), Level(1.0, 0.4))
    -6.0
    """
    error = math.hypot(one.error, other.error)
    return (other.mean - one.mean) / max(error, 1e-9)


def blocks(steps: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Returns the steps in blocks of `BLOCK_STEPS`. The last block ends with the last step, and first steps that do not
    fill a block are left out."""
    return [steps[start : start + BLOCK_STEPS] for start in range(len(steps) % BLOCK_STEPS, len(steps), BLOCK_STEPS)]
