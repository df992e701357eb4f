from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.prompts import (
    FIRST_ROWS,
    OnBadRow,
    PromptCursor,
    PromptSource,
    Task,
    apply_template,
    format_prompt,
    prompt_data,
    read_jsonl,
    split,
)
from asyncrl.errors import ConfigError, DatasetError, RunMismatch


def make_tasks(count: int) -> list[Task]:
    return [Task(question=f"q{i}", prompt=f"q{i}", answer=f"a{i}") for i in range(count)]


def write(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = b'{"prompt": "1+1", "answer": "2", "level": 3}'
BAD_ROWS = {
    "blank": b"   ",
    "bad_json": b'{"prompt": "x", "answer": ',
    "not_an_object": b'["x", "y"]',
    "missing_key": b'{"prompt": "x"}',
    "wrong_type": b'{"prompt": "x", "answer": 2}',
    "duplicate": b'{"prompt": "1+1", "answer": "two"}',
    "too_large": b'{"prompt": "x", "answer": "' + b"y" * 5000 + b'"}',
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
        read_jsonl(path, on_bad_row="refuse", max_row_bytes=1000)


@pytest.mark.parametrize("reason", BAD_ROWS)
@pytest.mark.fault("F33")
def test_a_bad_row_is_skipped_and_counted_and_the_rows_after_it_are_read(tmp_path: Path, reason: str) -> None:
    path = write(tmp_path, GOOD, BAD_ROWS[reason], b'{"prompt": "2+2", "answer": "4"}')
    tasks, skipped = read_jsonl(path, on_bad_row="skip", max_row_bytes=1000)
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
    assert "rename the keys" in message
    assert "skip" not in message


@pytest.mark.fault("F33")
def test_rows_that_lack_a_key_beside_good_ones_are_skipped_however_many_come_first(tmp_path: Path) -> None:
    path = write(tmp_path, *[b'{"prompt": "x"}'] * (FIRST_ROWS - 1), GOOD)
    tasks, skipped = read_jsonl(path, on_bad_row="skip")
    assert ([task.row for task in tasks], skipped) == ([FIRST_ROWS], {"missing_key": FIRST_ROWS - 1})


@pytest.mark.parametrize(
    "row",
    [
        b'{"messages": [{"role": "user", "content": "x"}], "answer": "2"}',
        b'{"prompt": [{"content": "x"}], "answer": "2"}',
    ],
)
@pytest.mark.fault("F33")
def test_a_conversation_is_refused_with_how_to_write_it_as_a_prompt(tmp_path: Path, row: bytes) -> None:
    with pytest.raises(DatasetError, match=r"the text of one turn\. Write the text of the user's message as 'prompt'"):
        read_jsonl(write(tmp_path, GOOD, row))


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
        (b'{"prompt": null, "answer": "2"}', "wrong_type"),
        (b'{"answer": "two", "level": 4, "prompt": "1\\u002b1"}', "duplicate"),
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
    path.write_bytes(GOOD)
    assert len(read_jsonl(path, max_row_bytes=len(GOOD))[0]) == 1
    with pytest.raises(DatasetError, match="row 1"):
        read_jsonl(path, max_row_bytes=len(GOOD) - 1)


@pytest.mark.fault("F33")
def test_a_missing_file_names_the_file_and_the_knob(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"absent\.jsonl.*data\.path"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_template_sees_the_question_and_scalar_metadata() -> None:
    task = Task(question="spell: abc", prompt="", answer="cba", metadata={"word": "abc", "level": 2, "nested": [1]})
    assert format_prompt("{question}|{word}|{level}|{{}}", task) == "spell: abc|abc|2|{}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{wrod}>", r"\{wrod\}.*did you mean \{word\}"),
        (
            "{nested}",
            r"which this config sets.*\{nested\}.*a task has \{question\}, \{word\} .*`prompt` of a JSONL row",
        ),
        ("{word.__class__}", r"\{word\.__class__\}"),
        ("{word[0]}", "which a task lacks"),
        ("{answer}", "which a task lacks"),
        ("{}", "which a task lacks"),
        ("{word", "malformed"),
        ("{word:d}", "cannot format"),
    ],
)
def test_template_that_cannot_be_filled_names_the_field_and_the_key(template: str, message: str) -> None:
    task = Task(question="q", prompt="q", answer="a", metadata={"word": "abc", "nested": [1]})
    with pytest.raises(ConfigError, match=message) as caught:
        apply_template(template, [task])
    assert caught.value.key == "data.prompt_template"


def test_split_keeps_each_question_once_and_on_one_side() -> None:
    tasks = make_tasks(2000)
    train, heldout = split(tasks + tasks[::-1], 0.1)
    assert sorted(task.question for task in train + heldout) == sorted(task.question for task in tasks)
    assert 140 < len(heldout) < 260


def test_split_depends_on_the_question_alone() -> None:
    tasks = make_tasks(500)
    heldout = {task.question for task in split(tasks, 0.2)[1]}
    elsewhere = [Task(question=t.question, prompt="other", answer="other") for t in reversed(tasks[100:])]
    assert {task.question for task in split(elsewhere, 0.2)[1]} == heldout & {task.question for task in elsewhere}


def test_a_prompt_that_is_held_out_for_one_question_is_not_issued_for_another() -> None:
    tasks = [Task(question=f"q{i}", prompt=f"{i % 50}>", answer="") for i in range(200)]
    train, heldout = split(tasks, 0.2)
    assert train
    assert heldout
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}


def test_split_keeps_the_order_and_the_first_of_equal_questions() -> None:
    tasks = [Task(question=q, prompt=q, answer=str(i)) for i, q in enumerate("abcab")]
    train, heldout = split(tasks, 0.0)
    assert [(t.question, t.answer) for t in train] == [("a", "0"), ("b", "1"), ("c", "2")]
    assert heldout == []


@given(count=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_every_epoch_issues_each_task_exactly_once(count: int, seed: int) -> None:
    tasks = make_tasks(count)
    source = PromptSource(tasks, seed=seed, shuffle=True, epochs=3)
    issued = [source.next() for _ in range(3 * count)]
    assert [source.task(number) for number in range(3 * count)] == issued
    for epoch in range(3):
        in_epoch = issued[epoch * count : (epoch + 1) * count]
        assert sorted(t.question for t in in_epoch if t) == sorted(t.question for t in tasks)
    assert source.next() is None
    assert source.next() is None


@given(count=st.integers(1, 40), before=st.integers(0, 100), seed=st.integers(0, 9), shuffle=st.booleans())
def test_a_restored_source_goes_on_exactly_where_the_cursor_was_taken(
    count: int, before: int, seed: int, shuffle: bool
) -> None:
    source = PromptSource(make_tasks(count), seed=seed, shuffle=shuffle, epochs=3)
    for _ in range(before):
        source.next()
    cursor = msgspec.json.decode(msgspec.json.encode(source.state()), type=PromptCursor)
    restored = PromptSource(make_tasks(count), seed=seed, shuffle=shuffle, epochs=3)
    restored.restore(cursor)
    assert [restored.next() for _ in range(2 * count)] == [source.next() for _ in range(2 * count)]


def test_order_is_decided_by_the_seed_and_differs_between_epochs_and_seeds() -> None:
    def order(seed: int, *, skip: int = 0) -> list[Task | None]:
        source = PromptSource(make_tasks(100), seed=seed)
        return [source.next() for _ in range(skip + 100)][skip:]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, skip=100)
    assert order(1) != make_tasks(100)


def test_without_shuffle_the_order_is_the_files() -> None:
    source = PromptSource(make_tasks(5), seed=7, shuffle=False, epochs=1)
    assert [source.next() for _ in range(6)] == [*make_tasks(5), None]


@pytest.mark.fault("F8")
def test_a_cursor_of_another_dataset_is_refused() -> None:
    cursor = PromptSource(make_tasks(5), seed=0).state()
    with pytest.raises(DatasetError, match="not those of this dataset"):
        PromptSource(make_tasks(6), seed=0).restore(cursor)
    with pytest.raises(DatasetError, match="outside"):
        PromptSource(make_tasks(5), seed=0).restore(msgspec.structs.replace(cursor, position=5))


CHANGED_ANSWER = [*make_tasks(4), msgspec.structs.replace(make_tasks(5)[4], answer="other")]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            CHANGED_ANSWER,
            r"has 5 training prompts, .* the 5 prompts .*: they differ from number 5 on, which is 'q4' in the run \(",
        ),
        (
            make_tasks(4),
            r"has 4 training prompts, .* the 5 prompts .*: they differ from number 5 on, which is 'q4' in the run",
        ),
        (
            make_tasks(6),
            r"has 6 training prompts, .* the 5 prompts .*: they differ from number 6 on\. Use the same data",
        ),
        (make_tasks(5)[::-1], r".*: they differ from number 1 on, which is 'q0' in the run"),
    ],
)
def test_other_prompts_are_refused_with_what_differs(others: list[Task], message: str) -> None:
    source = PromptSource(make_tasks(5), seed=0)
    source.check_same(prompt_data(make_tasks(5), source="here"))
    with pytest.raises(RunMismatch, match=rf"^data\.path = a\.jsonl on h {message}"):
        source.check_same(prompt_data(others, source="data.path = a.jsonl on h"))


def test_an_empty_dataset_is_refused_naming_its_knobs() -> None:
    with pytest.raises(DatasetError, match=r"data\.dataset.*data\.heldout_fraction"):
        PromptSource([], seed=0)
