"""Ports for servers that start later, while other tests and runs take any port that the kernel gives them."""

import socket
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_server import EPHEMERAL_PORTS, PORTS_OF_A_WORKER, free_port


def test_ports_are_below_those_that_the_kernel_hands_out_and_none_is_given_twice() -> None:
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == len(given)
    assert all(1024 < port < int(EPHEMERAL_PORTS.read_text().split()[0]) for port in given)


def test_two_workers_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []
    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        monkeypatch.setattr("prometheus_server._given", set())
        given = [free_port() for _ in range(PORTS_OF_A_WORKER // 2)]
        bounds.append((min(given), max(given)))
    assert all(above[0] > below[1] for above, below in pairwise(bounds)), bounds


def test_a_port_that_somebody_has_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        kernel = tmp_path / "ip_local_port_range"
        kernel.write_text(f"{taken.getsockname()[1] + 1}\t60999\n")
        monkeypatch.setattr("prometheus_server.EPHEMERAL_PORTS", kernel)
        monkeypatch.setattr("prometheus_server.PORTS_OF_A_WORKER", 1)
        with pytest.raises(RuntimeError, match="none of the 1 ports"):
            free_port()
