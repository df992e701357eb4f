"""The learner's live view: it is made again only when something is new, because it reads all records."""

from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import screen as screen_module
from asyncrl.deployment.screen import LearnerDisplay, Screen
from asyncrl.views.live import LiveView
from asyncrl.views.run_view import RunView


def test_the_view_is_made_again_only_for_new_records_failures_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def run_view(steps: list[object], **facts: Any) -> RunView:
        made.append(facts)
        return RunView(step=len(steps), failures=dict(facts["failures"]))

    monkeypatch.setattr(screen_module, "run_view", run_view)
    log, failures, cores = SimpleNamespace(steps=[], evals=[]), {"reward_raised": 1}, [4]
    shown: list[LiveView] = []
    display = LearnerDisplay(
        config=Config(),
        screen=Screen(show=shown.append, report=print, started_s=0.0),
        log=log,  # type: ignore[arg-type]
        cores=lambda: cores[0],
        metrics=SimpleNamespace(health=list),  # type: ignore[arg-type]
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
