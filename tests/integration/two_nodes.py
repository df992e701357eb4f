"""A Ray of two nodes on this machine, with its own token: the head is for learners, the second node for generators."""

import contextlib
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from kills import ray_session

STARTS = 3
"""Number of attempts to start a Ray node."""
PLACEMENT = ["generator.node_labels={pool: generator}", "learner.node_labels={pool: learner}"]
"""Overrides of a run, with which each part is on the node of its pool."""

CONTROL_ACTORS = ("CoordinatorActor", "WeightStore", "PartitionActor")
"""Classes of the shared actors with which a run ends: the buffer, the weight store, the row index."""


class TwoNodes(NamedTuple):
    """A Ray: its address, its session folder, and the process that started each node, by the node's label `pool`."""

    address: str
    session: str
    nodes: dict[str, psutil.Popen]


@contextlib.contextmanager
def two_nodes(logs: Path, *, modules: Sequence[Path] = ()) -> Iterator[TwoNodes]:
    """Starts the nodes. They end with the context. Their workers import modules from the folders `modules`, and those
    of the tests."""
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    path = os.pathsep.join([*map(str, modules), *sys.path])
    nodes: dict[str, psutil.Popen] = {}
    try:
        options = ["--head", "--port=0", "--include-dashboard=false"]
        address = started_node(
            nodes, "learner", *options, path=path, log=logs / "head.log", says=r"--address='([0-9.]+:\d+)'"
        )
        started_node(
            nodes, "generator", f"--address={address}", path=path, log=logs / "second.log", says="(Ray runtime started)"
        )
        yield TwoNodes(address, ray_session(nodes["learner"]), nodes)
    finally:
        del os.environ["RAY_AUTH_TOKEN"]
        running = [node for node in nodes.values() if node.poll() is None]
        family = [each for node in running for each in [node, *node.children(recursive=True)]]
        for node in reversed(running):
            node.terminate()
        _, alive = psutil.wait_procs(family, timeout=120)
        for left in alive:
            left.kill()


def started_node(nodes: dict[str, psutil.Popen], pool: str, *options: str, path: str, log: Path, says: str) -> str:
    """Adds a Ray node for a pool and waits until its log matches. Returns the first group of the match.

    A busy machine may take longer than Ray's limit of 30 s for the start of a node, which is then started again.
    """
    for left in reversed(range(STARTS)):
        begin_node(nodes, pool, *options, path=path, log=log)
        deadline_s = time.monotonic() + 360
        while not (found := re.search(says, log.read_text())) and nodes[pool].poll() is None:
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)  # polls another process
        if found:
            break
        assert left, log.read_text()
        assert "timed out during startup" in log.read_text(), log.read_text()
    assert found
    return found[1]


def begin_node(nodes: dict[str, psutil.Popen], pool: str, *options: str, path: str, log: Path) -> None:
    """Adds the process that starts a Ray node for a pool."""
    sizes = ["--num-cpus=2", f"--object-store-memory={2**29}", "--min-worker-port=0", "--max-worker-port=0"]
    with log.open("wb") as file:
        nodes[pool] = psutil.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", f"--labels=pool={pool}", *options, *sizes,
             "--disable-usage-stats", "--block"],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Without the mode, Ray joins an address without its token.
            env=os.environ | {"PYTHONPATH": path, "RAY_AUTH_MODE": "token"},
        )  # fmt: skip


def pools_of(actor: str, head: TwoNodes) -> list[str]:
    """Returns the pool of the node for each process of an actor class. Ray names the process after the class."""
    found = []
    for pool, node in head.nodes.items():
        for process in node.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [pool] * "".join(process.cmdline()[:1]).startswith(f"ray::{actor}")
    return found
