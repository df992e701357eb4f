"""Renders the status of a run as text and as JSON: versions, buffer, generators, ledger and headline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.common.roles import Role, RunState
from asyncrl.config.schema import HELDOUT
from asyncrl.coordinator.registry import ReplicaReport, ReplicaView, mean_states
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.records import EvalRecord, StepRecord, ess_of_steps, heldout_ends, in_words, shares_of
from asyncrl.metrics.numbers import AGENT_NUMBERS
from asyncrl.views.headline import Bottleneck, Headline, bottleneck, failed_share, headline
from asyncrl.views.run_facts import Setting, facts_of_steps, with_status


def status_lines(
    status: RunStatus,
    *,
    now: datetime,
    steps: Sequence[StepRecord] = (),
    evals: Sequence[EvalRecord] = (),
    setting: Setting | None = None,
) -> list[str]:
    """Returns the status as lines of plain text.

    `now` is the time of the status. `steps` and `evals` are the run's records; with them, one line is the headline of
    the run since its start, and one has the rewards of each held-out set.
    """
    counts, account = status.counts, status.account
    lines = [
        f"run {status.run}: {status.state.value}"
        + (f" ({status.message})" if status.message else "")
        + f", as of {now.astimezone(UTC):%H:%M:%S} UTC",
        f"{status.version.words} of {status.total_steps}, "
        f"weights published: {status.published.words if status.published else 'none'}, "
        f"staleness limit {status.max_staleness_versions} versions",
        f"buffer: {counts.reserved} reserved, {counts.ready} ready, {counts.leased} leased of "
        f"{status.capacity_groups} groups; {counts.booked_bytes / 2**20:.1f} MiB booked; "
        f"learner {activity(status)}; last progress "
        f"{status.quiet_s:.0f} s ago",
    ]
    lines += [_replica(view, status.reports.get(view.replica)) for view in status.replicas]
    lines += [f"replica {name} is not started again: {why}" for name, why in status.given_up.items()]
    fates = [f"{account.fates[fate].groups} {fate.value}" for fate in Fate if account.fates[fate].groups]
    lines.append(
        f"ledger: {account.issued.groups} groups issued = {' + '.join(fates) or '0'}"
        + (" (all accounted for)" if account.closed else " (NOT all accounted for: a bug of asyncrl)")
    )
    lines += _failures(status)
    lines += _continued(status)
    lines += _agents(steps)
    since = since_start(status, steps, setting=setting)
    if (found := since.headline) is not None:
        lines.append(f"{'warning' if found.warns else 'since the start'}: {found.sentence}")
    if since.ess_ratio_mean is not None:
        lines.append(
            f"effective sample size of the steps: mean {since.ess_ratio_mean:.3f}, lowest {since.ess_ratio_lowest:.3f}"
        )
    lines += _heldout(evals)
    lines += [
        f"deployment {deployment.id}: pid {deployment.pid} on {deployment.host}" for deployment in status.deployments
    ]
    return lines + [f"metrics of {name}: http://{target}/metrics" for name, target in sorted(status.targets.items())]


def _replica(view: ReplicaView, report: ReplicaReport | None) -> str:
    return (
        f"replica {view.replica}"
        + (f" of deployment {report.deployment}" if report is not None else "")
        + f": weights of {view.version.words if view.version else 'none'}, "
        + (f"{report.running_groups} of {report.slots} slots busy, " if report is not None and not view.trouble else "")
        + f"{view.reserved_groups} groups reserved"
        + (f", {view.trouble}" if view.trouble else "")
        + (
            f", started again {view.restarts} time{'s' if view.restarts > 1 else ''} (the last cause: {view.cause})"
            if view.restarts
            else ""
        )
        + (f"; {_spent(report)}" if report is not None and report.state_seconds else "")
    )


def status_json(
    status: RunStatus,
    *,
    now: datetime,
    steps: Sequence[StepRecord] = (),
    evals: Sequence[EvalRecord] = (),
    setting: Setting | None = None,
) -> bytes:
    """Returns the buffer's status as JSON.

    The key `since_start` has what limits the run, from its records too. The key `as_of` has the time of the status,
    ISO 8601. The key `heldout` has the rewards of the first and the last evaluation of each held-out set.
    """
    known = {"as_of": now, "since_start": since_start(status, steps, setting=setting), "heldout": heldout_ends(evals)}
    return msgspec.json.encode(msgspec.to_builtins(status) | known)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinceStart:
    """Shares of time by state since the start of the run, its bottleneck, its headline, and the mean and the lowest
    effective sample size of its steps. None means not known.

    The time in which the processes started (state `starting`) does not count, as in the headline.
    """

    learner_shares: Mapping[str, float] | None
    generator_shares: Mapping[str, float] | None
    bottleneck: Bottleneck | None
    headline: Headline | None
    ess_ratio_mean: float | None
    ess_ratio_lowest: float | None


def since_start(status: RunStatus, steps: Sequence[StepRecord], *, setting: Setting | None = None) -> SinceStart:
    """Returns the facts since the start of the run. The bottleneck needs heartbeats of both sides."""
    facts = with_status(
        facts_of_steps(steps, setting=setting or Setting(), failures={}, recent=False), status, recent=False
    )
    learner = shares_of(status.learner_state_seconds) or None
    generators = shares_of(mean_states(status.reports.values())) or None
    ess_mean, ess_lowest = ess_of_steps(steps)
    return SinceStart(
        learner_shares=learner,
        generator_shares=generators,
        bottleneck=bottleneck(learner, generators, room=facts.room) if learner and generators else None,
        headline=headline(replace(facts, learner_shares=learner, generator_shares=generators)),
        ess_ratio_mean=ess_mean,
        ess_ratio_lowest=ess_lowest,
    )


def _spent(report: ReplicaReport) -> str:
    """Returns the replica's shares of time since its start as text, or `starting`."""
    shares = shares_of(report.state_seconds)
    if not shares:
        return "starting"
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return "since the start: " + ", ".join(f"{state} {share:.0%}" for state, share in ordered if share >= 0.005)


def _heldout(evals: Sequence[EvalRecord]) -> Iterator[str]:
    """Yields a line with the first and the last reward of each held-out set."""
    for name in dict.fromkeys(record.name for record in evals):
        of_set = [record for record in evals if record.name == name and record.reward_mean is not None]
        ends = [f"{each.reward_mean:.3f} (step {each.version})" for each in [*of_set[:1], *of_set[1:][-1:]]]
        if ends:
            yield f"held-out reward{'' if name == HELDOUT else f' of {name}'}: {' → '.join(ends)}"


def _failures(status: RunStatus) -> Iterator[str]:
    """Yields lines with the failures by reason, and with the first failure of each reason."""
    if status.failures:
        share = failed_share({fate.value: amount.groups for fate, amount in status.account.fates.items()})
        yield f"failures: {in_words(status.failures)}; {share:.0%} of the groups that ended failed"
    for count in status.failures:
        yield f"first {count.first.subject}: {count.first.words}"


def _agents(steps: Sequence[StepRecord]) -> Iterator[str]:
    """Yields a line about the agents' episodes of the last step, if it has any."""
    last = steps[-1].diagnostics if steps else {}
    turns, calls, failed = (last.get(name) for name in AGENT_NUMBERS)
    if turns is not None:
        yield (
            f"an episode of an agent in the last step: {turns:.2f} turns, {calls or 0:.2f} calls of tools, of which "
            f"{failed or 0:.2f} failed (means)"
        )


def _continued(status: RunStatus) -> Iterator[str]:
    """Yields lines with the tokens of ended attempts: stored ones that were continued or dropped, and others."""
    events = status.account.events
    continued, dropped = events.get(Event.TOKENS_CONTINUED, 0), events.get(Event.TOKENS_DROPPED, 0)
    if continued + dropped:
        groups = events.get(Event.PREFIX_CONTINUED, 0)
        yield f"stored tokens of replicas that ended: {continued} continued in {groups} groups, {dropped} dropped"
    if thrown_away := events.get(Event.TOKENS_THROWN_AWAY, 0):
        yield f"tokens of attempts that began again or failed: {thrown_away} thrown away"


def activity(status: RunStatus) -> str:
    """Returns the learner's activity, as the buffer knows it."""
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        return "not attached"
    if status.state is not RunState.RUNNING:
        return status.state.value
    return f"waits: {status.counts.lease_wait.value.replace('_', ' ')}" if status.counts.lease_wait else "trains"
