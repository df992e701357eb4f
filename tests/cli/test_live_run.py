"""The report says how a run ended, for every kind of end."""

from pathlib import Path

import pytest

from asyncrl.cli import live_run
from asyncrl.cli.live_run import reported_run
from asyncrl.config.schema import Config
from asyncrl.errors import RunError, RunLocked


def config_in(path: Path) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(path)}})


def test_the_report_of_a_finished_run_says_so(tmp_path: Path) -> None:
    with reported_run(config_in(tmp_path), role="up") as run_dir:
        pass
    assert '<span class="badge finished">' in (run_dir.path / "report.html").read_text()


def test_the_report_of_a_failed_run_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(RunError), reported_run(config_in(tmp_path), role="up") as run_dir:
        raise RunError("the buffer is gone")
    page = (run_dir.path / "report.html").read_text()
    assert '<span class="badge failed">' in page
    assert "the buffer is gone" in page


@pytest.mark.fault("F35")
def test_a_run_that_is_refused_leaves_the_other_ones_report_alone(tmp_path: Path) -> None:
    with reported_run(config_in(tmp_path), role="up") as run_dir:
        with pytest.raises(RunLocked), reported_run(config_in(tmp_path), role="up"):
            pass
        assert not (run_dir.path / "report.html").exists()


def test_a_report_that_cannot_be_made_hides_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(path: Path) -> Path:
        raise OverflowError("a number too large")

    monkeypatch.setattr(live_run, "write_report", broken)
    with pytest.raises(RunError, match="the run's own"), reported_run(config_in(tmp_path), role="up"):
        raise RunError("the run's own")
    assert "was not written" in caplog.text
    assert "OverflowError: a number too large" in caplog.text
