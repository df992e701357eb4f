"""The sockets at which the processes of a run listen, and the tables of them in docs/security.md.

    python listening_sockets.py nodes '[9400, 41055]'
    python listening_sockets.py up '[9400, 41055]'

print those of all processes that the caller sees, as JSON: as rows of the table of several machines, and of that of
`asyncrl up`. The ports are those of metrics. Tests call it in each of two machines (tests/campaign/two_machines.py).
"""

import contextlib
import ipaddress
import json
import re
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
KINDS = {
    r"gcs_server": "Ray's GCS",
    r"raylet": "Ray's raylet",
    r"ray::(Dashboard|RuntimeEnv)Agent": "Ray's agents",
    r".*/ray/dashboard/dashboard\.py": "Ray's dashboard",
    r".*/ray/autoscaler/\S*monitor\.py": "Ray's autoscaler",
    r".* -m ray\.util\.client\.server": "Ray Client",
    r"VLLM::": "engine",
    r"ray::RankActor": "rank of the learner",
    r"ray::GeneratorActor": "replica",
    r"ray::CoordinatorActor": "buffer",
    r"ray::(RowStore|PartitionActor|WeightStore)": "stores of rows and weights",
    r".*\basyncrl\b.* (up|learner|generator|head)\b": "command",
}
"""Patterns of the name or the command of a process, and its kind in the table. The first one that matches counts."""
COLLECTIVES = ("engine", "rank of the learner")
"""Kinds of processes with sockets of gloo, whose interface an environment variable can change. All other sockets that
are not of metrics are those of a Ray that asyncrl started, unless `ray.address` names another one."""


WORKER_PORTS = range(10002, 20000)
"""Ports that `ray start` gives by default to its workers, which are actors and commands."""
WORKERS = "actors and commands, for Ray"
FIXED_PORTS = (6379, 8265, 10001, 52365)
"""Ports that Ray takes by default."""


class Listener(NamedTuple):
    """A row of the table: the kind of a process, the class of its address, and the setting that can change it. The
    setting follows from the kind of the process and the port, so a comparison does not find a wrong one."""

    process: str
    address: str
    setting: str


def listeners(roots: Iterable[psutil.Process], *, metrics: Collection[int]) -> set[Listener]:
    """Returns a row for each listening socket of these processes and of all processes that they have started. The ports
    `metrics` are those of metrics."""
    kinds: dict[int, str] = {}
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [root, *root.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    kinds[process.pid] = _kind(process)
    # One list of all sockets. A list for each of Ray's processes takes a fifth of a core.
    found = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN and each.pid in kinds]
    return {
        Listener(kinds[each.pid], _class_of(each.laddr.ip), _setting(kinds[each.pid], each.laddr.port in metrics))
        for each in found
    }


class NodeListener(NamedTuple):
    """A row of the table of several machines: the kind of a process, its port or the kind of the port, and the class of
    its address."""

    process: str
    port: str
    address: str


def listeners_here(metrics: Collection[int]) -> set[NodeListener]:
    """Returns a row for each listening socket that this process sees. The ports `metrics` are those of metrics."""
    found = [each for each in psutil.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    return {_on_node(each.pid, each.laddr.ip, each.laddr.port, metrics=metrics) for each in found}


def _on_node(pid: int | None, address: str, port: int, *, metrics: Collection[int]) -> NodeListener:
    kind = "a process that has ended"
    with contextlib.suppress(psutil.NoSuchProcess):
        kind = _kind(psutil.Process(pid))
    where = _class_of(address)
    if port in WORKER_PORTS and port not in FIXED_PORTS:
        return NodeListener(WORKERS, f"{WORKER_PORTS[0]} to {WORKER_PORTS[-1]}", where)
    named = "of metrics" if port in metrics else str(port) if port in FIXED_PORTS else "any"
    return NodeListener(kind, named, where)


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for text in (process.name(), command):
        for pattern, kind in KINDS.items():
            if re.match(pattern, text):
                return kind
    return command[:80]


def _class_of(address: str) -> str:
    found = ipaddress.ip_address(address.removeprefix("::ffff:"))
    return "127.0.0.1" if found.is_loopback else "every address" if found.is_unspecified else "the node's address"


def _setting(kind: str, of_metrics: bool) -> str:
    if of_metrics:
        return "metrics.host"
    return "GLOO_SOCKET_IFNAME" if kind in COLLECTIVES else "ray.address"


def documented() -> set[Listener]:
    """Returns the rows of the table in docs/security.md."""
    return {Listener(*row) for row in _rows("process", "listens at", "setting")}


def documented_on_nodes() -> tuple[set[NodeListener], set[NodeListener]]:
    """Returns the rows of the table of several machines: those of the learner's node with Ray's head, and those of the
    generators' node."""
    rows = _rows("process", "port", "learner's node, with Ray's head", "generators' node")
    listed = [(process, port, [places.split(", ") for places in nodes]) for process, port, *nodes in rows]
    learner, generators = (
        {NodeListener(process, port, place) for process, port, nodes in listed for place in nodes[node] if place != "—"}
        for node in range(2)
    )
    return learner, generators


def _rows(*titles: str) -> list[list[str]]:
    """Returns the cells of the page's table with these titles."""
    head = re.escape(f"| {' | '.join(titles)} |")
    table = re.search(rf"{head}\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None, f"the page has no table with {titles}"
    return [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in table[1].splitlines()]


if __name__ == "__main__":
    table, ports = sys.argv[1], json.loads(sys.argv[2])
    found = listeners_here(ports) if table == "nodes" else listeners(psutil.process_iter(), metrics=ports)
    print(json.dumps(sorted(found)))
