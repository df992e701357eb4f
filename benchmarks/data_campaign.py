"""Compares what the reward gets with what a file has, for random small datasets, row by row.

    python benchmarks/data_campaign.py --datasets 200

A dataset is a file of one of the kinds in `KINDS`, with random columns, values, types, nulls, duplicates, encodings and
settings, that the seed determines (`random_datasets.py`). Each row must be a task whose question, answer and metadata
are those of the file, as they arrive in a scoring process; or it must be left out with a reason that holds; or the
dataset must be refused for a row that is bad. Everything else is a difference. Takes a minute.
`tests/benchmarks/test_data_campaign.py` runs some datasets.
"""

import argparse
import logging
import math
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from random_datasets import KINDS, Dataset, made

from asyncrl.config.schema import Config
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import build_tasks
from asyncrl.environments.scoring_messages import Group, Request, encode
from asyncrl.errors import ConfigError, DatasetError


@dataclass(kw_only=True)
class Finding:
    """What was found for a dataset. `refused` is the error, if it was refused; `differences` should be empty."""

    seed: int
    kind: str
    rows: int = 0
    tasks: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    refused: str = ""
    differences: list[str] = field(default_factory=list)


def same(left: object, right: object) -> bool:
    """Returns whether two values are equal and have the same types, also inside of lists and objects."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


@dataclass(kw_only=True)
class Wanted:
    """What the reward must get for a row; `bad` is why the row is a bad one, if it is."""

    question: str = ""
    prompt: object = None
    answer: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    bad: str = ""


def wanted(row: Any, data: Mapping[str, Any]) -> Wanted:
    """Returns what the reward must get for a row, by the documented rules."""
    if not isinstance(row, dict):
        return Wanted(bad="not an object")
    names = {"prompt": "prompt", "answer": "answer"} | data.get("columns", {})
    prompt, answer = row.get(names["prompt"]), row.get(names["answer"])
    metadata = {name: value for name, value in row.items() if name not in names.values()}
    metadata = {name: value for name, value in metadata.items() if not (name == "messages" and value is None)}
    if prompt is None:
        return Wanted(bad="no prompt")
    question = prompt
    if isinstance(prompt, list):
        if prompt[-1]["role"] == "assistant":
            answer = prompt[-1]["content"] if answer is None else answer
            prompt = prompt[:-1]
        question = "\n".join(f"{each['role']}: {each['content']}" for each in prompt)
        question = prompt[0]["content"] if len(prompt) == 1 else question
    if not isinstance(question, str):
        return Wanted(bad="a prompt of another type")
    if not question.strip():
        return Wanted(bad="a blank prompt")
    if answer is None:
        return Wanted(bad="no answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return Wanted(bad="an answer of another type")
    if not _is_json(metadata):
        return Wanted(bad="metadata that JSON does not have")
    finished: object = prompt
    if isinstance(prompt, str):
        fields = {name: value for name, value in metadata.items() if isinstance(value, str | int | float)}
        try:
            finished = data.get("prompt_template", "{question}").format_map({**fields, "question": prompt})
        except KeyError as error:
            return Wanted(bad=f"no field {error}")
    return Wanted(question=question, prompt=finished, answer=str(answer), metadata=metadata)


def received(task: Task) -> Task:
    """Returns the task as a scoring process gets it."""
    request = Request(id=0, groups=(Group(task=task, completions=("",)),))
    return msgspec.json.decode(encode(request), type=Request).groups[0].task


def compared(seed: int, folder: Path) -> Finding:
    """Makes the dataset of a seed, reads it as a run does, and compares."""
    dataset = made(seed, folder)
    finding = Finding(seed=seed, kind=dataset.kind, rows=len(dataset.rows))
    left_out: dict[str, list[LeftOutRow]] = {}
    wants = [wanted(row, dataset.data) for row in dataset.rows]
    try:
        train, heldout = build_tasks(Config.model_validate({"data": dataset.data}), left_out=left_out)
    except (DatasetError, ConfigError) as error:
        finding.refused = str(error)
        finding.differences += _wrong_refusal(str(error), dataset, wants)
        return finding
    tasks = {task.row: received(task) for task in (*train, *heldout)}
    out = {each.row: each for each in left_out.get("", [])}
    finding.tasks, finding.left_out = len(tasks), Counter(each.reason for each in out.values())
    numbers = range(1, len(wants) + 1)
    if len(tasks) != len(train) + len(heldout) or sorted([*tasks, *out]) != [*numbers]:
        finding.differences.append(f"rows {sorted(set(numbers) ^ {*tasks, *out})[:9]} are not accounted for once")
    held = {task.prompt for task in heldout}
    for number, want in zip(numbers, wants, strict=True):
        if number in tasks:
            finding.differences += [f"row {number}: {each}" for each in _unlike(tasks[number], want)]
        elif number in out:
            reason = out[number].reason
            if not _holds(reason, number, wants, held=held):
                finding.differences.append(f"row {number} is left out as {reason}, but {want}")
    return finding


def _unlike(task: Task, want: Wanted) -> Iterator[str]:
    if want.bad:
        yield f"is a task, but has {want.bad}: {task}"
        return
    prompt: object = [dict(each) for each in task.messages] if isinstance(want.prompt, list) else task.prompt
    for name, got, has in (
        ("question", task.question, want.question),
        ("prompt", prompt, want.prompt),
        ("answer", task.answer, want.answer),
        ("metadata", task.metadata, want.metadata),
    ):
        if not same(got, has):
            yield f"the reward gets the {name} {got!r}, but the file has {has!r}"


def _holds(reason: str, number: int, wants: Sequence[Wanted], *, held: set[str]) -> bool:
    """Returns whether the reason holds for which a row is left out."""
    want = wants[number - 1]
    if reason == "duplicate":
        return not want.bad and any(same(_key(other), _key(want)) for other in wants[: number - 1])
    if reason == "held_out":
        return not want.bad and want.prompt in held
    return bool(want.bad)


def _key(want: Wanted) -> list[Any]:
    return [want.bad, want.prompt, want.answer, want.metadata]


def _wrong_refusal(error: str, dataset: Dataset, wants: Sequence[Wanted]) -> Iterator[str]:
    """Yields why a refusal is wrong: the file can be read, and the row that it names is good."""
    bad = [number for number, want in enumerate(wants, start=1) if want.bad]
    if not dataset.readable:
        if not re.search(r"utf|codec|JSON|encod", error, re.IGNORECASE):
            yield f"the file is in another encoding, but the error does not say so: {error}"
    elif not bad and "remains for training" not in error:
        yield f"is refused, but each row is good: {error}"
    elif (named := re.search(r"[,;] row (\d+)", error)) and int(named[1]) not in bad:
        yield f"names row {named[1]}, which is good: {error}"
    elif not named and "remains for training" not in error and "a task lacks" not in error:
        yield f"names no row: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = str(Path(folder) / "cache")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.datasets):
            place = Path(folder) / str(seed)
            place.mkdir()
            findings.append(compared(seed, place))
    for kind in KINDS:
        of_kind = [each for each in findings if each.kind == kind]
        out = sum((each.left_out for each in of_kind), Counter[str]())
        refused, rows, tasks = (
            sum(numbers)
            for numbers in zip(*[(bool(each.refused), each.rows, each.tasks) for each in of_kind], strict=True)
        )
        print(
            f"{kind}: {len(of_kind)} datasets, {refused} refused, {rows} rows, {tasks} tasks, left out {dict(out)}, "
            f"{sum(len(each.differences) for each in of_kind)} differences"
        )
    for each in findings:
        for difference in each.differences:
            print(f"seed {each.seed} ({each.kind}): {difference[:400]}")
    sys.exit(any(each.differences for each in findings))


if __name__ == "__main__":
    main()
