"""Reads the rows of datasets, and makes tasks of them.

A row that cannot be used is refused with its file and number, or it is skipped and counted by reason. It is never
skipped silently.
"""

import reprlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import Message, as_text, checked_messages
from asyncrl.errors import ConfigError, DatasetError

OnBadRow = Literal["refuse", "skip"]

MAX_ROW_BYTES = 2**20
"""Longest line of a file that `jsonl_rows` reads. A longer line is a bad row, because it means a broken file."""

FIRST_ROWS = 100
"""Rows at the beginning of a dataset that show what it is like. If all of them are bad, it has another format, and
`read_rows` refuses it. `asyncrl config check` reads only these rows, and `asyncrl init` finds the columns in them."""

READ = ("prompt", "messages", "answer")
"""The keys of a row that are read. `data.columns` maps each of them to the name that it has in a dataset."""

_RENAME = (
    ". Rows need a `prompt` (a text) or `messages` (a conversation), and an `answer`. If a dataset has other names, set"
    " data.columns to its own names, {prompt: THE_QUESTION, answer: THE_ANSWER}, or {answer: null} if it has no answers"
)


_ABSENT = object()
"""Stands for the value of a key that a row does not have, or whose value is null."""


class BadRow(Exception):
    """A row that cannot become a task. `reason` is a key of `left_out.REASONS`, by which bad rows are counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Row = Task | Mapping[str, Any] | BadRow


def jsonl_rows(path: Path) -> Iterator[Row]:
    """Yields the rows of a file with one JSON object a line. A row is a BadRow if it is `blank`, `too_large`, or
    `bad_json` (also for bad UTF-8). Raises DatasetError, which names the file, if it cannot be opened."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DatasetError(
            f"{path}: the dataset file cannot be read ({error.strerror}); set data.path to a file that exists"
        ) from error
    with file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 2), b"")):
            try:
                yield _decoded(line if number else line.removeprefix(BOM_UTF8))
            except BadRow as bad:
                yield bad
                rest = line
                while not rest.endswith(b"\n") and (rest := file.readline(MAX_ROW_BYTES)):
                    pass  # reads the rest of a row that is too large, in pieces, because it may not fit into memory


def _decoded(line: bytes) -> Any:
    if len(line.rstrip(b"\r\n")) > MAX_ROW_BYTES:
        raise BadRow("too_large", f"is longer than {MAX_ROW_BYTES} bytes")
    if not line.strip():
        raise BadRow("blank", "is blank")
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow("bad_json", f"is not JSON ({error})") from None


def read_rows(
    rows: Iterable[Row],
    *,
    source: str,
    on_bad_row: OnBadRow,
    columns: Mapping[str, str | None] = {},
) -> tuple[list[Task], list[LeftOutRow]]:
    """Converts rows to tasks. Returns the tasks, and the rows that were skipped.

    A row is a task, or an object with a `prompt` (a text or a list of messages) or `messages`, and an `answer` (a text
    or an integer). If the last message is one of the assistant, it is not part of the prompt, and it is the answer
    unless the row has an `answer`. `columns` has other names for `prompt`, `messages` and `answer`, with dots between
    the names of nested objects. With `answer: None` in it, the rows need no answer. A null under one of these names is
    an absent key. All other keys become metadata.

    A row is bad if it is a BadRow already, or for one of the reasons `blank`, `not_an_object`, `missing_key`,
    `wrong_type` and `messages`. If `on_bad_row` is `refuse`, raises DatasetError for the first bad row, with `source`
    and the row's number (from 1). If it is `skip`, bad rows are skipped. A dataset whose first `FIRST_ROWS` rows are
    all bad is refused in both cases, because it has another format and all rows would be skipped.
    """
    tasks: list[Task] = []
    skipped: list[LeftOutRow] = []
    made: Iterator[Task | BadRow] = (_task(row, number=n, columns=columns) for n, row in enumerate(rows, start=1))
    head = list(islice(made, FIRST_ROWS))
    bad = next((found for found in head if isinstance(found, BadRow)), None)
    if bad is not None and not any(isinstance(found, Task) for found in head):
        which = f"none of its first {len(head)} rows can be used" if len(head) > 1 else "its only row cannot be used"
        advice = _RENAME if bad.reason == "missing_key" else ""
        raise DatasetError(f"{source}: {which}; row 1 {bad}{advice}")
    for number, found in enumerate(chain(head, made), start=1):
        if isinstance(found, Task):
            tasks.append(found)
        elif on_bad_row == "refuse":
            raise DatasetError(
                f"{source}, row {number}: {found}; correct the row, or set data.on_bad_row: skip ({found.reason})"
            )
        else:
            skipped.append(LeftOutRow(number, found.reason, str(found)))
    return tasks, skipped


def _task(row: Row, *, number: int, columns: Mapping[str, str | None]) -> Task | BadRow:
    """Returns the task of a row, or the BadRow that says why there is none."""
    try:
        match row:
            case BadRow():
                return row
            case Task():
                return _of_code(row, number=number)
            case Mapping():
                return _of_row(row, number=number, columns=columns)
            case _:
                raise BadRow("not_an_object", f"is a {type(row).__name__}, not an object")
    except BadRow as bad:
        return bad


def _of_code(task: Task, *, number: int) -> Task:
    """Checks the types of a task that the user's code made, and fills in what the code may leave out: the row's number,
    and the texts of question and prompt if the task has messages only."""
    for name in ("question", "prompt", "answer"):
        if not isinstance(value := getattr(task, name), str):
            raise BadRow("wrong_type", f"has {name!r} of type {type(value).__name__}, not a string")
    _check_metadata(task.metadata)
    messages = _messages(task.messages, name="messages") if task.messages else ()
    if messages and not task.prompt:
        task = msgspec.structs.replace(task, question=task.question or as_text(messages), prompt=as_text(messages))
    return msgspec.structs.replace(task, messages=messages, row=task.row or number)


def _of_row(row: Mapping[str, Any], *, number: int, columns: Mapping[str, str | None]) -> Task:
    names = {name: columns.get(name, name) for name in READ}
    asked = names["prompt"] if _value(row, names["prompt"]) is not _ABSENT else names["messages"]
    prompt, answer = _value(row, asked), _value(row, names["answer"])
    if prompt is _ABSENT:
        raise _missing(row, names["prompt"])
    messages: tuple[Message, ...] = ()
    if not isinstance(prompt, str):
        messages = _messages(prompt, name=asked)
        if messages[-1]["role"] == "assistant":
            answer = messages[-1]["content"] if answer is _ABSENT else answer
            messages = messages[:-1]
    question = prompt if isinstance(prompt, str) else as_text(messages)
    if not question.strip():
        raise BadRow("blank", "has a blank prompt")
    read = {asked, names["answer"], *(name for name in names.values() if _value(row, name) is _ABSENT)}
    metadata = {key: value for key, value in row.items() if key not in read}
    _check_metadata(metadata)
    return Task(
        question=question,
        prompt=question,
        messages=messages,
        answer=_answer(answer, row, key=names["answer"]),
        metadata=metadata,
        row=number,
    )


def _value(row: Mapping[str, Any], key: str | None) -> Any:
    """Returns the value of a key, which may lead into nested objects (`reward_model.ground_truth`), or `_ABSENT`.

    A null counts as absent: when datasets with different columns are concatenated, each row has null in the columns
    that its own dataset lacks.
    """
    if key is None:
        return _ABSENT
    if key in row:
        return _ABSENT if row[key] is None else row[key]
    first, _, rest = key.partition(".")
    inner = row.get(first) if rest else None
    return _value(inner, rest) if isinstance(inner, Mapping) else _ABSENT


def _missing(row: Mapping[str, Any], key: str | None) -> BadRow:
    if key in row:
        return BadRow("missing_key", f"has the key {key!r}, but its value is null (in a CSV file: the cell is empty)")
    return BadRow("missing_key", f"has no key {key!r}, but only {sorted(map(str, row))[:8]}")


def _answer(answer: object, row: Mapping[str, Any], *, key: str | None) -> str:
    if key is None:
        return ""
    if answer is _ABSENT:
        raise _missing(row, key)
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    raise BadRow("wrong_type", f"has {key!r} of type {type(answer).__name__}, not a string or an integer")


def _messages(value: object, *, name: str | None) -> tuple[Message, ...]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise BadRow("wrong_type", f"has {name!r} of type {type(value).__name__}, not a string or a list of messages")
    try:
        messages = checked_messages(value)
    except ValueError as error:
        raise BadRow("messages", f"has {name!r}, which {error}") from None
    if all(message["role"] != "user" for message in messages):
        raise BadRow("messages", f"has {name!r} without a message of the user")
    return messages


def _check_metadata(metadata: object) -> None:
    """Raises BadRow if the metadata is not a dict that JSON gives back unchanged: scoring processes get tasks as JSON.

    JSON would turn NaN into null, bytes and dates into texts, and sets and tuples into lists.
    """
    if not isinstance(metadata, dict):
        raise BadRow("wrong_type", f"has 'metadata' of type {type(metadata).__name__}, not a dict")
    for key, value in metadata.items():
        if not isinstance(key, str):
            raise BadRow("wrong_type", f"has the key {key!r} of type {type(key).__name__} in its metadata, not a text")
        try:
            same = bool(msgspec.json.decode(msgspec.json.encode(value)) == value)
            why = "JSON would change it"
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            same, why = False, str(error)
        if not same:
            raise BadRow(
                "wrong_type",
                f"has {key!r} = {reprlib.repr(value)} of type {type(value).__name__}, which is not JSON ({why}), and "
                "the reward gets the keys besides prompt and answer as JSON; convert it, or leave it out",
            )


# Finds the columns of prompt and answer in a dataset whose columns have other names than `prompt` and `answer`.

LIKELY: Mapping[str, Sequence[str]] = {
    "prompt": ("question", "problem", "instruction", "query", "input"),
    "answer": (
        "solution",
        "output",
        "response",
        "target",
        "label",
        "ground_truth",
        "expected_answer",
        "final_answer",
        "reward_model.ground_truth",  # datasets for verl
    ),
    "system_prompt": ("system", "system_message"),
}
"""Names that datasets often have instead of `prompt`, `answer` and `system_prompt`, the likeliest first."""
NO_ANSWER = "none"
"""Value of the option --answer of `asyncrl init` for a dataset without answers."""


def columns_for(names: Sequence[str], *, prompt: str | None, answer: str | None, source: str) -> dict[str, str | None]:
    """Returns `data.columns` for a dataset with the columns `names`. `prompt` and `answer` are the user's choices, the
    options --prompt and --answer of `asyncrl init`. Without a choice, a column of `LIKELY` is taken.

    A column that has the name that asyncrl reads needs no entry. A conversation (`messages`) needs no column of
    answers, because it may end with its answer. Raises ConfigError if a choice is not one of the columns, or if no
    column is likely.

    >>> columns_for(["id", "question", "solution"], prompt=None, answer=None, source="mine.csv")
    {'prompt': 'question', 'answer': 'solution'}
    >>> columns_for(["messages"], prompt=None, answer=None, source="chat.parquet")
    {}
    """
    columns: dict[str, str | None] = {}
    if prompt is None and "prompt" not in names and "messages" not in names:
        prompt = _likely("prompt", names, source=source)
    if answer is None and "answer" not in names and "messages" not in (*names, prompt):
        answer = _likely("answer", names, source=source)
    for name, column in (("prompt", prompt), ("answer", answer)):
        if name == "answer" and column == NO_ANSWER and NO_ANSWER not in names:
            columns[name] = None
        elif column is not None:
            if column not in names and column.partition(".")[0] not in names:
                raise ConfigError(f"--{name} {column}: {source} has no such column; it has {', '.join(names)}")
            if column != name:
                columns[name] = column
    return columns


def _likely(name: str, names: Sequence[str], *, source: str) -> str:
    if found := likely_columns(name, names):
        return found[0]
    without = f", or --answer {NO_ANSWER} if there are no answers" if name == "answer" else ""
    raise ConfigError(
        f"DATA {source}: has no column `{name}`, but {', '.join(names)}; name its column with --{name} COLUMN{without}"
    )


def likely_columns(name: str, names: Iterable[str]) -> list[str]:
    """Returns the columns among `names` that may have the meaning of `name`, the likeliest first.

    >>> likely_columns("answer", ["Solution", "answer", "id"])
    ['answer', 'Solution']
    """
    by_lower_case = {each.lower(): each for each in reversed([*names])}
    return [by_lower_case[each] for each in (name, *LIKELY[name]) if each in by_lower_case]
