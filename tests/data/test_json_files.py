"""Values of JSON files keep their types, and rows their keys, whatever other rows of the file have."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.data.hugging_face import hugging_face_rows
from asyncrl.data.rows import BadRow, jsonl_rows
from asyncrl.environments.interfaces import build_tasks
from asyncrl.errors import DatasetError

MIXED: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "1", "value": 7, "tests": {"in": 1}},
    {"prompt": "b", "answer": "2", "value": 2**63, "tests": {"out": None}},
    {"prompt": "c", "answer": "3", "value": -0.0, "tests": [1, "2", 3.0]},
    {"prompt": "d", "answer": "4", "value": "2024-01-02 03:04:05", "tests": None},
    {"prompt": "e", "answer": "5", "value": 10**30},
    {"prompt": "f", "answer": "6", "value": True, "tests": {"in": 1.0}},
]


def lines(rows: list[Any]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


FORMS = {
    "list.json": json.dumps(MIXED),
    "indented.json": json.dumps(MIXED, indent=2),
    "lines.json": lines(MIXED),
    "lines.jsonl": lines(MIXED) + "\n\n",
    "list.jsonl": json.dumps(MIXED),
    "field.json": json.dumps({"version": 1, "data": MIXED}),
}


def rows(path: Path, *, split: str = "train", **options: Any) -> list[Any]:
    return list(hugging_face_rows(str(path), subset=None, split=split, options=options))


@pytest.mark.parametrize("form", FORMS)
def test_values_keep_their_types_and_rows_their_keys(form: str, tmp_path: Path) -> None:
    path = tmp_path / form
    path.write_text(FORMS[form])
    found = rows(path, **({"field": "data"} if form == "field.json" else {}))
    assert repr(found) == repr(MIXED)
    if form != "field.json":
        config = Config.model_validate({"data": {"dataset": "hf", "path": path, "heldout_fraction": 0}})
        kept = [repr(task.metadata) for task in build_tasks(config)[0]]
        assert kept == [repr({name: row[name] for name in row if name not in ("prompt", "answer")}) for row in MIXED]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
@pytest.mark.parametrize("form", ["rows.json", "rows.jsonl"])
def test_files_are_read_in_their_encoding_or_refused_with_the_option(form: str, encoding: str, tmp_path: Path) -> None:
    given = [{"prompt": "é\u2028ü", "answer": "ß"}]
    text = lines(given) if form == "rows.jsonl" else json.dumps(given, ensure_ascii=False)
    if encoding in ("latin-1", "cp1252"):
        given, text = [{"prompt": "éü", "answer": "ß"}], text.replace("\u2028", "")
    path = tmp_path / form
    path.write_bytes(text.encode(encoding))
    assert rows(path, encoding=encoding) == given
    if encoding.startswith("utf-8"):
        assert rows(path) == given
        return
    with pytest.raises(DatasetError, match=r"is not in the encoding utf-8 .*data\.options\.encoding"):
        rows(path)


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_a_byte_order_mark_is_not_a_part_of_the_first_row(prefix: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(prefix + lines(MIXED).encode())
    assert repr([*jsonl_rows(path)]) == repr(MIXED)
    later = tmp_path / "later.jsonl"
    later.write_bytes(lines(MIXED[:1]).encode() + b"\n" + prefix + lines(MIXED[1:2]).encode())
    assert isinstance([*jsonl_rows(later)][1], BadRow) is bool(prefix)


@pytest.mark.parametrize(
    ("split", "numbers"),
    [("train[:2]", [0, 1]), ("train[4:]", [4, 5]), ("train[:50%]", [0, 1, 2]), ("train[5:]+train[:1]", [5, 0])],
)
def test_a_part_of_a_file_is_taken(split: str, numbers: list[int], tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(MIXED[:4]))
    (tmp_path / "b.json").write_text(json.dumps(MIXED[4:]))
    assert repr(rows(tmp_path, split=split)) == repr([MIXED[number] for number in numbers])


def test_a_bad_line_is_a_bad_row_and_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines(MIXED[:1]) + "\n{bad\n" + lines(MIXED[1:2]))
    first, bad, second = rows(path)
    assert (first, second) == (MIXED[0], MIXED[1])
    assert isinstance(bad, BadRow)
    assert bad.reason == "bad_json"
    for text, words in (
        ("[{bad", "neither JSON nor JSON Lines"),
        ("7", "has a value of type int"),
        ("", "neither JSON"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DatasetError, match=f"bad\\.json: .*{words}"):
            rows(tmp_path / "bad.json")
    with pytest.raises(DatasetError, match=r"data\.options\.field = x: the file has no such key"):
        rows(_written(tmp_path, MIXED), field="x")


def _written(folder: Path, value: Any) -> Path:
    path = folder / "value.json"
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": ["a", "b"], "answer": ["1", 2]}, [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 2}]),
        (["a", "b"], [{"text": "a"}, {"text": "b"}]),
        ([{"prompt": "a", "answer": float("inf")}], [{"prompt": "a", "answer": float("inf")}]),
        ([{"prompt": "a"}, 7], [{"prompt": "a"}, 7]),
    ],
    ids=["columns", "texts", "infinite", "number"],
)
def test_other_forms_of_documents_have_rows_too(value: Any, expected: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text(json.dumps(value, indent=1))
    assert rows(path) == expected
