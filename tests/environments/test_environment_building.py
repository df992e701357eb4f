import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.data.rows import read_rows
from asyncrl.environments.interfaces import build_environment, build_reward, build_tasks, read_tasks
from asyncrl.errors import ConfigError, DatasetError

pytestmark = pytest.mark.slow

SPELLING = {"task": "spell_backward", "size": 50, "task_options": {"min_word_len": 3, "max_word_len": 4}}


class Doubling:
    """An environment that is named by import path."""

    def __init__(self, *, count: int = 2) -> None:
        self._count = count

    def tasks(self, seed: int) -> Sequence[Task]:
        return [Task(question=f"{seed}:{i}", prompt=f"{seed}:{i}", answer=str(2 * i)) for i in range(self._count)]

    def score(self, task: Task, completion: str) -> float:
        return float(completion == task.answer)


def listed(*, words: list[str]) -> list[Any]:
    return [Task(question=word, prompt=word, answer=word[::-1]) for word in words]


def rows() -> Iterator[Any]:
    """Yields what a user's function may yield: tasks and dicts."""
    yield Task(question="ab", answer="ba")
    yield {"prompt": "cd", "answer": "dc", "level": 2}


def not_tasks() -> list[Any]:
    return [*rows(), 7]


def conversations() -> list[Any]:
    return [Task(question=[{"role": "user", "content": "1+1"}], answer="2")]  # type: ignore[arg-type]


def fails() -> list[Any]:
    raise LookupError("no such split")


def fails_late() -> Iterator[Any]:
    yield from rows()
    raise LookupError("no such row")


def returns_nothing() -> None:
    pass


def other_columns() -> list[Any]:
    return [{"question": f"{number}", "answer": "x"} for number in range(300)]


class Failing(Doubling):
    def tasks(self, seed: int) -> Sequence[Task]:
        raise LookupError("no such split")


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
        (
            {"name": f"{HERE}:listed", "options": {"words": ["a"]}},
            "environment.name",
            r"returned a list, but an environment needs the methods tasks\(seed\)",
        ),
        ({"name": "reasoning_gym"}, "environment.options", "missing.*task"),
        ({"name": "math", "options": {"x": 1}}, "environment.options", "has no such option"),
    ],
)
@pytest.mark.fault("F28")
def test_an_environment_that_cannot_be_made_names_key_and_mend(section: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_environment(EnvironmentSection.model_validate(section))
    assert key in str(caught.value)


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


def test_a_function_may_yield_tasks_without_prompts_and_dicts_whose_other_keys_are_metadata() -> None:
    data = {"dataset": f"{HERE}:rows", "heldout_fraction": 0, "prompt_template": "{question}>"}
    train, _ = build_tasks(config(data=data))
    assert [(task.prompt, task.answer, task.metadata, task.row) for task in train] == [
        ("ab>", "ba", {}, 1),
        ("cd>", "dc", {"level": 2}, 2),
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("not_tasks", r"row 3: is a int, not an object; correct the row, or set data\.on_bad_row: skip"),
        ("conversations", r"row 1 has 'question' of type list, not a string"),
        (
            "other_columns",
            r"none of its first 100 rows can be used; row 1 has no key 'prompt', but only \['answer', 'question",
        ),
        ("returns_nothing", r"returned a NoneType; return or yield asyncrl Tasks, or dicts"),
    ],
)
@pytest.mark.fault("F33")
def test_rows_of_a_function_that_cannot_be_used_are_named(function: str, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        build_tasks(config(data={"dataset": f"{HERE}:{function}"}))


@pytest.mark.parametrize(("function", "text"), [("fails", "no such split"), ("fails_late", "no such row")])
def test_what_a_dataset_function_raises_is_said_with_its_line(function: str, text: str) -> None:
    with pytest.raises(DatasetError) as caught:
        build_tasks(config(data={"dataset": f"{HERE}:{function}"}))
    raised = rf"data\.dataset = {HERE}:{function} raised LookupError: {text} \(.*{HERE}\.py:\d+\)"
    assert re.fullmatch(raised, str(caught.value))


def test_what_an_environments_tasks_raise_is_said_with_its_line() -> None:
    with pytest.raises(DatasetError, match=rf"environment\.name = {HERE}:Failing raised LookupError.*{HERE}\.py:\d+\)"):
        build_tasks(config(environment={"name": f"{HERE}:Failing"}))


def test_only_the_first_rows_are_read_where_no_more_are_wanted() -> None:
    assert [task.row for task in read_tasks(config(data={"dataset": f"{HERE}:fails_late"}), first=2)] == [1, 2]


@pytest.mark.fault("F33")
def test_jsonl_rows_are_skipped_by_config_and_the_log_counts_them(
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
@pytest.mark.fault("F28")
def test_a_dataset_that_cannot_be_found_names_its_key(data: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_tasks(config(data=data))
    assert key in str(caught.value)


def test_the_math_environment_asks_for_a_dataset() -> None:
    with pytest.raises(ConfigError, match=r"set data\.dataset: jsonl"):
        build_tasks(config(environment={"name": "math"}))


def test_a_dataset_without_training_tasks_is_refused() -> None:
    data = {"dataset": f"{HERE}:listed", "options": {"words": []}}
    with pytest.raises(DatasetError, match=r"data\.heldout_fraction"):
        build_tasks(config(data=data))


@pytest.mark.fault("F33")
def test_tasks_whose_metadata_cannot_be_sent_to_scoring_are_refused_with_their_row() -> None:
    for metadata, text in [(None, r"row 1 has 'metadata' of type NoneType, not a dict"), ({"x": {1j}}, "not JSON")]:
        task = Task(question="ab", answer="ba", metadata=metadata)  # type: ignore[arg-type]
        with pytest.raises(DatasetError, match=text):
            read_rows([task], source="tasks:rows", on_bad_row="refuse")
    with pytest.raises(DatasetError, match="not JSON"):
        read_rows([{"prompt": "a", "answer": "b", "image": object()}], source="tasks:rows", on_bad_row="refuse")


def test_too_few_tasks_for_one_step_are_refused_where_the_rest_is_dropped() -> None:
    data: dict[str, Any] = {"dataset": f"{HERE}:rows", "heldout_fraction": 0, "drop_last": True}
    learner = {"groups_per_step": 4}
    with pytest.raises(
        DatasetError, match=r"2 tasks remain for training, .* learner\.groups_per_step = 4 groups, and data\.drop"
    ):
        build_tasks(config(data=data | {"epochs": 1}, learner=learner))
    for enough in ({"epochs": 2}, {"epochs": None}, {"epochs": 1, "drop_last": False}):
        assert len(build_tasks(config(data=data | enough, learner=learner))[0]) == 2
