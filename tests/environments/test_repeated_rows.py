"""Rows that share a question are all kept unless they are equal, in each kind of dataset."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.data.left_out import REASONS, LeftOutRow, counts
from asyncrl.environments.interfaces import build_sets, build_tasks
from asyncrl.errors import ConfigError, DatasetError

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


def spaced(first: int, count: int, space: str) -> Iterator[dict[str, Any]]:
    for number in range(first, first + count):
        yield {"prompt": f"{space}q{number}", "answer": ""}


@pytest.mark.parametrize("space", ["\n", " ", "\t\u3000"])
def test_parts_and_held_out_sets_share_no_prompt_that_differs_in_white_space_around_it(space: str) -> None:
    def data(**options: Any) -> dict[str, Any]:
        return {"dataset": f"{HERE}:spaced", "options": options}

    parts = [
        {"name": "a", "data": data(first=0, count=100, space="") | {"heldout_fraction": 0.3}},
        {"name": "b", "data": data(first=50, count=200, space=space) | {"heldout_fraction": 0}},
    ]
    more = {"data": data(first=200, count=100, space=""), "prompts": 4}
    config = Config.model_validate({"data": {"mixture": parts}, "eval": {"sets": {"more": more}}})
    train, heldout = build_tasks(config)
    trained = {task.prompt.strip() for task in train}
    assert len(heldout) > 20
    assert not trained & {task.prompt.strip() for task in heldout}
    assert [task.prompt for task in build_sets(config, train=train)["more"]] == [f"q{n}" for n in range(250, 300)]


GAPS = {
    "csv": "prompt,answer,unit\na,1,m\nb,2,\nc,3,s\nd,4,\n",
    "jsonl": "\n".join(
        json.dumps(row)
        for row in (
            {"prompt": "a", "answer": "1", "unit": "m"},
            {"prompt": "b", "answer": "2", "unit": None},
            {"prompt": "c", "answer": "3", "unit": 0},
            {"prompt": "d", "answer": "4"},
        )
    ),
    "json": json.dumps(
        [{"prompt": p, "answer": p, "unit": u} for p, u in zip("abcd", ["m", None, "s", None], strict=True)]
    ),
}


@pytest.mark.parametrize("kind", GAPS)
@pytest.mark.parametrize("template", ["{question} [{unit}]", "{unit}", "{question}{unit}{unit}"])
def test_a_row_without_a_value_for_the_template_is_named_or_skipped_and_counted(
    kind: str, template: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_text(GAPS[kind])
    data = {"dataset": "jsonl" if kind == "jsonl" else "hf", "path": path, "prompt_template": template}
    data |= {"heldout_fraction": 0}
    with pytest.raises(DatasetError, match=r"row 2: has no value for \{unit\}.*data\.on_bad_row: skip \(missing_key\)"):
        build_tasks(Config.model_validate({"data": data}))
    left_out: dict[str, list[LeftOutRow]] = {}
    train, _ = build_tasks(Config.model_validate({"data": data | {"on_bad_row": "skip"}}), left_out=left_out)
    assert [task.row for task in train] == [1, 3]
    assert [each.row for each in left_out[""]] == [2, 4]
    assert counts(left_out) == {"": {"missing_key": 2}}


def test_a_field_that_no_row_has_is_a_mistake_of_the_template(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(GAPS["csv"])
    data = {"dataset": "hf", "path": tmp_path / "rows.csv", "prompt_template": "{units}", "on_bad_row": "skip"}
    with pytest.raises(ConfigError, match=r"uses \{units\}, which a task lacks; did you mean \{unit\}"):
        build_tasks(Config.model_validate({"data": data}))


def parts_rows(first: int, count: int) -> Iterator[dict[str, Any]]:
    for number in range(first, first + count):
        yield {"prompt": f"q{number % 90}", "answer": str(number % 90)}
    yield {"prompt": " ", "answer": ""}


def test_every_row_of_every_part_is_a_task_or_left_out_with_a_reason() -> None:
    sizes = {"a": (0, 100), "b": (50, 60)}
    rows_of = dict.fromkeys(sizes, f"{HERE}:parts_rows")
    parts = [
        {
            "name": name,
            "data": {"dataset": rows_of[name], "options": {"first": first, "count": count}}
            | {"on_bad_row": "skip", "heldout_fraction": 0.3 if name == "a" else 0.6},
        }
        for name, (first, count) in sizes.items()
    ]
    config = Config.model_validate(
        {
            "data": {"mixture": parts},
            "eval": {"sets": {"more": {"data": parts[0]["data"] | {"heldout_fraction": 0.1}, "prompts": 4}}},
        }
    )
    left_out: dict[str, list[LeftOutRow]] = {}
    train, heldout = build_tasks(config, left_out=left_out)
    sets = build_sets(config, train=train, left_out=left_out)
    for name, (_, count) in sizes.items():
        used = [task.row for task in (*train, *heldout) if task.part == name]
        assert sorted([*used, *(each.row for each in left_out[name])]) == [*range(1, count + 2)]
    assert {each.reason for each in left_out["a"]} == {"duplicate", "blank", "held_out"}
    used = [task.row for task in sets["more"]]
    assert sorted([*used, *(each.row for each in left_out["eval/more"])]) == [*range(1, 102)]
    assert counts(left_out)["eval/more"]["trained"] > 0
    assert {each.reason for rows in left_out.values() for each in rows} <= REASONS.keys()
