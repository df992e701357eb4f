"""`down` and `scale` change the run of the directory that they are given, and no other run of the same name. `status`
and `top` show no other run as the run of the directory.

A run directory from elsewhere may be called `quickstart`, as a run of this user that lives.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from run_from_elsewhere import rewrite, run_of
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.common.roles import Role
from asyncrl.coordinator.registry import Deployment, Registry
from asyncrl.deployment import shared_actors
from asyncrl.errors import AnotherRun
from asyncrl.learner.records import RunInfo, known_info

HERE: dict[str, dict[str, Any]] = {
    "running elsewhere": {"host": "another.host"},
    "finished": {"state": "finished", "finished": "2026-11-20T16:50:00+00:00"},
    "died": {"state": "died", "finished": "2026-11-20T16:50:00+00:00"},
    "gone": {},
    "without a nonce": {"nonce": ""},
}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the run of this name that lives on the joined cluster."""
    done: list[str] = []

    def end_run(name: str) -> list[str]:
        done.append(f"ended {name}")
        return [name]

    async def call(method: Any, *_: object, **__: object) -> object:
        if method is Registry.run_nonce:
            return "of-the-user"
        done.append(method.__name__)
        return {}

    monkeypatch.setattr("asyncrl.deployment.cluster.join", lambda *_, **__: None)
    monkeypatch.setattr("asyncrl.deployment.local_clusters.use_ray_token", lambda: None)
    monkeypatch.setattr(shared_actors, "ask_to_end", lambda *_, **__: True)
    monkeypatch.setattr(shared_actors, "end_run", end_run)
    monkeypatch.setattr(shared_actors, "find_run", lambda _: SimpleNamespace(call=call))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return done


COMMANDS = (["down", "{run}"], ["scale", "{run}", "generators=0", "--no-wait"])


@pytest.mark.parametrize("kind", HERE)
@pytest.mark.parametrize("command", COMMANDS, ids=["down", "scale"])
def test_another_run_with_the_name_of_the_directory_is_left_alone(
    command: list[str], kind: str, tmp_path: Path, changed: list[str]
) -> None:
    run = run_of(tmp_path, **HERE[kind])
    result = CliRunner().invoke(app, [word.format(run=run) for word in command])
    assert changed == [], result.output


@pytest.mark.parametrize("command", COMMANDS, ids=["down", "scale"])
def test_the_run_of_the_directory_is_changed(command: list[str], tmp_path: Path, changed: list[str]) -> None:
    run = run_of(tmp_path, nonce="of-the-user", host="another.host")
    assert CliRunner().invoke(app, [word.format(run=run) for word in command]).exit_code == 0
    assert len(changed) == 1


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("command", COMMANDS, ids=["down", "scale"])
def test_a_run_without_a_directory_here_is_changed(command: list[str], tmp_path: Path, changed: list[str]) -> None:
    """The directory may be on another machine."""
    assert CliRunner().invoke(app, [word.format(run="quickstart") for word in command]).exit_code == 0
    assert len(changed) == 1


@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("kind", ["running elsewhere", "without a nonce"])
def test_status_shows_the_records_of_the_directory_and_names_the_other_run(
    kind: str, json: bool, tmp_path: Path, changed: list[str]
) -> None:
    run = run_of(tmp_path, **(HERE[kind] | {"host": "another.host"}))
    result = CliRunner().invoke(app, ["status", str(run), *(["--json"] if json else [])])
    assert result.exit_code == 0, result.output
    assert changed == [], "the other run was asked for its status"
    assert f"the run sent on this cluster is not the one of {run}" in result.stderr
    if json:
        assert msgspec.json.decode(result.stdout, type=RunInfo).host == "another.host"
    else:
        assert result.stdout.startswith(f"run sent has not recorded its end in {run}")


def test_top_shows_the_records_of_the_directory_and_names_the_other_run(tmp_path: Path, changed: list[str]) -> None:
    run = run_of(tmp_path, host="another.host")
    result = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert result.exit_code == 0, result.output
    assert changed == [], "the other run was asked for its status"
    assert f"the run sent on this cluster is not the one of {run}" in result.stderr
    assert "the view shows only the records" in result.stderr
    assert "the buffer does not answer" in result.stdout


@pytest.mark.parametrize("command", [["status"], ["top", "--once"]], ids=["status", "top"])
def test_the_run_of_the_directory_is_asked_for_its_status(
    command: list[str], tmp_path: Path, changed: list[str]
) -> None:
    run = run_of(tmp_path, nonce="of-the-user", host="another.host")
    CliRunner().invoke(app, [*command, str(run)])
    assert set(changed) == {"status"}


def test_a_named_cluster_is_that_of_the_run(tmp_path: Path, changed: list[str]) -> None:
    run = run_of(tmp_path, host="another.host")
    assert CliRunner().invoke(app, ["down", str(run), "--address", "10.0.0.9:6379"]).exit_code == 0
    assert changed == ["ended sent"]


def test_the_error_has_both_runs(tmp_path: Path, changed: list[str]) -> None:
    run = run_of(tmp_path)
    rewrite(run, nonce="sent-by-mail")
    info = known_info(run)
    assert info is not None
    with pytest.raises(AnotherRun, match=r"nonce is 'of-the-user', and run\.json there has 'sent-by-mail'; give the"):
        shared_actors.check_directory(run, info.nonce)


def test_a_run_has_the_nonce_of_its_last_learner() -> None:
    registry = Registry(shared={}, timeout_s=10.0, clock=lambda: 0.0)
    assert registry.run_nonce() == ""
    registry.attach(Deployment(id="a", role=Role.LEARNER, host="h", pid=1, nonce="n"))
    registry.detach("a")
    assert registry.run_nonce() == "n"


def test_down_ends_no_actors_of_a_learner_that_still_saves_although_its_directory_is_elsewhere(
    changed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared_actors, "ask_to_end", lambda *_, **__: False)
    answer = CliRunner().invoke(app, ["down", "elsewhere"])
    assert (answer.exit_code, changed) == (1, [])
    assert "it may still be saving weights" in answer.output
