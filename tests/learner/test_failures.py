"""Failed rollouts on the learner's terminal: the first of each kind at once and in full, then a line of counts."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from asyncrl.buffer.records import TOOL_FAILED, Failure, FailureCount
from asyncrl.coordinator.client import Call, CoordinatorClient
from asyncrl.errors import DataError, FailureClass, RunError
from asyncrl.learner.recording import COUNTS_EVERY_S, FailureWatch
from asyncrl.learner.records import groups_by_reason


def counted(reason: str, rollouts: int, *, groups: int | None = None, samples: int = 0) -> FailureCount:
    failure = Failure(
        failure_class=FailureClass.DATA,
        reason=reason,
        message=f"{reason} at tasks.py:30",
        prompt="0+3=",
        completion="[red]4",
    )
    groups = rollouts if groups is None else groups
    return FailureCount(rollouts=rollouts, groups=groups, samples=samples, first=failure)


class Scene:
    """A FailureWatch with a fake clock and scripted answers of the coordinator.

    `kept` has the counts that the watch passed on. `shown` returns the lines that were logged since the last call.
    """

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 100.0
        self.kept: list[Sequence[FailureCount]] = []
        self.answers: list[tuple[FailureCount, ...] | Exception] = []
        self.asked: list[int] = []
        self.watch = FailureWatch(
            coordinator=CoordinatorClient(self.send), keep=self.kept.append, clock=lambda: self.now_s
        )
        self._log = caplog

    async def send(self, call: Call) -> Any:
        assert (call.receiver, call.method) == ("Coordinator", "failure_counts")
        self.asked.append(call.arguments[0])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shown(self) -> list[str]:
        lines = [entry.getMessage() for entry in self._log.records]
        self._log.clear()
        return lines


def test_the_first_failure_of_a_reason_is_shown_at_once_with_prompt_and_completion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(caplog)
    scene.watch.show([counted("reward_raised", 1)])
    assert scene.shown() == [
        "first failure of reward_raised: reward_raised at tasks.py:30\n  prompt: '0+3='\n  completion: '[red]4'"
    ]
    scene.watch.show([counted("reward_raised", 1), counted("reward_timeout", 1)])
    assert [line.splitlines()[0] for line in scene.shown()] == [
        "first failure of reward_timeout: reward_timeout at tasks.py:30"
    ]


def test_counts_are_shown_only_when_they_changed_and_only_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(caplog)
    scene.watch.show([counted("reward_raised", 1)])
    scene.shown()
    scene.now_s += COUNTS_EVERY_S - 1
    scene.watch.show([counted("reward_raised", 5)])
    assert scene.shown() == []
    scene.now_s += 1
    several = [counted("reward_raised", 5), counted("reward_timeout", 7)]
    scene.watch.show(several)
    assert scene.shown()[1:] == ["failures so far: reward_timeout 7 rollouts, reward_raised 5 rollouts"]
    assert scene.kept[-1] == tuple(several)
    scene.now_s += COUNTS_EVERY_S
    kept = len(scene.kept)
    scene.watch.show(several)
    assert scene.shown() == []
    assert len(scene.kept) == kept


@pytest.mark.asyncio
async def test_the_end_shows_what_was_not_shown_yet(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(caplog)
    scene.watch.show([counted("reward_raised", 1)])
    scene.shown()
    scene.answers = [(counted("reward_raised", 3),)] * 2
    await scene.watch.finish()
    assert scene.shown() == ["failures so far: reward_raised 3 rollouts"]
    await scene.watch.finish()
    assert scene.shown() == []
    assert scene.kept[-1] == (counted("reward_raised", 3),)


@pytest.mark.asyncio
async def test_the_buffer_is_asked_for_more_than_is_known_and_may_be_silent_for_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(caplog)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr("asyncrl.learner.recording.asyncio.sleep", pause)
    scene.answers = [(counted("reward_raised", 2),), RunError("no answer"), ()]
    with pytest.raises(asyncio.CancelledError):
        await scene.watch.run()
    assert scene.asked == [0, 2, 2]
    assert "cannot be shown until the buffer answers again: no answer" in scene.shown()[-1]


@pytest.mark.fault("F19")
def test_completions_that_failed_alone_are_shown_and_counted_like_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(caplog)
    scene.watch.show([counted("reward_raised", 0, samples=1)])
    assert scene.shown()[0].startswith("first failure of reward_raised: ")
    assert scene.watch.failures == 1
    scene.now_s += COUNTS_EVERY_S
    counts = [counted("reward_raised", 0, samples=31), counted("reward_timeout", 2, samples=1), counted("engine", 40)]
    scene.watch.show(counts)
    assert scene.shown()[-1] == (
        "failures so far: engine 40 rollouts, reward_raised 31 single completions, reward_timeout 2 rollouts and 1 "
        "single completion"
    )
    assert scene.kept[-1] == tuple(counts)
    assert groups_by_reason(counts) == {"engine": 40, "reward_timeout": 2}


@pytest.mark.fault("F19")
def test_errors_of_different_types_are_different_failures_of_a_reward(caplog: pytest.LogCaptureFixture) -> None:
    def raised(error: str, *, rollouts: int, samples: int) -> FailureCount:
        found = DataError(f"judge raised {error}", reason="reward_raised", error=error)
        return FailureCount(rollouts=rollouts, samples=samples, first=Failure.of(found))

    scene = Scene(caplog)
    counts = [raised("ValueError", rollouts=2, samples=81), raised("TimeoutError", rollouts=0, samples=30)]
    counts.append(raised("KeyError", rollouts=1, samples=0))
    scene.watch.show(counts, at_once=True)
    *firsts, total = scene.shown()
    assert [line.partition(":")[0] for line in firsts] == [
        f"first failure of reward_raised ({error})" for error in ("ValueError", "TimeoutError", "KeyError")
    ]
    assert total == (
        "failures so far: reward_raised 3 rollouts and 111 single completions (ValueError 83, TimeoutError 30, "
        "KeyError 1)"
    )


def of_tool(tool: str, error: str, calls: int) -> FailureCount:
    failure = Failure(
        failure_class=FailureClass.DATA,
        reason=TOOL_FAILED,
        message=f"{error}: no (shop.py:10)",
        prompt="0+3=",
        tool=tool,
        error=error,
    )
    return FailureCount(tool_calls=calls, first=failure)


def test_failed_calls_are_shown_once_for_each_tool_and_error_and_counted_by_tool(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(caplog)
    counts = [of_tool("price", "ValueError", 1), of_tool("price", "NameError", 1), of_tool("stock", "TimeoutError", 1)]
    scene.watch.show(counts)
    assert scene.shown() == [
        "first failure of tool price: ValueError: no (shop.py:10)\n  prompt: '0+3='",
        "first failure of tool price: NameError: no (shop.py:10)\n  prompt: '0+3='",
        "first failure of tool stock: TimeoutError: no (shop.py:10)\n  prompt: '0+3='",
    ]
    scene.now_s += COUNTS_EVERY_S
    counts = [of_tool("price", "ValueError", 60), of_tool("price", "NameError", 1), of_tool("stock", "TimeoutError", 1)]
    scene.watch.show([*counts, counted("engine", 2)])
    assert scene.shown()[-1] == "failures so far: tool_failed 62 calls (price 61, stock 1), engine 2 rollouts"
    assert groups_by_reason(counts) == {}, "their groups are trained"


def test_groups_by_reason_leave_out_what_was_tried_again() -> None:
    counts = [counted("engine", 5, groups=0), counted("reward_raised", 2), counted("reward_timeout", 3)]
    assert list(groups_by_reason(counts).items()) == [("reward_timeout", 3), ("reward_raised", 2)]
