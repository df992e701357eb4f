"""A run that did not finish continues in its directory, from its newest complete checkpoint."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import make_step

from asyncrl.checkpoints.directory import RunManifest, folder_of, write
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import ConfigError
from asyncrl.learner.records import EvalRecord, StepRecord, read_lines


def config_in(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(folder)}, **sections})


def save(run: RunDir, step: int, *, incarnation: int = 1) -> None:
    """Writes a checkpoint that has only its manifest."""
    settings = dict(shared_config(config_in(run.path.parent)))
    manifest = RunManifest(version=Version(incarnation, step), lineage=run.lineage, settings=settings, packages={})
    write(folder_of(run.checkpoints, step), manifest, fill=lambda path: None)


def interrupted(folder: Path, *, steps: int, saved: int) -> RunDir:
    """Makes the directory of a run that was ended by a signal after `steps` steps, with one checkpoint."""
    with RunDir.create(config_in(folder)) as run:
        for step in range(steps):
            run.append_step(make_step(step))
            (run.path / "samples" / f"step-{step}.jsonl").touch()
        for version in (0, steps):
            run.append_eval(EvalRecord(version=version, wall_s=1, prompts=8, reward_mean=0.5))
        save(run, saved)
        run.stopped("asked to end by a signal")
    return run


def info_of(run: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.path / "run.json").read_bytes())
    return content


@pytest.mark.fault("F7")
@pytest.mark.parametrize("finished", [False, True])
def test_a_save_that_was_killed_leaves_no_folder_after_a_resume(finished: bool, tmp_path: Path) -> None:
    """It was killed while it wrote, or just before it gave the finished folder its name."""
    first = interrupted(tmp_path, steps=5, saved=3)
    rows = unfinished(folder_of(first.checkpoints, 4)) / "rows"
    rows.mkdir(parents=True)
    (rows / "7.0.safetensors").touch()
    if finished:
        (rows.parent / COMPLETE).touch()
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        assert again.resumed.step == 3
        assert [path.name for path in again.checkpoints.iterdir()] == ["step-3"]


def test_weights_of_lost_steps_make_room_for_the_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    """A run that fails saves its last weights without the rest of a checkpoint."""
    first = interrupted(tmp_path, steps=5, saved=3)
    rescued = folder_of(first.checkpoints, 5) / "hf"
    rescued.mkdir(parents=True)
    (rescued / "model.safetensors").touch()
    with RunDir.create(config_in(tmp_path)) as again:
        assert [path.name for path in again.checkpoints.iterdir()] == ["step-3"]
        save(again, 5)


@pytest.mark.fault("F6")
def test_records_of_steps_that_are_lost_are_taken_out_and_kept_apart(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    before = info_of(first)
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        assert (again.path, again.previous, again.resumed.step) == (first.path, None, 3)
        assert again.lineage == Lineage((Version(1, 3),))
        assert [record.step for record in read_lines(again.path / "steps.jsonl", StepRecord)] == [0, 1, 2]
        assert [record.step for record in read_lines(again.path / "lost-steps.jsonl", StepRecord)] == [3, 4]
        assert [record.version for record in read_lines(again.path / "evals.jsonl", EvalRecord)] == [0]
        assert sorted(path.name for path in (again.path / "samples").iterdir()) == [
            "step-0.jsonl", "step-1.jsonl", "step-2.jsonl",
        ]  # fmt: skip
        after = info_of(again)
        assert (after["state"], after["started"], after["nonce"]) == ("running", before["started"], before["nonce"])
        [restart] = after["resumed"]
        assert (restart["step"], restart["incarnation"]) == (3, 2)


def test_an_incarnation_that_left_nothing_keeps_its_number(tmp_path: Path) -> None:
    interrupted(tmp_path, steps=5, saved=3)
    for incarnation in (2, 3, 4):
        with RunDir.create(config_in(tmp_path)) as again:
            assert again.lineage.incarnation == incarnation
            again.stopped("asked to end by a signal")
    assert len(info_of(again)["resumed"]) == 3
    lineage = msgspec.json.decode((again.path / "lineage.json").read_bytes(), type=Lineage)
    assert lineage.branches == (Version(1, 3),) * 3


@pytest.mark.parametrize("why", ["fresh", "finished", "no checkpoint"])
def test_a_run_is_moved_aside_if_it_is_finished_or_has_no_checkpoint_or_a_new_one_is_wanted(
    tmp_path: Path, why: str
) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    if why == "finished":
        content = info_of(first) | {"state": "finished"}
        (first.path / "run.json").write_text(json.dumps(content))
    elif why == "no checkpoint":
        (folder_of(first.checkpoints, 3) / "COMPLETE").unlink()
    with RunDir.create(config_in(tmp_path), fresh=why == "fresh") as again:
        assert again.resumed is None
        assert again.previous == tmp_path / "quick.1"
        assert not (again.path / "steps.jsonl").exists()
        assert again.lineage == Lineage()


def test_a_setting_that_must_stay_is_refused_with_both_values_and_changes_nothing(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    changed = config_in(tmp_path, learner={"groups_per_step": 3})
    old = config_in(tmp_path).learner.groups_per_step
    with pytest.raises(ConfigError, match=rf"learner\.groups_per_step = 3, but .* started with {old}.*--fresh"):
        RunDir.create(changed)
    after = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    assert after == before
    with RunDir.create(config_in(tmp_path, learner={"total_steps": 9})) as again:
        assert again.resumed is not None
