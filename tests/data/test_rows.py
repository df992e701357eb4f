"""Rows of datasets become tasks, or are refused or skipped with their number and a reason."""

from collections import Counter
from datetime import date, datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from asyncrl.data.prompts import Task
from asyncrl.data.rows import FIRST_ROWS, MAX_ROW_BYTES, OnBadRow, jsonl_rows, read_rows
from asyncrl.errors import DatasetError


def write(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def read_jsonl(
    path: Path, *, on_bad_row: OnBadRow = "refuse", first: int | None = None
) -> tuple[list[Task], Counter[str]]:
    found = islice(jsonl_rows(path), first)
    tasks, left_out = read_rows(found, source=str(path), on_bad_row=on_bad_row)
    return tasks, Counter(each.reason for each in left_out)


GOOD = b'{"prompt": "1+1", "answer": "2", "level": 3}'
BAD_ROWS = {
    "blank": b"   ",
    "bad_json": b'{"prompt": "x", "answer": ',
    "not_an_object": b'["x", "y"]',
    "missing_key": b'{"prompt": "x"}',
    "wrong_type": b'{"prompt": "x", "answer": [2]}',
    "too_large": b'{"prompt": "x", "answer": "' + b"y" * MAX_ROW_BYTES + b'"}',
}


def test_jsonl_rows_become_tasks_with_their_other_keys_as_metadata(tmp_path: Path) -> None:
    tasks, skipped = read_jsonl(write(tmp_path, GOOD))
    assert tasks == [Task(question="1+1", prompt="1+1", answer="2", metadata={"level": 3}, row=1)]
    assert not skipped


@pytest.mark.parametrize("reason", BAD_ROWS)
@pytest.mark.fault("F33")
def test_a_bad_row_is_refused_with_file_row_and_knob(tmp_path: Path, reason: str) -> None:
    path = write(tmp_path, GOOD, BAD_ROWS[reason], b'{"prompt": "2+2", "answer": "4"}')
    with pytest.raises(DatasetError, match=rf"rows\.jsonl, row 2: .*data\.on_bad_row.*\({reason}\)"):
        read_jsonl(path, on_bad_row="refuse")


@pytest.mark.parametrize("reason", BAD_ROWS)
@pytest.mark.fault("F33")
def test_a_bad_row_is_skipped_and_counted_and_the_rows_after_it_are_read(tmp_path: Path, reason: str) -> None:
    path = write(tmp_path, GOOD, BAD_ROWS[reason], b'{"prompt": "2+2", "answer": "4"}')
    tasks, skipped = read_jsonl(path, on_bad_row="skip")
    assert [(task.answer, task.row) for task in tasks] == [("2", 1), ("4", 3)], "`row` is the number in the file"
    assert skipped == {reason: 1}


@pytest.mark.fault("F33")
def test_bad_utf8_and_deep_nesting_are_bad_json(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, b'{"prompt": "\xff", "answer": "2"}', b"[" * 100_000)
    tasks, skipped = read_jsonl(path, on_bad_row="skip")
    assert [task.row for task in tasks] == [1]
    assert skipped == {"bad_json": 2}


@pytest.mark.parametrize("on_bad_row", ["refuse", "skip"])
@pytest.mark.fault("F33")
def test_a_file_with_other_keys_is_refused_with_its_keys_and_how_to_rename_them_and_never_told_to_skip(
    tmp_path: Path, on_bad_row: OnBadRow
) -> None:
    path = write(tmp_path, *[b'{"question": "%d", "answer": "2"}' % number for number in range(FIRST_ROWS + 1)])
    with pytest.raises(DatasetError) as caught:
        read_jsonl(path, on_bad_row=on_bad_row)
    message = str(caught.value)
    assert f"none of its first {FIRST_ROWS} rows can be used; row 1 has no key 'prompt'" in message
    assert "['answer', 'question']" in message
    assert "data.columns" in message
    assert "skip" not in message


@pytest.mark.fault("F33")
def test_rows_that_lack_a_key_beside_good_ones_are_skipped_however_many_come_first(tmp_path: Path) -> None:
    path = write(tmp_path, *[b'{"prompt": "x"}'] * (FIRST_ROWS - 1), GOOD)
    tasks, skipped = read_jsonl(path, on_bad_row="skip")
    assert ([task.row for task in tasks], skipped) == ([FIRST_ROWS], {"missing_key": FIRST_ROWS - 1})


def test_only_the_first_rows_of_a_file_are_read_where_no_more_are_wanted(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, b'{"prompt": "2+2", "answer": "4"}', b"nonsense")
    assert [task.row for task in read_jsonl(path, first=2)[0]] == [1, 2]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"", "blank"),
        (b"\r", "blank"),
        (b'{"prompt": " \\n ", "answer": "2"}', "blank"),
        (b'{"prompt": "\\ud800", "answer": "2"}', "bad_json"),
        (b'{"prompt": "x", "answer": "2", "level": NaN}', "bad_json"),
        (b'{"prompt": "x", "answer": "2", "level": ' + b"9" * 5000 + b"}", "bad_json"),
        (b'{"prompt": "x", "answer": "2"} {}', "bad_json"),
        (b"null", "not_an_object"),
        (b'{"prompt": null, "answer": "2"}', "missing_key"),
    ],
)
@pytest.mark.fault("F33")
def test_a_row_that_is_bad_in_a_subtler_way_is_refused_with_its_number_too(
    tmp_path: Path, row: bytes, reason: str
) -> None:
    with pytest.raises(DatasetError, match=rf"row 3: .*\({reason}\)"):
        read_jsonl(write(tmp_path, GOOD, b'{"prompt": "2+2", "answer": "4"}', row))


@pytest.mark.fault("F33")
def test_a_row_at_the_limit_passes_and_the_last_row_needs_no_newline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    longest = GOOD + b" " * (MAX_ROW_BYTES - len(GOOD))
    path.write_bytes(longest)
    assert len(read_jsonl(path)[0]) == 1
    path.write_bytes(longest + b" ")
    with pytest.raises(DatasetError, match="row 1"):
        read_jsonl(path)


@pytest.mark.fault("F33")
def test_a_missing_file_names_the_file_and_the_knob(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"absent\.jsonl.*data\.path"):
        read_jsonl(tmp_path / "absent.jsonl")


USER = {"role": "user", "content": "2+2="}
SYSTEM = {"role": "system", "content": "Be brief."}
SOLVED = {"role": "assistant", "content": "It is 4."}


def read_one(row: Any, **options: Any) -> Task:
    [task], skipped = read_rows([row], source="rows", on_bad_row="refuse", **options)
    assert not skipped
    return task


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_conversation_becomes_the_messages_of_a_task(key: str) -> None:
    task = read_one({key: [SYSTEM, USER], "answer": "4", "level": 1})
    assert task.messages == (SYSTEM, USER)
    assert task.question == task.prompt == "system: Be brief.\nuser: 2+2="
    assert (task.answer, task.metadata) == ("4", {"level": 1})
    assert read_one({key: [USER], "answer": "4"}).question == "2+2="


def test_a_last_message_of_the_assistant_is_the_answer_and_not_a_part_of_the_prompt() -> None:
    task = read_one({"messages": [USER, SOLVED]})
    assert (task.messages, task.answer) == ((USER,), "It is 4.")
    task = read_one({"messages": [USER, SOLVED], "answer": "4"})
    assert (task.messages, task.answer) == ((USER,), "4"), "a row may name another reference"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "is empty"),
        ([{"content": "x"}], "has the role None in message 1; known roles are system, user, assistant"),
        ([USER, {"role": "tool", "content": "x"}], "has the role 'tool' in message 2"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has content of type list in message 1; only texts"),
        (["2+2="], "has a str as message 1, not an object with `role` and `content`"),
        ([USER, SYSTEM], "ends with the system's message"),
        ([USER, SOLVED | {"tool_calls": [{"function": {"name": "add"}}]}], "has tool_calls in message 2"),
        (
            [USER, {"role": "assistant", "content": "", "function_call": {"name": "add"}}],
            "has function_call in message",
        ),
        ([USER | {"images": ["a.png"], "audio": "b"}], "has images, audio in message 1"),
        ([SOLVED], "without a message of the user"),
        ([SYSTEM, SOLVED], "without a message of the user"),
    ],
)
@pytest.mark.fault("F33")
def test_a_conversation_that_cannot_be_used_is_refused_with_its_row_and_message(messages: Any, what: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_rows([{"messages": messages, "answer": "4"}], source="rows", on_bad_row="refuse")
    assert "row 1" in str(caught.value)
    assert what in str(caught.value)
    good = {"prompt": "a", "answer": "b"}
    _, [bad] = read_rows([good, {"messages": messages, "answer": "4"}], source="rows", on_bad_row="skip")
    assert (bad.row, bad.reason) == (2, "messages")
    assert what in bad.details


def test_a_dataset_has_its_own_names_for_prompt_and_answer_also_in_nested_objects() -> None:
    row = {"question": "2+2=", "reward_model": {"ground_truth": "4", "style": "rule"}, "prompt": "not this one"}
    task = read_one(row, columns={"prompt": "question", "answer": "reward_model.ground_truth"})
    assert (task.prompt, task.answer) == ("2+2=", "4")
    assert task.metadata == {"reward_model": row["reward_model"], "prompt": "not this one"}


def test_rows_need_no_answer_if_the_columns_say_so() -> None:
    assert read_one({"prompt": "write a poem"}, columns={"answer": None}).answer == ""
    with pytest.raises(DatasetError, match=r"has no key 'answer'.*\{answer: null\} if it has no answers"):
        read_one({"prompt": "write a poem"})


def test_an_integer_is_an_answer_too() -> None:
    assert read_one({"prompt": "2+2=", "answer": 4}).answer == "4"
    for other in (True, 4.0):
        with pytest.raises(DatasetError, match="has 'answer' of type"):
            read_one({"prompt": "2+2=", "answer": other})


def test_keys_of_messages_that_are_no_content_or_empty_are_left_out() -> None:
    extended = USER | {"name": None, "tool_calls": [], "images": None, "weight": 1, "reasoning_content": "It is plain."}
    assert read_one({"messages": [extended], "answer": "4"}).messages == (USER,)


def test_the_messages_of_a_task_that_code_has_made_are_checked_and_shown_as_its_prompt() -> None:
    task = read_one(Task(question="", messages=(SYSTEM, USER), answer="4"))
    assert task.prompt == task.question == "system: Be brief.\nuser: 2+2="
    with pytest.raises(DatasetError, match="has the role 'robot' in message 1"):
        read_one(Task(question="", messages=({"role": "robot", "content": "x"},), answer="4"))


@pytest.mark.parametrize(
    ("row", "columns", "prompt", "answer"),
    [
        ({"prompt": None, "messages": [USER, SOLVED], "answer": None}, {}, "2+2=", "It is 4."),
        ({"prompt": "2+2=", "messages": None, "answer": "4"}, {}, "2+2=", "4"),
        ({"prompt": [USER, SOLVED], "messages": None, "answer": None}, {}, "2+2=", "It is 4."),
        ({"q": None, "messages": [USER], "answer": 4}, {"prompt": "q"}, "2+2=", "4"),
        (
            {"prompt": None, "chat": [USER, SOLVED], "gold": None},
            {"messages": "chat", "answer": "gold"},
            "2+2=",
            "It is 4.",
        ),
        (
            {"messages": [USER, SOLVED], "reward_model": {"gold": None}},
            {"answer": "reward_model.gold"},
            "2+2=",
            "It is 4.",
        ),
    ],
)
def test_a_null_column_is_an_absent_column(
    row: dict[str, Any], columns: dict[str, str | None], prompt: str, answer: str
) -> None:
    task = read_one(row, columns=columns)
    assert (task.prompt, task.answer) == (prompt, answer)
    assert set(task.metadata) <= {"reward_model"}, "the columns of prompt and answer are not metadata"


@pytest.mark.parametrize("row", [{"prompt": None}, {"prompt": "x", "answer": None}, {"messages": None, "prompt": None}])
@pytest.mark.fault("F33")
def test_a_row_with_nulls_only_is_refused_by_name(row: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match=r"row 1 has the key '(prompt|answer)', but its value is null"):
        read_one(row)


def test_metadata_may_be_null() -> None:
    assert read_one({"prompt": "x", "answer": "y", "level": None}).metadata == {"level": None}


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("-inf"),
        b"bytes",
        bytearray(b"x"),
        {1, 2},
        frozenset("a"),
        (1, 2),
        {"deep": [{"er": float("nan")}]},
        [(1,)],
        {1: "integer key"},
        datetime(2024, 1, 2),
        date(2024, 1, 2),
        Decimal("1.50"),
        UUID(int=1),
        Task(question="a", answer="b"),
        object(),
        "\ud800",
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.fault("F33")
def test_metadata_that_json_would_change_is_refused_by_name(value: Any) -> None:
    for row in (
        {"prompt": "x", "answer": "y", "odd": value},
        Task(question="x", answer="y", metadata={"good": 1, "odd": value}),
    ):
        with pytest.raises(DatasetError, match=r"row 1 has 'odd' = .*, which is not JSON"):
            read_one(row)


def test_metadata_that_json_keeps_reaches_the_reward_as_it_is() -> None:
    metadata = {"a": [1, 2.5, -0.0, True, None, "é"], "b": {"c": 10**30, "d": [[], {}]}, "e": 1e308}
    assert read_one({"prompt": "x", "answer": "y", **metadata}).metadata == metadata
    with pytest.raises(DatasetError, match=r"row 1 has the key 7 of type int in its metadata, not a text"):
        read_one(Task(question="x", answer="y", metadata={7: 1}))  # type: ignore[dict-item]
