"""The learner's live view: it is made again only when something is new, because it reads all records."""

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import screen as screen_module
from asyncrl.deployment.screen import LearnerDisplay, Screen
from asyncrl.learner.training_time import TrainingTime
from asyncrl.views.live import LiveView
from asyncrl.views.run_view import RunView


def test_the_view_is_made_again_only_for_new_records_failures_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def run_view(steps: list[object], **facts: Any) -> RunView:
        made.append(facts)
        return RunView(step=len(steps), failures=dict(facts["failures"]), training=facts["training"])

    monkeypatch.setattr(screen_module, "run_view", run_view)
    now_s = [100.0]
    log = SimpleNamespace(
        steps=[], evals=[], training=lambda: TrainingTime(wall_s=now_s[0], trained_s=50.0), wall_s=lambda: now_s[0]
    )
    failures, cores, gauge = {"reward_raised": 1}, [4], list[float]()
    shown: list[LiveView] = []
    display = LearnerDisplay(
        config=Config(),
        screen=Screen(show=shown.append, report=print, started_s=0.0),
        log=log,  # type: ignore[arg-type]
        cores=lambda: cores[0],
        metrics=SimpleNamespace(health=list, effective_training_time=gauge.append),  # type: ignore[arg-type]
        failures=lambda: failures,
    )
    display.show()
    display.enter("training")
    assert (len(made), len(shown), shown[-1].phase) == (1, 2, "training")
    changes = [
        lambda: log.steps.append(object()),
        lambda: log.evals.append(object()),
        lambda: failures.update(reward_raised=2),
        lambda: cores.append(cores.pop() + 1),
        lambda: setattr(display, "hidden_tags", ("<think>",)),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        display.show()
        display.show()
        assert len(made) == number
    assert (shown[-1].run.step, shown[-1].run.failures) == (1, {"reward_raised": 2})
    assert made[-1]["setting"].hidden_tags == ("<think>",)
    now_s[0] = 200.0
    display.show()
    assert (len(made), gauge[-2:]) == (6, [0.5, 0.25]), "the share of time that trains falls while no step ends"
    assert shown[-1].run.training == TrainingTime(wall_s=200.0, trained_s=50.0)
    now_s[0] = 40.0  # the clock was set back
    display.show()
    assert gauge[-1] == 1.0
