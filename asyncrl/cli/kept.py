"""A process that trains several runs of a sweep. Its imports, its Ray, its engines and the processes of its ranks stay
between two runs.

`asyncrl sweep` gives the process one end of a socket. When a run has finished in order, the process writes the exit
code to the socket and waits for the command of the next run. It ends after any other run, and when the sweep closes its
end of the socket. So a run that failed, that was stopped or that was killed leaves nothing to the next one: Ray and all
processes below it end with this process. docs/runs.md ("What stays between two runs of a sweep") has the list.
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import msgspec

from asyncrl.cli import restarts
from asyncrl.errors import ConfigError
from asyncrl.metrics.states import monotonic_at_process_start

SOCKET = "ASYNCRL_SWEEP_SOCKET"
"""Variable with the file descriptor of the process's end of the socket."""
ORDER_BYTES = 2**20
"""Longest command of a run, bytes."""
Started = TypeVar("Started")


class Order(msgspec.Struct, frozen=True):
    """The command line of the next run, without `asyncrl`, and the path of the file that gets its output."""

    words: list[str]
    log: str


class Ended(msgspec.Struct, frozen=True):
    """The exit code with which the command of a run has ended, and whether the process waits for the next run."""

    code: int
    waits: bool


@dataclass
class KeptProcess:
    """The state of a process that trains several runs. A run sets `in_order` when it has finished without an error."""

    sweep: socket.socket
    came_s: float | None = None
    """Time at which the command of the present run came, on the monotonic clock. None for the first run, whose command
    is that of the process itself."""
    in_order: bool = False
    replicas: list[Any] = field(default_factory=list)
    """The replicas (`asyncrl.deployment.pool.Replica`) of the last run, whose engines wait for the next run. Their type
    is `Any`, because every command imports this module, so it must not import Ray."""
    ranks: list[Any] = field(default_factory=list)
    """The ranks (`asyncrl.ranks.group.PlacedRanks`) of the last run, whose processes wait for the next run."""

    def __post_init__(self) -> None:
        self._ray: Any = None
        self._shared: bytes | None = None
        self._orders = self.sweep.makefile("rb")

    def train_each(self, app: Callable[..., object]) -> NoReturn:
        """Runs the command in `sys.argv`, and then those that the sweep sends. Raises SystemExit with the exit code of
        the last one."""
        words: list[str] | None = None
        while True:
            self.in_order = False
            try:
                app(words)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
                if code or not self.in_order or restarts.earlier_end():
                    if words is not None:
                        self._send(Ended(code, waits=False))
                    raise
            # If this process dies from now on, its supervisor must not begin the first run again.
            restarts.starts_no_other()
            self._send(Ended(0, waits=True))
            order = self._received()
            if order is None:
                raise SystemExit(0)
            words, self.came_s = order.words, time.monotonic()
            _write_output_to(order.log)

    def ray_of(self, shared: bytes | None, start: Callable[[], Started]) -> Started:
        """Returns the Ray that this process has started. Starts it by `start` for the first run. `shared` are the
        settings in which the runs of this process must be equal (`asyncrl.cli.sweep_processes.kept_for`).

        Raises ConfigError if `shared` differs from that of the first run. The sweep compares these settings too, but as
        the configuration files had them when the sweep began.
        """
        if self._ray is None:
            self._ray, self._shared = start(), shared
        elif shared != self._shared:
            raise ConfigError(
                "a configuration file of the sweep has changed since the sweep began, so this run does not fit the "
                "engines of the run before; undo the change, or give the sweep another --name"
            )
        ray: Started = self._ray
        return ray

    def _send(self, message: Ended) -> None:
        self.sweep.sendall(msgspec.json.encode(message) + b"\n")

    def _received(self) -> Order | None:
        """Waits for the next order, and returns it; None if the sweep has closed its end of the socket."""
        line = self._orders.readline(ORDER_BYTES)
        return msgspec.json.decode(line, type=Order) if line.endswith(b"\n") else None


def _write_output_to(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _of_sweep() -> KeptProcess | None:
    descriptor = os.environ.pop(SOCKET, None)  # no process below this one may use it
    if descriptor is None:
        return None
    # Programs that this process starts do not get the socket. A child that `restarts.supervise` forks keeps it.
    os.set_inheritable(int(descriptor), False)
    return KeptProcess(sweep=socket.socket(fileno=int(descriptor)))


KEPT = _of_sweep()
"""The state of this process if a sweep may give it further runs; else None."""


def command_began_s() -> float:
    """Returns the start of the present command on the monotonic clock: the start of this process, or the time at which
    the command of a later run came."""
    return monotonic_at_process_start() if KEPT is None or KEPT.came_s is None else KEPT.came_s
