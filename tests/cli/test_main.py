"""The command line: each command has its line in the help, and errors are single lines."""

import pytest
import typer
from typer.testing import CliRunner

from asyncrl.cli import main
from asyncrl.errors import AsyncRLError, ConfigError, RunLocked

runner = CliRunner()


def test_help_lists_every_command_with_its_line_and_teaches_by_example() -> None:
    text = runner.invoke(main.app, ["--help"]).stdout
    for name, line in main.COMMANDS.items():
        assert f"{name} " in text
        assert line[:40] in text
    assert "-c quickstart" in text
    assert "staleness.max_versions=4" in text


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_in_the_table_exists_and_explains_itself(name: str) -> None:
    result = runner.invoke(main.app, [name, "--help"])
    assert result.exit_code == 0
    assert f"{name} [OPTIONS]" in result.stdout


def test_a_misspelt_command_says_what_was_meant() -> None:
    result = runner.invoke(main.app, ["confg", "check"])
    assert result.exit_code == 2
    assert "Did you mean 'config'" in result.stderr


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Makes a command raise the parameter, and returns the name of the command."""
    from asyncrl.cli import config

    fake = typer.Typer()

    @fake.command()
    def fail() -> None:
        raise request.param

    monkeypatch.setattr(config, "app", fake)
    return "config"


@pytest.mark.parametrize(
    ("raising", "exit_code"),
    [(ConfigError("a.b = 1: too small\nc.d = 2: too big"), 2), (RunLocked("run q is held by pid 3"), 1)],
    indirect=["raising"],
)
def test_our_errors_are_clean_lines_on_stderr_with_their_exit_code(raising: str, exit_code: int) -> None:
    result = runner.invoke(main.app, [raising])
    assert result.exit_code == exit_code
    assert result.stdout == ""
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("raising", [RunLocked("run q is held by pid 3")], indirect=True)
def test_debug_shows_the_traceback(raising: str) -> None:
    assert isinstance(runner.invoke(main.app, [raising], env={"ASYNCRL_DEBUG": "1"}).exception, AsyncRLError)


@pytest.mark.parametrize("raising", [ZeroDivisionError("our bug")], indirect=True)
def test_bugs_are_not_dressed_up_as_user_errors(raising: str) -> None:
    assert isinstance(runner.invoke(main.app, [raising]).exception, ZeroDivisionError)
