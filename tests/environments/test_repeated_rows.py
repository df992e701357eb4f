"""Rows that share a question are all kept unless they are equal, in each kind of dataset."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.environments.interfaces import build_tasks

HERE = __name__
SHARED: dict[str, list[dict[str, Any]]] = {
    "other field of the template": [{"prompt": "Translate", "input": word, "answer": "x"} for word in "abcd"],
    "other answer": [{"prompt": "Name a prime", "input": "", "answer": str(prime)} for prime in (2, 3, 5, 7)],
    "other metadata": [{"prompt": "Play", "input": "", "answer": "", "game": game} for game in range(4)],
    "nested metadata": [{"prompt": "Sum", "input": "", "answer": "", "game": {"a": [n]}} for n in range(4)],
}


def rows(kind: str) -> Iterator[dict[str, Any]]:
    yield from SHARED[kind]
    yield dict(reversed(SHARED[kind][1].items()))


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("dataset", ["own", "jsonl"])
def test_only_equal_rows_are_left_out_and_counted(
    kind: str, dataset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data: dict[str, Any] = {"dataset": f"{HERE}:rows", "options": {"kind": kind}}
    if dataset == "jsonl":
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows(kind)))
        data = {"dataset": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    data |= {"prompt_template": "{question}: {input}", "heldout_fraction": 0, "drop_last": False}
    train, _ = build_tasks(Config.model_validate({"data": data}))
    assert [task.row for task in train] == [1, 2, 3, 4]
    assert "skipped 1 rows (1 duplicate)" in caplog.text


def shared_prompts() -> Iterator[dict[str, Any]]:
    for number in range(400):
        yield {"prompt": f"q{number % 7}", "input": f"i{number % 50}", "answer": str(number)}


@pytest.mark.parametrize("template", ["{question}", "{question}: {input}", "{input}", "{question}{input}"])
def test_held_out_and_training_rows_share_no_prompt(template: str, caplog: pytest.LogCaptureFixture) -> None:
    data = {"dataset": f"{HERE}:shared_prompts", "prompt_template": template, "heldout_fraction": 0.15}
    train, heldout = build_tasks(Config.model_validate({"data": data}))
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}
    left_out = 400 - len(train) - len(heldout)
    assert (f"left out {left_out} training rows whose prompt is held out" in caplog.text) == (left_out > 0)
