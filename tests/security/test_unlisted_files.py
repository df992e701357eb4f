"""Files that the manifest of a checkpoint does not list are neither loaded nor copied: no checksum covers them, and a
file without a limit of size costs its sender nothing."""

import asyncio
import json
import shutil
import struct
from pathlib import Path

import pytest
from hostile_runs import write_run
from typer.testing import CliRunner

from asyncrl.checkpoints.directory import verified
from asyncrl.cli.main import app
from asyncrl.errors import CheckpointDamaged

NBYTES = 2**20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(write_run(tmp_path_factory.mktemp("written") / "runs", "sent"))


@pytest.fixture
def run(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(written, tmp_path / "runs" / "sent"))


def add_tensors(path: Path) -> None:
    """Writes a valid file with one vector, which takes no place on the disk."""
    header = json.dumps({"v": {"dtype": "F32", "shape": [NBYTES // 4], "data_offsets": [0, NBYTES]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + NBYTES)


LOADED = ("policy/weights/state/zz.safetensors", "rows/9.0.safetensors", "critic/weights/state/shard.safetensors",
          "policy/optimizer/state/more.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_tensors_that_the_manifest_does_not_list_damage_a_checkpoint(name: str, run: Path) -> None:
    add_tensors(run / "checkpoints" / "step-2" / name)
    with pytest.raises(CheckpointDamaged, match=rf"{name} is not in manifest\.json"):
        verified(run / "checkpoints" / "step-2")
    result = CliRunner().invoke(app, ["audit", "runs/sent"])
    assert result.exit_code == 1
    assert f"{name} is not in manifest.json" in result.output


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "hf/README.md", "policy/weights/state/.nfs0001"])
def test_other_files_may_lie_in_a_checkpoint(name: str, run: Path) -> None:
    (run / "checkpoints" / "step-2" / name).write_text("a note\n")
    verified(run / "checkpoints" / "step-2")
    assert CliRunner().invoke(app, ["audit", "runs/sent"]).exit_code == 0


@pytest.mark.parametrize("name", ["more.safetensors", "pytorch_model.bin", "modeling_sent.py", "sub/folder/more.bin"])
def test_export_copies_what_the_manifest_lists(name: str, run: Path) -> None:
    add_tensors(run / "checkpoints" / "step-2" / "hf" / name)
    result = CliRunner().invoke(app, ["export", "runs/sent", "weights"])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("weights").rglob("*")) == ["COMPLETE", "config.json"]
