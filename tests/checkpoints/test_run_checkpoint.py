"""The directory of a run's checkpoint: complete and verified, or not used."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import asyncrl
from asyncrl.checkpoints import directory
from asyncrl.checkpoints.directory import (
    SCHEMA,
    RunManifest,
    complete_steps,
    folder_of,
    newest,
    put_back,
    verified,
    write,
)
from asyncrl.common.version import Lineage, Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.errors import CheckpointDamaged, CheckpointIncomplete, CheckpointOfOtherFormat


def manifest(step: int) -> RunManifest:
    lineage = Lineage().child(Version(1, 2))
    return RunManifest(
        nonce="n", version=Version(2, step), lineage=lineage, settings={"learner.lr": 1e-3}, packages={"torch": "2"}
    )


def fill(path: Path) -> None:
    (path / "rows").mkdir()
    (path / "rows" / "a").write_bytes(b"rows")
    (path / "buffer.msgpack").write_bytes(b"buffer" * 100)


def saved(tmp_path: Path, *steps: int) -> None:
    for step in steps:
        write(folder_of(tmp_path, step), manifest(step), fill=fill)


def test_the_newest_checkpoint_is_found_with_its_manifest(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere") is None
    saved(tmp_path, 9, 10)
    (tmp_path / "step-11.tmp").mkdir()
    found = newest(tmp_path)
    assert found is not None
    path, read = found
    assert path == tmp_path / "step-10"
    assert sorted(read.files) == ["buffer.msgpack", "rows/a"]
    assert msgspec.structs.replace(read, files={}) == manifest(10)


@pytest.mark.fault("F7")
@pytest.mark.parametrize("at", ["fill", "manifest", "finish", "publish"])
def test_a_save_that_ends_at_any_point_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    saved(tmp_path, 9)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    targets = {"manifest": (directory, "write_atomically"), "finish": (directory.complete_directory, "finish")}
    targets["publish"] = (directory.complete_directory, "publish")
    if at in targets:
        monkeypatch.setattr(*targets[at], killed)
    with pytest.raises(KeyboardInterrupt):
        write(folder_of(tmp_path, 10), manifest(10), fill=killed if at == "fill" else fill)
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "step-9"
    saved(tmp_path, 10)
    assert verified(tmp_path / "step-10").version == Version(2, 10)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.fault("F7")
@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda path: flipped(path / "buffer.msgpack"), "buffer.msgpack"),
        (lambda path: flipped(path / "rows" / "a"), "rows/a"),
        (lambda path: (path / "manifest.json").write_text("{" + " " * ((path / "manifest.json").stat().st_size - 1)),
         "manifest.json"),
        (lambda path: (path / "buffer.msgpack").write_bytes(b"short"), "buffer.msgpack"),
        (lambda path: (path / "rows" / "a").unlink(), "rows/a"),
        (lambda path: (path / COMPLETE).write_text("{"), COMPLETE),
    ],
    ids=["buffer", "rows", "manifest", "short", "gone", "marker"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], names: str
) -> None:
    saved(tmp_path, 9, 10)
    damage(tmp_path / "step-10")
    with pytest.raises(CheckpointDamaged, match=names):
        verified(tmp_path / "step-10")
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "step-9"
    assert names in caplog.text


def test_a_disk_that_cannot_be_read_damages_only_the_checkpoint_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 9, 10)
    opened = directory.opened

    def failing(path: Path, **options: Any) -> Any:
        if "step-10" in path.parts and path.name == "buffer.msgpack":
            raise OSError(5, "Input/output error")
        return opened(path, **options)

    monkeypatch.setattr(directory, "opened", failing)
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "step-9"
    assert "buffer.msgpack cannot be read" in caplog.text


@pytest.mark.fault("F7")
def test_a_checkpoint_is_found_that_was_being_replaced_when_its_save_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 10)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 10)
    monkeypatch.undo()
    assert not (tmp_path / "step-10").exists()
    assert complete_steps(tmp_path) == [10]
    assert newest(tmp_path) == (tmp_path / "step-10.replaced", verified(tmp_path / "step-10.replaced"))
    put_back(tmp_path)
    assert newest(tmp_path) == (tmp_path / "step-10", verified(tmp_path / "step-10"))
    assert (tmp_path / "step-10" / COMPLETE).exists()
    assert not (tmp_path / "step-10.replaced").exists()


def test_a_checkpoint_without_its_last_file_is_incomplete(tmp_path: Path) -> None:
    saved(tmp_path, 9, 10)
    (tmp_path / "step-10" / COMPLETE).unlink()
    with pytest.raises(CheckpointIncomplete):
        verified(tmp_path / "step-10")
    found = newest(tmp_path)
    assert found is not None
    assert found[0].name == "step-9"


@pytest.mark.parametrize("schema", [1, 2, SCHEMA + 1])
@pytest.mark.parametrize(("writer", "named"), [("0.7.1", "0.7.1"), ("<b>\n" * 99, "of an unknown version")])
def test_a_checkpoint_of_another_version_is_refused_in_one_sentence(
    tmp_path: Path, schema: int, writer: str, named: str
) -> None:
    """Of its manifest, only the number of the format and the versions of the packages are as they are now."""
    saved(tmp_path, 9, 10)
    path = folder_of(tmp_path, 10)
    other = json.dumps({"schema": schema, "packages": {"asyncrl": writer}, "version": "x"})
    (path / "manifest.json").write_text(other)
    marker = json.loads((path / COMPLETE).read_text())
    marker["files"]["manifest.json"] = len(other)
    (path / COMPLETE).write_text(json.dumps(marker))
    for read in (partial(verified, path), partial(newest, tmp_path)):
        with pytest.raises(CheckpointOfOtherFormat) as refused:
            read()
        assert str(refused.value) == (
            f"asyncrl {named} wrote the checkpoint {path} in format {schema}, and asyncrl {asyncrl.__version__} reads "
            f"only format {SCHEMA}: resume the run with the version that wrote it, or begin a new one, whose "
            "model.path can be the folder hf of the checkpoint"
        )
