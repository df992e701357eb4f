"""The Ray actor around one rank: it meets the others, fetches its own groups' rows, and hands calls to the worker.

Imports torch, accelerate and transformers only inside the actor's process, when the rank is set up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.config.schema import Config
from asyncrl.policy.interfaces import StepReport, TrainGroup

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from asyncrl.policy.worker import PolicyWorker

LOOPBACK = "127.0.0.1"
BESIDE = "beside"
"""Ray concurrency group of calls that run in a thread beside the rank's steps."""


class RankActor:
    """Order of calls: `node_address` on all, `open_rendezvous` on rank 0, `setup` on all; then anything, on all."""

    def __init__(self, *, rank: int, world_size: int, config: Config) -> None:
        self._rank, self._world_size, self._config = rank, world_size, config
        self._store: Store | None = None
        self._worker: PolicyWorker | None = None

    def node_address(self) -> str:
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open_rendezvous(self, host: str) -> int:
        """Starts the store at which the ranks meet, on a free port of `host`; returns the port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # our own listening socket: bound to this address alone, and to a port that nobody can take in between
        listener = socket.create_server((host, 0))
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=self._config.learner.startup_timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def setup(self, *, model_path: str, host: str, port: int) -> None:
        """Loads the model and meets the other ranks."""
        import os

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from asyncrl.policy.worker import PolicyWorker

        if host == LOOPBACK and os.path.isdir("/sys/class/net/lo"):
            # all ranks on this node: gloo would look the host's name up and take what it finds
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=self._config.learner.startup_timeout_s)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        self._worker = PolicyWorker(
            model_path=model_path, config=self._config, rank=self._rank, world_size=self._world_size, store=store
        )

    def train_on_refs(self, updates: Sequence[Sequence[TrainGroup]], *, step: int) -> StepReport:
        """Fetches the rows of this rank's groups, then trains. When any rank lacks rows, none trains (F37): the report
        then has only this rank's `lost_keys`, empty on the ranks that lack nothing."""
        worker = self._ready()
        # half of what the other ranks wait for this one's verdict
        fetched, lost = _with_rows(updates, timeout_s=self._config.learner.collective_timeout_s / 2)
        if worker.any_rank(bool(lost)):
            return StepReport(lost_keys=lost, rows_lost=True)
        return worker.train_step(fetched, step=step)

    def on_rank(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(worker, *args)`: how other layers, such as weight publication, reach a rank's model."""
        return function(self._ready(), *args)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _ready(self) -> PolicyWorker:
        assert self._worker is not None, "setup() comes first"
        return self._worker


def _with_rows(
    updates: Sequence[Sequence[TrainGroup]], *, timeout_s: float
) -> tuple[list[list[TrainGroup]], tuple[str, ...]]:
    """The groups with their rows fetched, all at once, and the keys of those whose rows are gone or out of reach."""
    refs = [group.rows for groups in updates for group in groups if isinstance(group.rows, ray.ObjectRef)]
    if refs:
        ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    fetched: list[list[TrainGroup]] = []
    lost: list[str] = []
    for groups in updates:
        fetched.append([])
        for group in groups:
            try:
                rows = ray.get(group.rows, timeout=0) if isinstance(group.rows, ray.ObjectRef) else group.rows
                fetched[-1].append(replace(group, rows=rows))
            except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                lost.append(group.key)
    return fetched, tuple(lost)
