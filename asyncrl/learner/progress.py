"""Decides when a learner that waits for groups must end the run: no group was committed and no step trained for too
long, or too many rollouts failed. Pure functions."""

from collections.abc import Sequence

from asyncrl.buffer.records import FailureCount, LeaseWait
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import BriefStatus, RunStatus
from asyncrl.errors import RunError, StallError
from asyncrl.learner.records import in_words


def must_look(status: BriefStatus, *, waits: LeaseWait, config: Config) -> bool:
    """Returns whether a waiting learner has to call `check_progress`, for which it must first get the run's full
    status."""
    return waits is LeaseWait.TOO_MANY_FAILURES or status.quiet_s > config.run.stall_timeout_s


def check_progress(status: RunStatus, *, waits: LeaseWait, config: Config, delivery: str = "") -> None:
    """Raises an error when the learner must not wait any longer for a lease. `delivery` says what is wrong with the
    delivery of the newest weights, if anything.

    Raises RunError when the buffer gives no more leases, because too many groups failed (`Refusal.TOO_MANY_FAILURES`).
    Raises StallError (F5 in docs/faults.md) when no group was committed and no step was trained for longer than
    `run.stall_timeout_s`.
    """
    streak = status.failure_streak
    if waits is LeaseWait.TOO_MANY_FAILURES and streak is not None:
        first, last = streak.first, streak.last
        what = "your reward" if first.of_reward and last.of_reward else "generating a group"
        differs = "" if last.message == first.message else f"; the last failure: {last.words}"
        raise RunError(
            f"{what} failed {streak.groups} times in a row (generator.max_data_failures = "
            f"{config.generator.max_data_failures}): {first.words}{differs}. Fix the cause and start again."
        )
    limit_s = config.run.stall_timeout_s
    if status.quiet_s > limit_s:
        failures = [count for count in status.failures if not count.tool_calls]
        causes = f"; failures: {in_words(failures)}; the first cause: {failures[0].first.words}" if failures else ""
        raise StallError(
            f"no group was committed and no step was trained for {status.quiet_s:.0f} s (run.stall_timeout_s = "
            f"{limit_s:g}). The learner waits ({waits.value}); {replicas_in_words(status)}"
            f"{causes}{f'; {delivery}' if delivery else ''}. Look at the generators' logs, or "
            "raise run.stall_timeout_s if a group needs longer than that"
        )


def nothing_trained(failures: Sequence[FailureCount], *, config: Config) -> RunError:
    """Returns the error of a run whose prompts ran out before its first step."""
    failures = [count for count in failures if not count.tool_calls]  # failed tool calls end no group
    if failures:
        return RunError(
            f"no step was trained: the prompts ran out, and rollouts failed ({in_words(failures)}). "
            f"The first cause: {failures[0].first.words}. Fix it and start the run again."
        )
    return RunError(
        "no step was trained: the prompts ran out before there were learner.groups_per_step = "
        f"{config.learner.groups_per_step} groups; lower it, raise data.epochs, or add prompts"
    )


def replicas_in_words(status: RunStatus) -> str:
    """Returns the state of each replica as text, for error messages."""
    if not status.replicas:
        return "no generator has joined: start one with `asyncrl generator`"
    words = [
        f"{view.replica} at {view.version.words if view.version else 'no weights'}, "
        f"{view.reserved_groups} groups reserved"
        + (f", refused for {view.refused_for.value}" if view.refused_for else "")
        + (f", {view.trouble}" if view.trouble else "")
        for view in status.replicas
    ]
    return "generators: " + "; ".join(words)
