"""`asyncrl resume RUN` starts what `asyncrl up` starts, with the saved configuration and the chosen checkpoint."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from mirrored_scene import mirror_of, save
from started_runs import Started
from typer.testing import CliRunner

from asyncrl.cli import resume as command
from asyncrl.cli.main import SUPERVISED, app
from asyncrl.config.load import load_config
from asyncrl.deployment.resuming import chosen_checkpoint
from asyncrl.deployment.run_dir import RunDir

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

runner = CliRunner()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """There is a run of the name `quick` in the present directory's `runs`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # the command sets it in this process; it is removed after the test
    settings = {"run.name": "quick", "learner.total_steps": 70}
    with RunDir.create(load_config([QUICKSTART, settings])):
        pass
    started = Started()
    monkeypatch.setattr(command, "run_in_terminal", started)
    return started


@pytest.mark.parametrize("named", ["quick", "runs/quick"])
def test_a_run_continues_with_its_saved_configuration_and_the_overrides(named: str, started: Started) -> None:
    result = runner.invoke(app, ["resume", named, "--at", "step-4", "learner.total_steps=90", "metrics.learner_port=0"])
    assert result.exit_code == 0, result.output
    assert (started.config.learner.total_steps, started.config.model.path) == (90, "models/tiny-speller")
    assert started.config.run.dir / started.config.run.name == Path("runs/quick")
    assert started.options["choose"].func is chosen_checkpoint
    assert started.options["choose"].keywords == {"step": 4}
    assert started.again == ["up", "-c", "runs/quick/config.yaml"]


def test_without_at_the_newest_checkpoint_is_chosen(started: Started) -> None:
    assert runner.invoke(app, ["resume", "quick"]).exit_code == 0
    assert started.options["choose"].keywords == {"step": None}


def test_a_directory_that_was_moved_is_resumed_where_it_is(started: Started, tmp_path: Path) -> None:
    (tmp_path / "runs" / "quick").rename(tmp_path / "runs" / "quick.1")
    assert runner.invoke(app, ["resume", "quick.1"]).exit_code == 0
    assert (started.config.run.dir, started.config.run.name) == (Path("runs"), "quick.1")


def test_a_restart_after_a_process_has_died_does_not_go_back_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lose the steps that were trained since."""
    monkeypatch.setattr(command, "begun_directory", lambda: Path("runs/quick"))
    assert runner.invoke(app, ["resume", "quick", "--at", "step-4"]).exit_code == 0
    assert started.options["choose"].keywords == {"step": None}
    assert "resume" in SUPERVISED


@pytest.mark.parametrize(
    ("words", "exit_code", "error"),
    [
        (["quik"], 1, "there is no run quik in runs/; did you mean quick?"),
        (["quick", "--at", "140"], 2, "--at 140: this is not the name of a checkpoint"),
        (["quick", "run.name=other"], 2, "run.dir and run.name name runs/other, but a run is resumed in its directory"),
        (["quick", "learner.total_step=3"], 2, "learner.total_step"),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_anything_is_started(
    words: list[str], exit_code: int, error: str, started: Started
) -> None:
    result = runner.invoke(app, ["resume", *words])
    assert result.exit_code == exit_code, result.output
    assert error in result.stderr
    assert started.again == ()


def test_a_directory_without_a_configuration_is_no_run(started: Started, tmp_path: Path) -> None:
    (tmp_path / "runs" / "other").mkdir()
    result = runner.invoke(app, ["resume", "other"])
    assert result.exit_code == 1
    assert "runs/other is not the directory of a run: it has no config.yaml" in result.stderr


@pytest.mark.parametrize(
    "there", [(), ("steps.jsonl",), ("checkpoints/step-2/COMPLETE",), ("lineage.json", "evals.jsonl")]
)
@pytest.mark.parametrize("at", [(), ("--at", "step-2")])
def test_a_directory_without_the_record_of_its_run_is_refused_and_no_new_run_begins(
    there: Sequence[str], at: Sequence[str], started: Started, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "quick" / "run.json").unlink()
    for name in there:
        (file := tmp_path / "runs" / "quick" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    result = runner.invoke(app, ["resume", "quick", *at])
    assert result.exit_code == 1
    assert "runs/quick has a configuration and no run.json" in result.stderr
    assert "asyncrl up -c runs/quick/config.yaml" in result.stderr
    assert started.again == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": 7}'])
def test_a_record_of_a_run_that_cannot_be_read_is_refused_before_anything_is_started(
    text: str, started: Started, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "quick" / "run.json").write_text(text)
    result = runner.invoke(app, ["resume", "quick", "--at", "step-2"])
    assert result.exit_code == 1
    assert "cannot read runs/quick/run.json" in result.stderr
    assert started.again == ()


def test_the_help_teaches_going_back_and_training_further() -> None:
    text = runner.invoke(app, ["resume", "--help"]).stdout
    assert "asyncrl resume quickstart --at step-100" in text
    assert "asyncrl resume quickstart learner.total_steps=400" in text


@pytest.fixture
def url(started: Started, tmp_path: Path) -> str:
    """The mirror of the run, whose directory is gone."""
    url = f"file://{tmp_path}/mirror"
    shutil.rmtree(tmp_path / "runs")
    with RunDir.create(load_config([QUICKSTART, {"run.name": "quick", "run.dir": "first", "run.mirror": url}])) as run:
        save(run, 2)
        run.stopped()
        mirror_of(run, url=url).pass_once()
    return url


def test_a_run_continues_from_its_mirror_which_needs_no_trust(url: str, started: Started, tmp_path: Path) -> None:
    result = runner.invoke(app, ["resume", url, "learner.total_steps=90"])
    assert result.exit_code == 0, result.output
    assert started.config.run.dir / started.config.run.name == Path("runs/quick")
    assert (started.config.run.mirror, started.config.learner.total_steps) == (url, 90)
    assert (tmp_path / "runs" / "quick" / "checkpoints" / "step-2" / "COMPLETE").exists()


def test_a_restart_of_a_fetched_run_does_not_ask_the_storage(
    url: str, started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that does not answer must not end the run."""
    shutil.rmtree(tmp_path / "mirror")
    monkeypatch.setattr(command, "begun_directory", lambda: Path("first/quick"))
    result = runner.invoke(app, ["resume", url])
    assert result.exit_code == 0, result.output
    assert started.config.run.dir / started.config.run.name == Path("first/quick")
    assert started.config.run.mirror == url


def test_a_copy_of_a_mirror_is_its_own_mirror(url: str, started: Started, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "mirror", tmp_path / "copied")
    assert runner.invoke(app, ["resume", f"file://{tmp_path}/copied"]).exit_code == 0
    assert started.config.run.mirror == f"file://{tmp_path}/copied"


def test_a_mirror_that_only_the_directory_names_needs_trust(url: str, started: Started) -> None:
    assert runner.invoke(app, ["resume", "first/quick", "run.mirror=null"]).exit_code == 0
    started.again = ()
    result = runner.invoke(app, ["resume", "first/quick"])
    assert result.exit_code == 2
    assert f"run.mirror = {url}; if you trust it, pass --trust" in " ".join(result.stderr.split())
    assert started.again == ()
