"""The example of a user's own task: its config builds its questions, and its reward scores them."""

from pathlib import Path

import pytest

from asyncrl.config.import_path import resolve
from asyncrl.config.load import load_config
from asyncrl.environments.interfaces import build_tasks

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CONFIGS))


@pytest.mark.usefixtures("importable")
def test_the_example_makes_questions_and_scores_answers() -> None:
    config = load_config([CONFIGS / "own_task.yaml"], [])
    train, heldout = build_tasks(config)
    assert len(train) + len(heldout) == 100 * 100
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}
    [task] = [task for task in [*train, *heldout] if task.prompt == "7,31>"]
    reward = resolve(str(config.environment.reward), key="environment.reward")
    assert [reward(task, text) for text in ("31", "7", "", "31 ")] == [1.0, 0.1, 0.0, 0.0]
