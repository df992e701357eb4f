"""Datasets that the library `datasets` reads. No request goes to the Hub: all are files that the tests write."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from asyncrl.config.schema import Config
from asyncrl.data.hugging_face import hugging_face_rows
from asyncrl.environments.interfaces import build_tasks, read_tasks
from asyncrl.errors import DatasetError

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.slow

ROWS = [{"question": f"{n}+{n}=", "solution": 2 * n, "level": n} for n in range(10)]


def written(folder: Path, end: str) -> Path:
    data, path = datasets.Dataset.from_list(ROWS), folder / f"rows{end}"
    match end:
        case ".parquet":
            data.to_parquet(path)
        case ".jsonl":
            data.to_json(path)
        case ".csv":
            data.to_csv(path)
        case "":
            data.save_to_disk(path)
        case "/splits":
            path = folder / "splits"
            datasets.DatasetDict({"train": data, "test": data.select([3])}).save_to_disk(path)
    return path


def config(path: Path | str, **data: Any) -> Config:
    columns = {"prompt": "question", "answer": "solution"}
    section = {"dataset": "hf", "path": str(path), "columns": columns, "heldout_fraction": 0} | data
    return Config.model_validate({"data": section})


@pytest.mark.parametrize("end", [".parquet", ".jsonl", ".csv", "", "/splits"])
def test_files_of_each_format_become_tasks(end: str, tmp_path: Path) -> None:
    tasks = read_tasks(config(written(tmp_path, end)))
    assert [(task.prompt, task.answer, task.row) for task in tasks[:2]] == [("0+0=", "0", 1), ("1+1=", "2", 2)]
    assert (len(tasks), tasks[9].metadata) == (10, {"level": "9" if end == ".csv" else 9})


CELLS = [
    "007",
    "1.50",
    "TRUE",
    "null",
    "1" * 23,
    "NA",
    "1e5",
    "-0",
    "2024-01-02",
    "0x1F",
    " 7",
    "+3",
    "inf",
    "1,000",
    "None",
]


@pytest.mark.parametrize("cell", CELLS)
def test_each_cell_of_a_csv_file_is_a_text(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'question,solution,id\na,"{cell}","{cell}"\nb,"{cell}","{cell}"\n')
    for found in (config(path), config("csv", options={"data_files": str(path)})):
        tasks = read_tasks(found)
        assert [task.answer for task in tasks] == [cell, cell]
        assert [task.metadata for task in tasks] == [{"id": cell}, {"id": cell}]


def test_a_block_of_numbers_between_words_keeps_its_zeros(tmp_path: Path) -> None:
    cells = ["word"] * 10_000 + [f"00{number}" for number in range(10_000)] + ["word"]
    lines = [f"q{number},{cell}" for number, cell in enumerate(cells)]
    (tmp_path / "rows.csv").write_text("\n".join(["question,solution", *lines]))
    assert [task.answer for task in read_tasks(config(tmp_path / "rows.csv"))] == cells


def test_an_empty_cell_of_a_csv_file_is_a_missing_value_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('question;solution;level;never\na;1;2;\nb;3;;\nc;"";4;\n')
    rows = list(hugging_face_rows(str(tmp_path), subset=None, split="train", options={"sep": ";"}))
    assert [(row["solution"], row["level"], row["never"]) for row in rows] == [
        ("1", "2", None),
        ("3", None, None),
        (None, "4", None),
    ]


@pytest.mark.parametrize("row", ["1+1=,2,", "1+1=,2,3"])
def test_a_csv_file_with_more_cells_than_columns_is_refused_and_not_shifted(row: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"question,solution\n{row}\n")
    with pytest.raises(DatasetError, match=r"more cells than the 2 columns of its header \(question, solution\)"):
        read_tasks(config(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("separator", "option"), [(";", '{delimiter: ";"}'), ("\t", '{delimiter: "\\t"}'), ("|", '{delimiter: "|"}')]
)
def test_another_separator_of_a_csv_file_is_named_with_its_option(separator: str, option: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"question{separator}solution\n1, 2 or 3{separator}1\n")
    with pytest.raises(DatasetError) as refused:
        read_tasks(config(path))
    assert f"data.options: {option}" in str(refused.value)
    assert [task.answer for task in read_tasks(config(path, options={"delimiter": separator}))] == ["1"]


@pytest.mark.parametrize(
    ("header", "twice"), [("question,solution,solution", "solution"), ("question,solution,a,b,a,b,a", "a, b")]
)
def test_a_csv_header_with_a_name_twice_is_refused(header: str, twice: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n{header}\n")
    with pytest.raises(DatasetError, match=f"its header has {twice} more than once"):
        read_tasks(config(path))
    path.write_text("question,solution,solution.1\na,1,2\n")
    assert [task.metadata for task in read_tasks(config(path))] == [{"solution.1": "2"}]


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        ("question,solution\nö,1\n".encode("latin-1"), "data.options: {encoding: latin-1}"),
        (b'question,solution\na,1\nb, "x, y"\n', "set data.options: {skipinitialspace: true}"),
        (b'question,solution\na,"1\n', "look at the quotes"),
        (b"question,solution\na,1\nb,2,3,4\n", "the number of cells of that line"),
    ],
)
def test_a_csv_file_that_cannot_be_read_says_once_why_and_what_to_try(
    content: bytes, advice: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DatasetError) as refused:
        read_tasks(config(path))
    assert advice in str(refused.value)
    assert str(refused.value).count("Error tokenizing data") <= 1


def test_csv_files_with_other_columns_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,solution\na,1\n")
    (tmp_path / "b.csv").write_text("solution,question\n2,b\n")
    assert [task.answer for task in read_tasks(config(tmp_path))] == ["1", "2"]
    (tmp_path / "b.csv").write_text("solution,question,level\n2,b,3\n")
    with pytest.raises(DatasetError, match=r"b\.csv: has the columns solution, question, level, but"):
        read_tasks(config(tmp_path))


@pytest.mark.fault("F33")
def test_the_error_of_a_broken_file_says_its_cause(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,solution\na,1\nb,2,3,4\n")
    with pytest.raises(DatasetError, match="Expected 2 fields in line 3, saw 4"):
        read_tasks(config(tmp_path / "rows.csv"))


def test_a_folder_of_files_and_a_part_of_a_split_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row | {"file": name}) for row in ROWS))
    assert len(read_tasks(config(tmp_path))) == 20
    assert len(read_tasks(config(tmp_path, split="train[:3]"))) == 3
    assert len(read_tasks(config(tmp_path), first=2)) == 2


def test_a_conversation_is_read_with_its_messages(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
    datasets.Dataset.from_list([{"messages": chat}]).to_parquet(tmp_path / "chat.parquet")
    [task] = build_tasks(config(tmp_path / "chat.parquet", columns={}, system_prompt="Be brief."))[0]
    assert [each["content"] for each in task.messages] == ["Be brief.", "2+2="]
    assert task.answer == "4"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "absent.parquet"}, r"data\.path = absent\.parquet: there is no such file; name a file"),
        ({"path": "absent/dataset"}, r"data\.path = absent/dataset, .*: cannot be read"),
        ({"split": "validation", "path": "splits"}, r"data\.split = validation: the dataset has train, test"),
        ({"path": "mixed"}, r"needs files of one format.*found \.csv, \.jsonl"),
        ({"path": "none"}, r"needs files of one format.*found none"),
        ({"path": "notes.txt"}, r"needs files of one format.*found \.txt"),
    ],
)
@pytest.mark.fault("F33")
def test_a_dataset_that_cannot_be_read_names_its_settings(
    data: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (datasets.config, constants):  # the libraries read the variable of the same name on import only
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    written(tmp_path, "/splits")
    (tmp_path / "none").mkdir()
    (tmp_path / "mixed").mkdir()
    for name in ("mixed/a.csv", "mixed/b.jsonl", "notes.txt"):
        (tmp_path / name).write_text("x")
    with pytest.raises(DatasetError, match=message):
        read_tasks(config(**({"path": "splits"} | data)))


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"pip install 'asyncrl\[hf\]'"):
        hugging_face_rows("x", subset=None, split="train", options={})
