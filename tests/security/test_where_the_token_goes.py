"""A command joins the cluster that run.json names only if this machine is a node of it: it sends the user's token."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from run_from_elsewhere import WAITS, rewrite, run_of, waiting
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.deployment import cluster
from asyncrl.deployment.known_runs import own_address
from asyncrl.errors import RunError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

OWN = "127.0.0.1:32839"
ELSEWHERE = [
    "10.0.0.9:6379",
    "cluster.example:6379",
    "ray://10.0.0.9:10001",
    "127.0.0.1:3283",
    "127.0.0.1:328390",
    "[::1]:32839",
    "local",
]


def process_named(name: str, folder: Path, *arguments: str) -> Iterator[psutil.Popen]:
    (folder / name).symlink_to(sys.executable)
    return waiting([str(folder / name), "-I", "-c", WAITS, *arguments])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[psutil.Popen]:
    """A process with the name and the argument of Ray's process on a node of the cluster OWN."""
    yield from process_named("raylet", tmp_path, f"--gcs-address={OWN}")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a command joined. Each refuses."""
    addresses: list[str] = []

    def join(address: str, **_: object) -> None:
        addresses.append(address)
        raise RunError("no Ray cluster answers")

    monkeypatch.setattr(cluster, "join", join)
    monkeypatch.setattr("asyncrl.deployment.local_clusters.use_ray_token", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return addresses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that says that it lives here."""
    return run_of(tmp_path, pid=os.getpid())


@pytest.mark.usefixtures("node")
def test_a_cluster_with_a_node_of_this_user_here_is_joined(run: Path, joined: list[str]) -> None:
    rewrite(run, ray_address=OWN)
    (run / "lock").unlink()  # otherwise a free lock shows that the run is gone
    for command in ("status", "down"):
        CliRunner().invoke(app, [command, str(run)])
    assert joined == [OWN, OWN]


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("address", ELSEWHERE)
@pytest.mark.parametrize("command", ["status", "top", "down", "scale"])
def test_another_address_is_joined_only_when_the_user_names_it(
    command: str, address: str, run: Path, joined: list[str]
) -> None:
    rewrite(run, ray_address=address)
    (run / "lock").unlink()
    words = [command, str(run), *{"scale": ["generators=2"], "top": ["--once"]}.get(command, [])]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code != 0
    assert joined == []
    assert f"names the Ray cluster at {address}, but this machine is not a node of it" in answer.stderr
    assert f"pass --address {address}" in answer.stderr
    CliRunner().invoke(app, [*words, "--address", address])
    assert set(joined) == {address}


@pytest.mark.parametrize("state", ["running", "finished", "stopped", "failed", "died"])
@pytest.mark.parametrize("address", ELSEWHERE[:3])
def test_down_sends_no_token_whatever_the_state_of_the_run(
    state: str, address: str, run: Path, joined: list[str]
) -> None:
    rewrite(run, ray_address=address, state=state, finished="2026-11-20T16:50:00+00:00")
    answer = CliRunner().invoke(app, ["down", str(run)])
    assert joined == []
    assert f"pass --address {address}" in answer.stderr


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("named", [OWN, "localhost:32839", "127.0.1:32839", "0x7f000001:32839"])
def test_another_name_of_this_machine_gives_the_address_of_its_node(named: str, tmp_path: Path) -> None:
    assert own_address(tmp_path, named) == OWN


@pytest.mark.parametrize("name", ["raylet.sh", "gcs_server", "my-raylet"])
def test_a_process_with_another_name_is_no_node(name: str, tmp_path: Path) -> None:
    for _ in process_named(name, tmp_path, f"--gcs-address={OWN}"):
        with pytest.raises(RunError, match="is not a node of it"):
            own_address(tmp_path, OWN)


@pytest.mark.usefixtures("node")
def test_a_node_of_another_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_address(tmp_path, OWN)
    own = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: own + 1)
    with pytest.raises(RunError, match="is not a node of it"):
        own_address(tmp_path, OWN)
