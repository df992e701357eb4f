"""Joining a cluster: an address where no process listens fails at once; any other address is left to Ray."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray._private import services
from ray.exceptions import RaySystemError

from asyncrl.deployment import cluster
from asyncrl.deployment.local_clusters import LocalCluster, check_no_head, own_clusters, started_for
from asyncrl.errors import CallTimeout, ClusterUnreachable, RunError


@dataclass
class Ray:
    """What joins see of Ray in this test. `noted` is the file to which `ray start` writes the address of its cluster,
    and does not exist. `asked` has the addresses with which `ray.init` was called, and `nodes` lists the nodes."""

    noted: Path
    found: list[LocalCluster] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    refuses: Exception | None = None
    nodes: Callable[[], object] = list

    def init(self, *, address: str, **_: Any) -> None:
        self.asked.append(address)
        if self.refuses is not None:
            raise self.refuses


@pytest.fixture(autouse=True)
def its_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ray:
    """A Ray that is asked nothing else. No cluster of this user runs, and no variable names one."""
    own = Ray(noted=tmp_path / "ray" / "ray_current_cluster")
    own.noted.parent.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cluster, "own_clusters", lambda: own.found)
    monkeypatch.setattr(cluster.ray, "init", own.init)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: own.nodes())
    return own


@pytest.fixture
def noted(its_ray: Ray) -> Path:
    return its_ray.noted


@pytest.fixture
def asked(its_ray: Ray) -> list[str]:
    return its_ray.asked


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_where_nobody_listens_ray_is_not_even_asked(asked: list[str], port: int) -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "127.0.0.1:99999"):
        with pytest.raises(
            ClusterUnreachable, match=r"no Ray cluster answers at ray\.address.*asyncrl head"
        ) as refused:
            cluster.join(address, namespace="run")
        assert refused.value.restart_mends, "a head that was lost comes back"
    assert asked == []


def test_the_cluster_of_the_last_ray_start_may_have_died(asked: list[str], noted: Path) -> None:
    noted.write_text("127.0.0.1:1\n")
    with pytest.raises(RunError, match="no Ray cluster answers"):
        cluster.join("auto", namespace="run")
    assert asked == []


def test_without_a_cluster_auto_is_refused_at_once(asked: list[str]) -> None:
    with pytest.raises(RunError, match=r"no Ray cluster answers at ray\.address = 'auto' \(you have started none"):
        cluster.join("auto", namespace="run")
    assert asked == []


def test_auto_is_the_cluster_of_this_users_last_ray_start(asked: list[str], port: int, noted: Path) -> None:
    """It may run in another container, which has the same folder for temporary files."""
    noted.write_text(f"127.0.0.1:{port}\n")
    cluster.join("auto", namespace="run")
    assert asked == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("kind", ["of another user", "link", "pipe", "folder", "empty", "not UTF-8"])
def test_an_address_that_another_user_could_have_written_gets_no_token(
    kind: str, asked: list[str], port: int, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All users may write in Ray's folder, also `ray_current_cluster`, and Ray itself joins what is written there."""
    address = f"127.0.0.1:{port}"
    match kind:
        case "of another user":
            noted.write_text(address)
            os.chown(noted, 65534, -1) if os.getuid() == 0 else monkeypatch.setattr("os.getuid", lambda: 1 + 10**6)
        case "link":
            noted.with_name("mine").write_text(address)
            noted.symlink_to("mine")
        case "pipe":
            os.mkfifo(noted)
        case "folder":
            noted.mkdir()
        case "empty":
            noted.touch()
        case "not UTF-8":
            noted.write_bytes(b"\xff" + address.encode())
    with pytest.raises(RunError, match=r"RAY_ADDRESS or --address"):
        cluster.join("auto", namespace="run")
    assert asked == []


def test_a_process_of_another_user_that_looks_like_ray_gets_no_token(
    asked: list[str], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {f"127.0.0.1:{port}"}
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: addresses)
    with pytest.raises(RunError, match=r"RAY_ADDRESS or --address"):
        cluster.join("auto", namespace="run")
    assert asked == []


HERE = str(Path("runs").resolve())


def heads(*runs: str, port: int, command: str = "head", folder: str = HERE) -> list[LocalCluster]:
    """Returns clusters of these runs in `folder`. Only the last one listens at a port, `port`."""
    ports = [*range(1, len(runs)), port]
    return [
        LocalCluster(address=f"127.0.0.1:{each}", pid=each, command=command if run else "", run=run, folder=folder)
        for run, each in zip(runs, ports, strict=True)
    ]


@pytest.mark.parametrize(
    "runs",
    [["run"], ["b", "run"], ["", "b", "c", "run"], ["b"], [""]],
    ids=["own", "another before", "many", "only another", "ray start"],
)
def test_auto_is_the_head_of_the_run_and_else_the_only_one(
    runs: list[str], its_ray: Ray, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    its_ray.found = heads(*runs, port=port)
    cluster.join("auto", namespace="run")
    assert its_ray.asked == [f"127.0.0.1:{port}"]
    assert ("no Ray cluster was started for run run, so the run joins" in caplog.text) is (runs == ["b"])


@pytest.mark.parametrize("runs", [["b", "c"], ["", ""], ["run", "run"], ["", "b", "c"]])
def test_several_possible_clusters_are_refused_and_listed(runs: list[str], its_ray: Ray, port: int) -> None:
    its_ray.found = found = heads(*runs, port=port)
    with pytest.raises(RunError, match=rf"{len(runs)} Ray clusters on this .*set ray\.address") as raised:
        cluster.join("auto", namespace="run")
    assert str(raised.value).splitlines()[1:] == [f"  {each}" for each in found]
    assert its_ray.asked == []


def test_ray_address_is_stronger_than_what_runs_here(its_ray: Ray, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    its_ray.found = heads("b", "c", "run", port=1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    cluster.join("auto", namespace="run")
    assert its_ray.asked == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("runs", [["b"], ["b", "c"]])
def test_a_cluster_that_up_started_is_only_for_its_run(runs: list[str], its_ray: Ray, port: int) -> None:
    its_ray.found = heads(*runs, port=port, command="up")
    with pytest.raises(RunError, match="was started by another run for itself, so it cannot be joined"):
        cluster.join("auto", namespace="run")
    cluster.join("auto", namespace=runs[-1])
    assert its_ray.asked == [f"127.0.0.1:{port}"]


def test_a_second_head_says_that_there_is_one() -> None:
    found = heads("b", "", "c", port=7)
    notes = check_no_head(Path("runs/run"), found)
    assert [note.partition(",")[0] for note in notes] == [
        "another head runs on this machine: 127.0.0.1:1 (`asyncrl head` of run b",
        "another head runs on this machine: 127.0.0.1:7 (`asyncrl head` of run c",
    ]
    with pytest.raises(RunError, match=r"run c has a Ray cluster on this machine already: 127\.0\.0\.1:7"):
        check_no_head(Path("runs/c"), found)
    assert len(check_no_head(Path("elsewhere/c"), found)) == 2, "a run of this name in another folder is another run"


@pytest.mark.parametrize("command", ["head", "up"])
def test_of_two_runs_with_one_name_each_joins_that_of_its_folder(command: str, its_ray: Ray, port: int) -> None:
    other = heads("run", port=1, command=command, folder="/elsewhere/runs")
    its_ray.found = [*other, *heads("run", port=port)]
    cluster.join("auto", namespace="run")
    assert its_ray.asked == [f"127.0.0.1:{port}"]


def test_the_mark_of_a_cluster_is_in_the_environment_of_its_processes() -> None:
    """A process that looks like a raylet stands for one. That of an audit is no cluster of its run."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'raylet'); print(flush=True); input()"
    raylets, marks = [], ["head a", "up a b", None, "audit a"]
    try:
        for number, mark in enumerate(marks):
            with contextlib.ExitStack() as marked:
                if mark is not None:
                    command, _, run = mark.partition(" ")
                    marked.enter_context(started_for(command, Path("/some where") / run))
                raylet = subprocess.Popen(
                    [sys.executable, "-c", code, f"--x --gcs-address=192.0.2.9:{number + 1} --y"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )  # fmt: skip
            raylets.append(raylet)
            assert raylet.stdout is not None
            assert raylet.stdout.readline()
        found = {each.address: each for each in own_clusters() if each.address.startswith("192.0.2.9:")}
        assert [(found[f"192.0.2.9:{n}"].command, found[f"192.0.2.9:{n}"].run) for n in (1, 2, 3)] == [
            ("head", "a"),
            ("up", "a b"),
            ("", ""),
        ]
        assert [found[f"192.0.2.9:{n}"].folder for n in (1, 2, 3)] == ["/some where", "/some where", ""]
        assert [each.pid for each in found.values()] == [each.pid for each in raylets[:3]]
    finally:
        for raylet in raylets:
            raylet.communicate(b"\n", timeout=60)
    assert [each for each in own_clusters() if each.address.startswith("192.0.2.9:")] == []


def test_where_somebody_listens_ray_is_asked(asked: list[str], port: int) -> None:
    cluster.join(f"127.0.0.1:{port}", namespace="run")
    assert asked == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:1"])
def test_other_kinds_of_addresses_are_rays(address: str, asked: list[str]) -> None:
    cluster.join(address, namespace="run")
    assert asked == [address]


def test_a_refused_token_is_told_apart_from_a_cluster_that_is_not_there(its_ray: Ray) -> None:
    its_ray.refuses = ConnectionError("Failed to connect to Ray cluster at 192.0.2.2:6379")
    its_ray.refuses.__cause__ = RuntimeError("Last connection error: RPC error: InvalidAuthToken: missing or incorrect")
    with pytest.raises(RunError, match="refuses our token; set RAY_AUTH_TOKEN"):
        cluster.join("ray://192.0.2.2:1", namespace="run")


@pytest.mark.parametrize("mode", ["token", None])
def test_a_cluster_that_asks_for_no_token_is_named(
    mode: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    cluster.join("ray://192.0.2.2:1", namespace="run")
    assert ("requires no token" in caplog.text) is (mode is None)


@pytest.mark.asyncio
async def test_a_ray_that_does_not_list_its_nodes_is_a_failure_that_its_caller_knows(
    its_ray: Ray,
) -> None:
    def gone() -> None:
        raise RaySystemError("Ray has not been started yet")

    its_ray.nodes = gone
    with pytest.raises(RunError, match=r"does not list its nodes.*not been started"):
        await cluster.ray_nodes(timeout_s=60)
    ended = threading.Event()
    its_ray.nodes = lambda: ended.wait(60)
    try:
        with pytest.raises(CallTimeout, match=r"Ray's head did not list its nodes within 0\.01 s; see whether"):
            await cluster.ray_nodes(timeout_s=0.01)
    finally:
        ended.set()
