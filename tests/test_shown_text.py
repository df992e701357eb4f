"""Nothing that a process shows has control characters or secrets, whichever way it takes."""

import gc
import json
import logging
import os
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from asyncrl import shown_text
from asyncrl.cli.main import app, main
from asyncrl.cli.preflight import checked_config
from asyncrl.cli.start import reported_run, shown_run
from asyncrl.cli.terminal import say
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.deployment import launch
from asyncrl.deployment.launch import log_to
from asyncrl.environments.secrets import hide_secrets
from asyncrl.shown_text import describe_process, escaped, fact, log_to_stderr
from asyncrl.user_code import describe_error

logger = logging.getLogger(__name__)
PACKAGE = Path(shown_text.__file__).parent
QUICKSTART = PACKAGE.parent / "configs" / "quickstart.yaml"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
KEY = "sk-0123456789"
HOSTILE = f"\x1b]0;title\x07 \x1b[2J \x9b31m \r overwritten {KEY}"
"""Text that would set the title of a terminal, clear it, colour it, and overwrite a line."""


@pytest.fixture(autouse=True)
def _hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_text, "_redact", shown_text._redact)  # restores it after the test
    hide_secrets(EnvironmentSection(secrets=["KEY"]), {"KEY": KEY})


def assert_harmless(text: str) -> None:
    assert not CONTROL.search(text)
    assert KEY not in text
    assert "<KEY>" in text
    assert "\\u001b[2J" in text


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


@given(st.text())
def test_only_tabs_and_newlines_are_left_of_control_characters(text: str) -> None:
    assert not CONTROL.search(escaped(text))
    assert escaped("\t\n") == "\t\n"


@pytest.mark.parametrize("code", [*range(0x2028, 0x202F), *range(0x2066, 0x206A)])
def test_text_cannot_change_the_direction_of_the_text_after_it(code: int) -> None:
    assert escaped(f"a{chr(code)}b") == f"a\\u{code:04x}b"


@pytest.mark.parametrize("text", ["שלום", "مرحبا\u200f", "क्‍ष", "👩‍👩‍👧", "a\u00adb", "à la carte"])
def test_text_of_any_language_stays(text: str) -> None:
    assert escaped(text) == text


@given(st.text())
def test_json_stays_the_same_data(text: str) -> None:
    assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text


def test_the_log_and_the_terminal_of_a_command_show_nothing_harmful(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to(tmp_path / "up.log"):
        logger.warning("group %s failed: %s", "7.0", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError as error:
            logger.error("it failed", exc_info=error)
    for text in (tmp_path.joinpath("up.log").read_text(), capsys.readouterr().err):
        assert text.count("<KEY>") == 2
        assert "Traceback" in text
        assert_harmless(text)


def test_the_log_of_an_actor_shows_nothing_harmful(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))  # pytest's has handlers already
    log_to_stderr()
    logging.root.info("group %s failed: %s", "7.0", HOSTILE)
    assert_harmless(capsys.readouterr().err)


def test_a_warning_of_a_command_without_a_log_shows_nothing_harmful(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    monkeypatch.setattr(sys, "argv", ["asyncrl", "--version"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    with pytest.raises(SystemExit):
        main()
    logger.warning("%s cannot be used", HOSTILE)
    assert_harmless(capsys.readouterr().err)


def test_a_line_of_a_command_shows_nothing_harmful_but_has_its_own_color(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, label="warning:", color="yellow", err=True)
    text = capsys.readouterr().err
    assert text.startswith("warning: ")
    assert_harmless(text.removesuffix("\n"))


@pytest.mark.usefixtures("judge_key")
def test_a_command_shows_no_secret_of_its_configuration() -> None:
    checked_config([QUICKSTART, {"environment.secrets": ["JUDGE_API_KEY", "NOT_SET"]}], [], roles=())
    assert shown_text.shown(f"401 for {KEY}") == "401 for <JUDGE_API_KEY>"


@pytest.mark.usefixtures("in_tmp_path")
def test_the_error_of_a_command_shows_no_escape_sequence(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", "a\x1b[2Jrun"])
    assert result.exit_code == 1
    assert "there is no run a\\u001b[2Jrun" in result.stderr
    assert not CONTROL.search(result.stderr)


def test_a_report_above_the_live_view_shows_nothing_harmful(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path)}})
    with shown_run(config, role="up", console=Console(width=500), started_s=0.0, choose=lambda *_: None) as (
        _,
        screen,
    ):
        screen.report(f"the first prompt: {HOSTILE}")
    assert_harmless(capsys.readouterr().out)


def test_the_description_of_an_error_shows_no_secret() -> None:
    assert describe_error(ValueError(f"401 for {KEY}")) == "ValueError: 401 for <KEY>"


def test_run_json_and_the_report_show_no_secret_of_the_error_that_ended_the_run(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": str(tmp_path), "name": "quick"}})
    with (
        pytest.raises(ZeroDivisionError),
        reported_run(config, role="up", choose=lambda *_: None),
    ):
        raise ZeroDivisionError(f"401 for {KEY}")
    for name in ("run.json", "report.html", "logs/up-0.log"):
        text = (tmp_path / "quick" / name).read_text()
        assert KEY not in text, name
        assert "401 for " in text, name


def test_a_short_value_that_occurs_by_chance_is_not_hidden_in_logs() -> None:
    hide_secrets(EnvironmentSection(secrets=["WORKERS", "UNSET"]), {"WORKERS": "8"})
    assert shown_text.shown("step 8 of 80") == "step 8 of 80"


def test_every_log_and_every_line_of_a_command_goes_the_one_way_that_is_checked_above() -> None:
    other_ways = re.compile(
        r"\b(?:typer\.echo|click\.echo|logging\.(?:basicConfig|Formatter|StreamHandler)|(?<!\.)print)\("
    )
    users = {
        f"{file.relative_to(PACKAGE)}: {found[0]}"
        for file in PACKAGE.rglob("*.py")
        for found in other_ways.finditer(file.read_text(encoding="utf-8"))
    }
    assert users == {
        "shown_text.py: logging.StreamHandler(",
        "shown_text.py: logging.basicConfig(",
        "cli/terminal.py: typer.echo(",
        "cli/restarts.py: print(",  # its text is all its own, and it imports nothing
        "cli/doctor.py: print(",  # in code of a probe
        "cli/gpu_checks.py: print(",  # in code of a probe
        "deployment/launch.py: print(",  # of a formatted record
        "deployment/pod_end.py: print(",  # of a preStop command of a pod: names of actors, which asyncrl chooses
        "config/docs.py: print(",  # of the generators of the documentation
        "vllm_internals.py: print(",  # names of vLLM
        "metrics/trackers.py: print(",  # in a docstring
        "deployment/model_evaluation.py: print(",  # in a docstring
    }


def test_the_time_of_a_line_is_utc_on_a_machine_with_another_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    record = logging.LogRecord("asyncrl.tried", logging.INFO, __file__, 1, "lost", (), None)
    record.created = 1_796_025_600.25
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        line = shown_text.LogFormatter().format(record)
    time.tzset()
    assert line == "2026-11-30T08:00:00.250Z INFO asyncrl.tried: lost"


@pytest.fixture
def without_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no facts for its log, and those of the test end with it."""
    monkeypatch.setattr(shown_text, "_facts", {})


@pytest.mark.usefixtures("without_facts")
def test_each_line_of_a_json_log_is_an_object_with_utc_time_and_the_facts_of_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = [6]
    describe_process(run="quick", role="learner", incarnation=2, rank=0, replica=None, step=lambda: trained[0])
    assert [fact(name) for name in ("incarnation", "step", "unknown")] == [2, trained[0], None]
    record = logging.LogRecord("asyncrl.tried", logging.INFO, __file__, 1, "lost %s:\n%s", ("a", HOSTILE), None)
    record.created = 1_796_025_600.25
    line = json.loads(shown_text.JsonLogFormatter().format(record))
    assert line == {
        "time": "2026-11-30T08:00:00.250Z",
        "level": "INFO",
        "logger": "asyncrl.tried",
        "message": f"lost a:\n{HOSTILE.replace(KEY, '<KEY>')}",
        "node": socket.gethostname(),
        "pid": os.getpid(),
        "run": "quick",
        "role": "learner",
        "incarnation": 2,
        "rank": 0,
        "step": 6,
    }
    trained[0] += 1
    with log_to(tmp_path / "up.log", form="json"):
        logger.warning("it %s", "fails", exc_info=ValueError(HOSTILE))
    for text in (tmp_path.joinpath("up.log").read_text(), capsys.readouterr().err):
        assert_harmless(text)
        (only,) = text.splitlines()
        line = json.loads(only)
        assert (line["level"], line["message"], line["step"]) == ("WARNING", "it fails", 7)
        assert line["exception"].endswith(f"ValueError: {HOSTILE.replace(KEY, '<KEY>')}")


@given(st.text())
@example("\x7f\u2028")
def test_any_message_is_one_line_of_json_and_comes_back(text: str) -> None:
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "%s", (text,), None)
    line = shown_text.JsonLogFormatter().format(record)
    assert not CONTROL.search(line)
    assert "\n" not in line
    assert json.loads(line)["message"] == shown_text.redacted(text)


def test_a_log_continues_in_a_new_file_when_it_is_large_and_old_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOG_BYTES", 200)
    monkeypatch.setattr(launch, "LOG_FILES", 2)
    with log_to(tmp_path / "up.log"):
        for number in range(20):
            logger.info("line %d %s", number, "x" * 60)
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(files) == ["up.log", "up.log.1", "up.log.2"]
    assert all(len(text) <= 200 for text in files.values())
    assert "line 19" in files["up.log"]
    assert "line 0 " not in "".join(files.values())
