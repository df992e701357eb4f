"""Training continues from a checkpoint on any number of ranks as if it had not stopped; a bad checkpoint changes
nothing."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_scenarios import LEARNER, OWN, WORLDS, group_of, run_loader, run_saver
from rounding import GRADIENT, LOSS, UNIT, assert_reordered, assert_within, weight_spread
from tiny_groups import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.policy import export
from asyncrl.ranks.gather import parameter_specs
from asyncrl.ranks.report import train_result

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves on one, two and four ranks at the same time, then loads each checkpoint on one, two and four ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    make_model(folder / "model")
    for run in (run_saver, run_loader):
        contexts = [
            torch.multiprocessing.start_processes(
                run, args=(world_size, folder), nprocs=world_size, join=False, start_method="forkserver"
            )
            for world_size in WORLDS
        ]
        for context in contexts:
            while not context.join():
                pass
    return folder


def results(folder: Path, stage: str, world_size: int) -> list[dict[str, Any]]:
    """Returns the results of each rank."""
    return [pickle.loads((folder / f"{stage}-{world_size}-{rank}.pkl").read_bytes()) for rank in range(world_size)]


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


@pytest.mark.parametrize("loaded_by", WORLDS)
@pytest.mark.parametrize("saved_by", WORLDS)
def test_a_policy_trains_on_from_a_checkpoint_as_if_it_had_not_stopped(
    folder: Path, saved_by: int, loaded_by: int
) -> None:
    unbroken = [found["policy"]["after"] for found in results(folder, "saved", 1)]
    resumed = [found["policy"][saved_by] for found in results(folder, "loaded", loaded_by)]
    assert resumed[0]["rates"] == unbroken[0]["rates"]
    first_rate = LEARNER["optimizer"]["learning_rate"]
    assert unbroken[0]["rates"][1] < unbroken[0]["rates"][0] < first_rate, (
        "the learning-rate schedule must have advanced by then"
    )
    for step in range(2):
        wanted = train_result([found["records"][step] for found in unbroken])
        trained = train_result([found["records"][step] for found in resumed])
        assert_within(trained["loss"], wanted["loss"], bound=LOSS)
        assert_reordered(trained["grad_norm"], wanted["grad_norm"], spread=GRADIENT)
    for found in resumed:
        assert found["weights"].keys() == unbroken[0]["weights"].keys()
        for name, weight in unbroken[0]["weights"].items():
            assert_within(found["weights"][name], weight, bound=weight_spread(4), name=name)
        assert found["moments"].keys() == unbroken[0]["moments"].keys()
        for name, moment in unbroken[0]["moments"].items():
            # The relative error of the square of a gradient is twice that of the gradient.
            assert_reordered(found["moments"][name], moment, spread=2 * GRADIENT, name=name)


def test_weights_alone_leave_the_optimizer_and_the_schedule_where_they_are(folder: Path) -> None:
    for found in results(folder, "saved", 2):
        before, alone = found["policy"]["before"], found["policy"]["weights_only"]
        assert_same(alone["weights"], before["weights"])
        assert alone["calls"] == 4
        assert alone["moments"] > 0


def test_the_tokenizer_is_saved_beside_them(folder: Path) -> None:
    assert AutoTokenizer.from_pretrained(folder / "policy-4/tokenizer").pad_token == "t0"


def test_each_rank_writes_its_own_shard_and_nothing_is_pickled(folder: Path) -> None:
    files = {str(path.relative_to(folder / "policy-4")) for path in (folder / "policy-4").rglob("*") if path.is_file()}
    shards = {f"state/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3, 4)}
    saved = {name for name in files if name.startswith(("weights/", "optimizer/"))}
    assert saved == {
        f"{part}/{name}" for part in ("weights", "optimizer") for name in {*shards, "COMPLETE"}
    } | {"optimizer/training.json"}  # fmt: skip


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("loaded_by", WORLDS)
@pytest.mark.parametrize("saved_by", WORLDS)
def test_uneven_tied_and_stepless_state_is_the_same_on_any_number_of_ranks(
    folder: Path, saved_by: int, loaded_by: int, start: int, steps: int
) -> None:
    """The checkpoint is saved after `steps` updates, and loaded into a model with other weights that made `start`
    updates. Before its first update AdamW has no state, and the first update after such a load must count as the
    first."""
    saved = [found["toy"][str(steps)] for found in results(folder, "saved", saved_by)]
    for rank, ranks in enumerate(results(folder, "loaded", loaded_by)):
        found = ranks["toy"][saved_by][f"{steps} into {start}"]
        assert_same(found["loaded"], saved[0]["saved"])
        assert found["after"].keys() == saved[0]["after"].keys()
        for name, state in saved[0]["after"].items():
            # Every rank computes the whole gradient, but the shards divide the elementwise operations of the update
            # into different vectors. There are two updates of about 16 operations, each of which may round differently.
            assert_reordered(found["after"][name], state, spread=2 * 16 * 2 * UNIT, name=name)
        assert found["tied"]
        assert found["train_calls"] == 7
        np.testing.assert_array_equal(found["drawn"], saved[rank % saved_by]["drawn"])
    assert ("norm exp_avg" in saved[0]["saved"]) == (steps > 0)


@pytest.mark.parametrize("loaded_by", WORLDS)
@pytest.mark.parametrize("saved_by", WORLDS)
def test_the_state_of_an_own_optimizer_is_that_of_the_checkpoint(folder: Path, saved_by: int, loaded_by: int) -> None:
    for own in OWN:
        saved = results(folder, "saved", saved_by)[0]["toy"][own]
        for ranks in results(folder, "loaded", loaded_by):
            found = ranks["toy"][saved_by][own]
            assert_same(found["loaded"], saved["saved"])
            for name, state in saved["after"].items():
                if saved_by == loaded_by:
                    np.testing.assert_array_equal(found["after"][name], state, err_msg=name)
                else:
                    assert_reordered(found["after"][name], state, spread=2 * 16 * 2 * UNIT, name=name)
    assert {name for name in saved["saved"] if name.startswith("norm ")} == {"norm step", "norm sum"}


def test_a_state_that_differs_between_the_ranks_is_refused_by_all_of_them(folder: Path) -> None:
    for found in results(folder, "saved", 2):
        name, text = found["faults"]["numbers apart"]
        assert name == "CheckpointError"
        assert re.match(
            r"the optimizer's state has state\.\w+\.?\w*\.norm = [\d.]+ on rank 0 and [\d.]+ on rank 1, ", text
        )
        name, text = found["faults"]["names apart"]
        assert name == "CheckpointError"
        assert text.startswith("state.norm.exp_avg is a tensor of the checkpoint on rank 0, but not on rank 1; ")


def test_the_state_of_another_optimizer_is_refused(folder: Path) -> None:
    for ranks in results(folder, "loaded", 2):
        for saved_by in WORLDS:
            assert "embed.weight.exp_avg is in the checkpoint, but not here" in ranks["toy"][saved_by]["refused"][1]


@pytest.mark.parametrize("saved_by", WORLDS)
def test_weights_for_other_programs_are_the_same_from_a_checkpoint_as_from_the_ranks(
    folder: Path, saved_by: int
) -> None:
    """The ranks have trained two more steps when they convert the checkpoint."""
    live, converted = (
        {path.name: path.read_bytes() for path in (folder / f"policy-{saved_by}" / kind).iterdir()}
        for kind in ("live", "converted")
    )
    assert live.pop("COMPLETE") != converted.pop("COMPLETE"), "each directory has an id"
    assert converted == live


@pytest.mark.parametrize("file_bytes", [2**30, 2**15])
@pytest.mark.parametrize("saved_by", WORLDS)
def test_weights_for_other_programs_are_rounded_to_the_engine_s_precision_and_may_be_in_several_files(
    folder: Path, saved_by: int, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", file_bytes)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    specs = parameter_specs(model, dtype=torch.bfloat16)
    with group_of(0, 1, tmp_path / "store") as group:
        export.convert_to_hf(
            model,
            specs,
            weights_path=folder / f"policy-{saved_by}/weights",
            tokenizer_path=str(folder / "model"),
            path=tmp_path / "hf",
            dtype=torch.bfloat16,
            group=group,
        )
    files = list((tmp_path / "hf").glob("*.safetensors"))
    sizes = [spec.nbytes for spec in specs if spec.name != "lm_head.weight"]  # it is tied to the embedding
    assert (len(files) == 1) == (sum(sizes) <= file_bytes)
    largest = max(file.stat().st_size for file in files)
    assert largest < max(file_bytes, *sizes) + 2**13, "beside the weights, a file has only a header"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").state_dict()
    weights = results(folder, "saved", saved_by)[0]["policy"]["before"]["weights"]
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(loaded[name], torch.from_numpy(weight).to(torch.bfloat16)), name
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").pad_token == "t0"


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_save_beside_training_has_the_state_of_its_own_step(folder: Path, ranks: int) -> None:
    for found in (each["beside"] for each in results(folder, "saved", ranks)):
        assert not np.array_equal(found["trained"]["norm"], found["staged"]["norm"]), "training must have gone on"
        assert not found["before"]
        assert_same(found["loaded"], found["staged"])
        assert found["refused"] == (
            "CheckpointError",
            "the previous checkpoint is still being written; save again when it is complete",
        )
        assert_same(found["second"], found["trained"])
        assert found["reused"], "the second save must use the memory of the first"


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_tensor_that_all_ranks_hold_is_copied_and_written_by_one(folder: Path, ranks: int) -> None:
    """15 + 2 numbers are sharded and `scale` is not. The moments are twice the parameters and two step counters."""
    copied = [each["beside"]["nbytes"] for each in results(folder, "saved", ranks)]
    assert [sum(part) for part in zip(*copied, strict=True)] == [4 * (15 + 2 + 1), 4 * (2 * (15 + 2) + 2)]


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        (
            "no directory",
            "CheckpointIncomplete",
            "nothing/weights is not a complete checkpoint: it has no file COMPLETE",
        ),
        ("no marker", "CheckpointIncomplete", "no marker/optimizer is not a complete checkpoint"),
        ("short", "CheckpointDamaged", "has 40 bytes"),
        ("gone", "CheckpointDamaged", "has no bytes"),
        ("garbled", "CheckpointError", "cannot load the checkpoint"),
        ("of two saves", "CheckpointMismatch", "belong to different saves"),
        ("another shape", "CheckpointMismatch", "embed.weight is (5, 3) in the checkpoint and (5, 2) here"),
        ("another dtype", "CheckpointMismatch", "embed.weight is torch.float32 in the checkpoint and torch.bfloat16"),
        ("missing", "CheckpointMismatch", "more is not in the checkpoint"),
        ("unknown", "CheckpointMismatch", "more is in the checkpoint, but not here"),
    ],
)
def test_what_cannot_be_loaded_says_why_on_every_rank_and_changes_nothing(
    folder: Path, fault: str, error: str, says: str
) -> None:
    found = [ranks["faults"][fault] for ranks in results(folder, "saved", 2)]
    assert found[0]["error"] == found[1]["error"]
    kind, message = found[0]["error"]
    assert kind == error
    assert says in message
    assert all(rank["untouched"] for rank in found)


@pytest.mark.parametrize("fault", ["before the marker", "disk full on rank 1", "between the renames"])
@pytest.mark.fault("F7", "F27")
def test_a_save_that_dies_leaves_the_last_one_and_the_next_one_works(folder: Path, fault: str) -> None:
    for ranks in results(folder, "saved", 2):
        found = ranks["faults"][fault]
        assert found["error"][0] == "CheckpointError"
        assert "No space left on device" in found["error"][1]
        assert_same(found["left"], ranks["faults"]["first"])
        assert_same(found["then"], ranks["faults"]["second"])
        assert found["files"] == ["optimizer", "weights"], "files of the interrupted save must be removed"


def test_weights_and_optimizer_in_one_directory_are_refused_and_what_is_there_stays(folder: Path) -> None:
    for ranks in results(folder, "saved", 2):
        found = ranks["faults"]["one in the other"]
        assert all(error[0] == "CheckpointError" and "nothing was written" in error[1] for error in found["errors"])
        assert_same(found["left"], ranks["faults"]["first"])


def test_a_directory_that_is_no_checkpoint_is_not_replaced(folder: Path) -> None:
    for ranks in results(folder, "saved", 2):
        assert ranks["faults"]["foreign"]["kept"]
        assert ranks["faults"]["foreign"]["error"][0] == "CheckpointError"
        assert "is not a checkpoint" in ranks["faults"]["foreign"]["error"][1]


def test_ranks_that_write_to_different_disks_are_told_so(folder: Path) -> None:
    for ranks in results(folder, "saved", 2):
        kind, message = ranks["faults"]["apart"]["error"]
        assert kind == "CheckpointError"
        assert " bytes)" in message
        assert "a file system that all ranks share" in message
