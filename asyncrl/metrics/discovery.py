"""Service discovery: lists the run's metrics endpoints for Prometheus.

Prometheus reads the list from a file (`file_sd_configs`) or over HTTP (`http_sd_configs`): the learner's metrics server
answers `GET /sd` with the same list. The list gives every series the labels `run`, `role`, `replica` and `node`. The
file is replaced as a whole, so Prometheus never reads an incomplete list.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.atomic_write import write_atomically

RAY = "ray"
"""The role of Ray's own endpoints; there is one per node.

A page of Ray's metrics is ten times as large as a page of asyncrl's. Prometheus therefore scrapes Ray's endpoints in a
separate job.
"""


class Target(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One endpoint. `role` is a role of the catalogue or `RAY`. `replica` distinguishes the processes of one role, for
    example `generator-0`. `node` is the host name of the node of the process, as Ray shows it; in a container, that of
    the container."""

    role: str
    replica: str
    address: str
    node: str


def process_target(name: str, address: str, *, node: str) -> Target:
    """Returns the target of a process. Its name starts with its role: `learner`, `generator-0`."""
    return Target(role=name.partition("-")[0], replica=name, address=address, node=node)


def ray_targets(nodes: Iterable[Mapping[str, Any]]) -> list[Target]:
    """Returns the endpoints of Ray's metrics for the nodes from `ray.nodes()` that are alive and export metrics."""
    targets = []
    for node in nodes:
        host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
        if node["Alive"] and port > 0:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            name = f"ray-{node['NodeID'][:8]}"
            targets.append(Target(role=RAY, replica=name, address=address, node=node["NodeManagerHostname"]))
    return sorted(targets)


def target_groups(*, run: str, targets: Iterable[Target]) -> bytes:
    """Returns these targets in the JSON format of Prometheus' service discovery, in a stable order."""
    groups = [
        {
            "targets": [target.address],
            "labels": {"run": run, "role": target.role, "replica": target.replica, "node": target.node},
        }
        for target in sorted(targets)
    ]
    return msgspec.json.format(msgspec.json.encode(groups), indent=2) + b"\n"


def write_targets(path: Path, *, run: str, targets: Iterable[Target]) -> None:
    """Replaces the file at `path` by a list of these targets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, target_groups(run=run, targets=targets))
