"""Decides what becomes of groups in which the reward of some completions failed (`environment.on_error`), and reports
these failures."""

import logging
import uuid
from collections.abc import Iterable, Sequence

from asyncrl.algorithms.presets import compares_groups
from asyncrl.buffer.records import TOOL_FAILED, Failure, FailureCount, cut_text
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.environments.agents import ToolFailure
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Components
from asyncrl.errors import DataError, FailureClass, RunError

logger = logging.getLogger(__name__)


def fewest_rewards(config: Config) -> int:
    """Returns how many completions of a group must have a reward, so that the group can be trained.

    A group of which one completion is left teaches nothing if advantages compare the completions of a group. A failed
    completion with the reward 0 can be compared, but a group without any reward fails, so that a reward that always
    fails stops the run.
    """
    if config.environment.on_error == "zero" or not compares_groups(config.algorithm):
        return 1
    return min(2, config.learner.group_size)


def rewards_of(scores: Sequence[Score], *, config: Config) -> tuple[float | None, ...]:
    """Returns the reward of each completion of a group; None for a completion that is left out.

    Raises DataError with the first error if a reward failed and `environment.on_error` is `fail`, or if fewer than
    `fewest_rewards` completions have a reward.
    """
    errors, on_error = [score for score in scores if isinstance(score, DataError)], config.environment.on_error
    if errors:
        first = next((error for error in errors if error.completion), errors[0])
        if on_error == "fail":
            raise first
        if len(scores) - len(errors) < fewest_rewards(config):
            few = f"; {len(errors)} of {len(scores)} completions of the group have no reward" if len(scores) > 1 else ""
            raise DataError(f"{first}{few}", reason=first.reason, completion=first.completion, error=first.error)
    substitute = 0.0 if on_error == "zero" else None
    return tuple(substitute if isinstance(score, DataError) else total(score) for score in scores)


def total(score: float | Components) -> float:
    """Returns the reward of a score."""
    return score.total if isinstance(score, Components) else score


def parts_of(score: float | Components) -> dict[str, float]:
    """Returns the components of a reward by name, without their weights; none if it has no components."""
    return dict(score.parts) if isinstance(score, Components) else {}


def components_of(scores: Sequence[Score]) -> dict[str, tuple[float | None, ...]]:
    """Returns the components of the rewards by name, one entry for each score; None if the reward failed or lacks the
    component. Returns an empty dict if no reward has components."""
    parts = [score.parts if isinstance(score, Components) else {} for score in scores]
    return {name: tuple(each.get(name) for each in parts) for name in dict.fromkeys(n for each in parts for n in each)}


def failures_of(scores: Sequence[Score], *, prompt: str) -> tuple[Failure, ...]:
    """Returns a record of each completion whose reward failed, in a group that is trained nevertheless."""
    return tuple(Failure.of(score, prompt=prompt) for score in scores if isinstance(score, DataError))


def failures_of_tools(failures: Iterable[ToolFailure], *, prompt: str) -> tuple[Failure, ...]:
    """Returns a record of each failed call of a tool by the agents of a prompt."""
    return tuple(
        Failure(
            failure_class=FailureClass.DATA,
            reason=TOOL_FAILED,
            message=cut_text(failure.message),
            prompt=cut_text(prompt),
            tool=failure.tool,
            error=failure.error,
        )
        for failure in failures
    )


async def report_failures(failures: Sequence[Failure], coordinator: CoordinatorClient) -> None:
    """Reports to the coordinator the failed completions and calls of tools of committed groups: the number of each kind
    of failure, and the first one of it."""
    if not failures:
        return
    of_label: dict[str, list[Failure]] = {}
    for failure in failures:
        of_label.setdefault(failure.label, []).append(failure)
    counts = [
        FailureCount(tool_calls=len(each), first=each[0])
        if each[0].of_tool
        else FailureCount(samples=len(each), first=each[0])
        for each in of_label.values()
    ]
    words = ", ".join(f"{count.first.label} {count.failures}" for count in counts)
    logger.warning("failures in groups that are trained: %s", words)
    try:
        await coordinator.call(Coordinator.samples_failed, uuid.uuid4().hex, counts)
    except (RunError, TimeoutError) as lost:
        logger.warning("failures did not reach the buffer: %s", lost)
