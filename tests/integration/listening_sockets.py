"""The sockets at which the processes of a run listen, and the table of them in docs/security.md."""

import contextlib
import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

import psutil
from conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "security.md"
KINDS = {
    r"gcs_server": "Ray's GCS",
    r"raylet": "Ray's raylet",
    r"ray::(Dashboard|RuntimeEnv)Agent": "Ray's agents",
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


def _kind(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    for text in (process.name(), command):
        for pattern, kind in KINDS.items():
            if re.match(pattern, text):
                return kind
    return command[:80]


def _class_of(address: str) -> str:
    found = ipaddress.ip_address(address.removeprefix("::ffff:"))
    return (
        "127.0.0.1" if found.is_loopback else "every address" if found.is_unspecified else "an address of the machine"
    )


def _setting(kind: str, of_metrics: bool) -> str:
    if of_metrics:
        return "metrics.host"
    return "GLOO_SOCKET_IFNAME" if kind in COLLECTIVES else "ray.address"


def documented() -> set[Listener]:
    """Returns the rows of the table in docs/security.md."""
    table = re.search(r"\| process \| listens at \| setting \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text())
    assert table is not None, "the page has no such table"
    rows = [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in table[1].splitlines()]
    return {Listener(*row) for row in rows}
