"""When a learner that waits must give up: the run stands still, or too many rollouts failed. Pure."""

from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.records import FailureStreak, LeaseWait
from asyncrl.config.schema import Config
from asyncrl.errors import RunError, StallError
from asyncrl.learner.failures import in_words


def check_progress(status: RunStatus, *, waits: LeaseWait, config: Config) -> None:
    """RunError when the buffer gave up after too many failures in a row, StallError (F5) when nothing moves on either
    side."""
    streak = status.failure_streak
    if waits is LeaseWait.TOO_MANY_FAILURES and streak is not None:
        raise RunError(f"{_streak_in_words(streak, limit=config.generator.max_data_failures)}. Fix it and start again.")
    limit_s = config.run.stall_timeout_s
    if status.quiet_s > limit_s:
        raise StallError(
            f"nothing was committed or trained for {status.quiet_s:.0f} s (run.stall_timeout_s = {limit_s:g}): "
            f"the learner waits ({waits.value}); {replicas_in_words(status)}{_failures_in_words(status)}"
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


def _failures_in_words(status: RunStatus) -> str:
    """The end of a sentence: how many rollouts failed, with the first cause; nothing when none did."""
    if not status.failures:
        return ""
    return f"; rollouts that failed: {in_words(status.failures)}, first {status.failures[0].first.words}"


def _streak_in_words(streak: FailureStreak, *, limit: int) -> str:
    """How often in a row which part failed, with the first cause, and with the last one where it is another."""
    first, last = streak.first, streak.last
    what = "your reward" if first.of_reward and last.of_reward else "generating a group"
    words = f"{what} failed {streak.groups} times in a row (generator.max_data_failures = {limit}): {first.words}"
    return words if last.message == first.message else f"{words}; the last time: {last.words}"
