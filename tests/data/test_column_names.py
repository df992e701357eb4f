"""The columns of prompt and answer are found by their names, or are those that the user names."""

import doctest

import pytest

from asyncrl.data import rows
from asyncrl.data.rows import columns_for
from asyncrl.errors import ConfigError


def found(names: list[str], *, prompt: str | None = None, answer: str | None = None) -> dict[str, str | None]:
    return columns_for(names, prompt=prompt, answer=answer, source="mine.csv")


def test_doctests() -> None:
    assert doctest.testmod(rows).failed == 0


@pytest.mark.parametrize(
    ("names", "columns"),
    [
        (["prompt", "answer", "question"], {}),
        (["Question", "Label", "input"], {"prompt": "Question", "answer": "Label"}),
        (["input", "problem", "answer"], {"prompt": "problem"}),
        (["messages", "id"], {}),
        (["prompt", "output"], {"answer": "output"}),
        (["prompt", "reward_model", "reward_model.ground_truth"], {"answer": "reward_model.ground_truth"}),
    ],
)
def test_columns_with_other_names_are_found(names: list[str], columns: dict[str, str]) -> None:
    assert found(names) == columns


def test_the_user_s_columns_come_first_and_dots_lead_into_nested_ones() -> None:
    assert found(["question", "chat", "reward_model"], prompt="chat", answer="reward_model.ground_truth") == {
        "prompt": "chat",
        "answer": "reward_model.ground_truth",
    }
    assert found(["prompt", "answer", "messages"], prompt="messages") == {"prompt": "messages"}
    assert found(["prompt", "answer"], prompt="prompt", answer="none") == {"answer": None}
    assert found(["prompt", "none"], answer="none") == {"answer": "none"}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a", "b"], {}, r"DATA mine\.csv: has no column `prompt`, but a, b; name its column with --prompt COLUMN$"),
        (["prompt", "b"], {}, "has no column `answer`.*--answer COLUMN, or --answer none if there are no answers"),
        (["prompt", "b"], {"answer": "c"}, r"--answer c: mine\.csv has no such column; it has prompt, b"),
    ],
)
def test_a_column_that_is_not_there_is_named(names: list[str], options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(names, **options)
