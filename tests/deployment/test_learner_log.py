"""The numbers of a run's records that experiment trackers get."""

from pathlib import Path

from made_up_run import make_step

from asyncrl.config.schema import Config
from asyncrl.deployment.learner_log import TrackedRecords
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import EvalRecord


def config_in(folder: Path) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(folder)}})


class KeptNumbers:
    """Stands for trackers, and keeps the numbers that they get."""

    def __init__(self, *_: object, **__: object) -> None:
        self.logged: list[tuple[int, dict[str, float | None]]] = []

    def log(self, step: int, numbers: dict[str, float | None]) -> None:
        self.logged.append((step, numbers))

    def close(self) -> None: ...


def test_each_set_has_its_own_numbers_in_trackers(tmp_path: Path) -> None:
    config, trackers = config_in(tmp_path), KeptNumbers()
    with RunDir.create(config) as run:
        tracked = TrackedRecords(config, run, before=None, new_trackers=lambda *_, **__: trackers)
        for name in ("heldout", "sums"):
            tracked.append_eval(
                EvalRecord(
                    name=name, version=4, wall_s=1, prompts=8, reward_mean=0.5, pass_at={2: 0.75}, truncated_ratio=0.25
                )
            )
    assert trackers.logged == [
        (
            4,
            {
                f"{prefix}_version": 4,
                f"{prefix}_mean": 0.5,
                f"{prefix}_pass_at_2": 0.75,
                f"{prefix}_truncated_ratio": 0.25,
            },
        )
        for prefix in ("reward/heldout", "reward/heldout_sums")
    ]


def test_speeds_are_since_the_step_before_also_in_a_run_that_was_resumed(tmp_path: Path) -> None:
    config, trackers = config_in(tmp_path), KeptNumbers()
    with RunDir.create(config) as run:
        before = make_step(0, wall_s=10.0)
        tracked = TrackedRecords(config, run, before=before, new_trackers=lambda *_, **__: trackers)
        tracked.append_step(make_step(1, wall_s=12.0, trained_tokens=10))
        tracked.append_step(make_step(2, wall_s=17.0, trained_tokens=10))
        tracked.append_eval(EvalRecord(version=1, wall_s=18, prompts=8, reward_mean=0.5))
    assert [(step, numbers.get("speed/trained_tokens_per_s")) for step, numbers in trackers.logged] == [
        (2, 5.0),
        (3, 2.0),
        (3, None),
    ], "an evaluation of an earlier version has the newest step, because a tracker refuses an earlier one"
