"""Joining a cluster: an address where no process listens fails at once; any other address is left to Ray."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from asyncrl.deployment import cluster
from asyncrl.errors import RunError


@pytest.fixture(autouse=True)
def no_cluster_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> str:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(cluster.services, "get_ray_address_from_environment", none)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list of addresses with which `ray.init` is called."""
    addresses: list[str] = []

    def init(*, address: str, **_: Any) -> None:
        addresses.append(address)

    monkeypatch.setattr(cluster.ray, "init", init)
    return addresses


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_where_nobody_listens_ray_is_not_even_asked(asked: list[str], port: int) -> None:
    for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", "127.0.0.1:99999"):
        with pytest.raises(RunError, match=r"no Ray cluster answers at ray\.address.*asyncrl head"):
            cluster.join(address, namespace="run")
    assert asked == []


def test_what_ray_takes_for_auto_may_have_died(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.services, "get_ray_address_from_environment", lambda *_: "127.0.0.1:1")
    with pytest.raises(RunError, match="no Ray cluster answers"):
        cluster.join("auto", namespace="run")
    assert asked == []


def test_where_somebody_listens_ray_is_asked(asked: list[str], port: int) -> None:
    cluster.join(f"127.0.0.1:{port}", namespace="run")
    assert asked == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1"])
def test_other_kinds_of_addresses_are_rays(address: str, asked: list[str]) -> None:
    cluster.join(address, namespace="run")
    assert asked == [address]


def test_a_refused_token_is_told_apart_from_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        try:
            raise RuntimeError("Last connection error: RPC error: InvalidAuthToken: missing or incorrect")
        except RuntimeError as error:
            raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.2:6379") from error

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(RunError, match="refuses our token; set RAY_AUTH_TOKEN"):
        cluster.join("auto", namespace="run")


@pytest.mark.parametrize("mode", ["token", None])
def test_a_cluster_that_asks_for_no_token_is_named(
    mode: str | None, asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    cluster.join("auto", namespace="run")
    assert ("requires no token" in caplog.text) is (mode is None)


@pytest.mark.asyncio
async def test_a_ray_that_does_not_list_its_nodes_is_a_failure_that_its_caller_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone() -> None:
        raise RaySystemError("Ray has not been started yet")

    monkeypatch.setattr(cluster.ray, "nodes", gone)
    with pytest.raises(RunError, match=r"does not list its nodes.*not been started"):
        await cluster.ray_nodes(timeout_s=60)
    ended = threading.Event()
    monkeypatch.setattr(cluster.ray, "nodes", lambda: ended.wait(60))
    try:
        with pytest.raises(TimeoutError):
            await cluster.ray_nodes(timeout_s=0.01)
    finally:
        ended.set()
