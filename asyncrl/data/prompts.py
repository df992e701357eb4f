"""Prompts: makes them of questions, issues them in a shuffled order, and holds some of them out.

A dataset is a sequence of `Task`s, which `rows.py` reads. `PromptSource` issues the training tasks epoch after epoch,
in an order that only the seed determines. Held-out tasks are chosen by a hash of the question, so that another draw of
the same question never leaks into training.
"""

import difflib
import string
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from asyncrl.data.conversation import Message, as_text, asked
from asyncrl.errors import ConfigError, DatasetError, RunMismatch


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `prompt` is the text for the model, `answer` the reference, `metadata` the other data for scoring.

    A dataset leaves `prompt` empty: `data.prompt_template` makes it from question and metadata. If there are
    `messages`, the model gets them in its chat template instead, and `prompt` shows them as one text. `row` is the
    task's number in its dataset, from 1, which errors name. It is 0 for a task that is not from a dataset.
    """

    question: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str
    metadata: dict[str, Any] = {}
    row: int = 0

    @property
    def input(self) -> "str | tuple[Message, ...]":
        """The prompt for the model: the messages if there are any, else the text."""
        return self.messages or self.prompt


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
    """Returns the same tasks, with their prompts made by `format_prompt`. Raises ConfigError for a template with other
    text than the question, if a task has messages."""
    if template != "{question}" and (chat := next((task for task in tasks if task.messages), None)) is not None:
        key = "data.prompt_template"
        raise ConfigError(
            f"{key}: {template!r} cannot be applied to row {chat.row}, which has messages; put the text into "
            "data.system_prompt or data.few_shot, and leave the template out",
            key=key,
        )
    return [
        task if task.messages else msgspec.structs.replace(task, prompt=format_prompt(template, task)) for task in tasks
    ]


def in_conversation(
    tasks: Sequence[Task], *, system_prompt: str | None, examples: Sequence[Mapping[str, str]]
) -> list[Task]:
    """Returns the tasks with the system's message and the solved `examples` (`prompt` and `answer`) before their own
    messages. A text becomes the message of the user."""
    before: list[Message] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    for example in examples:
        before.append({"role": "user", "content": example["prompt"]})
        before.append({"role": "assistant", "content": example["answer"]})
    if not before:
        return list(tasks)
    placed = []
    for task in tasks:
        own = asked(task.input)
        if system_prompt is not None and own[0]["role"] == "system":
            raise DatasetError(
                f"row {task.row} has a message of the system, and data.system_prompt would be a second one; unset it"
            )
        messages = (*before, *own)
        placed.append(msgspec.structs.replace(task, messages=messages, prompt=as_text(messages)))
    return placed


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
