"""`asyncrl fork RUN NEW` starts what `asyncrl up` starts, with the configuration of another run and its weights."""

import subprocess
import sys
from pathlib import Path

import pytest
from mirrored_scene import save
from started_runs import Started
from typer.testing import CliRunner

from asyncrl.cli import fork as command
from asyncrl.cli.main import SUPERVISED, app
from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.deployment.resuming import no_checkpoint, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import ForkPoint

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

runner = CliRunner()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """There is a run of the name `quick` in the present directory's `runs`, with two checkpoints and a tiny model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # the command sets it in this process; it is removed after the test
    settings = {"run.name": "quick", "run.mirror": "file:///tmp/mirror-of-quick", "learner.total_steps": 70}
    with RunDir.create(load_config([QUICKSTART, settings])) as run:
        save(run, 2)
        save(run, 4)
    started = Started()
    monkeypatch.setattr(command, "run_in_terminal", started)
    monkeypatch.setattr(command, "prepared", lambda layers, overrides, **_: (load_config(layers, overrides), None))
    return started


def test_a_fork_has_the_settings_of_the_other_run_the_file_and_the_overrides(started: Started, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("staleness: {max_versions: 7}\nlearner: {total_steps: 30}\n")
    result = runner.invoke(app, ["fork", "quick", "mine", "--at", "step-2", "-c", "mine.yaml", "learner.total_steps=9"])
    assert result.exit_code == 0, result.output
    config = started.config
    assert (config.staleness.max_versions, config.learner.total_steps) == (7, 9)
    assert config.environment == load_config([QUICKSTART]).environment
    assert config.run.dir / config.run.name == Path("runs/mine")
    assert config.run.mirror is None, "the mirror is that of the other run"
    assert config.model.tiny is None, "the model would be built again for other prompts"
    fork_point: ForkPoint = started.options["forked_from"]
    assert (fork_point.run, fork_point.version) == ("quick", Version(1, 2))
    assert fork_point.directory == str(tmp_path / "runs" / "quick")
    assert started.options["choose"] is no_checkpoint
    assert started.again == ["up", "-c", "runs/mine/config.yaml"]


def test_without_at_the_newest_checkpoint_is_taken_and_both_runs_may_be_paths(started: Started, tmp_path: Path) -> None:
    result = runner.invoke(app, ["fork", str(tmp_path / "runs" / "quick"), str(tmp_path / "elsewhere" / "mine")])
    assert result.exit_code == 0, result.output
    assert started.config.run.dir / started.config.run.name == tmp_path / "elsewhere" / "mine"
    assert started.options["forked_from"].version == Version(1, 4)


@pytest.mark.parametrize(
    ("words", "exit_code", "error"),
    [
        (["quik", "mine"], 1, "there is no run quik in runs/; did you mean quick?"),
        (["quick", "mine", "--at", "50"], 2, "--at 50: this is not the name of a checkpoint"),
        (["quick", "mine", "--at", "step-3"], 2, "no complete checkpoint of this step; there are step-2, step-4"),
        (["quick", "quick"], 2, "runs/quick exists, and a fork is a new run"),
        (["quick", "mine", "run.name=other"], 2, "but NEW names runs/mine: leave out both settings"),
        (["quick", "mine", "model.lora.rank=8"], 2, "model.lora.alpha = 32, but step-4 of run quick"),
        (["quick", "mine", "learner.total_step=3"], 2, "learner.total_step"),
        (["quick", "mine", "environment.reward=mine:reward"], 2, "environment.reward = mine:reward; if you trust it"),
    ],
)
def test_a_fork_that_cannot_begin_is_refused_before_anything_is_started(
    words: list[str], exit_code: int, error: str, started: Started
) -> None:
    result = runner.invoke(app, ["fork", *words])
    assert result.exit_code == exit_code, result.output
    assert error in " ".join(result.stderr.split())
    assert started.again == ()
    assert not Path("runs/mine").exists()


def test_with_trust_the_code_of_the_configuration_is_used(started: Started) -> None:
    result = runner.invoke(app, ["fork", "quick", "mine", "--trust", "environment.reward=mine:reward"])
    assert result.exit_code == 0, result.output
    assert started.config.environment.reward == "mine:reward"


def test_a_restart_after_the_first_checkpoint_resumes_the_fork_without_the_other_run(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.invoke(app, ["fork", "quick", "mine", "learner.total_steps=9"])
    with RunDir.create(started.config, choose=no_checkpoint, forked_from=started.options["forked_from"]) as run:
        save(run, 3)
        run.close(state="failed", reason="a rank has died")
    (tmp_path / "runs" / "quick").rename(tmp_path / "gone")
    monkeypatch.setattr(command, "begun_directory", lambda: Path("runs/mine"))
    result = runner.invoke(app, ["fork", "quick", "mine", "learner.total_steps=9"])
    assert result.exit_code == 0, result.output
    assert started.options == {"forked_from": None, "choose": unfinished_run}
    assert started.config.learner.total_steps == 9
    assert "fork" in SUPERVISED


def test_a_restart_of_a_finished_fork_begins_nothing(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.invoke(app, ["fork", "quick", "mine"])
    with RunDir.create(started.config, choose=no_checkpoint, forked_from=started.options["forked_from"]) as run:
        save(run, 3)
        run.close(state="finished", reason="trained 3 steps")
    monkeypatch.setattr(command, "begun_directory", lambda: Path("runs/mine"))
    started.again = ()
    result = runner.invoke(app, ["fork", "quick", "mine"])
    assert (result.exit_code, result.stdout) == (0, "run runs/mine is finished: trained 3 steps\n")
    assert started.again == ()


def test_a_configuration_that_changes_after_the_check_of_trust_is_not_read(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, check = Path("runs/quick/config.yaml"), command.check_trusted

    def check_and_change(directory: Path, config: Config) -> None:
        check(directory, config)
        saved.write_text(saved.read_text() + "\nenvironment: {reward: 'theirs:reward'}\n")

    monkeypatch.setattr(command, "check_trusted", check_and_change)
    result = runner.invoke(app, ["fork", "quick", "mine"])
    assert result.exit_code == 0, result.output
    assert started.config.environment.reward != "theirs:reward"


def test_the_help_says_what_is_taken_over() -> None:
    text = " ".join(runner.invoke(app, ["fork", "--help"]).stdout.split())
    assert "takes over the weights of the policy" in text
    assert "asyncrl fork quickstart stale --at step-50 staleness.max_versions=8" in text


def test_the_command_is_imported_without_ray_which_would_read_the_mode_of_the_token_too_early() -> None:
    code = "import sys, asyncrl.cli.fork; sys.exit(any(name in sys.modules for name in ('ray', 'torch', 'vllm')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
