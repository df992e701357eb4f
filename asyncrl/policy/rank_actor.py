"""The Ray actor of one rank. It connects to the other ranks and passes calls to the worker.

It imports torch, accelerate and transformers only in the actor's process, when the rank is set up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.config.import_path import resolve
from asyncrl.config.schema import Config
from asyncrl.errors import REFUSALS

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from asyncrl.policy.meta_rank import MetaRank
    from asyncrl.policy.sharded_worker import ShardedWorker

LOOPBACK = "127.0.0.1"
BESIDE = "beside"
"""Ray concurrency group for calls that run in a second thread, in parallel with the rank's steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """An object of the caller, such as a loss, in Ray's object store.

    Ray does not resolve a reference inside another object, so the ranks load the object themselves. If a rank cannot
    import it, the call is refused, and the rank goes on.
    """

    ref: ray.ObjectRef[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """The kind of ranks in a group, as import paths that are resolved in the ranks' processes."""

    section: str
    """The section of the configuration for these ranks. Errors use it as the ranks' name."""
    worker: str
    """Import path of a `ShardedWorker`."""
    meta_rank: str
    """Import path of the `MetaRank` for this worker."""


POLICY_RANKS = RankKind(
    section="learner",
    worker="asyncrl.policy.worker:PolicyWorker",
    meta_rank="asyncrl.policy.meta_rank:PolicyMetaRank",
)


class RankActor:
    """Call `node_address` on all ranks, `open_rendezvous` on rank 0, `setup` on all. After that, other methods may be
    called, on all ranks."""

    def __init__(self, *, rank: int, world_size: int, config: Config, kind: RankKind) -> None:
        self._rank, self._world_size, self._config, self._kind = rank, world_size, config, kind
        self._store: Store | None = None
        self._worker: ShardedWorker[Any] | None = None
        self._meta_rank: MetaRank[Any] | None = None

    def node_address(self) -> str:
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open_rendezvous(self, host: str) -> int:
        """Starts the TCP store through which the ranks connect, on a free port of `host`. Returns the port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
        import os

        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if host == LOOPBACK and os.path.isdir("/sys/class/net/lo"):
            # all ranks are on this node; otherwise gloo would look up the host's name and might pick another interface
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=self._config.learner.startup_timeout_s)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        self._worker = resolve(self._kind.worker, key="worker")(
            model_path=model_path, config=self._config, rank=self._rank, world_size=self._world_size, store=store
        )

    def setup_data_plane(self) -> None:
        """Opens the rank's data-plane client, for `call_with_meta`."""
        from asyncrl.data_plane.clients import open_client

        self._meta_rank = resolve(self._kind.meta_rank, key="meta_rank")(self._ready(), open_client(self._config))

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the worker. A refusal (`REFUSALS`) is returned, not raised, so the ranks stay usable."""
        return self._answer(self._ready(), method, args, options)

    def attempt(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the worker. A refusal is raised where the reference to the result is resolved."""
        return getattr(self._ready(), method)(*args, **options)

    def call_with_meta(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the meta rank. A refusal (`REFUSALS`) is returned, not raised."""
        assert self._meta_rank is not None, "call setup_data_plane() first"
        return self._answer(self._meta_rank, method, args, options)

    def on_rank(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function(worker, *args)`. Other layers, such as weight publication, access a rank's model in this
        way."""
        return function(self._ready(), *args)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def _answer(self, target: object, method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            return getattr(target, method)(*self._opened(args), **options)
        except REFUSALS as refusal:
            return refusal

    def _opened(self, args: Sequence[Any]) -> list[Any]:
        """Returns the arguments with each `Shared` object loaded, on all ranks or on none."""
        if not any(isinstance(arg, Shared) for arg in args):
            return [*args]
        timeout_s = self._config.run.stall_timeout_s
        opened: list[Any] = []
        with self._ready().together():
            opened += [ray.get(arg.ref, timeout=timeout_s) if isinstance(arg, Shared) else arg for arg in args]
        return opened

    def _ready(self) -> ShardedWorker[Any]:
        assert self._worker is not None, "call setup() first"
        return self._worker
