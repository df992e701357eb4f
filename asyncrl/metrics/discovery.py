"""Where Prometheus finds the run's endpoints: a file (`file_sd_configs`), and over HTTP (`http_sd_configs`).

The labels `run`, `role` and `replica` of every series come from here. The file is replaced whole, so that Prometheus
never reads half of it; the learner's metrics server answers `GET /sd` with the same list.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.atomic_write import write_atomically

RAY = "ray"
"""The role of Ray's own endpoints, one a node. A page of Ray's is ten times one of ours: Prometheus asks for it in a
job of its own, and who reads the run does not."""


class Target(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One endpoint. `role` is one of the catalogue's or `RAY`; `replica` tells apart processes of one, e.g.
    `generator-0`."""

    role: str
    replica: str
    address: str


def targets_of(addresses: Mapping[str, str]) -> list[Target]:
    """The endpoints of processes that are named after their role, as `learner` or `generator-0`."""
    return [Target(role=name.partition("-")[0], replica=name, address=address) for name, address in addresses.items()]


def ray_targets(nodes: Iterable[Mapping[str, Any]]) -> list[Target]:
    """Where the nodes that `ray.nodes()` lists serve Ray's metrics: those that live, and do."""
    targets = []
    for node in nodes:
        host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
        if node["Alive"] and port > 0:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            targets.append(Target(role=RAY, replica=f"ray-{node['NodeID'][:8]}", address=address))
    return sorted(targets)


def target_groups(*, run: str, targets: Iterable[Target]) -> bytes:
    """Exactly these targets as Prometheus' JSON, in a stable order."""
    groups = [
        {"targets": [target.address], "labels": {"run": run, "role": target.role, "replica": target.replica}}
        for target in sorted(targets)
    ]
    return msgspec.json.format(msgspec.json.encode(groups), indent=2) + b"\n"


def write_targets(path: Path, *, run: str, targets: Iterable[Target]) -> None:
    """Make `path` list exactly these targets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, target_groups(run=run, targets=targets))
