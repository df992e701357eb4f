"""The command line: light commands import no framework, commands are imported on use, and errors are single lines."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from asyncrl.cli import main
from asyncrl.errors import AsyncRLError, ConfigError, RunLocked

_ROOT = Path(__file__).parents[2]
_HEAVY = ("torch", "ray", "vllm", "transformers", "accelerate", "numpy")

runner = CliRunner()


def _heavy_after(statements: str) -> list[str]:
    code = f"import sys\n{statements}\nprint(*[name for name in {_HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=_ROOT
    )
    return done.stderr.splitlines()[-1].split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["config", "check", "-c", "configs/quickstart.yaml"],
        ["config", "show", "run.seed=1"],
        ["config", "schema"],
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_light_commands_import_no_framework(arguments: list[str]) -> None:
    call = f"from asyncrl.cli.main import app\ntry:\n    app({arguments!r})\nexcept SystemExit as end:\n"
    assert _heavy_after(f"{call}    assert not end.code") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        ("up", "generator.replcas=2"),
        ("learner", "algorithm.loss=dapo"),
        ("generator", "weights.publish_every_steps=9"),
    ],
)
@pytest.mark.fault("F28")
def test_a_run_that_cannot_be_is_refused_before_anything_heavy_is_imported_or_made(
    command: str, mistake: str, tmp_path: Path
) -> None:
    arguments = [command, "-c", "configs/quickstart.yaml", f"run.dir={tmp_path}", mistake]
    call = f"from asyncrl.cli.main import app\ntry:\n    app({arguments!r})\nexcept SystemExit as end:\n"
    assert _heavy_after(f"{call}    assert end.code == 2") == []
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_help_imports_no_command() -> None:
    code = "from asyncrl.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
    code += "import sys\nassert not {'asyncrl.cli.config', 'asyncrl.cli.doctor', 'pydantic'} & sys.modules.keys()"
    _heavy_after(code)


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
def test_debug_shows_the_traceback(raising: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_DEBUG", "1")
    assert isinstance(runner.invoke(main.app, [raising]).exception, AsyncRLError)


@pytest.mark.parametrize("raising", [ZeroDivisionError("our bug")], indirect=True)
def test_bugs_are_not_dressed_up_as_user_errors(raising: str) -> None:
    assert isinstance(runner.invoke(main.app, [raising]).exception, ZeroDivisionError)
