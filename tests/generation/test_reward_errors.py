"""What becomes of a group in which the reward of some completions failed: `environment.on_error`."""

from collections.abc import Sequence
from typing import Any

import pytest
from fake_engine import FakeEngine
from pool import LengthScorer, Tokenizer, manifest_of

from asyncrl.buffer.records import Failure, FailureCount, Ticket
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, CoordinatorClient
from asyncrl.data.prompts import Task
from asyncrl.environments.agents import ToolFailure
from asyncrl.environments.scores import Score
from asyncrl.errors import DataError, RunError
from asyncrl.generation.episodes import Attempt
from asyncrl.generation.reward_errors import failures_of, failures_of_tools, report_failures, rewards_of
from asyncrl.generation.rollout import Rollouts
from asyncrl.weights.staging import StagedWeights

RAISED = DataError("it raised", reason="reward_raised", completion="4")
LATE = DataError("it took longer than 10 s", reason="reward_timeout", completion="5")
UNSCORED = DataError("it took longer than 10 s", reason="reward_timeout")


def settings(on_error: str, *, advantage: str | None = None, group_size: int = 4) -> Config:
    algorithm = {} if advantage is None else {"advantage": advantage}
    critic = {"critic": {}} if advantage == "gae" else {}
    return Config.model_validate(
        {"environment": {"on_error": on_error}, "algorithm": algorithm, "learner": {"group_size": group_size}} | critic
    )


@pytest.mark.parametrize(
    ("on_error", "scores", "rewards"),
    [
        ("mask", [1.0, RAISED, 0.5, LATE], (1.0, None, 0.5, None)),
        ("zero", [1.0, RAISED, 0.5, LATE], (1.0, 0.0, 0.5, 0.0)),
        ("zero", [1.0, RAISED, RAISED, LATE], (1.0, 0.0, 0.0, 0.0)),
        ("fail", [1.0, 0.0, 0.5, 0.25], (1.0, 0.0, 0.5, 0.25)),
    ],
)
@pytest.mark.fault("F19")
def test_a_failed_completion_is_left_out_or_has_the_reward_0(
    on_error: str, scores: Sequence[Score], rewards: tuple[float | None, ...]
) -> None:
    assert rewards_of(scores, config=settings(on_error)) == rewards


@pytest.mark.parametrize(
    ("on_error", "scores", "message"),
    [
        ("mask", [1.0, RAISED, LATE, LATE], "it raised; 3 of 4 completions of the group have no reward"),
        ("mask", [UNSCORED, LATE, UNSCORED, LATE], "it took longer than 10 s; 4 of 4 completions of the group have"),
        ("zero", [LATE, RAISED, RAISED, LATE], "it took longer than 10 s; 4 of 4 completions of the group have no"),
        ("fail", [1.0, 0.0, 0.5, LATE], "it took longer than 10 s"),
        ("fail", [UNSCORED, 0.0, RAISED, LATE], "it raised"),
    ],
)
@pytest.mark.fault("F19")
def test_a_group_with_too_few_rewards_fails_with_the_first_error_that_belongs_to_a_completion(
    on_error: str, scores: Sequence[Score], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        rewards_of(scores, config=settings(on_error))
    assert str(caught.value).startswith(message)
    assert caught.value.completion in ("4", "5")
    assert caught.value.reason.startswith("reward_")


@pytest.mark.parametrize(
    ("advantage", "good", "fails"),
    [
        ("group_norm", 1, True),
        ("group_norm", 2, False),
        ("leave_one_out", 1, True),
        ("tasks:mine", 1, True),  # it may compare the completions of a group
        ("reinforce_pp", 1, False),
        ("reinforce_pp", 0, True),
        ("gae", 1, False),
        ("gae", 0, True),
    ],
)
def test_one_reward_is_enough_where_advantages_do_not_compare_the_completions_of_a_group(
    advantage: str, good: int, fails: bool
) -> None:
    scores: list[Score] = [0.5] * good + [RAISED] * (4 - good)
    config = settings("mask", advantage=advantage)
    if fails:
        with pytest.raises(DataError):
            rewards_of(scores, config=config)
    else:
        assert rewards_of(scores, config=config).count(None) == 4 - good


def test_the_error_of_a_group_of_one_completion_counts_no_completions() -> None:
    config = settings("mask", advantage="reinforce_pp", group_size=1)
    with pytest.raises(DataError, match=r"^it raised$"):
        rewards_of([RAISED], config=config)


@pytest.mark.asyncio
async def test_failed_completions_are_reported_by_reason_with_the_first_of_each() -> None:
    sent: list[Call] = []

    async def send(call: Call) -> Any:
        sent.append(call)

    other = DataError("it raised again", reason="reward_raised", completion="6")
    failures = failures_of([RAISED, 1.0, LATE, other], prompt="0+3=")
    await report_failures(failures, CoordinatorClient(send))
    [call] = sent
    assert call.arguments[1] == [
        FailureCount(samples=2, first=Failure.of(RAISED, prompt="0+3=")),
        FailureCount(samples=1, first=Failure.of(LATE, prompt="0+3=")),
    ]
    tools = [
        ToolFailure(tool=tool, error=error, message=f"{error}: no (shop.py:{line})")
        for line, (tool, error) in enumerate(
            [("price", "KeyError"), ("price", "NameError"), ("stock", "KeyError"), ("price", "KeyError")]
        )
    ]
    await report_failures((*failures, *failures_of_tools(tools, prompt="0+3=")), CoordinatorClient(send))
    assert [(count.first.label, count.samples, count.tool_calls) for count in sent.pop().arguments[1]] == [
        ("data/reward_raised", 2, 0), ("data/reward_timeout", 1, 0), ("data/tool_failed/price/KeyError", 0, 2),
        ("data/tool_failed/price/NameError", 0, 1), ("data/tool_failed/stock/KeyError", 0, 1),
    ]  # fmt: skip
    await report_failures([], CoordinatorClient(send))
    assert len(sent) == 1, "without failures there is no call"


@pytest.mark.asyncio
async def test_a_report_that_does_not_arrive_does_not_end_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def lost(call: Call) -> Any:
        raise RunError("no answer")

    await report_failures(failures_of([RAISED], prompt="p"), CoordinatorClient(lost))
    assert "failures did not reach the buffer: no answer" in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("on_error", ["mask", "zero", "fail"])
async def test_a_held_out_question_whose_reward_failed_has_no_reward_whatever_becomes_of_a_group(on_error: str) -> None:
    config = Config.model_validate({"environment": {"on_error": on_error}, "learner": {"group_size": 3}})
    engine, scorer = FakeEngine(), LengthScorer()
    await engine.load(manifest_of(7), StagedWeights())
    rollouts = Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=scorer, replica="a")  # type: ignore[arg-type]
    scorer.fail_first = True
    task = Task(question="q", prompt="q", answer="a")
    with pytest.raises(DataError, match="the reward raised"):
        await rollouts.answers(task, config.eval.each_set()["heldout"], number=0)
    ticket = Ticket(group=3, attempt=1, task=task, seed=0, version=Version(1, 7), max_staleness_versions=2, replica="a")
    if on_error == "fail":
        with pytest.raises(DataError, match="the reward raised"):
            await rollouts.run(ticket, Attempt())
        return
    group = await rollouts.run(ticket, Attempt())
    assert group.meta.rewards[0] == (None if on_error == "mask" else 0.0)
    assert [(each.reason, each.prompt) for each in group.failures] == [("reward_raised", "q")]
    assert group.rows.size == 3, "the rows of all samples are stored"
