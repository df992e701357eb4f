"""The Ray actor of one rank. It connects to the other ranks and passes calls to the worker."""

from __future__ import annotations

import gc
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import ray

from asyncrl.common.imports import uncollected
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import REFUSALS, RunError
from asyncrl.log_files import LogFile
from asyncrl.shown_text import describe_process, log_to_stderr

with uncollected():  # these import torch and transformers
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from asyncrl.ranks.named_rows import FetchedRows
    from asyncrl.ranks.worker import RankWorker

LOOPBACK = "127.0.0.1"
SENDING = "sending"
"""Ray concurrency group for sending weights. Its calls run in their own thread, beside the rank's steps."""
SAVING = "saving"
"""Ray concurrency group for writing checkpoints. It has its own thread too, so that a slow disk delays no other
call."""


class RankActor:
    """The process of one rank. Call `begin` on all ranks, `open_rendezvous` on rank 0, `setup` on all. After that,
    other methods may be called, on all ranks. `setup` makes an object of the class `worker`. If the calls name
    rows on a data plane, it also makes the access to them with `rows`. After `close` on all ranks and `rest` on all,
    `begin` begins another run.

    `call`, `call_with_rows` and `attempt` take a function whose first argument is the worker: a method of the worker's
    class, or a function of another layer that reads the rank's model."""

    def __init__(
        self,
        *,
        worker: type[RankWorker[Any]],
        rank: int,
        world_size: int,
        rows: Callable[[RankWorker[Any], Config], FetchedRows] = FetchedRows,
    ) -> None:
        gc.freeze()  # Python's garbage collector must not scan the imported modules again and again
        self._kind, self._rank, self._world_size = worker, rank, world_size
        self._kind_of_rows = rows
        self._environment = dict(os.environ)
        self._config: Config
        self._store: TCPStore | None = None
        self._worker: RankWorker[Any] | None = None
        self._rows: FetchedRows | None = None
        self._step: int | None = None
        self._log: LogFile | None = None

    def __repr__(self) -> str:
        """Ray puts this name before the lines of the rank's log. It also asks for it before `__init__` is called."""
        return f"{self._kind.section} rank {self._rank}" if hasattr(self, "_kind") else type(self).__name__

    def begin(self, config: Config, *, incarnation: object = None, logs: Path | None = None) -> str:
        """Begins a run, in a new process or after `rest`. Returns the address of the node.

        The lines of this process's log name the `incarnation` of the run. They are also written to a file in the folder
        `logs`, if it is given.
        """
        self._config, self._step = config, None
        section, rank = self._kind.section, self._rank
        log_to_stderr(config.run.log_format)
        describe_process(run=config.run.name, role=section, rank=rank, incarnation=incarnation, step=lambda: self._step)
        if logs is not None:
            self._log = LogFile(logs / f"{section}-rank-{rank}.{incarnation}.log", form=config.run.log_format)
        return self.node_address()

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

    def setup(self, *, model_path: str, host: str, port: int, named_rows: bool) -> None:
        """Connects to the other ranks and loads the model. With `named_rows`, also opens a data-plane client."""
        has = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
        for name, value in socket_interfaces(node=self.node_address(), rendezvous=host, interfaces=has).items():
            os.environ.setdefault(name, value)
        timeout = timedelta(seconds=self._config.learner.startup_timeout_s)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        self._worker = self._kind(
            model_path=model_path, config=self._config, rank=self._rank, world_size=self._world_size, store=store
        )
        if named_rows:
            self._rows = self._kind_of_rows(self._worker, self._config)

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls `function(worker, *args)`. A refusal (`REFUSALS`) is returned, not raised, so the ranks stay usable."""
        try:
            return function(self._ready(), *args, **options)
        except REFUSALS as refusal:
            return refusal

    def call_with_rows(
        self,
        function: Callable[..., Any],
        rows: BatchedDataDict | KVBatchMeta,
        writes: Mapping[str, str],
        shared: Sequence[Any] = (),
        **options: Any,
    ) -> Any:
        """Calls `function(worker, rows, *shared)`. `rows` are the rows themselves, or a meta that names them. `shared`
        are references to objects of the caller, such as a loss.

        For a meta, the rank fetches the rows. If `writes` is not empty, the rank writes columns of the result back and
        returns None: `writes` maps their names in the result to their names on the data plane. A refusal (`REFUSALS`)
        is returned, not raised.
        """
        try:
            self._step = options.get("step", self._step)
            args = self._opened(shared)
            if not isinstance(rows, KVBatchMeta):
                return function(self._ready(), rows, *args, **options)
            assert self._rows is not None, "call setup() with named_rows first"
            found = function(self._ready(), self._rows.fetch(rows, step=options.get("step")), *args, **options)
            if not writes:
                return found
            self._rows.write(rows, {name: found[column] for column, name in writes.items() if rows.size})
        except REFUSALS as refusal:
            return refusal

    def attempt(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls `function(worker, *args)`. Any error, also a refusal (`REFUSALS`), is raised where the caller resolves
        the reference to the result."""
        return function(self._ready(), *args, **options)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    def rest(self) -> None:
        """Drops all state of the run, after `close` on all ranks. Only the process and its imported modules stay.

        Raises RunError if the worker, its model or its optimizer is still in use, for example by a delivery of weights
        that has not ended. Then this process must end.
        """
        parts = (self._worker, getattr(self._worker, "model", None), getattr(self._worker, "optimizer", None))
        dropped = [weakref.ref(part) for part in parts if part is not None]
        del parts
        self._worker = self._rows = self._store = None
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # its entries have the device mesh of the run
        gc.collect()
        if any(part() is not None for part in dropped):
            raise RunError(f"{self!r} is still in use, so its process cannot be used for another run")
        if self._log is not None:
            self._log.close()
            self._log = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # other processes may use this memory meanwhile
            torch.cuda.reset_peak_memory_stats()
        # accelerate's variables change how transformers loads models, and `setup` does not replace a set variable
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        # Only changed variables are set, because Ray's threads may read the others at the same time.
        os.environ.update({name: value for name, value in self._environment.items() if os.environ.get(name) != value})

    def _opened(self, shared: Sequence[ray.ObjectRef[Any]]) -> list[Any]:
        """Returns the objects of these references, loaded on all ranks or on none.

        The references are in a list, inside of which Ray does not resolve them before the call. So if a rank cannot
        import an object, all ranks refuse the call and go on.
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


# The nodes of a model's ranks: which rank is where, and through which network interface the ranks connect.
#
# FSDP gathers the parameters of each layer in each pass among the ranks of one copy of the model, which are consecutive
# (`learner.shards`, HSDP). Within a node that is ten to fifty times as fast as between nodes. So the ranks of one node
# are consecutive too.


def rank_order(nodes: Sequence[str], *, shards: int) -> list[int]:
    """Returns the bundles of a placement group in the order of ranks. `nodes[i]` is the node of bundle i.

    The bundles of one node are consecutive. Nodes whose bundles make up whole copies of `shards` ranks come first, so
    that no other node shifts them.

    >>> rank_order(["a", "b", "a", "b"], shards=2)
    [0, 2, 1, 3]
    >>> rank_order(["a", "b", "c", "b", "c", "c"], shards=2)
    [1, 3, 0, 2, 4, 5]
    """
    counts = Counter(nodes)

    def place(bundle: int) -> tuple[bool, int, int]:
        node = nodes[bundle]
        return counts[node] % shards != 0, nodes.index(node), bundle

    return sorted(range(len(nodes)), key=place)


def spanning_groups(nodes: Sequence[str], *, shards: int) -> dict[int, list[str]]:
    """Returns the nodes of each copy of the model that is on several nodes, by its first rank. `nodes[r]` is the node
    of rank r, and a copy has `shards` consecutive ranks.

    >>> spanning_groups(["a", "a", "a", "b"], shards=2)
    {2: ['a', 'b']}
    """
    groups = {first: list(dict.fromkeys(nodes[first : first + shards])) for first in range(0, len(nodes), shards)}
    return {first: found for first, found in groups.items() if len(found) > 1}


def spanning_warning(nodes: Sequence[str], *, shards: int | None) -> str | None:
    """Returns a warning if a copy of the learner's model is on several nodes; else None. `nodes[r]` is the name of the
    node of rank r. `shards` is `learner.shards`."""
    size = shards or len(nodes)
    spanning = spanning_groups(nodes, shards=size)
    if not spanning:
        return None
    where = "; ".join(f"ranks {first} to {first + size - 1} on {' and '.join(on)}" for first, on in spanning.items())
    counts = Counter(nodes)
    fits = math.gcd(*counts.values())
    advice = (
        f"set learner.shards = {fits}, if the GPUs of {fits} ranks hold a copy of the model"
        if fits > 1 and fits != size
        else "use as many ranks on each node (learner.ranks, learner.node_labels), and set learner.shards to a divisor "
        "of that number"
    )
    have = ", ".join(f"{node} has {count}" for node, count in counts.items())
    return (
        f"learner ranks that share one copy of the model are on several nodes: {where}. Each pass then gathers the "
        f"parameters over the network, with learner.shards = {'unset' if shards is None else shards} and {have}; "
        f"{advice}"
    )


def socket_interfaces(*, node: str, rendezvous: str, interfaces: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Returns the environment variables that tell gloo and NCCL the network interface of a rank.

    `node` is the rank's address in Ray, `rendezvous` the address at which the ranks meet, and `interfaces` has the
    addresses of each interface. gloo would look up the host's name, which Debian and Ubuntu map to 127.0.1.1, and NCCL
    would take the first interface, which may be one of Docker. A variable is left out if no interface has the address.
    Ranks of one node meet at 127.0.0.1. NCCL still gets the interface of `node`, because the same processes send
    weights to the engines of other nodes.
    """
    loopback = rendezvous.startswith("127.")
    gloo = _interface(rendezvous if loopback else node, interfaces)
    nccl = _interface(node, interfaces)
    # Without `=`, NCCL takes all interfaces whose names begin with the value: eth1 and eth10.
    return ({} if gloo is None else {"GLOO_SOCKET_IFNAME": gloo}) | (
        {} if nccl is None else {"NCCL_SOCKET_IFNAME": f"={nccl}"}
    )


def _interface(address: str, interfaces: Mapping[str, Collection[str]]) -> str | None:
    return next((name for name, addresses in interfaces.items() if address in addresses), None)
