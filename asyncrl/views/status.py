"""Renders the status of a run as text and as JSON: versions, buffer, generators, ledger and headline."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from asyncrl.buffer.ledger import Fate
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.failures import groups_by_reason, in_words
from asyncrl.metrics.scrape import Scrape
from asyncrl.run.roles import Role, RunState
from asyncrl.views.headline import Bottleneck, Headline, bottleneck, failed_share, headline
from asyncrl.views.run_facts import Setting
from asyncrl.views.top import equal_rewards, facts_of_scrapes


def status_lines(status: RunStatus, *, scraped: Scrape | None = None, setting: Setting | None = None) -> list[str]:
    """Returns the status as lines of plain text.

    With a scrape of the run's endpoints, one line is the headline of the run since its start.
    """
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
            + ("" if view.live else ", no heartbeats")
            + (f"; {shares}" if shares else "")
        )
    fates = [f"{account.fates[fate].groups} {fate.value}" for fate in Fate if account.fates[fate].groups]
    lines.append(
        f"ledger: {account.issued.groups} groups issued = {' + '.join(fates) or '0'}"
        + (" (all accounted for)" if account.closed else " (NOT all accounted for: a bug of asyncrl)")
    )
    lines += _failures(status)
    found = since_start(status, scraped, setting=setting) if scraped is not None else None
    if found is not None and found.headline is not None:
        lines.append(f"{'warning' if found.headline.warns else 'since the start'}: {found.headline.sentence}")
    lines += [
        f"deployment {deployment.id}: pid {deployment.pid} on {deployment.host}" for deployment in status.deployments
    ]
    lines += [f"metrics of {name}: http://{target}/metrics" for name, target in sorted(status.targets.items())]
    return lines + (scraped.strangers() if scraped is not None else [])


def status_json(status: RunStatus, *, scraped: Scrape, setting: Setting | None = None) -> bytes:
    """Returns the buffer's status as JSON. The key `since_start` has the numbers from the run's metrics endpoints."""
    since = since_start(status, scraped, setting=setting)
    return msgspec.json.encode(msgspec.to_builtins(status) | {"since_start": since})


@dataclass(frozen=True, slots=True, kw_only=True)
class SinceStart:
    """Shares of time by state since the start of the run, its bottleneck and its headline. None means not known."""

    learner_shares: Mapping[str, float] | None
    generator_shares: Mapping[str, float] | None
    bottleneck: Bottleneck | None
    headline: Headline | None


def since_start(status: RunStatus, scraped: Scrape, *, setting: Setting | None = None) -> SinceStart:
    """Returns the facts since the start of the run.

    The bottleneck is None unless the learner and at least one generator answered the scrape. The fates and failures
    come from the buffer's status, not from the scrape.
    """
    equal = equal_rewards(scraped)
    facts = replace(
        facts_of_scrapes(scraped, scraped, setting=setting or Setting(), equal=[equal] if equal else []),
        groups={fate.value: amount.groups for fate, amount in status.account.fates.items()},
        failures=groups_by_reason(status.failures),
    )
    learner, generators = facts.learner_shares, facts.generator_shares
    return SinceStart(
        learner_shares=learner,
        generator_shares=generators,
        bottleneck=bottleneck(learner, generators, room=facts.room) if learner and generators else None,
        headline=headline(facts),
    )


def _failures(status: RunStatus) -> list[str]:
    """Returns lines with the failed rollouts by reason, and with the first failure of each reason."""
    if not status.failures:
        return []
    share = failed_share({fate.value: amount.groups for fate, amount in status.account.fates.items()})
    lines = [f"failed rollouts: {in_words(status.failures)}; {share:.0%} of the groups that ended"]
    return lines + [f"first {count.first.reason}: {count.first.words}" for count in status.failures]


def _learner(status: RunStatus) -> str:
    """Returns the learner's activity, as the buffer knows it."""
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        return "not attached"
    if status.state is not RunState.RUNNING:
        return status.state.value
    return f"waits: {status.counts.lease_wait.value.replace('_', ' ')}" if status.counts.lease_wait else "trains"
