"""A run's status as text: versions, buffer, generators, ledger, who waits for whom."""

from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.membership import Role, RunState
from asyncrl.metrics.scrape import Scrape
from asyncrl.views.bottleneck import bottleneck
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
            f"{view.busy_slots} groups under way, {view.free_slots} slots free"
            + ("" if view.live else ", silent")
            + (f"; {shares}" if shares else "")
        )
    fates = [f"{account.fates[fate].groups} {fate.value}" for fate in Fate if account.fates[fate].groups]
    lines.append(
        f"ledger: {account.issued.groups} groups issued = {' + '.join(fates) or '0'}"
        + (" (closed)" if account.closed else " (NOT CLOSED: a bug)")
    )
    lines += _limited(scraped)
    lines += [
        f"deployment {deployment.id}: pid {deployment.pid} on {deployment.host}" for deployment in status.deployments
    ]
    lines += [f"metrics of {name}: http://{target}/metrics" for name, target in sorted(status.targets.items())]
    return lines


def _limited(scraped: Scrape | None) -> list[str]:
    """Nothing when one side does not answer: of a wait without the other side's there is nothing to say."""
    if scraped is None:
        return []
    learner, generators = (scraped.shares(name, by="state") for name in (LEARNER_SECONDS, GENERATOR_SECONDS))
    return [f"since the start: {bottleneck(learner, generators).sentence}"] if learner and generators else []


def _learner(status: RunStatus) -> str:
    """What the learner does, as far as the buffer sees it."""
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        return "not there"
    if status.state is not RunState.RUNNING:
        return status.state.value
    return f"waits: {status.counts.lease_wait.value.replace('_', ' ')}" if status.counts.lease_wait else "trains"
