"""A run's status as text and as JSON: versions, buffer, generators, ledger, who waits for whom."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.membership import Role, RunState
from asyncrl.metrics.scrape import Scrape
from asyncrl.views.bottleneck import Bottleneck, bottleneck
from asyncrl.views.top import GENERATOR_SECONDS, LEARNER_SECONDS


def status_lines(status: RunStatus, *, scraped: Scrape | None = None) -> list[str]:
    """One screen, plain text. With a scrape of the run's endpoints it says what has limited the run since its start."""
    counts, account = status.counts, status.account
    lines = [
        f"run {status.run}: {status.state.value}" + (f" ({status.message})" if status.message else ""),
        f"{status.version.words} of {status.total_steps}, "
        f"weights published: {status.published.words if status.published else 'none'}, "
        f"staleness limit {status.max_staleness_versions} versions",
        f"buffer: {counts.reserved} reserved, {counts.ready} ready, {counts.leased} leased of "
        f"{status.capacity_groups} groups; {counts.booked_bytes / 2**20:.1f} MiB booked; "
        f"learner {_learner(status)}; last progress "
        f"{status.quiet_s:.0f} s ago",
    ]
    for view in status.replicas:
        report = status.reports.get(view.replica)
        seconds = report.state_seconds if report is not None else {}
        total = sum(seconds.values())
        shares = ", ".join(
            f"{state} {value / total:.0%}"
            for state, value in sorted(seconds.items(), key=lambda item: -item[1])
            if total > 0 and value / total >= 0.005
        )
        lines.append(
            f"replica {view.replica}"
            + (f" of deployment {report.deployment}" if report is not None else "")
            + f": weights of {view.version.words if view.version else 'none'}, "
            + (f"{report.running_groups} of {report.slots} slots busy, " if report is not None else "")
            + f"{view.reserved_groups} groups reserved"
            + ("" if view.live else ", silent")
            + (f"; {shares}" if shares else "")
        )
    fates = [f"{account.fates[fate].groups} {fate.value}" for fate in Fate if account.fates[fate].groups]
    lines.append(
        f"ledger: {account.issued.groups} groups issued = {' + '.join(fates) or '0'}"
        + (" (closed)" if account.closed else " (NOT CLOSED: a bug)")
    )
    found = since_start(scraped) if scraped is not None else None
    if found is not None and found.bottleneck is not None:
        lines.append(f"since the start: {found.bottleneck.sentence}")
    lines += [
        f"deployment {deployment.id}: pid {deployment.pid} on {deployment.host}" for deployment in status.deployments
    ]
    lines += [f"metrics of {name}: http://{target}/metrics" for name, target in sorted(status.targets.items())]
    return lines + (scraped.strangers() if scraped is not None else [])


def status_json(status: RunStatus, *, scraped: Scrape) -> bytes:
    """All that the buffer knows, and under `since_start` what the run's endpoints say of its time."""
    return msgspec.json.encode(msgspec.to_builtins(status) | {"since_start": since_start(scraped)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SinceStart:
    """Both sides' time by state, as shares, and what limits the run; None is what is not known."""

    learner_shares: Mapping[str, float] | None
    generator_shares: Mapping[str, float] | None
    bottleneck: Bottleneck | None


def since_start(scraped: Scrape) -> SinceStart:
    """Of a wait without the other side's there is nothing to say: both sides must answer for a bottleneck."""
    learner, generators = (scraped.shares(name, by="state") for name in (LEARNER_SECONDS, GENERATOR_SECONDS))
    return SinceStart(
        learner_shares=learner,
        generator_shares=generators,
        bottleneck=bottleneck(learner, generators) if learner and generators else None,
    )


def _learner(status: RunStatus) -> str:
    """What the learner does, as far as the buffer sees it."""
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        return "not there"
    if status.state is not RunState.RUNNING:
        return status.state.value
    return f"waits: {status.counts.lease_wait.value.replace('_', ' ')}" if status.counts.lease_wait else "trains"
