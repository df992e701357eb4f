"""Named held-out sets: their questions are not trained, and each is scored by its own rewards."""

import logging
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.parts import all_configs
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import build_sets, build_tasks
from asyncrl.environments.scoring import PartScorers
from asyncrl.errors import DatasetError

HERE = "test_held_out_sets"


def sums(first: int = 0, count: int = 40) -> list[dict[str, str]]:
    return [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(first, first + count)]


def contains(task: Task, completion: str) -> float:
    return float(task.answer in completion)


def config(sets: dict[str, Any], **data: Any) -> Config:
    run = {"dataset": f"{HERE}:sums", "prompt_template": "{question}=", "heldout_fraction": 0.25} | data
    return load_config([{"data": run, "environment": {"reward": "exact_match"}, "eval": {"sets": sets}}])


def sets_of(settings: Config) -> tuple[dict[str, list[Task]], list[Task], list[Task]]:
    train, heldout = build_tasks(settings)
    return build_sets(settings, train=train), train, heldout


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_no_question_of_a_set_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found, train, heldout = sets_of(
        config(
            {
                "strict": {"environment": {"reward": f"{HERE}:contains"}},
                "asked": {"data": {"prompt_template": "What is {question}?"}},
                "more": {"data": {"options": {"first": 30, "count": 50}}},
            }
        )
    )
    assert heldout
    assert [task.question for task in found["strict"]] == [task.question for task in heldout]
    assert [task.question for task in found["asked"]] == [task.question for task in heldout], "with any prompt"
    assert found["asked"][0].prompt == f"What is {heldout[0].question}?"
    trained = {task.question for task in train}
    whole = [row["prompt"] for row in sums(30, 50)]
    assert [task.question for task in found["more"]] == [question for question in whole if question not in trained]
    assert {task.part for task in found["more"]} == {"eval/more"}
    left_out = sum(question in trained for question in whole)
    assert f"eval.sets.more: left out {left_out} questions that the run trains" in caplog.text


def test_a_set_of_which_every_question_is_trained_is_refused() -> None:
    settings = config({"same": {"environment": {"reward": f"{HERE}:contains"}}}, heldout_fraction=0.0)
    with pytest.raises(DatasetError, match=r"eval\.sets\.same: none of its 40 questions can be evaluated"):
        sets_of(settings)


@pytest.mark.usefixtures("importable")
@pytest.mark.asyncio
async def test_a_set_is_scored_by_its_own_rewards_and_equal_ones_share_their_processes() -> None:
    settings = config(
        {
            "lenient": {"environment": {"reward": f"{HERE}:contains"}},
            "asked": {"data": {"prompt_template": "What is {question}?"}},
        }
    )
    scorers = PartScorers(all_configs(settings))
    await scorers.start()
    try:
        assert len(scorers._all) == 2, "the set with only another prompt has the rewards of the run"
        for part, rewards in (("", [0.0, 1.0]), ("eval/asked", [0.0, 1.0]), ("eval/lenient", [1.0, 1.0])):
            assert await scorers.score(Task(question="2+1", prompt="", answer="3", part=part), ["is 3", "3"]) == rewards
    finally:
        await scorers.close()
