"""Gathers the facts of a run that its views show, from its records and, while it lives, from its buffer's status.

`run_view` gathers them in one place. The live view, `asyncrl status`, the report and the headline show parts of its
result. Totals of the whole run, which the last lines of a run and `asyncrl compare` show, are in the run's summary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from asyncrl.common.device_time import PoolCost
from asyncrl.common.roles import Role, RunState
from asyncrl.coordinator.registry import mean_states
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.records import (
    EvalRecord,
    Note,
    StepRecord,
    ess_of_steps,
    groups_by_reason,
    mean,
    running_s,
    shares_of,
    state_shares,
)
from asyncrl.learner.training_time import TrainingTime
from asyncrl.metrics.numbers import AGENT_NUMBERS
from asyncrl.views.evidence import RECENT_STEPS, evidence_of
from asyncrl.views.health import notes_of
from asyncrl.views.setting import Setting

REWARDS = 500
"""A view has at most this many rewards, because the live view is made twice a second, also in a run with many steps."""


class HeldoutReward(NamedTuple):
    """The mean reward of a held-out evaluation, and the version of the weights that were evaluated."""

    version: int
    reward: float


class Episodes(NamedTuple):
    """Means over the episodes of agents in a step."""

    turns: float
    tool_calls: float
    failed_tool_calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The facts of a run at one moment. None and empty values mean that a fact is not known.

    A view covers the last `RECENT_STEPS` steps (the live view) or all steps (`asyncrl status`, the report): the
    `groups` and the shares of time are of the steps that it covers. The other facts are the same in both:

    - Of the last `RECENT_STEPS` steps: the speeds, without the time in which the run was started again, and the time
      that is left (`eta_s`). Skipped steps count, because they take time too. `completion_tokens_mean`,
      `truncated_ratio` (answers that were cut at their length limit) and `zero_variance_ratio` (groups whose rewards
      are all equal) are also of these steps.
    - Of the last step: `ess_ratio`, `episodes`, and `step`, the number of trained steps up to and with it.
      `oldest_token_versions` is the largest staleness of a token in the last trained step.
    - Of all steps: their numbers, their mean and lowest effective sample size, `rewards` (the mean rewards, oldest
      first; of many steps, some of them) and `evals` (all held-out evaluations).
    - `training` is the wall time of the run since its first start, with the share of it that trained the run, and
      `costs` are the device-seconds of its pools.
    - `notes` are the health notes, the most urgent first (`asyncrl.views.health`).

    `groups` maps fates to numbers of groups, `buffer_groups` the states of the buffer's slots. `failures` is the number
    of failed groups by reason. `replica_versions` maps each replica to the step of its weights. `learner_activity` is
    what the learner does at this moment, and `quiet_s` the time since the run's last progress. `learner_shares` and
    `generator_shares` map states to shares of time, which add up to 1. `room` is as in `Setting`.
    """

    step: int = 0
    eta_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    steps_trained: int | None = None
    steps_skipped: int | None = None

    rewards: Sequence[float] = ()
    evals: Sequence[EvalRecord] = ()
    zero_variance_ratio: float | None = None
    episodes: Episodes | None = None

    completion_tokens_mean: float | None = None
    truncated_ratio: float | None = None

    oldest_token_versions: int | None = None
    ess_ratio: float | None = None
    ess_ratio_mean: float | None = None
    ess_ratio_lowest: float | None = None
    notes: Sequence[Note] = ()

    groups: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    buffer_groups: Mapping[str, int] | None = None

    published_version: int | None = None
    replica_versions: Mapping[str, int] = field(default_factory=dict)
    learner_activity: str | None = None
    quiet_s: float | None = None
    learner_shares: Mapping[str, float] | None = None
    generator_shares: Mapping[str, float] | None = None
    room: bool | None = None
    training: TrainingTime | None = None
    costs: Sequence[PoolCost] = ()

    @property
    def heldout(self) -> dict[str, list[HeldoutReward]]:
        """The evaluations of each held-out set, in the order of `evals`. Evaluations without a reward are left out, and
        so are sets that have no others."""
        found: dict[str, list[HeldoutReward]] = {record.name: [] for record in self.evals}
        for record in self.evals:
            if record.reward_mean is not None:
                found[record.name].append(HeldoutReward(record.version, record.reward_mean))
        return {name: rewards for name, rewards in found.items() if rewards}


def run_view(
    steps: Sequence[StepRecord],
    *,
    recent: bool,
    evals: Sequence[EvalRecord] = (),
    setting: Setting | None = None,
    failures: Mapping[str, int] | None = None,
    status: RunStatus | None = None,
    training: TrainingTime | None = None,
    costs: Sequence[PoolCost] = (),
) -> RunView:
    """Returns the view of the run with these records. It covers the last `RECENT_STEPS` steps if `recent`, else all.

    `failures` is the number of failed groups by reason, `training` the wall time of the run, and `costs` the
    device-seconds of its pools. With the buffer's `status`, the failures, the groups by fate and in the buffer, the
    versions and the time without progress come from it. Unless `recent`, the shares of time come from it too, because
    the buffer knows them also before the first step and after the last one.
    """
    known = setting or Setting()
    view = RunView(evals=evals, failures=failures or {}, room=known.room, training=training, costs=costs)
    if steps:
        view = _with_last_steps(view, steps, known.total_steps)
        view = _with_all_steps(view, steps)
        view = _with_covered_steps(view, steps, covered=steps[-RECENT_STEPS:] if recent else steps)
    if status is not None:
        view = _with_status(view, status)
        if not (recent and steps):
            view = replace(view, groups={fate.value: amount.groups for fate, amount in status.account.fates.items()})
        if not recent:
            view = _with_shares_since_start(view, status)
    seen = evidence_of(steps, evals, setting=known, groups=view.groups, failures=view.failures)
    return replace(view, notes=notes_of(seen))


def _with_last_steps(view: RunView, steps: Sequence[StepRecord], total_steps: int | None) -> RunView:
    """Adds the facts of the last steps, which every view shows as the run's present state."""
    recent, last = steps[-RECENT_STEPS:], steps[-1]
    span_s, done = running_s(recent), last.version_after - recent[0].version_after
    left = None if total_steps is None else total_steps - last.version_after
    return replace(
        view,
        step=last.version_after,
        eta_s=left * span_s / done if left is not None and done else None,
        samples_per_s=sum(record.trained_samples for record in recent[1:]) / span_s if done else None,
        tokens_per_s=sum(record.trained_tokens for record in recent[1:]) / span_s if done else None,
        zero_variance_ratio=mean([record.zero_variance_ratio for record in recent]),
        completion_tokens_mean=mean([record.completion_tokens_mean for record in recent]),
        truncated_ratio=mean([record.truncated_ratio for record in recent]),
        ess_ratio=last.ess_ratio,
        episodes=_episodes(last),
        buffer_groups=last.buffer_groups,
    )


def _episodes(step: StepRecord) -> Episodes | None:
    """Returns the means over the episodes of agents in a step; None if it has none."""
    turns, calls, failed = (step.diagnostics.get(name) for name in AGENT_NUMBERS)
    return None if turns is None else Episodes(turns, calls or 0.0, failed or 0.0)


def _with_all_steps(view: RunView, steps: Sequence[StepRecord]) -> RunView:
    """Adds the facts of all steps."""
    all_trained = steps[-1].version_after - steps[0].step
    last_trained = next((record for record in reversed(steps) if record.trained), None)
    shown = steps[:: -(len(steps) // REWARDS + 1)][::-1]
    ess_mean, ess_lowest = ess_of_steps(steps)
    return replace(
        view,
        steps_trained=all_trained,
        steps_skipped=len(steps) - all_trained,
        rewards=[record.reward_mean for record in shown if record.reward_mean is not None],
        oldest_token_versions=None if last_trained is None else max(last_trained.token_staleness, default=0),
        ess_ratio_mean=ess_mean,
        ess_ratio_lowest=ess_lowest,
    )


def _with_covered_steps(view: RunView, steps: Sequence[StepRecord], *, covered: Sequence[StepRecord]) -> RunView:
    """Adds the facts of the steps that the view covers."""
    before = steps[-len(covered) - 1].ledger_groups if len(covered) < len(steps) else {}
    return replace(
        view,
        groups={fate: number - before.get(fate, 0) for fate, number in covered[-1].ledger_groups.items()},
        learner_shares=state_shares(covered, "learner_state_s") or None,
        generator_shares=state_shares(covered, "generator_state_s") or None,
    )


def _with_status(view: RunView, status: RunStatus) -> RunView:
    """Adds the facts that only the buffer knows, or that are newer in its status than in the last record."""
    return replace(
        view,
        failures=groups_by_reason(status.failures),
        buffer_groups=status.groups_by_state,
        published_version=None if status.published is None else status.published.step,
        replica_versions={each.replica: each.version.step for each in status.replicas if each.version is not None},
        learner_activity=_activity(status),
        quiet_s=status.quiet_s,
    )


def _with_shares_since_start(view: RunView, status: RunStatus) -> RunView:
    """Adds the shares of time since the start of each process, from its heartbeats."""
    return replace(
        view,
        learner_shares=shares_of(status.learner_state_seconds) or None,
        generator_shares=shares_of(mean_states(status.reports.values())) or None,
    )


def _activity(status: RunStatus) -> str:
    """Returns the learner's activity, as the buffer knows it."""
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        return "not attached"
    if status.state is not RunState.RUNNING:
        return status.state.value
    return f"waits: {status.counts.lease_wait.value.replace('_', ' ')}" if status.counts.lease_wait else "trains"
