from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import build_environment, build_reward, build_tasks
from asyncrl.errors import ConfigError, DatasetError

pytestmark = pytest.mark.slow

SPELLING = {"task": "spell_backward", "size": 50, "task_options": {"min_word_len": 3, "max_word_len": 4}}


class Doubling:
    """An environment by import path."""

    def __init__(self, *, count: int = 2) -> None:
        self._count = count

    def tasks(self, seed: int) -> Sequence[Task]:
        return [Task(question=f"{seed}:{i}", prompt=f"{seed}:{i}", answer=str(2 * i)) for i in range(self._count)]

    def score(self, task: Task, completion: str) -> float:
        return float(completion == task.answer)


def listed(*, words: list[str]) -> list[Any]:
    return [Task(question=word, prompt=word, answer=word[::-1]) for word in words]


def not_tasks() -> list[Any]:
    return [*listed(words=["ab"]), {"prompt": "x"}]


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


HERE = "test_environment_building"


def test_an_environment_by_import_path_gets_its_options_and_scores() -> None:
    section = EnvironmentSection(name=f"{HERE}:Doubling", options={"count": 3})
    assert len(build_environment(section).tasks(0)) == 3
    assert build_reward(section).function(Task(question="", prompt="", answer="4"), "4") == 1.0


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ({"name": "reasoning_gim"}, "environment.name", "did you mean 'reasoning_gym'"),
        ({"name": f"{HERE}:Doublin"}, "environment.name", "did you mean 'Doubling'"),
        ({"name": f"{HERE}:Doubling", "options": {"cuont": 3}}, "environment.options", "did you mean 'count'"),
        ({"name": f"{HERE}:listed", "options": {"words": ["a"]}}, "environment.name", r"list without tasks\(seed\)"),
        ({"name": "reasoning_gym"}, "environment.options", "missing.*task"),
        ({"name": "math", "options": {"x": 1}}, "environment.options", "unexpected"),
    ],
)
def test_f28_an_environment_that_cannot_be_made_names_key_and_mend(
    section: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_environment(EnvironmentSection.model_validate(section))
    assert caught.value.key == key


def test_a_reward_replaces_the_score_without_building_the_environment() -> None:
    section = EnvironmentSection(name="no.such:environment", reward="exact_match")
    assert build_reward(section).function(Task(question="", prompt="", answer="a b"), " a b\n") == 1.0


def test_tasks_of_an_environment_are_templated_split_and_repeatable() -> None:
    settings = config(
        environment={"options": SPELLING}, data={"prompt_template": "{word}>", "heldout_fraction": 0.3}, run={"seed": 5}
    )
    train, heldout = build_tasks(settings)
    assert build_tasks(settings) == (train, heldout)
    assert train
    assert heldout
    assert all(task.prompt == task.metadata["word"] + ">" for task in train + heldout)
    assert not {task.question for task in train} & {task.question for task in heldout}


def test_another_seed_draws_other_tasks_and_never_issues_a_held_out_question() -> None:
    def draw(seed: int) -> tuple[set[str], set[str]]:
        sides = build_tasks(config(environment={"options": SPELLING | {"size": 3000}}, run={"seed": seed}))
        train, heldout = ({task.question for task in side} for side in sides)
        return train, heldout

    train_0, heldout_0 = draw(0)
    train_1, heldout_1 = draw(1)
    assert train_0 != train_1
    assert heldout_0 & heldout_1
    assert not train_0 & heldout_1
    assert not train_1 & heldout_0


def test_tasks_of_an_import_path_get_their_options() -> None:
    words = [f"w{i}" for i in range(10)]
    data = {"dataset": f"{HERE}:listed", "options": {"words": words}, "heldout_fraction": 0.0}
    train, heldout = build_tasks(config(data=data))
    assert ([task.question for task in train], heldout) == (words, [])
    assert [task.row for task in train] == list(range(1, 11))


def test_f33_an_item_that_is_no_task_is_refused_with_its_number() -> None:
    with pytest.raises(DatasetError, match="item 2 is a dict"):
        build_tasks(config(data={"dataset": f"{HERE}:not_tasks"}))


def test_f33_jsonl_rows_are_skipped_by_config_and_the_log_counts_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "12345", "answer": "x"}\n\n{"prompt": "12", "answer": "y"}\nnope\n')
    data = {"dataset": "jsonl", "path": path, "on_bad_row": "skip", "heldout_fraction": 0}
    train, _ = build_tasks(config(data=data))
    assert [task.answer for task in train] == ["x", "y"]
    assert "skipped 2 rows (1 bad_json, 1 blank)" in caplog.text
    with pytest.raises(DatasetError, match="row 2"):
        build_tasks(config(data=data | {"on_bad_row": "refuse"}))


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        ({"dataset": "jsonl"}, "data.path", "must be set"),
        ({"dataset": "json"}, "data.dataset", "did you mean 'jsonl'"),
        ({"dataset": f"{HERE}:listed", "options": {"word": []}}, "data.options", "did you mean 'words'"),
    ],
)
def test_f28_a_dataset_that_cannot_be_found_names_its_key(data: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_tasks(config(data=data))
    assert caught.value.key == key


def test_the_math_environment_asks_for_a_dataset() -> None:
    with pytest.raises(ConfigError, match="set jsonl"):
        build_tasks(config(environment={"name": "math"}))


def test_a_dataset_without_training_tasks_is_refused() -> None:
    data = {"dataset": f"{HERE}:listed", "options": {"words": []}}
    with pytest.raises(DatasetError, match=r"data\.heldout_fraction"):
        build_tasks(config(data=data))
