"""Makes the live view of a run from its records and, for a watcher outside the run, from its buffer's status."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from asyncrl.config.schema import Config
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.records import EvalRecord, StepRecord, mean, running_s
from asyncrl.views.headline import headline
from asyncrl.views.live import LiveView
from asyncrl.views.quantities import duration
from asyncrl.views.run_facts import RECENT_STEPS, Setting, facts_of_steps, with_status
from asyncrl.views.status import activity

REWARDS = 500
"""The live view has at most this many rewards: it is made twice a second, also in a run with many steps."""


def live_view(
    config: Config,
    *,
    phase: str,
    elapsed_s: float,
    steps: Sequence[StepRecord],
    evals: Sequence[EvalRecord],
    setting: Setting,
    failures: Mapping[str, int] | None = None,
    status: RunStatus | None = None,
) -> LiveView:
    """Returns the present view of the run. `failures` is the number of failed groups by reason.

    With the buffer's `status`, the failures, the groups in the buffer and the versions come from it.

    Speeds and shares of time are means over the last `RECENT_STEPS` steps, without the time in which the run was
    started again. Skipped steps count, because they take time too.
    """
    facts = facts_of_steps(steps, setting=setting, failures=failures or {}, recent=True)
    if status is not None:
        facts = with_status(facts, status, recent=bool(steps))
    view = LiveView(config=config, phase=phase, elapsed_s=elapsed_s, headline=headline(facts))
    if not steps:
        return view
    recent, last = steps[-RECENT_STEPS:], steps[-1]
    span_s = running_s(recent)
    done = last.version_after - recent[0].version_after
    trained = next((record for record in reversed(steps) if record.trained), None)
    shown = steps[:: -(len(steps) // REWARDS + 1)][::-1]
    view = replace(
        view,
        step=last.version_after,
        eta_s=(config.learner.total_steps - last.version_after) * span_s / done if done else None,
        rewards=[record.reward_mean for record in shown if record.reward_mean is not None],
        heldout=_heldout(evals),
        oldest_token_versions=max(trained.token_staleness, default=0) if trained is not None else None,
        ess_ratio=last.ess_ratio,
        samples_per_s=sum(record.trained_samples for record in recent[1:]) / span_s if done else None,
        zero_variance_ratio=mean([record.zero_variance_ratio for record in recent]),
        completion_tokens_mean=mean([record.completion_tokens_mean for record in recent]),
        truncated_ratio=mean([record.truncated_ratio for record in recent]),
        tokens_per_s=sum(record.trained_tokens for record in recent[1:]) / span_s if done else None,
        buffer_groups=last.buffer_groups,
        learner_shares=facts.learner_shares,
        generator_shares=facts.generator_shares,
    )
    if status is None:
        return view
    return replace(  # the buffer knows these better than the last record
        view,
        buffer_groups=status.groups_by_state,
        published_version=None if status.published is None else status.published.step,
        replica_versions={each.replica: each.version.step for each in status.replicas if each.version is not None},
        activity=f"learner {activity(status)}, last progress {duration(status.quiet_s)} ago",
    )


def _heldout(evals: Sequence[EvalRecord]) -> dict[str, list[float]]:
    """Returns the rewards of the evaluations of each held-out set, in order."""
    found: dict[str, list[float]] = {}
    for record in evals:
        if record.reward_mean is not None:
            found.setdefault(record.name, []).append(record.reward_mean)
    return found
