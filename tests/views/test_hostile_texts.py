"""No view writes a control character to a terminal, and no page gets an element, whatever wrote the texts of a run."""

import re
from pathlib import Path

import pytest
from hostile_run import PARTS, hostile_texts, write_texts_run
from html_page import Page
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.schema import Config
from asyncrl.learner.records import EvalRecord
from asyncrl.views.compare import compare_html
from asyncrl.views.compared_runs import read_compared
from asyncrl.views.console import ShownConsole
from asyncrl.views.live import LiveDisplay, LiveView, render
from asyncrl.views.report import read_run, report_html
from asyncrl.views.run_view import RunView

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
TEXTS = hostile_texts(500)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_texts_run(folder, TEXTS[start::4], name=f"run{start}") for start in range(4)]


@pytest.mark.parametrize(
    "command",
    [
        *(["samples"], ["samples", "--worst", "-n", "100"], ["samples", "--step", "0"], ["samples", "--color", "mask"]),
        *(["status"], ["top", "--once"], ["report"], ["audit"]),
    ],
    ids=" ".join,
)
def test_no_command_that_looks_at_a_run_writes_a_control_character(runs: list[Path], command: list[str]) -> None:
    for run in runs:
        result = CliRunner().invoke(app, [*command, str(run)])
        assert not CONTROL.search(result.output)
        assert result.output


def test_the_comparison_of_runs_writes_no_control_character(runs: list[Path], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    assert not CONTROL.search(result.output)


def test_the_texts_of_a_run_change_neither_the_title_nor_the_elements_of_its_pages(
    runs: list[Path], tmp_path: Path
) -> None:
    """`make campaign` checks the same in a browser."""
    plain = [f"text {number}" for number in range(len(TEXTS))]
    same = [write_texts_run(tmp_path, plain[start::4], name=f"run{start}") for start in range(4)]
    for hostile, harmless in zip(runs, same, strict=True):
        assert skeleton(report_html(read_run(hostile))) == skeleton(report_html(read_run(harmless)))
    hostile_page, harmless_page = (compare_html(read_compared(each, info_of=lambda _: None)) for each in (runs, same))
    assert skeleton(hostile_page) == skeleton(harmless_page)


def skeleton(page: str) -> tuple[str, list[str], list[tuple[str, str | None]]]:
    """Returns the title, the names of the elements, and the attributes of all elements, with the values of classes."""
    read = Page(page)
    return read.title, read.tags, [(name, value if name == "class" else None) for name, value in read.attributes]


def test_the_error_about_wrong_arguments_writes_no_control_character() -> None:
    for text in PARTS:
        for arguments in (
            [text],
            ["report", f"--{text}"],
            ["config", "show", "-c", text],
            ["samples", "a", "-n", text],
        ):
            assert not CONTROL.search(CliRunner().invoke(app, arguments).output)


def test_the_samples_show_each_text(runs: list[Path]) -> None:
    shown = "".join(CliRunner().invoke(app, ["samples", "-n", "100", str(run)]).output for run in runs)
    for part in ("[link=file:///x]", ":smile:", "\\x1b[2J", "<img src=x onerror=alert(3)>"):
        assert part in shown


@pytest.mark.parametrize("terminal", [False, True])
def test_the_live_view_writes_no_control_character_but_its_own(terminal: bool, capsys: pytest.CaptureFixture) -> None:
    for text in PARTS:
        view = LiveView(
            config=Config(),
            phase=text,
            elapsed_s=1,
            run=RunView(
                step=3,
                rewards=[0.5],
                evals=[
                    EvalRecord(name=text, version=0, wall_s=1, prompts=1, reward_mean=reward) for reward in (0.5, 0.6)
                ],
                learner_activity=text,
                quiet_s=1.0,
                buffer_groups={text: 1},
                learner_shares={text: 1.0},
            ),
        )
        console = ShownConsole(force_terminal=terminal, width=500, no_color=True, legacy_windows=False)
        with LiveDisplay(console, every_steps=1) as display:
            display.update(view)
        console.print(render(view))
    own = re.compile(r"\x1b\[\?25[lh]|\r\x1b\[2K|\x1b\[1A|\x1b\[2K|\x1b\[[\d;]*m")
    assert not CONTROL.search(own.sub("", capsys.readouterr().out))


def test_the_console_shows_texts_in_any_part_of_a_view_without_markup(capsys: pytest.CaptureFixture) -> None:
    for text in TEXTS:
        table = Table(title=text)
        table.add_column(text)
        table.add_row(text)
        ShownConsole(width=200).print(Panel(table, title=Text(text)), Text(text), text)
    shown = capsys.readouterr().out
    assert not CONTROL.search(shown)
    assert "[link=file:///x]" in shown
