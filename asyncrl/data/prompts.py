"""Makes prompts from questions, issues them in a shuffled order, and holds some of them out for evaluation.

A dataset is a sequence of `Task`s, which `rows.py` reads. `PromptSource` issues the training tasks epoch after epoch,
in an order that only the seed determines. A hash of the question, and of the other fields in `data.prompt_template`,
decides whether a task is held out. So tasks that are equal in these are never both held out and trained.
"""

import difflib
import string
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, filterfalse, islice
from typing import Any

import msgspec
import xxhash

from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.tokenizer import Message, as_text, asked
from asyncrl.errors import ConfigError, DatasetError, RunMismatch


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One question. `prompt` is the text for the model, `answer` the reference, `metadata` the other data for scoring.

    A dataset need not set `prompt`: `data.prompt_template` makes it from question and metadata. If there are
    `messages`, the model gets them in its chat template instead, and `prompt` shows them as one text. `row` is the
    task's number in its dataset, from 1, which errors name. It is 0 for a task that is not from a dataset. `part` is
    the name of the task's part of `data.mixture`, or `eval/NAME` for a task of `eval.sets`; otherwise empty.
    `generation_prompt` is the text with which the chat template begins the model's answer, for example
    `<|im_start|>assistant\n<think>\n`: a completion continues this text. It is set before the completion is scored.
    Until then, and without a template, it is empty.
    """

    question: str
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str
    metadata: dict[str, Any] = {}
    row: int = 0
    part: str = ""
    generation_prompt: str = ""

    @property
    def input(self) -> "str | tuple[Message, ...]":
        """The prompt for the model: the messages if there are any, else the text."""
        return self.messages or self.prompt


class PromptCursor(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a `PromptSource`: the number of prompts that it has issued, and a hash of its tasks and of the
    weights of its mixture."""

    issued: int
    fingerprint: str


class PromptData(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the training prompts of a deployment, by which they are compared with the prompts of its run.

    `source` names the dataset of the prompts and the machine, for errors. `rows` has `ROW_BYTES` bytes of a hash of
    each task, in order: they show where two datasets differ.
    """

    source: str
    fingerprint: str
    rows: bytes


ROW_BYTES = 4


def prompt_data(tasks: Sequence[Task], *, source: str) -> PromptData:
    """Returns the hashes of the prompts of `tasks`, in this order. `source` is described in `PromptData`."""
    return PromptData(
        source=source,
        fingerprint=fingerprint(tasks),
        rows=b"".join(xxhash.xxh3_64_digest(_whole(task))[:ROW_BYTES] for task in tasks),
    )


def _whole(task: Task) -> bytes:
    """Returns the data that hashes of a task cover: its prompt, messages, answer and metadata, as JSON. The numbers of
    rows and the names of parts are not in it."""
    whole = (task.prompt, task.messages, task.answer, task.metadata)
    return msgspec.json.encode(whole, order="deterministic")


_SCALAR = (str, int, float, bool)


def _fields_of(task: Task) -> dict[str, Any]:
    """Returns the fields of a task that `data.prompt_template` may use: the question and the scalar metadata."""
    scalar = {name: value for name, value in task.metadata.items() if isinstance(value, _SCALAR)}
    return scalar | {"question": task.question}


def _has_field(task: Task, name: str) -> bool:
    """Returns whether the metadata of a task have the field `name` for `data.prompt_template`."""
    return isinstance(task.metadata.get(name), _SCALAR)


def _names_in(template: str) -> list[str]:
    """Returns the names of the fields that a template uses. Raises ConfigError for a malformed template."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.prompt_template: {template!r} is malformed ({error}); double a literal brace"
        ) from None


def without_fields(template: str, tasks: Sequence[Task]) -> list[tuple[Task, LeftOutRow]]:
    """Returns the tasks that lack a field of the template, for example because a cell of a CSV file is empty, each with
    the reason. Tasks with messages need no template, so they are not returned. If all tasks lack a field, the template
    is wrong, and the returned list is empty. Raises ConfigError for a malformed template."""
    names = set(_names_in(template)) - {"question"}
    lacking = [(task, sorted(filterfalse(partial(_has_field, task), names))) for task in tasks] if names else []
    rows = [(task, missing) for task, missing in lacking if missing and not task.messages]
    if len(rows) == len(tasks):
        return []  # no task has all fields, so the template names a wrong one, and `format_prompt` raises the error
    why = (
        "has no value for {%s} of data.prompt_template (the key is absent or null, its value is not a text or a "
        "number, or in a CSV file the cell is empty)"
    )
    return [(task, LeftOutRow(task.row, "missing_key", why % missing[0])) for task, missing in rows]


def format_prompt(template: str, task: Task) -> str:
    """Returns the text for the model: `template` with `{question}` and the task's scalar metadata filled in.

    Only plain fields are allowed, no attributes or indices, because the metadata may come from an untrusted file.
    Raises ConfigError for a malformed template, and for a field that the task does not have or whose value does not fit
    the template's format.
    """
    fields, key, named = _fields_of(task), "data.prompt_template", f"row {task.row}" if task.row else "a task"
    for name in _names_in(template):
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {{{close[0]}}}? " if close else ""
            there = ", ".join(f"{{{field}}}" for field in sorted(fields))
            raise ConfigError(
                f"{key}: {template!r}, which this config sets, uses {{{name}}}, which a task lacks; {hint}{named} has "
                f"{there} ({{question}} is the `prompt` of a JSONL row); change the template"
            )
    try:
        return template.format_map(fields)
    except (ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{key}: {template!r} cannot format {fields} ({error})") from None


def apply_template(template: str, tasks: Sequence[Task]) -> list[Task]:
    """Returns copies of the tasks with prompts made by `format_prompt`. A task that has messages stays as it is. If
    there is such a task, raises ConfigError for any template but `{question}`."""
    if template != "{question}" and (chat := next((task for task in tasks if task.messages), None)) is not None:
        key = "data.prompt_template"
        raise ConfigError(
            f"{key}: {template!r} cannot be applied to row {chat.row}, which has messages; put the text into "
            "data.system_prompt or data.few_shot, and leave the template out"
        )
    return [
        task if task.messages else msgspec.structs.replace(task, prompt=format_prompt(template, task)) for task in tasks
    ]


def in_conversation(
    tasks: Sequence[Task], *, system_prompt: str | None, examples: Sequence[Mapping[str, str]]
) -> list[Task]:
    """Returns the tasks with `system_prompt` and the solved `examples` (`prompt` and `answer`) as messages before their
    own ones. A prompt that is a text becomes a message of the user. Raises DatasetError if a task has a system message
    of its own besides `system_prompt`."""
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
                f"row {task.row} has a message of the system, and data.system_prompt would be a second one; unset "
                "data.system_prompt"
            )
        messages = (*before, *own)
        placed.append(msgspec.structs.replace(task, messages=messages, prompt=as_text(messages)))
    return placed


def without_repeated(tasks: Sequence[Task]) -> tuple[list[Task], list[LeftOutRow]]:
    """Returns two lists: the tasks without repetitions, and the rows of the repetitions. A task is a repetition if its
    finished prompt, answer and metadata are equal to those of an earlier task. A text and a single message of the user
    with this text are the same prompt."""
    first_rows: dict[bytes, int] = {}
    kept, repeated = [], []
    for task in tasks:
        same_form = msgspec.structs.replace(task, messages=tuple(asked(task.input)))
        digest = xxhash.xxh3_128_digest(_whole(same_form))
        if digest not in first_rows:
            first_rows[digest] = task.row
            kept.append(task)
        else:
            repeated.append(LeftOutRow(task.row, "duplicate", f"is equal to row {first_rows[digest]}"))
    return kept, repeated


def asked_in(task: Task, template: str) -> tuple[str, ...]:
    """Returns the question of a task, and its other fields that `data.prompt_template` uses. Tasks that are equal in
    these count as the same question. White space around the texts does not count, as in `compared`."""
    names = {*_names_in(template)} - {"question"}
    return (task.question.strip(), *(str(task.metadata.get(name)).strip() for name in sorted(names)))


def compared(task: Task) -> str:
    """Returns the text by which a training prompt is compared with held-out prompts: the messages of the task, without
    the white space around them. Many chat templates remove this white space, so prompts that differ in nothing else are
    the same for the model."""
    return "\n".join(f"{message['role']}: {message['content'].strip()}" for message in asked(task.input))


def split(
    tasks: Sequence[Task], heldout_fraction: float, *, template: str = "{question}"
) -> tuple[list[Task], list[Task]]:
    """Splits tasks into (training, held-out) tasks, in the given order.

    A hash of the question, and of the other fields that `template` uses, decides whether a task is held out. So the
    choice depends neither on a seed nor on the other tasks, and tasks with the same question and fields are on the same
    side. A training task is left out if a held-out task has the same prompt: a template may turn two questions into one
    prompt.
    """
    threshold = round(heldout_fraction * 2**64)
    train: list[Task] = []
    heldout: list[Task] = []
    for task in tasks:
        key = "\0".join(asked_in(task, template))
        side = heldout if xxhash.xxh3_64_intdigest(key.encode()) < threshold else train
        side.append(task)
    kept_back = {compared(task) for task in heldout}
    return [task for task in train if compared(task) not in kept_back], heldout


def mixture_pattern(weights: Sequence[int]) -> list[int]:
    """Returns a block of part numbers in which part i occurs as often as its weight says, spread evenly.

    Each place of the block goes to the part that is furthest behind its share (smooth weighted round-robin).

    >>> mixture_pattern([3, 1])
    [0, 0, 1, 0]
    """
    pattern, behind = [], [0] * len(weights)
    for _ in range(sum(weights)):
        behind = [have + weight for have, weight in zip(behind, weights, strict=True)]
        chosen = behind.index(max(behind))
        behind[chosen] -= sum(weights)
        pattern.append(chosen)
    return pattern


def interleaved(parts: Sequence[Sequence[Task]], weights: Sequence[int]) -> list[Task]:
    """Returns all tasks of the parts, in the proportion of their weights as long as each part has any left."""
    left = [iter(part) for part in parts]
    pattern = cycle(mixture_pattern(weights))
    mixed: list[Task] = []
    while len(mixed) < sum(map(len, parts)):
        mixed.extend(islice(left[next(pattern)], 1))
    return mixed


class PromptSource:
    """Issues each of `tasks` once an epoch, in an order that only the seed determines.

    >>> source = PromptSource(tasks, seed=0, shuffle=True, epochs=None)
    >>> source.next()                       # a Task, or None after `epochs` epochs
    >>> cursor = source.state()             # goes into a checkpoint
    >>> PromptSource(tasks, seed=0, shuffle=True, epochs=None).restore(cursor)   # continues with the next task

    With `weights` by the names of parts (`data.mixture`), it issues the parts' tasks in the pattern of
    `mixture_pattern`, each part in its own order and epochs. It ends when a part has finished its last epoch and would
    be next.

    `seed` is that of the run. A source stores no shuffled list: an epoch's order is a keyed permutation, computed for
    one position at a time.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        weights = weights or {"": 1}
        self._tasks, self._names, self._weights = tasks, list(weights), list(weights.values())
        self._parts = [[task for task in tasks if task.part == name] for name in weights]
        for name, part in zip(weights, self._parts, strict=True):
            if not part:
                raise DatasetError(
                    f"{f'data.mixture.{name}' if name else 'the dataset'} has no training prompts; check data.dataset "
                    "and data.heldout_fraction"
                )
        pattern = mixture_pattern(self._weights)
        self._places = [(part, pattern[:place].count(part)) for place, part in enumerate(pattern)]
        self.seed = seed
        self._shuffle = shuffle
        self.total = None if epochs is None else self._end_of(epochs)
        """The number of prompts that are issued in all epochs; None without an end."""
        self._data = fingerprint(tasks)
        self._fingerprint = self._data if self._names == [""] else _mixed(self._data, weights)
        self._issued = 0

    def _end_of(self, epochs: int) -> int:
        """Returns the number of prompts that are issued before any part would begin an epoch beyond `epochs`."""
        ends = []
        for part, tasks in enumerate(self._parts):
            block, rank = divmod(len(tasks) * epochs, self._weights[part])
            ends.append(block * len(self._places) + self._places.index((part, rank)))
        return min(ends)

    def next(self) -> Task | None:
        """Returns the next task, or None when all epochs are over."""
        if self.total is not None and self._issued >= self.total:
            return None
        self._issued += 1
        return self.task(self._issued - 1)

    def task(self, number: int) -> Task:
        """Returns the task that was or will be issued as number `number`, from 0 on."""
        block, place = divmod(number, len(self._places))
        part, rank = self._places[place]
        tasks, name = self._parts[part], self._names[part]
        epoch, position = divmod(block * self._weights[part] + rank, len(tasks))
        if self._shuffle:
            key = f"{self.seed}/{name}/{epoch}" if name else f"{self.seed}/{epoch}"
            position = _permuted(position, size=len(tasks), key=key)
        return tasks[position]

    def state(self) -> PromptCursor:
        """Returns the cursor from which `restore` continues after the last issued task."""
        return PromptCursor(issued=self._issued, fingerprint=self._fingerprint)

    def restore(self, cursor: PromptCursor) -> None:
        """Continues from `cursor`. Raises DatasetError for a negative cursor, and for the cursor of another dataset or
        mixture, in which the same number means another prompt."""
        if cursor.fingerprint != self._fingerprint:
            raise DatasetError(
                f"the checkpoint's prompts ({cursor.fingerprint}) are not those of this dataset ({self._fingerprint}); "
                "restore the data and the settings data.* and environment.* of the run's start, or start a new run"
            )
        if cursor.issued < 0:
            raise DatasetError(f"cursor {cursor} is negative: the checkpoint is damaged; resume from an earlier one")
        self._issued = cursor.issued

    def check_same(self, others: PromptData) -> None:
        """Raises RunMismatch if `others`, the prompts of another deployment, are not these prompts in this order."""
        if others.fingerprint == self._data:
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
    """Returns a hash of the tasks in their order: of prompts, answers, metadata and names of parts. Equal datasets have
    equal hashes."""
    digest = xxhash.xxh3_64()
    for task in tasks:
        for data in (_whole(task), task.part.encode()):
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _mixed(data: str, weights: Mapping[str, int]) -> str:
    """Returns the hash of a mixture, from the hash `data` of its tasks and from its weights. Both determine the order
    of the prompts."""
    return xxhash.xxh3_64_hexdigest(f"{data} {list(weights.items())}".encode())


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
