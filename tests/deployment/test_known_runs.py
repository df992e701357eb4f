"""Runs below a folder: the living are told from the dead, and a run that has ended points to its report."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.cli.options import running_address
from asyncrl.deployment import cluster
from asyncrl.deployment.known_runs import address_of, ended_run, live_runs
from asyncrl.errors import RunError
from asyncrl.learner.records import RunInfo


def record(folder: Path, name: str, **changed: Any) -> Path:
    fields: dict[str, Any] = {
        "name": name,
        "state": "running",
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": "2026-11-20T16:38:09+00:00",
        "nonce": "n",
    }
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.json").write_bytes(msgspec.json.encode(RunInfo(**(fields | changed))))
    return path


def gone_pid() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    return gone.pid


def test_a_run_lives_while_its_process_on_this_host_does(tmp_path: Path) -> None:
    record(tmp_path, "live")
    record(tmp_path, "dead", pid=gone_pid())
    record(tmp_path, "elsewhere", host="another.host")
    record(tmp_path, "ended", state="finished")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    assert [info.name for info in live_runs(tmp_path)] == ["live"]
    assert live_runs(tmp_path / "nowhere") == []


ENDED = {"state": "finished", "finished": "2026-11-20T16:50:00+00:00", "exit_reason": "done"}


def test_a_run_that_has_ended_points_to_its_report(tmp_path: Path) -> None:
    path = record(tmp_path, "quick", **ENDED)
    assert ended_run("quick", tmp_path) is None, "there is no report"
    (path / "report.html").touch()
    assert ended_run("quick", tmp_path) == f"run quick finished 2026-11-20 16:50 UTC (done): see {path}/report.html"


def test_a_run_that_lives_here_tells_its_ray_and_is_not_called_an_earlier_one(tmp_path: Path) -> None:
    live = record(tmp_path, "live", ray_address="127.0.0.1:32839")
    (live / "report.html").touch()
    record(tmp_path, "over", ray_address="127.0.0.1:1", **ENDED)
    assert address_of("live", tmp_path) == "127.0.0.1:32839"
    assert ended_run("live", tmp_path) is None
    assert address_of("over", tmp_path) is None
    assert address_of("nowhere", tmp_path) is None


def test_a_run_is_an_earlier_one_only_when_its_process_is_known_to_be_gone(tmp_path: Path) -> None:
    gone = gone_pid()
    dead = record(tmp_path, "dead", pid=gone)
    elsewhere = record(tmp_path, "elsewhere", host="another.host", pid=gone)
    over = record(tmp_path, "over", host="another.host", pid=gone, **ENDED)
    for path in (dead, elsewhere, over):
        (path / "report.html").touch()
    assert ended_run("dead", tmp_path) == f"an earlier run is recorded: see {dead}/report.html"
    assert ended_run("elsewhere", tmp_path) is None, "its report was made while it goes on"
    assert "finished 2026-11-20 16:50 UTC" in (ended_run("over", tmp_path) or "")


def test_an_option_and_the_environment_come_before_what_a_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "runs", "live", ray_address="127.0.0.1:32839")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert running_address("live", None) == "127.0.0.1:32839"
    assert running_address("nowhere", None) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert running_address("live", None) == "10.0.0.1:6379"
    assert running_address("live", "10.0.0.2:6379") == "10.0.0.2:6379"


def test_status_of_a_run_that_is_gone_says_where_its_report_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: Any, **__: Any) -> None:
        raise RunError("no Ray cluster answers")

    monkeypatch.setattr(cluster, "join", join)
    # It would set RAY_AUTH_MODE in this process, and every later Ray of the tests would start with it.
    monkeypatch.setattr("asyncrl.deployment.launch.use_ray_token", lambda: None)
    monkeypatch.chdir(tmp_path)
    (record(tmp_path / "runs", "quick", **ENDED) / "report.html").touch()
    answer = CliRunner().invoke(app, ["status", "quick"])
    assert answer.exit_code == 1
    ended, unanswered = answer.stderr.splitlines()
    assert "runs/quick/report.html" in ended, "what is known comes first"
    assert "no Ray cluster answers" in unanswered
    assert "report.html" not in CliRunner().invoke(app, ["status", "other"]).stderr
