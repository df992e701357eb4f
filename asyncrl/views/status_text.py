"""Renders the status of a run as text and as JSON: versions, buffer, generators, ledger and headline."""

from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.config.schema import HELDOUT
from asyncrl.coordinator.registry import ReplicaReport, ReplicaView
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.records import heldout_ends, in_words, shares_of
from asyncrl.views.headline import bottleneck_of, headline
from asyncrl.views.health_finds import failed_share
from asyncrl.views.quantities import cost, duration, held_out, held_out_numbers
from asyncrl.views.run_view import RunView


def status_lines(status: RunStatus, run: RunView, *, now: datetime) -> list[str]:
    """Returns the status as lines of plain text. `run` is the view of the run since its start. `now` is the time of the
    status."""
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
        f"learner {run.learner_activity}; last progress "
        f"{status.quiet_s:.0f} s ago",
    ]
    lines += [_replica(view, status.reports.get(view.replica)) for view in status.replicas]
    lines += [f"replica {name} is not started again: {why}" for name, why in status.given_up.items()]
    if status.scaled_because:
        wanted = sum(status.wanted_replicas.values())
        lines.append(
            f"the deployments should have {wanted} replicas together; the last change: {status.scaled_because}"
        )
    fates = [f"{account.fates[fate].groups} {fate.value}" for fate in Fate if account.fates[fate].groups]
    lines.append(
        f"ledger: {account.issued.groups} groups issued = {' + '.join(fates) or '0'}"
        + (" (all accounted for)" if account.closed else " (NOT all accounted for: a bug of asyncrl)")
    )
    lines += _failures(status)
    lines += _continued(status)
    lines += _agents(run)
    if (found := headline(run)) is not None:
        lines.append(f"{'warning' if found.warns else 'since the start'}: {found.sentence}")
    lines += [f"warning: {note.sentence}" for note in run.notes[1:]]
    if run.ess_ratio_mean is not None:
        lines.append(
            f"effective sample size of the steps: mean {run.ess_ratio_mean:.3f}, lowest {run.ess_ratio_lowest:.3f}"
        )
    lines += _training_time(run)
    lines += [f"device time of the {spent.pool}: {cost(spent)}" for spent in run.costs]
    lines += _heldout(run)
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
        + (f"; log {report.log_place}" if report is not None and report.log else "")
        + (f"; {_spent(report)}" if report is not None and report.state_seconds else "")
    )


def status_json(status: RunStatus, run: RunView, *, now: datetime) -> bytes:
    """Returns the buffer's status as JSON. `run` is the view of the run since its start.

    The key `as_of` has the time of the status, ISO 8601. The key `since_start` has the shares of time by state since
    the start, without the time in which the processes started; the bottleneck, the headline, the health notes, the
    mean and the lowest effective sample size of the steps, the `training_time` with its parts in seconds and the
    effective training time ratio, and the `costs` of each pool in device-seconds. Null means not known. The key
    `heldout` has the rewards of the first and the last evaluation of each held-out set, with their steps, and the other
    numbers of the last one.
    """
    since_start = {
        "learner_shares": run.learner_shares,
        "generator_shares": run.generator_shares,
        "bottleneck": bottleneck_of(run),
        "headline": headline(run),
        "notes": run.notes,
        "ess_ratio_mean": run.ess_ratio_mean,
        "ess_ratio_lowest": run.ess_ratio_lowest,
        "training_time": run.training,
        "effective_training_time_ratio": None if run.training is None else run.training.ratio,
        "costs": run.costs,
    }
    known = {"as_of": now, "since_start": since_start, "heldout": heldout_ends(run.evals)}
    return msgspec.json.encode(msgspec.to_builtins(status) | known)


def _spent(report: ReplicaReport) -> str:
    """Returns the replica's shares of time since its start as text, or `starting`."""
    shares = shares_of(report.state_seconds)
    if not shares:
        return "starting"
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return "since the start: " + ", ".join(f"{state} {share:.0%}" for state, share in ordered if share >= 0.005)


def _training_time(run: RunView) -> Iterator[str]:
    """Yields a line with the effective training time ratio, and where the rest of the wall time went, if the run has
    trained a step."""
    if run.steps_trained and (spent := run.training) is not None:
        yield (
            f"effective training time: {spent.ratio:.0%} of {duration(spent.wall_s)} since the first start; "
            f"{duration(spent.starting_s)} starts, {duration(spent.again_s)} steps that were trained again, "
            f"{duration(spent.other_s)} other"
        )


def _heldout(run: RunView) -> Iterator[str]:
    """Yields a line with the first and the last reward of each held-out set, and one with the other numbers of its
    newest evaluation."""
    for name, ends in heldout_ends([record for record in run.evals if record.reward_mean is not None]).items():
        of_set = "" if name == HELDOUT else f" of {name}"
        yield f"held-out reward{of_set}: {held_out(ends)}"
        if numbers := held_out_numbers(ends):
            yield f"{numbers}{of_set and f' ({name})'}"


def _failures(status: RunStatus) -> Iterator[str]:
    """Yields a line with the numbers of failures by reason, and one with the first failure of each `FailureCount` (of
    one class, one reason, and one tool or type of error)."""
    if status.failures:
        share = failed_share({fate.value: amount.groups for fate, amount in status.account.fates.items()})
        yield f"failures: {in_words(status.failures)}; {share:.0%} of the groups that ended failed"
    for count in status.failures:
        yield f"first {count.first.subject}: {count.first.words}"


def _agents(run: RunView) -> Iterator[str]:
    """Yields a line about the agents' episodes of the last step, if it has any."""
    if (means := run.episodes) is not None:
        yield (
            f"an episode of an agent in the last step: {means.turns:.2f} turns, {means.tool_calls:.2f} calls of tools, "
            f"of which {means.failed_tool_calls:.2f} failed (means)"
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
