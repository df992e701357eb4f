"""A run that did not finish continues in its directory, from its newest complete checkpoint or from an earlier one."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import make_step

from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import SCHEMA, RunManifest, folder_of, verified, write
from asyncrl.cli import restarts
from asyncrl.cli.options import print_previous
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.common.version import Lineage, Version
from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import GeneratorTotals
from asyncrl.deployment import resuming
from asyncrl.deployment.learner_log import LearnerLog, going_on
from asyncrl.deployment.resuming import Choice, chosen_checkpoint, no_checkpoint, step_of, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointOfOtherFormat,
    ConfigError,
    RunError,
    RunLocked,
)
from asyncrl.learner.records import EvalRecord, StepRecord, read_lines
from asyncrl.metrics.trackers import Going


def config_in(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(folder)}, **sections})


def save(run: RunDir, step: int, *, incarnation: int = 1) -> None:
    """Writes a checkpoint that has only its manifest."""
    settings = dict(shared_config(config_in(run.path.parent)))
    version = Version(incarnation, step)
    manifest = RunManifest(nonce=run.nonce, version=version, lineage=run.lineage, settings=settings, packages={})
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
        run.stopped()
    return run


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 1])
@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize("command", ["up", "resume"])
def test_a_checkpoint_of_another_version_is_refused_and_no_older_one_takes_its_place(
    command: str, step: int | None, schema: int, tmp_path: Path
) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    older = verified(folder_of(first.checkpoints, 3))
    newer = msgspec.structs.replace(older, version=Version(1, 4), schema=schema)
    write(folder_of(first.checkpoints, 4), newer, fill=lambda path: None)
    before = {path: path.stat().st_mtime_ns for path in first.path.rglob("*")}
    choose: Choice = unfinished_run if command == "up" else partial(chosen_checkpoint, step=step)
    with pytest.raises(CheckpointOfOtherFormat, match=f"step-4 in format {schema}, and asyncrl .* reads only format"):
        RunDir.create(config_in(tmp_path), choose=choose)
    assert {path: path.stat().st_mtime_ns for path in first.path.rglob("*")} == before


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


def test_the_evaluation_of_a_checkpoint_stays_with_it_although_its_weights_were_newer(tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path)) as run:
        for version, due in ((0, None), (4, 3), (5, None)):
            run.append_eval(EvalRecord(version=version, due=due, wall_s=1, prompts=8, reward_mean=0.5))
        save(run, 3)
        run.stopped()
    with RunDir.create(config_in(tmp_path)) as again:
        assert [record.version for record in read_lines(again.path / "evals.jsonl", EvalRecord)] == [0, 4]


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
        assert sorted(path.name for path in (again.path / "samples").glob("step-*")) == [
            "step-0.jsonl", "step-1.jsonl", "step-2.jsonl",
        ]  # fmt: skip
        after = info_of(again)
        assert (after["state"], after["started"], after["nonce"]) == ("running", before["started"], before["nonce"])
        [restart] = after["resumed"]
        assert (restart["step"], restart["incarnation"]) == (3, 2)
        [known] = again.restarts
        assert abs(known.unix_time_s - time.time()) < 3600


def test_a_part_of_a_record_at_the_end_is_removed_so_that_the_next_record_is_whole(tmp_path: Path) -> None:
    """A crash of the machine may leave it."""
    run = interrupted(tmp_path, steps=1, saved=1)
    with (run.path / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "lo')
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        again.append_step(make_step(1))
    assert [record.step for record in read_lines(run.path / "steps.jsonl", StepRecord)] == [0, 1]


def test_an_incarnation_that_left_nothing_keeps_its_number(tmp_path: Path) -> None:
    interrupted(tmp_path, steps=5, saved=3)
    for incarnation in (2, 3, 4):
        with RunDir.create(config_in(tmp_path)) as again:
            assert again.lineage.incarnation == incarnation
            again.stopped()
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
    with RunDir.create(config_in(tmp_path), choose=no_checkpoint if why == "fresh" else unfinished_run) as again:
        assert again.resumed is None
        assert again.previous == tmp_path / "quick.1"
        assert not (again.path / "steps.jsonl").exists()
        assert again.lineage == Lineage()


def test_a_checkpoint_that_names_no_optimizer_has_the_state_of_adamw(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    with_name = verified(folder_of(first.checkpoints, 3))
    settings = {key: value for key, value in with_name.settings.items() if key != "learner.optimizer.name"}
    without = msgspec.structs.replace(with_name, version=Version(1, 4), settings=settings)
    write(folder_of(first.checkpoints, 4), without, fill=lambda path: None)
    with pytest.raises(ConfigError, match=r"optimizer\.name = torch\.optim:Adam, but .* has the state of adamw, "):
        RunDir.create(config_in(tmp_path, learner={"optimizer": {"name": "torch.optim:Adam"}}))
    with RunDir.create(config_in(tmp_path)) as run:
        assert run.resumed is not None
        assert run.resumed.step == 4


def test_a_setting_that_must_stay_is_refused_with_both_values_and_changes_nothing(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    changed = config_in(tmp_path, learner={"groups_per_step": 3})
    old = config_in(tmp_path).learner.groups_per_step
    with pytest.raises(ConfigError, match=rf"learner\.groups_per_step = 3, but .* started with {old}.*--fresh"):
        RunDir.create(changed)
    sgd = config_in(tmp_path, learner={"optimizer": {"name": "torch.optim:SGD"}})
    with pytest.raises(
        ConfigError, match=r"optimizer\.name = torch\.optim:SGD, but .* state of adamw, .* asyncrl fork"
    ):
        RunDir.create(sgd)
    with pytest.raises(ConfigError, match=r"generator\.top_k = 8, but .* started with None"):
        RunDir.create(config_in(tmp_path, generator={"top_k": 8}))
    with pytest.raises(ConfigError, match=r"environment\.max_branches = 3, but .* have up to 1 branches"):
        RunDir.create(config_in(tmp_path, environment={"max_branches": 3}))
    after = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    assert after == before
    with RunDir.create(config_in(tmp_path, learner={"total_steps": 9})) as again:
        assert again.resumed is not None


def saved_often(folder: Path, *, state: str = "stopped") -> RunDir:
    """Makes the directory of a run that ended after 6 steps, with checkpoints of the steps 2, 4 and 6."""
    with RunDir.create(config_in(folder)) as run:
        for step in range(6):
            run.append_step(make_step(step))
            (run.path / "samples" / f"step-{step}.jsonl").write_text(f"{step}")
        for version in (0, 6):
            run.append_eval(EvalRecord(version=version, wall_s=1, prompts=8, reward_mean=0.5))
        for step in (2, 4, 6):
            save(run, step)
        (run.path / "summary.json").write_text("{}")
        if state == "stopped":
            run.stopped()
    assert info_of(run)["state"] == state
    return run


def test_a_resumed_run_counts_the_time_of_its_steps_once_and_since_its_first_start(tmp_path: Path) -> None:
    saved_often(tmp_path)
    run_json = tmp_path / "quick" / "run.json"
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
    run_json.write_text(json.dumps(json.loads(run_json.read_text()) | {"started": an_hour_ago.isoformat()}))
    with RunDir.create(config_in(tmp_path), choose=partial(chosen_checkpoint, step=4)) as again:
        spent = LearnerLog(config_in(tmp_path), again).training()
    # the steps end a second after each other, and 0.9 s after their lease
    assert (spent.trained_s, spent.again_s) == pytest.approx((0.9 + 3, 0.9 + 1))
    assert spent.wall_s >= 3600.0


def test_a_resumed_run_brings_a_new_coordinator_the_totals_of_its_records(tmp_path: Path) -> None:
    def spent(pool: Pool, step: int) -> DeviceTime:
        return DeviceTime(pool=pool, device=Device.GPU, working_s=float(step + 1))

    config = config_in(tmp_path)
    with RunDir.create(config) as run:
        assert LearnerLog(config, run).generators == GeneratorTotals()
        for step in range(6):
            times = (spent(Pool.LEARNER, step), spent(Pool.GENERATORS, step))
            counted: dict[str, Any] = {
                "generated_samples": 10 * step,
                "weight_updates": step,
                "generator_state_s": {"idle": step},
            }
            run.append_step(make_step(step, device_time=times, **counted))
        save(run, 4)
        run.stopped()
    with RunDir.create(config) as again:
        assert LearnerLog(config, again).generators == GeneratorTotals(
            samples=30,
            weight_updates=3,
            state_seconds={"idle": 3.0},
            device_time=(spent(Pool.GENERATORS, 5),),  # lost steps cost time, too
        )


def test_a_resumed_run_knows_the_evaluations_before(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint={"keep_best": 1})
    with RunDir.create(config) as run:
        for step in range(4):
            run.append_step(make_step(step))
        for version, reward in ((2, 0.9), (4, 0.5)):
            run.append_eval(EvalRecord(version=version, wall_s=1, prompts=8, reward_mean=reward))
            save(run, version)
        run.stopped()
    with RunDir.create(config) as again:
        assert again.resumed is not None
        assert LearnerLog(config, again).best_steps([2, 4], running=lambda: None) == {2}


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume_at(folder: Path, step: int | None, *, total_steps: int = 9) -> RunDir:
    config = config_in(folder, learner={"total_steps": total_steps, "optimizer": {"warmup_steps": 0}})
    return RunDir.create(config, choose=partial(chosen_checkpoint, step=step))


@pytest.mark.parametrize("state", ["stopped", "finished"])
def test_a_run_goes_back_to_an_earlier_checkpoint_and_later_ones_are_set_aside_whole(
    state: str, tmp_path: Path
) -> None:
    first = saved_often(tmp_path, state=state)
    before = content_of(first.path)
    with resume_at(tmp_path, 2) as again:
        assert again.resumed is not None
        assert (again.path, again.previous, again.resumed.step) == (first.path, None, 2)
        assert again.lineage == Lineage((Version(1, 2),))
        assert [record.step for record in read_lines(again.path / "steps.jsonl", StepRecord)] == [0, 1]
        assert [record.step for record in read_lines(again.path / "lost-steps.jsonl", StepRecord)] == [2, 3, 4, 5]
        assert [record.version for record in read_lines(again.path / "lost-evals.jsonl", EvalRecord)] == [6]
        assert sorted(path.name for path in again.checkpoints.iterdir()) == ["lost-2", "step-2"]
        assert again.set_aside == again.checkpoints / "lost-2"
        after = content_of(again.path)
        for name, content in before.items():
            folder, _, rest = name.partition("/")
            step = int("".join(filter(str.isdecimal, rest.partition("/")[0])) or 0)
            if (folder, step > 2) == ("checkpoints", True) or (folder, step >= 2) == ("samples", True):
                assert after[f"{folder}/lost-2/{rest}"] == content, name
            elif folder in ("checkpoints", "samples"):
                assert after[name] == content, name
        assert "summary.json" not in after, "it described steps that are lost"


def test_trackers_get_to_know_which_incarnation_went_back(tmp_path: Path) -> None:
    saved_often(tmp_path)
    with resume_at(tmp_path, None) as again:
        assert going_on(again) == Going(step=6, incarnation=2, went_back=0)
        again.stopped()
    with resume_at(tmp_path, 2) as again:
        assert going_on(again) == Going(step=2, incarnation=3, went_back=3)
        again.stopped()
    with resume_at(tmp_path, None) as again:
        assert going_on(again) == Going(step=2, incarnation=4, went_back=3), "incarnation 3 may have sent nothing"
    with RunDir.create(config_in(tmp_path), choose=no_checkpoint) as new:
        assert going_on(new) is None


def test_checkpoints_that_were_set_aside_are_not_found_again(tmp_path: Path) -> None:
    """Also not by a run that goes back twice."""
    saved_often(tmp_path)
    with resume_at(tmp_path, 4) as again:
        again.append_step(make_step(4, wall_s=94.0))
        again.append_step(make_step(5, wall_s=95.0))
        save(again, 6, incarnation=2)
        again.stopped()
    with resume_at(tmp_path, 2) as again:
        assert sorted(path.name for path in again.checkpoints.rglob("step-*")) == [
            "step-2",
            "step-4",
            "step-6",
            "step-6",
        ]
        again.stopped()
    with resume_at(tmp_path, None) as again:
        assert again.resumed is not None
        assert again.resumed.step == 2
        assert again.lineage == Lineage((Version(1, 4), Version(1, 2), Version(1, 2)))
        lost = [record.step for record in read_lines(again.path / "lost-steps.jsonl", StepRecord)]
        assert lost == [4, 5, 2, 3, 4, 5]


@pytest.mark.fault("F6")
@pytest.mark.parametrize("choose", [unfinished_run, partial(chosen_checkpoint, step=None)])
def test_a_start_that_is_killed_after_it_began_to_go_back_is_gone_on_with(
    choose: Choice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed before each of its changes. Before the first one, everything is as it was. Later, the run goes
    back."""
    for kill_at in range(16):
        folder = tmp_path / f"{kill_at}"
        saved_often(folder)
        killed = Killed(at=kill_at)
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(Path, "rename", killed.before(Path.rename))
            patched.setattr(Path, "replace", killed.before(Path.replace))
            resume_at(folder, 2).close(state="stopped", reason="")
        config = config_in(folder, learner={"total_steps": 9, "optimizer": {"warmup_steps": 0}})
        with RunDir.create(config, choose=choose) as again:
            assert again.resumed is not None
            assert again.resumed.step == (6 if kill_at == 0 else 2), f"killed before change {kill_at}"
            left = sorted(path.name for path in again.checkpoints.glob("step-*"))
            assert left == (["step-2"] if kill_at else ["step-2", "step-4", "step-6"])
            again.stopped()
    assert killed.left > 0, "the last start was not killed"


class Killed:
    """Ends a process before change number `at` of its files."""

    def __init__(self, *, at: int) -> None:
        self.left = at

    def before(self, change: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def changed(path: Path, target: Path) -> Path:
            if self.left <= 0:
                raise KeyboardInterrupt
            self.left -= 1
            return change(path, target)

        return changed


def test_a_start_that_is_killed_while_it_sets_files_aside_leaves_records_that_cover_every_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = saved_often(tmp_path)
    rename = Path.rename
    for moves in range(8):
        left = moves

        def killed(path: Path, target: Path) -> Path:
            nonlocal left
            if "lost-" in str(target):
                if left == 0:
                    raise KeyboardInterrupt
                left -= 1
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", killed)
            with contextlib.suppress(KeyboardInterrupt):
                resume_at(tmp_path, 2).close(state="stopped", reason="")
        steps = sorted(int(path.name.removeprefix("step-")) for path in first.checkpoints.glob("step-*"))
        assert steps == [2, 4, 6][: len(steps)]
        assert len(read_lines(first.path / "steps.jsonl", StepRecord)) >= max(steps)
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        assert again.resumed.step == 2
        assert [record.step for record in read_lines(again.path / "steps.jsonl", StepRecord)] == [0, 1]


@pytest.mark.parametrize("second", [2, 4])
@pytest.mark.parametrize("file", ["lost-steps.jsonl", "steps.jsonl", "lost-evals.jsonl", "evals.jsonl"])
def test_a_start_that_is_killed_while_it_takes_records_out_leaves_none_twice(
    file: str, second: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second start may go back less far than the one that was killed."""
    run = saved_often(tmp_path)

    def killed(path: Path, data: bytes) -> None:
        if path.name == file:
            raise KeyboardInterrupt
        write_atomically(path, data)

    kept = content_of(run.path)
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(resuming, "write_atomically", killed)
        resume_at(tmp_path, 2)
    for name, content in kept.items():  # a user who takes back what was set aside
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("checkpoints"):
            (run.path / name).write_bytes(content)
    with resume_at(tmp_path, second) as again:
        for name, kind, step_of_record, all_of_them in (
            ("steps", StepRecord, lambda record: record.step, [*range(6)]),
            ("evals", EvalRecord, lambda record: record.version, [0, 6]),
        ):
            living = [step_of_record(record) for record in read_lines(again.path / f"{name}.jsonl", kind)]
            lost = [step_of_record(record) for record in read_lines(again.path / f"lost-{name}.jsonl", kind)]
            assert living + lost == all_of_them
            assert all(step <= second for step in living)


def test_a_damaged_newer_checkpoint_is_set_aside_when_the_one_before_it_is_used(tmp_path: Path) -> None:
    first = saved_often(tmp_path)
    damage(first, 6)
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        assert again.resumed.step == 4
        assert [path.name for path in again.set_aside.iterdir()] == ["step-6"]


def damage(run: RunDir, step: int) -> None:
    """Makes the checkpoint differ from its manifest, without changing a size."""
    path = folder_of(run.checkpoints, step) / "manifest.json"
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    ("step", "total_steps", "error", "words"),
    [
        (3, 9, ConfigError, r"--at step-3: .* no complete checkpoint of this step; there are step-2, step-4, step-6"),
        (4, 9, CheckpointDamaged, r"--at step-4: .*cannot be read[^$]*there are step-2, step-4, step-6"),
        (6, 6, ConfigError, r"of step 6, and learner\.total_steps = 6, so there is nothing to train: raise .*--at"),
        (None, 5, ConfigError, r"of step 6, and learner\.total_steps = 5"),
    ],
)
def test_a_checkpoint_that_cannot_be_continued_is_refused_and_nothing_changes(
    step: int | None, total_steps: int, error: type[Exception], words: str, tmp_path: Path
) -> None:
    first = saved_often(tmp_path)
    damage(first, 4)
    before = content_of(first.path)
    with pytest.raises(error, match=words):
        resume_at(tmp_path, step, total_steps=total_steps)
    assert content_of(first.path) == before


@pytest.mark.fault("F7")
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_not_moved_aside(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    damage(first, 3)
    before = content_of(first.path)
    with pytest.raises(CheckpointDamaged, match=r"none of its checkpoints can be used \(step-3; .*--fresh"):
        RunDir.create(config_in(tmp_path))
    assert content_of(first.path) == before
    with RunDir.create(config_in(tmp_path), choose=no_checkpoint) as again:
        assert again.previous is not None
        assert again.resumed is None


@pytest.mark.fault("F7")
def test_a_run_goes_on_from_a_checkpoint_that_was_being_replaced_when_it_was_killed(tmp_path: Path) -> None:
    first = interrupted(tmp_path, steps=5, saved=3)
    path = folder_of(first.checkpoints, 3)
    path.rename(path.with_name("step-3.replaced"))
    with RunDir.create(config_in(tmp_path)) as again:
        assert again.resumed is not None
        assert again.resumed.path == path
        assert [each.name for each in again.checkpoints.iterdir()] == ["step-3"]


@pytest.mark.fault("F35")
def test_a_refused_start_holds_no_lock_even_if_its_error_is_kept(tmp_path: Path) -> None:
    """A notebook keeps the traceback of the last error, and with it the frames that have opened the lock."""
    saved_often(tmp_path)
    with pytest.raises(ConfigError) as kept:
        resume_at(tmp_path, 3)
    with resume_at(tmp_path, 4) as again:
        assert again.resumed is not None
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("step", [None, 8])
def test_a_checkpoint_of_another_run_is_refused_with_both_nonces_and_nothing_changes(
    step: int | None, tmp_path: Path
) -> None:
    first = saved_often(tmp_path)
    with RunDir.create(config_in(tmp_path / "other")) as other:
        save(other, 8)
    folder_of(other.checkpoints, 8).rename(folder_of(first.checkpoints, 8))
    before = content_of(first.path)
    with pytest.raises(CheckpointError, match=f"step-8 is of a run .*{other.nonce}.*{first.nonce}.* move .* back"):
        resume_at(tmp_path, step)
    with pytest.raises(CheckpointError, match=other.nonce):
        RunDir.create(config_in(tmp_path))
    assert content_of(first.path) == before


def test_a_run_without_a_checkpoint_or_with_another_format_is_not_begun_anew(tmp_path: Path) -> None:
    first = saved_often(tmp_path)
    for step in (2, 4, 6):
        (folder_of(first.checkpoints, step) / COMPLETE).unlink()
    with pytest.raises(ConfigError, match=r"has no complete and undamaged checkpoint.*asyncrl up"):
        resume_at(tmp_path, None)
    with pytest.raises(ConfigError, match=r"--at step-2: .*there are none"):
        resume_at(tmp_path, 2)
    (first.path / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match=r"cannot read .*run\.json"):
        resume_at(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["quick"]


def test_a_run_that_is_running_is_refused_with_its_holder(tmp_path: Path) -> None:
    saved_often(tmp_path)
    with RunDir.create(config_in(tmp_path)) as running:
        before = content_of(running.path)
        with pytest.raises(RunLocked, match=rf"is in use by pid {os.getpid()} on .* since"):
            resume_at(tmp_path, 2)
        assert content_of(running.path) == before


@pytest.mark.parametrize("name", ["140", "step-", "step-x", "step-3/hf", "lost-2"])
def test_another_word_than_the_name_of_a_checkpoint_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--at {name}: .*e\.g\. step-140"):
        step_of(name)


def test_the_first_lines_name_the_checkpoint_and_where_later_ones_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_often(tmp_path)
    with resume_at(tmp_path, 2) as run:
        print_previous(run)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"resuming run quick from step 2: the checkpoint {run.checkpoints / 'step-2'} is ")
    assert second.startswith(f"the later checkpoints step-4, step-6 are now in {run.checkpoints / 'lost-2'}; delete")


def test_the_log_of_a_restarted_command_says_how_its_last_process_ended_and_where_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_often(tmp_path, state="finished")
    monkeypatch.setattr(restarts, "_earlier_end", "by SIGKILL")
    with resume_at(tmp_path, 2) as run, caplog.at_level(logging.INFO):
        print_previous(run)
    assert "the process before this one ended by SIGKILL; resuming run quick from step 2: " in caplog.text


def test_the_log_of_a_run_that_was_asked_to_restart_says_by_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_often(tmp_path, state="stopped")
    monkeypatch.setattr(restarts, "_earlier_end", "with an error")
    with resume_at(tmp_path, 2) as run, caplog.at_level(logging.INFO):
        print_previous(run)
    why = "asked to end by a signal, before the first step"
    assert f"the process before this one was {why}; resuming run quick from step 2: " in caplog.text
