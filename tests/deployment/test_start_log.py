"""The log line that says where the time of a start went."""

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment.screen import StartLog
from asyncrl.views.live import LiveView
from asyncrl.views.run_view import RunView


def view(phase: str, elapsed_s: float, *, step: int = 0) -> LiveView:
    return LiveView(config=Config(), phase=phase, elapsed_s=elapsed_s, run=RunView(step=step))


def logged(views: list[LiveView], caplog: pytest.LogCaptureFixture) -> list[str]:
    shown: list[LiveView] = []
    log = StartLog(shown.append)
    with caplog.at_level("INFO", "asyncrl.deployment.screen"):
        for each in views:
            log.update(each)
    assert shown == views
    return caplog.messages


NEW_RUN = [view("starting Ray", 2.0), view("importing the learner", 5.5), view("training", 9.0), view("training", 9.5)]


def test_after_the_first_step_the_seconds_of_each_phase_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    steps = [view("training", 12.0, step=1), view("training", 13.0, step=2)]
    assert logged([*NEW_RUN, *steps], caplog) == [
        "the first step was trained 12.0 s after the start: importing the command 2.0 s, starting Ray 3.5 s, "
        "importing the learner 3.5 s, training 3.0 s"
    ]


def test_the_steps_before_a_resume_are_not_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    resumed = [view("restoring step 7", 4.0, step=7), view("training", 6.0, step=7), view("training", 6.5, step=7)]
    assert logged(resumed, caplog) == []
    assert "8.0 s after" in logged([*resumed, view("training", 8.0, step=8)], caplog)[0]


def test_a_start_without_a_step_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(NEW_RUN, caplog) == []
