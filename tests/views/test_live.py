"""The live view: complete when all values are known, without made-up values else, and plain lines without a
terminal."""

import doctest
import io
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from asyncrl.common.concern import Concern
from asyncrl.config.schema import Config
from asyncrl.learner.records import EvalRecord, Note
from asyncrl.learner.training_time import TrainingTime
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.views import live
from asyncrl.views.live import (
    LiveDisplay,
    LiveView,
    phase_line,
    plain_line,
    render,
    share_bar,
    sparkline,
)
from asyncrl.views.run_view import RunView

EVALS = [
    EvalRecord(name=name, version=version, wall_s=1, prompts=8, reward_mean=reward)
    for name, version, reward in (("heldout", 0, 0.38), ("sums", 0, 0.25), ("sums", 40, 0.5))
]


def view(
    step: int = 80, *, config: Config | None = None, phase: str = "training", elapsed_s: float = 75.0, **changed: Any
) -> LiveView:
    fields: dict[str, Any] = {
        "step": step,
        "eta_s": 62.0,
        "rewards": (0.4, 0.5, 0.625),
        "evals": EVALS,
        "oldest_token_versions": 1,
        "ess_ratio": 0.967,
        "samples_per_s": 213.0,
        "tokens_per_s": 1130.0,
        "buffer_groups": {"reserved": 16, "ready": 9, "leased": 16},
        "learner_shares": {"waiting_for_groups": 0.3, "forward_backward": 0.7},
        "generator_shares": {"generating": 0.9, "blocked_on_staleness": 0.1},
    }
    return LiveView(config=config or Config(), phase=phase, elapsed_s=elapsed_s, run=RunView(**(fields | changed)))


SHORT = Config.model_validate({"learner": {"total_steps": 25}})
STARTING = LiveView(config=Config(), phase="loading the model", elapsed_s=8.0)


def shown(rendered: LiveView, *, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(rendered))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_doctests() -> None:
    assert doctest.testmod(live).failed == 0


def test_the_panel_shows_everything_that_is_known() -> None:
    text = shown(view())
    for words in (
        "quickstart", "training", "1 min 15 s", "80 of 200", "1 min 2 s left", "0.625", "held out 0.38",
        "sums 0.25 → 0.50",
        "at most 1 versions old, limit 2", "97%", "213 samples/s", "1.13k tokens/s", "16 reserved, 9 ready, 16 leased",
        "41 of 48 slots", "waiting for groups 30%", "generating 90%", "The learner waits for groups 30 %",
    ):  # fmt: skip
        assert words in text, words


def test_start_up_shows_its_phase_and_nothing_that_is_not_known() -> None:
    text = shown(STARTING)
    assert "loading the model" in text
    assert "reward" not in text
    assert phase_line(STARTING) == "loading the model (8.0 s)"


def noted(concern: Concern, fact: str) -> dict[str, Any]:
    return {"notes": [Note(concern=concern, number=1.0, fact=fact, look="asyncrl samples RUN")]}


FLAT = noted(Concern.NO_GRADIENT, "In 100 % of the groups all rewards are equal")
FAILING = noted(Concern.FAILURES, "49 % of the groups failed")
BOTH = {"notes": [*FLAT["notes"], *FAILING["notes"]]}


def test_a_headline_is_shown_before_the_first_step_too() -> None:
    text = shown(view(0, **BOTH))
    assert "In 100 % of the groups all rewards are equal" in text
    assert "49 % of the groups failed" in text, "further notes follow the headline"


def test_without_a_terminal_each_warning_is_printed_once_and_a_bottleneck_never() -> None:
    views = [view(11), view(12, **FLAT), view(13, **FAILING), view(14, **FLAT)]
    warnings = [line for line in plain(10, views) if "rewards are equal" in line or "failed" in line]
    flat, failing = views[1].headline, views[2].headline
    assert flat is not None
    assert failing is not None
    assert failing.sentence.startswith("49 % of the groups failed")
    assert warnings == [f"warning: {flat.sentence}", f"warning: {failing.sentence}"]
    assert not any("waits for groups" in line for line in plain(10, views))


def test_what_is_logged_while_the_panel_is_shown_appears_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("sys.stderr", Terminal())
    with LiveDisplay(console, every_steps=10) as display:
        display.update(view(80))
        print("first failure of reward_raised: [red]x[/red]", file=sys.stderr)
        display.update(view(81))
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert drawn.index("first failure of reward_raised: [red]x[/red]") < drawn.index("81 of 200")
    assert isinstance(sys.stderr, Terminal)
    assert sys.stderr.getvalue() == ""


def test_an_stderr_that_goes_to_a_file_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stderr = Console(file=io.StringIO(), force_terminal=True, width=100), io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with LiveDisplay(console, every_steps=10):
        print("to the file", file=sys.stderr)
    assert stderr.getvalue() == "to the file\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_first_step_needs_no_optional_number() -> None:
    bare = LiveView(config=Config(), phase="training", elapsed_s=9.0, run=RunView(step=1))
    assert "1 of 200" in shown(bare)
    assert plain_line(bare) == "step 1/200, reward –"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_panel_fits_its_terminal(width: int) -> None:
    assert all(len(line) <= width for line in shown(view(), width=width).splitlines())


def test_a_plain_line_has_the_numbers_of_the_step() -> None:
    assert plain_line(view()) == (
        "step 80/200, reward 0.625, staleness 1 of 2, effective sample size 97 %, 213 samples/s, 1.13k tokens/s, "
        "1 min 2 s left"
    )


def test_the_speeds_are_followed_by_the_share_of_the_wall_time_that_trained() -> None:
    spent = view(training=TrainingTime(wall_s=600.0, trained_s=450.0))
    assert "1.13k tokens/s, effective training time 75%" in shown(spent)
    assert "1.13k tokens/s, effective training time 75%, 1 min 2 s left" in plain_line(spent)


def test_names_are_text_and_not_rich_markup() -> None:
    run = Config().run.model_copy(update={"name": "[bold]x[/bold]"})
    assert "[bold]x[/bold]" in shown(view(config=Config().model_copy(update={"run": run})))
    odd = LiveView(config=Config(), phase="[red]y", elapsed_s=0)
    assert "[red]y" in shown(odd)
    assert plain(10, [odd]) == ["[red]y (0.0 s)"]


def plain(every_steps: int, views: list[LiveView]) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=False)
    with LiveDisplay(console, every_steps=every_steps) as display:
        for each in views:
            display.update(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_a_line_is_printed_a_phase_every_n_steps_and_at_the_end() -> None:
    views = [STARTING, STARTING, *(view(step, config=SHORT) for step in range(1, 26)), view(25, config=SHORT)]
    lines = plain(10, views)
    assert [line.split(",")[0] for line in lines] == [
        "loading the model (8.0 s)", "step 1/25", "training (1 min 15 s)", "step 10/25", "step 20/25", "step 25/25",
    ]  # fmt: skip


def test_without_a_terminal_no_step_is_printed_twice_and_the_end_says_what_it_does() -> None:
    closing = [view(25, config=SHORT, phase=phase) for phase in ("training", "closing", "evaluating", "closing")]
    lines = plain(10, [view(0, config=SHORT), *closing])
    assert [line.split(",")[0].split(" (")[0] for line in lines] == [
        "training", "step 25/25", "closing", "evaluating", "closing",
    ]  # fmt: skip


def test_without_a_terminal_a_learner_that_does_not_answer_for_a_moment_has_no_line_of_step_0() -> None:
    unknown = view(0, phase="1 buffer; no answer from learner")
    lines = plain(10, [view(20), unknown, view(21)])
    assert [line.split(",")[0] for line in lines] == [
        "step 20/200", "training (1 min 15 s)", "1 buffer; no answer from learner (1 min 15 s)", "step 21/200",
        "training (1 min 15 s)",
    ]  # fmt: skip


def test_without_a_terminal_a_run_that_is_stopped_shows_how_far_it_came() -> None:
    lines = plain(10, [view(12), view(17), view(17, phase="closing")])
    assert [line.split(",")[0].split(" (")[0] for line in lines] == [
        "step 12/200", "training", "step 17/200", "closing",
    ]  # fmt: skip


def test_without_a_terminal_steps_that_are_jumped_over_do_not_lose_the_line() -> None:
    lines = plain(10, [view(1), view(9), view(13), view(14), view(31)])
    steps = [line.split(",")[0] for line in lines if line.startswith("step")]
    assert steps == ["step 1/200", "step 13/200", "step 31/200"]


def test_in_a_terminal_the_panel_is_drawn_in_place() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LiveDisplay(console, every_steps=10) as display:
        display.update(view(80))
        display.update(view(81))
    assert isinstance(console.file, io.StringIO)
    assert "81 of 200" in console.file.getvalue()


@given(parts=st.lists(st.floats(min_value=0, max_value=1), min_size=1, max_size=7).filter(lambda parts: sum(parts) > 0))
def test_a_share_bar_is_always_as_long_as_it_should_be(parts: list[float]) -> None:
    shares = {state: part / sum(parts) for state, part in zip(LEARNER_STATES, parts, strict=False)}
    bar = share_bar(shares, cells=30).plain
    assert set(bar[:30]) <= {"█", "░"}
    assert not set(bar[30:]) & {"█", "░"}
    assert bar.count("░") == 0


@given(values=st.lists(st.floats(min_value=-100, max_value=100), max_size=200))
def test_a_sparkline_has_a_cell_a_value_up_to_its_width(values: list[float]) -> None:
    assert len(sparkline(values, cells=30)) == min(30, len(values))


def test_a_sparkline_rises_with_its_values() -> None:
    line = sparkline([value / 10 for value in range(90)], cells=30)
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")
