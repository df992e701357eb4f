"""The Ray actor of one rank. It connects to the other ranks and passes calls to the worker."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import psutil
import ray

from asyncrl.common.imports import uncollected
from asyncrl.config.schema import Config
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import REFUSALS
from asyncrl.ranks.nodes import socket_interfaces

with uncollected():  # these import torch and transformers
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from asyncrl.ranks.named_rows import FetchedRows
    from asyncrl.ranks.worker import RankWorker

LOOPBACK = "127.0.0.1"
BESIDE = "beside"
"""Ray concurrency group for calls that run in a second thread, in parallel with the rank's steps."""
SAVING = "saving"
"""Ray concurrency group for writing checkpoints. It has its own thread, so that a slow disk delays no other call."""


class RankActor:
    """Call `node_address` on all ranks, `open_rendezvous` on rank 0, `setup` on all. After that, other methods may be
    called, on all ranks."""

    def __init__(self, *, worker: type[RankWorker[Any]], rank: int, world_size: int, config: Config) -> None:
        gc.freeze()  # see `uncollected`
        self._kind, self._rank, self._world_size, self._config = worker, rank, world_size, config
        self._store: TCPStore | None = None
        self._worker: RankWorker[Any] | None = None
        self._rows: FetchedRows | None = None

    def __repr__(self) -> str:
        """Ray puts this name before the lines of the rank's log. It also asks for it before `__init__` is called."""
        return f"{self._kind.section} rank {self._rank}" if hasattr(self, "_kind") else type(self).__name__

    def node_address(self) -> str:
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open_rendezvous(self, host: str) -> int:
        """Starts the TCP store through which the ranks connect, on a free port of `host`. Returns the port."""
        # a listening socket of our own is bound only to this address, and no other process can take its port meanwhile
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
        """Connects to the other ranks and loads the model."""
        has = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
        for name, value in socket_interfaces(node=self.node_address(), rendezvous=host, interfaces=has).items():
            os.environ.setdefault(name, value)
        timeout = timedelta(seconds=self._config.learner.startup_timeout_s)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        self._worker = self._kind(
            model_path=model_path, config=self._config, rank=self._rank, world_size=self._world_size, store=store
        )

    def open_data_plane(self) -> None:
        """Opens the rank's data-plane client, for calls with rows that a meta names."""
        self._rows = FetchedRows(self._ready(), self._config)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the worker. A refusal (`REFUSALS`) is returned, not raised, so the ranks stay usable."""
        try:
            return self.attempt(method, *args, **options)
        except REFUSALS as refusal:
            return refusal

    def call_with_rows(
        self, method: str, rows: Any, writes: Mapping[str, str], shared: Sequence[Any] = (), **options: Any
    ) -> Any:
        """Calls a method of the worker with its rows. `rows` are the rows themselves, or a meta that names them.
        `shared` are references to objects of the caller, such as a loss.

        For a meta, the rank fetches the rows and writes columns of the result back: `writes` maps their names in the
        result to their names on the data plane. A refusal (`REFUSALS`) is returned, not raised.
        """
        try:
            args = self._opened(shared)
            if not isinstance(rows, KVBatchMeta):
                return self.attempt(method, rows, *args, **options)
            assert self._rows is not None, "call open_data_plane() first"
            found = self.attempt(method, self._rows.fetch(rows, step=options.get("step")), *args, **options)
            if not writes:
                return found
            self._rows.write(rows, {name: found[column] for column, name in writes.items() if rows.size})
        except REFUSALS as refusal:
            return refusal

    def attempt(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the worker. A refusal is raised where the reference to the result is resolved."""
        return getattr(self._ready(), method)(*args, **options)

    def on_rank(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls `function(worker, *args)`. Other layers, such as weight publication, access a rank's model in this
        way."""
        return function(self._ready(), *args, **options)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _opened(self, shared: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Returns the shared objects, loaded on all ranks or on none.

        Ray does not resolve references inside of a list, so that a call is only refused, and the rank goes on, if it
        cannot import an object.
        """
        if not shared:
            return []
        opened: list[Any] = []
        with self._ready().together():
            opened += [ray.get(ref, timeout=self._config.run.stall_timeout_s) for ref in shared]
        return opened

    def _ready(self) -> RankWorker[Any]:
        assert self._worker is not None, "call setup() first"
        return self._worker
