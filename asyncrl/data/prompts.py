"""Prompts: reads them, issues them in a shuffled order, and holds some of them out.

A dataset is a sequence of `Task`s. `PromptSource` issues the training tasks epoch after epoch, in an order that only
the seed determines. Held-out tasks are chosen by a hash of the question, so that another draw of the same question
never leaks into training. A row that cannot be used is refused with its file and number, or it is skipped and counted
by reason. It is never skipped silently.
"""

import difflib
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import xxhash

from asyncrl.errors import ConfigError, DatasetError, RunMismatch

OnBadRow = Literal["refuse", "skip"]

MAX_ROW_BYTES = 2**20
"""Longest line of a dataset file. A longer line means a broken file, not a prompt."""

FIRST_ROWS = 100
"""Rows that are checked first. If all of them are bad, the dataset has another format, so it is refused."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `prompt` is the text for the model, `answer` the reference, `metadata` the other data for scoring.

    A dataset leaves `prompt` empty: `data.prompt_template` makes it from question and metadata. `row` is the task's
    number in its dataset, from 1, which errors name. It is 0 for a task that is not from a dataset.
    """

    question: str
    prompt: str = ""
    answer: str
    metadata: dict[str, Any] = {}
    row: int = 0


class PromptCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a `PromptSource`: it has issued `position` prompts of `epoch` from the dataset `fingerprint`."""

    epoch: int
    position: int
    fingerprint: str


class PromptData(msgspec.Struct, frozen=True, kw_only=True):
    """The training prompts of a deployment, as they are compared with those of its run.

    `source` says where they come from, and on which machine. `rows` has `ROW_BYTES` bytes of a hash of each prompt and
    its answer, in order: they show where two datasets differ.
    """

    source: str
    fingerprint: str
    rows: bytes


ROW_BYTES = 4


def prompt_data(tasks: Sequence[Task], *, source: str) -> PromptData:
    """Returns what identifies the prompts `tasks`."""
    hashes = (xxhash.xxh3_64_digest(f"{task.prompt}\0{task.answer}".encode())[:ROW_BYTES] for task in tasks)
    return PromptData(source=source, fingerprint=fingerprint(tasks), rows=b"".join(hashes))


class BadRow(Exception):
    """A row that cannot become a task. Rows are counted by `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


Row = Task | Mapping[str, Any] | BadRow


def read_jsonl(
    path: Path, *, on_bad_row: OnBadRow = "refuse", max_row_bytes: int = MAX_ROW_BYTES, first: int | None = None
) -> tuple[list[Task], Counter[str]]:
    """Reads the tasks of a file with one JSON object a line. Returns them, and the number of skipped rows by reason.

    In addition to the bad rows of `read_rows`, a row is bad if it is `too_large`, `bad_json` (also for bad UTF-8) or
    `duplicate` (its prompt occurred before). `first` limits how many rows are read. Raises DatasetError, which names
    the file and the row (from 1).
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DatasetError(
            f"{path}: the dataset file cannot be read ({error.strerror}); set data.path to a file that exists"
        ) from error
    with file:
        rows = _lines(file, max_row_bytes=max_row_bytes)
        return read_rows(islice(rows, first), source=str(path), on_bad_row=on_bad_row)


def read_rows(rows: Iterable[Row], *, source: str, on_bad_row: OnBadRow) -> tuple[list[Task], Counter[str]]:
    """Converts rows to tasks. Returns them, and the number of skipped rows by reason. A row is a task, or an object
    with the texts `prompt` and `answer`; its other keys become metadata.

    A row is bad if it is `blank`, `not_an_object`, `missing_key`, `wrong_type` or `messages`. Raises DatasetError,
    which names `source` and the row (from 1). A dataset whose first `FIRST_ROWS` rows are all bad is refused even if
    `on_bad_row` is `skip`, because it has another format and all rows would be skipped.
    """
    tasks: list[Task] = []
    skipped: Counter[str] = Counter()
    made = (_task(row, number=number) for number, row in enumerate(rows, start=1))
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
            skipped[found.reason] += 1
    return tasks, skipped


def _task(row: Row, *, number: int) -> Task | BadRow:
    """Returns the task of a row, or the BadRow that says why there is none."""
    try:
        match row:
            case BadRow():
                return row
            case Task():
                for name in ("question", "prompt", "answer"):
                    _check_text(getattr(row, name), name=name)
                _check_metadata(row.metadata)
                return row if row.row else msgspec.structs.replace(row, row=number)
            case Mapping():
                return _task_of(row, number=number)
            case _:
                raise BadRow("not_an_object", f"is a {type(row).__name__}, not an object")
    except BadRow as bad:
        return bad


def _task_of(row: Mapping[str, Any], *, number: int) -> Task:
    if "messages" in row and "prompt" not in row:
        raise BadRow("messages", f"has 'messages' instead of 'prompt': {_ONE_TURN}")
    for key in ("prompt", "answer"):
        if key not in row:
            raise BadRow("missing_key", f"has no key {key!r}, but only {sorted(map(str, row))[:8]}")
        _check_text(row[key], name=key)
    if not row["prompt"].strip():
        raise BadRow("blank", "has a blank prompt")
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    _check_metadata(metadata)
    return Task(question=row["prompt"], prompt=row["prompt"], answer=row["answer"], metadata=metadata, row=number)


_ONE_TURN = (
    "a prompt is the text of one turn. Write the text of the user's message as 'prompt'; the model's chat template is "
    "applied to it (data.chat: auto)"
)
_RENAME = (
    ". Rows need the texts 'prompt' and 'answer': rename the keys in the dataset, or set data.dataset to your own "
    "function, which yields {'prompt': …, 'answer': …} for each row"
)


def _check_metadata(metadata: object) -> None:
    """Raises BadRow if the metadata is not a dict that JSON can encode: scoring processes get tasks as JSON."""
    if not isinstance(metadata, dict):
        raise BadRow("wrong_type", f"has 'metadata' of type {type(metadata).__name__}, not a dict")
    try:
        msgspec.json.encode(metadata)
    except (TypeError, ValueError) as error:
        raise BadRow(
            "wrong_type",
            f"has keys besides 'prompt' and 'answer' that are not JSON ({error}), and the reward gets them as JSON; "
            "convert them, or leave them out",
        ) from None


def _check_text(value: object, *, name: str) -> None:
    if isinstance(value, str):
        return
    if name != "answer" and isinstance(value, list | dict):
        raise BadRow("messages", f"has {name!r} of type {type(value).__name__}, not a string: {_ONE_TURN}")
    raise BadRow("wrong_type", f"has {name!r} of type {type(value).__name__}, not a string")


def _lines(file: BinaryIO, *, max_row_bytes: int) -> Iterator[Mapping[str, Any] | BadRow]:
    seen: set[str] = set()
    for line in iter(lambda: file.readline(max_row_bytes + 2), b""):
        try:
            row = _decoded(line, max_row_bytes=max_row_bytes)
            prompt = row.get("prompt")
            if isinstance(prompt, str) and prompt in seen:
                raise BadRow("duplicate", "has the prompt of an earlier row")
            if isinstance(prompt, str) and isinstance(row.get("answer"), str):
                seen.add(prompt)
            yield row
        except BadRow as bad:
            yield bad
            rest = line
            while not rest.endswith(b"\n") and (rest := file.readline(max_row_bytes)):
                pass  # reads the rest of a row that is too large, in pieces, because it may not fit into memory


def _decoded(line: bytes, *, max_row_bytes: int) -> dict[str, Any]:
    if len(line.rstrip(b"\r\n")) > max_row_bytes:
        raise BadRow("too_large", f"is longer than {max_row_bytes} bytes")
    if not line.strip():
        raise BadRow("blank", "is blank")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRow("bad_json", f"is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"is a {type(row).__name__}, not an object")
    return row


def format_prompt(template: str, task: Task) -> str:
    """Returns the text for the model: `template` with `{question}` and the task's scalar metadata filled in.

    Only plain fields are allowed, no attributes or indices, because the metadata may come from an untrusted file.
    Raises ConfigError for a malformed template, and for a field that the task does not have.
    """
    fields: dict[str, Any] = {k: v for k, v in task.metadata.items() if isinstance(v, str | int | float | bool)}
    fields["question"] = task.question
    key = "data.prompt_template"
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{key}: {template!r} is malformed ({error}); double a literal brace", key=key) from None
    for name in names:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {{{close[0]}}}? " if close else ""
            there = ", ".join(f"{{{field}}}" for field in sorted(fields))
            raise ConfigError(
                f"{key}: {template!r}, which this config sets, uses {{{name}}}, which a task lacks; {hint}a task has "
                f"{there} ({{question}} is the `prompt` of a JSONL row); change the template",
                key=key,
            )
    try:
        return template.format_map(fields)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{key}: {template!r} cannot format {fields} ({error})", key=key) from None


def apply_template(template: str, tasks: Sequence[Task]) -> list[Task]:
    """Returns the same tasks, with their prompts made by `format_prompt`."""
    return [msgspec.structs.replace(task, prompt=format_prompt(template, task)) for task in tasks]


def split(tasks: Sequence[Task], heldout_fraction: float) -> tuple[list[Task], list[Task]]:
    """Splits tasks into (training, held-out) tasks, in the given order. Only the first task of each question is used.

    Whether a question is held out depends only on its text, so that every seed and every draw make the same choice. A
    training task is left out if a held-out task has the same prompt: a template may turn two questions into one prompt.
    """
    threshold = round(heldout_fraction * 2**64)
    first_of: dict[str, Task] = {}
    for task in tasks:
        first_of.setdefault(task.question, task)
    train: list[Task] = []
    heldout: list[Task] = []
    for task in first_of.values():
        side = heldout if xxhash.xxh3_64_intdigest(task.question.encode()) < threshold else train
        side.append(task)
    kept_back = {task.prompt for task in heldout}
    return [task for task in train if task.prompt not in kept_back], heldout


class PromptSource:
    """Issues each of `tasks` once an epoch, in an order that only the seed determines.

    >>> source = PromptSource(tasks, seed=0, shuffle=True, epochs=None)
    >>> source.next()                       # a Task, or None after `epochs` epochs
    >>> cursor = source.state()             # goes into a checkpoint
    >>> PromptSource(tasks, seed=0, shuffle=True, epochs=None).restore(cursor)   # continues with the next task

    It stores only the list and a cursor. An epoch's order is a keyed permutation, computed for one position at a time.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, shuffle: bool = True, epochs: int | None = None) -> None:
        if not tasks:
            raise DatasetError("the dataset has no training prompts; check data.dataset and data.heldout_fraction")
        self._tasks = tasks
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._fingerprint = fingerprint(tasks)
        self._epoch = 0
        self._position = 0

    def next(self) -> Task | None:
        """Returns the next task, or None when all epochs are over."""
        if self._epochs is not None and self._epoch >= self._epochs:
            return None
        task = self._at(self._epoch, self._position)
        self._position += 1
        if self._position == len(self._tasks):
            self._epoch, self._position = self._epoch + 1, 0
        return task

    def task(self, number: int) -> Task:
        """Returns the task that was or will be issued as number `number`, from 0 on."""
        return self._at(*divmod(number, len(self._tasks)))

    def _at(self, epoch: int, position: int) -> Task:
        if self._shuffle:
            position = _permuted(position, size=len(self._tasks), key=f"{self._seed}/{epoch}")
        return self._tasks[position]

    def state(self) -> PromptCursor:
        """Returns the cursor from which `restore` continues after the last issued task."""
        return PromptCursor(epoch=self._epoch, position=self._position, fingerprint=self._fingerprint)

    def restore(self, cursor: PromptCursor) -> None:
        """Continues from `cursor`. Raises DatasetError for the cursor of another dataset, whose positions mean other
        prompts."""
        if cursor.fingerprint != self._fingerprint:
            raise DatasetError(
                f"the checkpoint's prompts ({cursor.fingerprint}) are not those of this dataset ({self._fingerprint}); "
                "restore the data and the settings data.* and environment.* of the run's start, or start a new run"
            )
        if cursor.epoch < 0 or not 0 <= cursor.position < len(self._tasks):
            raise DatasetError(
                f"cursor {cursor} is outside of a dataset of {len(self._tasks)} prompts; use the data that the run "
                "started with"
            )
        self._epoch, self._position = cursor.epoch, cursor.position

    def check_same(self, others: PromptData) -> None:
        """Raises RunMismatch if `others`, the prompts of another deployment, are not these prompts in this order."""
        if others.fingerprint == self._fingerprint:
            return
        own, count = prompt_data(self._tasks, source="").rows, len(others.rows) // ROW_BYTES
        equal = next(
            (row for row, task in enumerate(self._tasks) if _row(own, row) != _row(others.rows, row)), len(self._tasks)
        )
        where = f"they differ from number {equal + 1} on"
        if equal < len(self._tasks):
            task = self._tasks[equal]
            where += f", which is {task.prompt[:40]!r} in the run (row {task.row} of its dataset)"
        raise RunMismatch(
            f"{others.source} has {count} training prompts, which are not the {len(self._tasks)} prompts that the run "
            f"was started with: {where}. Use the same data, tokenizer and versions of packages on all machines, or set "
            "another run.name"
        )


def fingerprint(tasks: Sequence[Task]) -> str:
    """Returns a hash of prompts and answers in their order. Equal datasets have equal hashes."""
    digest = xxhash.xxh3_64()
    for task in tasks:
        for text in (task.prompt, task.answer):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def _row(rows: bytes, number: int) -> bytes:
    return rows[number * ROW_BYTES : (number + 1) * ROW_BYTES]


def _permuted(index: int, *, size: int, key: str) -> int:
    """Returns the image of `index` under a permutation of range(size) that `key` determines, in O(1) time and memory.

    A four-round Feistel network is a bijection on the smallest even number of bits that holds `size`. A value beyond
    `size` is mapped again until it falls inside (cycle walking; Black & Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains").
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_ in range(4):
            noise = xxhash.xxh3_64_intdigest(f"{key}/{round_}/{right}".encode())
            left, right = right, left ^ (noise & mask)
        index = left << half_bits | right
        if index < size:
            return index
