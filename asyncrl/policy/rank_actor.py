"""The Ray actor around one rank: it meets the others, and hands calls to the worker.

Imports torch, accelerate and transformers only inside the actor's process, when the rank is set up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.config.import_path import resolve
from asyncrl.config.schema import Config
from asyncrl.errors import CheckpointError, ImpreciseColumns, MissingColumns, Offloaded, RowsLost, WeightError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from asyncrl.policy.meta_rank import MetaRank
    from asyncrl.policy.sharded_worker import ShardedWorker

LOOPBACK = "127.0.0.1"
BESIDE = "beside"
"""Ray concurrency group of calls that run in a thread beside the rank's steps."""
REFUSALS = (RowsLost, MissingColumns, ImpreciseColumns, Offloaded, WeightError, CheckpointError)
"""What a rank answers with instead of failing: all ranks agree on it, or it leaves their own group whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """What the ranks of a group are, by import paths, which are followed in their own processes."""

    section: str
    """The config's section that a user finds them in, and what errors call them."""
    worker: str
    """A `ShardedWorker`."""
    meta_rank: str
    """The `MetaRank` around it."""


POLICY_RANKS = RankKind(
    section="learner",
    worker="asyncrl.policy.worker:PolicyWorker",
    meta_rank="asyncrl.policy.meta_rank:PolicyMetaRank",
)


class RankActor:
    """Order of calls: `node_address` on all, `open_rendezvous` on rank 0, `setup` on all; then anything, on all."""

    def __init__(self, *, rank: int, world_size: int, config: Config, kind: RankKind) -> None:
        self._rank, self._world_size, self._config, self._kind = rank, world_size, config, kind
        self._store: Store | None = None
        self._worker: ShardedWorker[Any] | None = None
        self._meta_rank: MetaRank[Any] | None = None

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

        if host == LOOPBACK and os.path.isdir("/sys/class/net/lo"):
            # all ranks on this node: gloo would look the host's name up and take what it finds
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=self._config.learner.startup_timeout_s)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        self._worker = resolve(self._kind.worker, key="worker")(
            model_path=model_path, config=self._config, rank=self._rank, world_size=self._world_size, store=store
        )

    def setup_data_plane(self) -> None:
        """Opens the rank's access to the rows that `call_with_meta` names."""
        from asyncrl.data_plane.clients import open_client

        self._meta_rank = resolve(self._kind.meta_rank, key="meta_rank")(self._ready(), open_client(self._config))

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of the worker. A refusal is an answer: the ranks can go on."""
        return _answer(getattr(self._ready(), method), *args, **options)

    def attempt(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of the worker whose refusals are raised, for whoever asks Ray for the answer."""
        return getattr(self._ready(), method)(*args, **options)

    def call_with_meta(self, method: str, *args: Any, **options: Any) -> Any:
        """A method of the meta rank. A refusal is an answer."""
        assert self._meta_rank is not None, "setup_data_plane() comes first"
        return _answer(getattr(self._meta_rank, method), *args, **options)

    def on_rank(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(worker, *args)`: how other layers, such as weight publication, reach a rank's model."""
        return function(self._ready(), *args)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _ready(self) -> ShardedWorker[Any]:
        assert self._worker is not None, "setup() comes first"
        return self._worker


def _answer(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except REFUSALS as refusal:
        return refusal
