"""`asyncrl export --at best` writes the weights of the checkpoint with the best evaluation."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from asyncrl.checkpoints.directory import HF, RunManifest, folder_of, write
from asyncrl.cli.main import app
from asyncrl.common.version import Version
from asyncrl.config.load import dump_config, load_config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import EvalRecord

SETTINGS = ["eval.sets.sums={environment: {reward: math_verify}}", "checkpoint.best_eval=sums"]


def run_with(folder: Path, *rewards: tuple[int, str, float]) -> Path:
    """Writes a run with checkpoints after steps 1 and 2, and evaluations (step, set, reward)."""
    config = load_config([], [f"run.dir={folder}", "run.name=quick", *SETTINGS])
    with RunDir.create(config) as run:
        for step in (1, 2):
            manifest = RunManifest(
                nonce=run.nonce, version=Version(1, step), lineage=run.lineage, settings={}, packages={}
            )

            def fill(path: Path, step: int = step) -> None:
                (path / HF).mkdir()
                (path / HF / "weights").write_text(f"of step {step}")

            write(folder_of(run.checkpoints, step), manifest, fill=fill)
        for step, name, reward in rewards:
            run.append_eval(EvalRecord(name=name, version=step, wall_s=1, prompts=8, reward_mean=reward))
        assert "best_eval: sums" in dump_config(config)
    return run.path


def test_the_best_checkpoint_is_that_of_the_set_that_the_config_names(tmp_path: Path) -> None:
    run = run_with(tmp_path, (1, "heldout", 0.1), (1, "sums", 0.9), (2, "heldout", 0.8), (2, "sums", 0.5))
    assert msgspec.json.decode((run / "run.json").read_bytes())["state"] == "finished"
    for at, step in (("best", 1), ("step-2", 2)):
        done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / at), "--at", at])
        assert done.exit_code == 0, done.output
        assert (tmp_path / at / "weights").read_text() == f"of step {step}"


def test_without_an_evaluation_there_is_no_best_checkpoint(tmp_path: Path) -> None:
    run = run_with(tmp_path, (1, "heldout", 0.1))
    done = CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), "--at", "best"])
    assert done.exit_code == 2
    assert "--at best: no checkpoint of the run " in done.output
    assert "has an evaluation sums" in done.output


def test_weights_are_not_exported_to_a_folder_that_is_named_like_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", str(run), "s3://bucket/out"])
    assert done.exit_code == 2
    assert "is a URL, and only a folder works here" in done.output
    assert not list(tmp_path.glob("s3:*"))
