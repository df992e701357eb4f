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
    assert (len(tasks), tasks[9].metadata) == (10, {"level": 9})


def test_a_folder_of_files_and_a_part_of_a_split_are_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
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
