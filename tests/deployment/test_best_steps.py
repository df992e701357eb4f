"""The checkpoints that a learner keeps for their rewards, also after it was resumed."""

from pathlib import Path

import pytest

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
