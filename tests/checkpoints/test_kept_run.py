"""The committed run of `kept_run/` can be read, and asyncrl still writes what an equal version can read.

A change of the format fails here. It needs another number of the format: see `kept_run.py`.
"""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from kept_run import CONFIG, KEPT, NONCE, ROWS, TinyRank, parts, snapshot, write_checkpoint
from safetensors import safe_open

import asyncrl
from asyncrl.checkpoints.directory import CHECKPOINTS, SCHEMA, folder_of, verified
from asyncrl.checkpoints.run import BUFFER, read_snapshot
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.deployment.resuming import chosen_checkpoint
from asyncrl.deployment.run_dir import RunDir
from asyncrl.views.report import read_run, report_html

CHECKPOINT = folder_of(KEPT / CHECKPOINTS, 1)
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_kept_checkpoint_has_the_number_of_the_format_and_is_undamaged() -> None:
    manifest = verified(CHECKPOINT)
    assert (manifest.schema, manifest.version, manifest.nonce) == (SCHEMA, Version(1, 1), NONCE)
    assert f"| {SCHEMA} |" in PAGE.read_text(), "the page lists the formats"


def test_its_buffer_is_read_and_written_byte_for_byte() -> None:
    found = read_snapshot(CHECKPOINT)
    assert found == snapshot()
    assert [group.meta is None for group in found.buffer.open] == [False, True]
    assert found.buffer.waiting
    assert found.buffer.failures.counts
    assert msgspec.msgpack.encode(snapshot()) == (CHECKPOINT / BUFFER).read_bytes()


def test_its_weights_its_optimizer_and_its_rows_are_loaded(one_rank: None) -> None:
    rank, expected = TinyRank(), TinyRank().trained()
    run = parts(rank)
    run.load(CHECKPOINT)
    assert rank.train_calls == 1
    torch.testing.assert_close(rank.tensors(), expected.tensors(), rtol=1e-6, atol=0)
    [ready] = [group.ticket.key for group in read_snapshot(CHECKPOINT).buffer.open if group.meta is not None]
    rows = run.rows.client.get_samples(samples_of(ready, count=2), TRAIN_PARTITION, tuple(ROWS))
    for name, column in ROWS.items():
        assert torch.equal(rows[name], column), name


def test_asyncrl_writes_the_same_files_with_the_same_keys_and_tensors(one_rank: None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "step-1")
    assert layout(tmp_path / "step-1") == layout(CHECKPOINT)


def layout(folder: Path) -> dict[str, Any]:
    """Returns the parts of each file of a checkpoint by its name: keys of JSON, tensors with dtype and shape, else the
    size."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = file.keys()
                tensors = {key: file.get_slice(key) for key in names}
                found[name] = (
                    {key: (each.get_dtype(), each.get_shape()) for key, each in tensors.items()},
                    set(file.metadata() or ()),
                )
        elif path.suffix == ".json" or path.name == "COMPLETE":
            found[name] = set(json.loads(path.read_bytes()))
        else:
            found[name] = path.stat().st_size
    return found


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    shutil.copytree(KEPT, tmp_path / "kept")
    config = Config.model_validate({**CONFIG.model_dump(), "run": {"name": "kept", "dir": str(tmp_path)}})
    with RunDir.create(config, choose=partial(chosen_checkpoint, step=None)) as run:
        assert run.resumed is not None
        assert (run.resumed.step, run.lineage.incarnation, run.nonce) == (1, 2, NONCE)


def test_its_records_are_read_and_shown() -> None:
    run = asyncrl.load_run(KEPT)
    assert run.steps["reward_mean"].tolist() == [0.5]
    assert run.evals["reward_mean"].tolist() == [0.25]
    assert run.summary is not None
    assert run.summary.wall_s == 50.0
    assert "tac" in report_html(read_run(KEPT))
