"""The parts of a run's checkpoint: what is saved, and in which order."""

from pathlib import Path

import pytest
import torch
from buffer_scenes import Scene
from memory_client import MemoryClient

from asyncrl.checkpoints.directory import verified
from asyncrl.checkpoints.run import RunParts, read_snapshot
from asyncrl.common.version import Lineage
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import PromptCursor
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import CheckpointError
from asyncrl.policy.tq_policy import STEP_FIELDS


class FakeRanks:
    """Policy or critic whose calls are listed in `calls`."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def check_folder(self, folder: Path) -> None:
        self._calls.append(f"check {self._name}")

    def stage_checkpoint(self) -> None:
        self._calls.append(f"stage {self._name}")

    def write_checkpoint(self, weights_path: Path, optimizer_path: Path) -> None:
        self._calls.append(f"write {self._name}")
        weights_path.mkdir(parents=True)
        (weights_path / "shard").write_bytes(self._name.encode())

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        assert optimizer_path is None
        self._calls.append(f"load {(weights_path / 'shard').read_text()}")

    def write_hf(self, weights_path: Path, path: Path) -> None:
        self._calls.append(f"convert {(weights_path / 'shard').read_text()}")
        path.mkdir()
        (path / "model").write_bytes(b"weights")


def parts(calls: list[str], *, critic: bool) -> RunParts:
    config = Config.model_validate({"learner": {"groups_per_step": 2, "group_size": 2}})
    client = MemoryClient()
    client.register_partition(TRAIN_PARTITION, STEP_FIELDS, 8, ["train"], 2)
    return RunParts(
        config=config,
        policy=FakeRanks("policy", calls),  # type: ignore[arg-type]
        critic=FakeRanks("critic", calls) if critic else None,  # type: ignore[arg-type]
        rows=Rows(config, client=client),
        lineage=Lineage(),
        nonce="quick-nonce",
        packages={},
    )


def snapshot(run: RunParts) -> RunSnapshot:
    """Returns a snapshot with one ready and one reserved group. The rows of the ready one are on the data plane."""
    scene = Scene()
    ready, _ = scene.reserve(2)
    scene.commit(ready)
    rows = BatchedDataDict(
        input_ids=torch.tensor([[1, 2], [3, 4]]),
        input_lengths=torch.tensor([2, 2]),
        weight_versions=torch.zeros(2, 2, dtype=torch.long),
        generation_logprobs=torch.zeros(2, 2),
        token_mask=torch.ones(2, 2),
    )
    run.rows.client.put_samples(samples_of(ready.key, count=2), TRAIN_PARTITION, fields=rows)
    return RunSnapshot(buffer=scene.buffer.snapshot(), prompts=PromptCursor(issued=0, fingerprint=""))


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("hf", [False, True])
def test_the_parts_are_written_after_they_were_copied(tmp_path: Path, critic: bool, hf: bool) -> None:
    calls: list[str] = []
    run = parts(calls, critic=critic)
    taken = snapshot(run)
    run.check_folder(tmp_path)
    run.stage()
    run.write(tmp_path / "step-0", taken, hf=hf)
    models = ["policy", "critic"] if critic else ["policy"]
    assert calls == [
        *(f"check {name}" for name in models),
        *(f"stage {name}" for name in models),
        *(f"write {name}" for name in models),
        *(["convert policy"] if hf else []),
    ]
    files = set(verified(tmp_path / "step-0").files)
    assert files == {
        "buffer.msgpack",
        "rows/0.0.safetensors",
        *(f"{name}/weights/shard" for name in models),
        *(["hf/model"] if hf else []),
    }
    assert read_snapshot(tmp_path / "step-0") == taken


@pytest.mark.parametrize(("saved", "here"), [(False, False), (True, True), (False, True), (True, False)])
def test_a_fork_loads_the_weights_of_the_models_that_both_runs_have_and_no_optimizer(
    tmp_path: Path, saved: bool, here: bool
) -> None:
    run = parts([], critic=saved)
    run.stage()
    run.write(tmp_path / "step-0", snapshot(run), hf=False)
    calls: list[str] = []
    parts(calls, critic=here).load_weights(tmp_path / "step-0", critic=saved)
    assert calls == ["load policy", *(["load critic"] if saved and here else [])]


def test_a_part_that_cannot_be_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    run = parts([], critic=False)

    def full(*_: Path) -> None:
        raise CheckpointError("no space left")

    run.policy.write_checkpoint = full  # type: ignore[method-assign, assignment]
    with pytest.raises(CheckpointError, match="no space left"):
        run.write(tmp_path / "step-0", snapshot(run), hf=False)
    assert not (tmp_path / "step-0").exists()
