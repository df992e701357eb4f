"""When a learner that waits must give up: the run stands still, or its prompts cannot be answered. Pure."""

from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.records import LeaseWait
from asyncrl.config.schema import Config
from asyncrl.errors import RunError, StallError


def check_progress(status: RunStatus, *, waits: LeaseWait, config: Config) -> None:
    """Raises RunError after too many DATA failures in a row, StallError (F5) when nothing moves on either side."""
    failures = status.counts.data_failures_in_a_row
    if failures >= config.generator.max_data_failures:
        raise RunError(
            f"{failures} rollouts in a row failed for a reason that another attempt does not mend "
            f"({_most_common(status.account.failures)}); generator.max_data_failures is the limit"
        )
    limit_s = config.run.stall_timeout_s
    if status.quiet_s > limit_s:
        raise StallError(
            f"nothing was committed or trained for {status.quiet_s:.0f} s (run.stall_timeout_s = {limit_s:g}): "
            f"the learner waits ({waits.value}); {replicas_in_words(status)}"
        )


def replicas_in_words(status: RunStatus) -> str:
    """Where each replica stands, for an error that has to name both sides."""
    if not status.replicas:
        return "no generator has joined: start one with `asyncrl generator`"
    words = [
        f"{view.replica} at {view.version.words if view.version else 'no weights'}, "
        f"{view.reserved_groups} groups reserved"
        + (f", refused for {view.refused_for.value}" if view.refused_for else "")
        + ("" if view.live else ", silent")
        for view in status.replicas
    ]
    return "generators: " + "; ".join(words)


def _most_common(failures: dict[str, int]) -> str:
    return max(failures, key=lambda label: failures[label]) if failures else "unknown"
