"""Runs below a folder: live and dead runs are distinguished, and for an ended run the end is known."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_up_run import make_step
from typer.testing import CliRunner
from written_runs import write_run

from asyncrl.cli.main import app
from asyncrl.cli.options import running_address
from asyncrl.complete_directory import COMPLETE
from asyncrl.deployment import cluster, known_runs
from asyncrl.deployment.known_runs import (
    address_of,
    as_it_is,
    best_checkpoint,
    check_there,
    dead_runs,
    ended_run,
    live_runs,
    may_have_died,
    named_run,
    newest_weights,
)
from asyncrl.errors import RunError
from asyncrl.learner.records import EvalRecord, RunInfo, known_info


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
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_bytes(msgspec.json.encode(RunInfo(**(fields | changed))))
    return path


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray answers."""

    def join(*_: Any, **__: Any) -> None:
        raise RunError("no Ray cluster answers")

    monkeypatch.setattr(cluster, "join", join)
    # The real function would set RAY_AUTH_MODE in this process, for every Ray of later tests.
    monkeypatch.setattr("asyncrl.deployment.local_clusters.use_ray_token", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def a_node_of_each_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is a node of all clusters."""
    monkeypatch.setattr(known_runs, "own_address", lambda _, address: address)


def gone_pid() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    return gone.pid


@pytest.mark.parametrize("name", ["logs/learner-0.log", "logs/generator-3.log", "logs", "steps.jsonl"])
def test_the_time_of_death_is_not_that_of_a_file_outside_of_the_directory(name: str, tmp_path: Path) -> None:
    run, outside = record(tmp_path, "dead", pid=gone_pid()), tmp_path / "outside"
    (run / name).parent.mkdir(exist_ok=True)
    outside.mkdir()
    (outside / "learner-0.log").write_text("later")
    os.utime(outside / "learner-0.log", (2_000_000_000, 2_000_000_000))
    target = outside if name == "logs" else outside / "learner-0.log"
    (run / name).symlink_to(target)
    info = as_it_is(run)
    assert info is not None
    assert info.finished is not None
    assert not info.finished.startswith("2033")


def test_a_run_lives_while_its_process_on_this_host_does(tmp_path: Path) -> None:
    record(tmp_path, "live")
    record(tmp_path, "dead", pid=gone_pid())
    record(tmp_path, "elsewhere", host="another.host")
    record(tmp_path, "ended", state="finished")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")
    assert [info.name for info in live_runs(tmp_path)] == ["live"]
    assert [path.name for path in dead_runs(tmp_path)] == ["dead"]
    may_be_dead = {path.name for path in tmp_path.iterdir() if may_have_died(path)}
    assert may_be_dead == {"dead", "elsewhere"}
    assert live_runs(tmp_path / "nowhere") == []


def test_a_process_that_got_a_dead_runs_pid_is_not_taken_for_it(tmp_path: Path) -> None:
    lock = record(tmp_path, "quick") / "lock"
    lock.touch()
    with lock.open("rb") as held:
        assert [path.name for path in dead_runs(tmp_path)] == ["quick"], "no process holds the lock, so the run is dead"
        fcntl.flock(held, fcntl.LOCK_EX)
        assert dead_runs(tmp_path) == []
    assert live_runs(tmp_path) == []


ENDED = {"state": "finished", "finished": "2026-11-20T16:50:00+00:00", "exit_reason": "done"}


def test_a_run_that_has_ended_points_to_its_report(tmp_path: Path) -> None:
    path = record(tmp_path, "quick", **ENDED)
    assert ended_run(path) == "run quick finished 2026-11-20 16:50 UTC (done)", "there is no report"
    (path / "report.html").touch()
    assert ended_run(path) == f"run quick finished 2026-11-20 16:50 UTC (done): see {path}/report.html"
    assert as_it_is(path) == known_info(path)


@pytest.mark.parametrize("state", ["finished", "failed", "died"])
@pytest.mark.parametrize("newline", ["\n", "\r", "\u2028"])
def test_no_line_of_a_reason_looks_like_a_line_of_the_command(state: str, newline: str, tmp_path: Path) -> None:
    path = record(tmp_path, "quick", **ENDED | {"state": state, "exit_reason": f"done{newline}error: delete all"})
    said = ended_run(path)
    assert said is not None
    assert "\n  error: delete all" in said
    assert not any(line.startswith("error") for line in said.splitlines())


@pytest.mark.usefixtures("a_node_of_each_cluster")
def test_a_run_that_lives_here_tells_its_ray_and_has_not_ended(tmp_path: Path) -> None:
    live = record(tmp_path, "live", ray_address="127.0.0.1:32839")
    (live / "report.html").touch()
    over = record(tmp_path, "over", ray_address="127.0.0.1:1", **ENDED)
    assert address_of(live) == "127.0.0.1:32839"
    assert ended_run(live) is None
    assert address_of(over) is None
    assert address_of(tmp_path / "nowhere") is None


def test_of_another_hosts_run_only_what_it_wrote_is_known(tmp_path: Path) -> None:
    gone = gone_pid()
    assert ended_run(record(tmp_path, "elsewhere", host="another.host", pid=gone)) is None
    assert "finished 2026" in (ended_run(record(tmp_path, "over", host="another.host", pid=gone, **ENDED)) or "")


def dead_run(folder: Path, *, steps: int, saved: tuple[int, ...] = ()) -> tuple[Path, int]:
    """Writes the records of a run whose process ended after `steps` steps. Returns its directory and its pid."""
    path = write_run(folder, [make_step(step) for step in range(steps)], finish=False, end=None, name="killed")
    for step in saved:
        (path / "checkpoints" / f"step-{step}" / "hf").mkdir(parents=True)
        (path / "checkpoints" / f"step-{step}" / "hf" / COMPLETE).touch()
    pid = gone_pid()
    info = known_info(path)
    assert info is not None
    (path / "run.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(info, pid=pid)))
    return path, pid


def test_a_run_that_died_says_how_far_it_came_and_where_its_newest_weights_are(tmp_path: Path) -> None:
    path, pid = dead_run(tmp_path, steps=17, saved=(9, 10))
    (path / "checkpoints" / "step-11" / "hf").mkdir(parents=True)  # an incomplete checkpoint
    total = read_total_steps(path)
    assert ended_run(path) == (
        f"run killed died without recording a reason (process {pid} is gone) after step 17 of {total}; "
        f"newest weights: {path}/checkpoints/step-10/hf"
    )
    found = as_it_is(path)
    assert found is not None
    assert found.state == "died"
    assert found.finished is not None


def test_the_best_checkpoint_is_the_complete_one_with_the_highest_reward(tmp_path: Path) -> None:
    path, _ = dead_run(tmp_path, steps=3)
    for step in (1, 2, 3):
        (path / "checkpoints" / f"step-{step}").mkdir(parents=True)
        if step < 3:
            (path / "checkpoints" / f"step-{step}" / COMPLETE).touch()
    assert best_checkpoint(tmp_path / "nowhere") is None
    (path / "evals.jsonl").write_bytes(
        b"".join(
            msgspec.json.encode(EvalRecord(version=step, wall_s=1, prompts=8, reward_mean=reward)) + b"\n"
            for step, reward in ((1, 0.5), (2, 0.25), (3, 0.75))
        )
    )
    best = best_checkpoint(path)
    assert best is not None
    assert (best[0], best[1].reward_mean) == (path / "checkpoints" / "step-1", 0.5)


def read_total_steps(path: Path) -> int:
    from asyncrl.config.load import load_config

    return load_config([path / "config.yaml"], []).learner.total_steps


def test_a_run_that_died_early_or_whose_records_cannot_be_read_says_what_it_can(tmp_path: Path) -> None:
    path, pid = dead_run(tmp_path, steps=0)
    assert ended_run(path) == (
        f"run killed died without recording a reason (process {pid} is gone) before the first step; no weights were "
        "saved"
    )
    (path / "steps.jsonl").write_text("{}\n")
    assert "after an unknown number of steps" in (ended_run(path) or "")


def test_the_newest_weights_are_those_of_the_last_step_by_number(tmp_path: Path) -> None:
    assert newest_weights(tmp_path) is None
    for step in ("step-9", "step-10", "notes"):
        (tmp_path / "checkpoints" / step / "hf").mkdir(parents=True)
        (tmp_path / "checkpoints" / step / "hf" / COMPLETE).touch()
    assert newest_weights(tmp_path) == tmp_path / "checkpoints" / "step-10" / "hf"


@pytest.mark.usefixtures("in_tmp_path")
def test_a_run_that_is_not_there_is_answered_with_those_that_are() -> None:
    elsewhere = r"\. If run\.dir is another folder, give the path: FOLDER/"
    with pytest.raises(RunError, match=rf"^there is no run quik in runs/; existing runs: none{elsewhere}quik$"):
        check_there(named_run(Path("quik")))
    record(Path("runs"), "quick", **ENDED)
    record(Path("runs"), "other", **ENDED)
    check_there(named_run(Path("quick")))
    with pytest.raises(
        RunError,
        match=rf"^there is no run quik in runs/; did you mean quick\? Existing runs: other, quick{elsewhere}quik$",
    ):
        check_there(named_run(Path("quik")))
    with pytest.raises(RunError, match=rf"^there is no run zzz in runs/; existing runs: other, quick{elsewhere}zzz$"):
        check_there(named_run(Path("runs/zzz")))
    for number in range(20):
        record(Path("runs"), f"run-{number:02}", **ENDED)
    with pytest.raises(RunError, match=r"^there is no run zzz in mine/; existing runs: none$"):
        check_there(named_run(Path("mine/zzz")))
    with pytest.raises(RunError, match=r"run-09 and 10 more\. If run\.dir"):
        check_there(named_run(Path("zzz")))


@pytest.mark.parametrize("command", ["status", "top", "stacks", "report", "down"])
@pytest.mark.usefixtures("in_tmp_path", "no_ray")
def test_every_command_about_a_run_that_is_not_there_says_which_are(command: str) -> None:
    record(Path("runs"), "quick", **ENDED)
    answer = CliRunner().invoke(app, [command, "quik"])
    assert answer.exit_code == 1
    [*before, error] = answer.stderr.splitlines()
    assert error == (
        "error: there is no run quik in runs/; did you mean quick? Existing runs: quick. If run.dir is another folder, "
        "give the path: FOLDER/quik"
    )
    assert before == (["connecting to the run's Ray ..."] if command == "status" else [])


@pytest.mark.usefixtures("a_node_of_each_cluster")
def test_an_option_and_the_environment_come_before_what_a_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = record(tmp_path, "live", ray_address="127.0.0.1:32839")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert running_address(live, None) == "127.0.0.1:32839"
    assert running_address(tmp_path / "nowhere", None) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert running_address(live, None) == "10.0.0.1:6379"
    assert running_address(live, "10.0.0.2:6379") == "10.0.0.2:6379"


@pytest.mark.usefixtures("in_tmp_path", "no_ray")
def test_a_run_that_has_ended_is_no_reason_to_start_a_ray() -> None:
    (record(Path("runs"), "quick", **ENDED) / "report.html").touch()
    ended = "run quick finished 2026-11-20 16:50 UTC (done): see runs/quick/report.html\n"
    answer = CliRunner().invoke(app, ["top", "quick"])
    assert (answer.exit_code, answer.stdout, answer.stderr) == (0, ended, "")
    answer = CliRunner().invoke(app, ["status", "quick"])
    assert (answer.exit_code, answer.stdout) == (0, ended), "it shows what it was asked for"
    answer = CliRunner().invoke(app, ["status", "quick", "--json"])
    assert json.loads(answer.stdout)["state"] == "finished"


@pytest.mark.usefixtures("no_ray")
def test_the_status_of_an_ended_run_has_its_warning(tmp_path: Path) -> None:
    steps = [make_step(step, zero_variance_ratio=1.0) for step in range(3)]
    path = write_run(tmp_path, steps)
    _, warning = CliRunner().invoke(app, ["status", str(path)]).stdout.splitlines()
    assert warning.startswith("warning: ")
    assert "all rewards are equal" in warning


@pytest.mark.usefixtures("in_tmp_path", "no_ray")
def test_at_an_address_that_the_user_names_the_cluster_is_asked_first() -> None:
    (record(Path("runs"), "quick", **ENDED) / "report.html").touch()
    answer = CliRunner().invoke(app, ["status", "quick", "--address", "10.0.0.1:6379"])
    _, ended, unanswered = answer.stderr.splitlines()
    assert "runs/quick/report.html" in ended
    assert "no Ray cluster answers" in unanswered


@pytest.mark.parametrize("command", ["status", "top", "stacks"])
@pytest.mark.usefixtures("no_ray")
def test_a_dead_run_is_called_dead(command: str, tmp_path: Path) -> None:
    path, pid = dead_run(tmp_path, steps=3, saved=(2,))
    answer = CliRunner().invoke(app, [command, str(path)])
    line = answer.stdout
    assert line.startswith(f"run killed died without recording a reason (process {pid} is gone) after step 3 of ")
    assert f"; newest weights: {path}/checkpoints/step-2/hf\n" in line


def test_the_report_of_a_dead_run_says_so_and_does_not_change_what_the_run_wrote(tmp_path: Path) -> None:
    path, pid = dead_run(tmp_path, steps=3)
    before = (path / "run.json").read_bytes()
    answer = CliRunner().invoke(app, ["report", str(path)])
    assert answer.exit_code == 0, answer.stderr
    assert answer.stderr.startswith(f"note: run killed died without recording a reason (process {pid} is gone) after")
    page = (path / "report.html").read_text()
    assert '<span class="badge died">died</span>' in page
    assert f"died without recording a reason (process {pid} is gone) after step 3 of" in page
    assert (path / "run.json").read_bytes() == before
