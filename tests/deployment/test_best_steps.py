"""The checkpoints that a learner keeps for their rewards, also after it was resumed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_run import make_step

from asyncrl.config.schema import CheckpointSection, Config, EvalSection
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import EvalRecord


def config_in(folder: Path, *, keep_best: int) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(folder)}, "checkpoint": {"keep_best": keep_best}})


@pytest.mark.parametrize(("keep_best", "best"), [(0, set()), (1, {20}), (2, {20, 30}), (9, {10, 20, 30})])
def test_the_best_steps_are_those_of_the_recorded_evaluations(tmp_path: Path, keep_best: int, best: set[int]) -> None:
    config = config_in(tmp_path, keep_best=keep_best)
    with RunDir.create(config) as run:
        log = LearnerLog(config, run)
        for step, reward in ((10, 0.1), (20, 0.9), (30, 0.5), (40, 0.99)):
            log.append_eval(EvalRecord(version=step, wall_s=1, prompts=8, reward_mean=reward))
        assert log.best_steps([10, 20, 30], running=lambda: None) == best, "40 has no checkpoint"


def test_a_checkpoint_whose_evaluation_still_runs_stays(tmp_path: Path) -> None:
    config = config_in(tmp_path, keep_best=1)
    with RunDir.create(config) as run:
        log = LearnerLog(config, run)
        log.append_eval(EvalRecord(version=10, wall_s=1, prompts=8, reward_mean=0.1))
        assert log.best_steps([10, 20], running=lambda: 20) == {10, 20}


def test_a_resumed_run_knows_the_evaluations_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, keep_best=1)
    with RunDir.create(config) as run:
        first = LearnerLog(config, run)
        for step in range(3):
            first.append_step(make_step(step))
        for step, reward in ((1, 0.9), (2, 0.5)):
            first.append_eval(EvalRecord(version=step, wall_s=1, prompts=8, reward_mean=reward))
        monkeypatch.setattr(run, "resumed", SimpleNamespace(step=2))
        assert LearnerLog(config, run).best_steps([1, 2], running=lambda: None) == {1}


def test_only_the_set_that_the_config_names_counts(tmp_path: Path) -> None:
    sets = {"sums": {"environment": {"reward": "math_verify"}}}
    config = config_in(tmp_path, keep_best=1).model_copy(
        update={
            "checkpoint": CheckpointSection(keep_best=1, best_eval="sums"),
            "eval": EvalSection.model_validate({"sets": sets}),
        }
    )
    with RunDir.create(config) as run:
        log = LearnerLog(config, run)
        for step, name, reward in ((10, "sums", 0.5), (20, "sums", 0.25), (20, "heldout", 0.9)):
            log.append_eval(EvalRecord(name=name, version=step, wall_s=1, prompts=8, reward_mean=reward))
        assert log.best_steps([10, 20], running=lambda: None) == {10}


def test_each_set_has_its_own_numbers_in_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, keep_best=0)
    logged: list[dict[str, float | None]] = []
    with RunDir.create(config) as run:
        log = LearnerLog(config, run)
        monkeypatch.setattr(log._trackers, "log", lambda step, numbers: logged.append(numbers))
        for name in ("heldout", "sums"):
            log.append_eval(EvalRecord(name=name, version=4, wall_s=1, prompts=8, reward_mean=0.5, pass_at={2: 0.75}))
    assert logged == [
        {"reward/heldout_mean": 0.5, "reward/heldout_version": 4, "reward/heldout_pass_at_2": 0.75},
        {"reward/heldout_sums_mean": 0.5, "reward/heldout_sums_version": 4, "reward/heldout_sums_pass_at_2": 0.75},
    ]
