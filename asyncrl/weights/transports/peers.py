"""The process group for weights: the learner's ranks first, then the replicas, or the engines' workers.

It is separate from the learner's own group. Messages use gloo. Bytes use gloo on CPUs, where a learner rank gets no
bytes of another one, and NCCL on GPUs. Invariant: every wait ends. A rank closes the group when its exchange fails or
exceeds the deadline. The waits of the other ranks then end with a broken connection. To continue, all ranks join a new
group.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncrl.common.tasks import in_daemon
from asyncrl.errors import CollectiveError, UpdateRefused, WeightError

Answer = TypeVar("Answer")

KNOWING_WHO_IS_MISSING = 0.9
"""Share of the deadline after which a rank stops waiting for others, so that it has time left to name the missing."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which the ranks meet, and their numbers. Ranks 0 to train_world_size − 1 train, and the others
    generate. Rank 0 listens at host:port.

    `timeout_s` is `weights.load_timeout_s` of the config. It limits joining, and each exchange as a whole. Every group
    needs a port of its own, at which rank 0 can listen, or already listens.
    """

    host: str
    port: int
    world_size: int
    train_world_size: int
    timeout_s: float


class Peers:
    """This process's membership of the process group for weights. Create it with `join`. It runs one exchange at a
    time."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, device: torch.device, store: Any) -> None:
        self.rank, self.device = rank, device
        self.world_size, self.train_world_size = rendezvous.world_size, rendezvous.train_world_size
        self._timeout_s = rendezvous.timeout_s
        self._store = store  # keep it: the store of rank 0 serves the other ranks
        self._said = self._gloo("said", rank, self.world_size, rendezvous)
        trainers = rendezvous.train_world_size
        if device.type == "cpu":
            # Each train rank has a group with all ranks that generate, so that train ranks get no bytes of each other.
            own = [rank] if rank < trainers else range(trainers)
            place, size = max(0, rank - trainers + 1), 1 + self.world_size - trainers
            self._sent = {root: self._gloo(f"sent/{root}", place, size, rendezvous) for root in own}
        else:
            # vLLM's own NCCL engine is not used: it sends from rank 0 only, has no checksum and no deadline, and
            # applies weights while it receives them, so that the death of one peer would tear every replica.
            backends: Any = dist
            timeout = timedelta(seconds=rendezvous.timeout_s)
            nccl = backends.ProcessGroupNCCL(PrefixStore("sent", store), rank, self.world_size, timeout)
            self._sent = dict.fromkeys(range(trainers), nccl)

    def _gloo(self, name: str, rank: int, size: int, rendezvous: Rendezvous) -> Any:
        backends: Any = dist
        options = backends.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        hostname = _own_address(rendezvous.host, rendezvous.port)
        options._devices = [backends.ProcessGroupGloo.create_device(hostname=hostname)]
        return backends.ProcessGroupGloo(PrefixStore(name, self._store), rank, size, options)

    @classmethod
    def join(
        cls, rendezvous: Rendezvous, *, rank: int, device: torch.device, listener: socket.socket | None = None
    ) -> "Peers":
        """Joins the group and returns when all ranks have joined. Rank 0 may give the socket that listens. Raises
        CollectiveError if `rank` is not below `world_size`, if a peer fails, or after `timeout_s`: then it names the
        missing ranks."""
        if rank >= rendezvous.world_size:
            raise CollectiveError(
                f"rank {rank} cannot join the weights' process group at {rendezvous.host}:{rendezvous.port}, because "
                f"world_size={rendezvous.world_size} is too small; use a larger world_size"
            )
        return _within(
            rendezvous.timeout_s,
            lambda: cls(rendezvous, rank=rank, device=device, store=_meet(rendezvous, rank=rank, listener=listener)),
            what=f"joining the weights' process group at {rendezvous.host}:{rendezvous.port} as rank {rank}",
        )

    def exchange(self, function: Callable[["Peers"], Answer], *, what: str) -> Answer:
        """Runs `function(self)`, which communicates. Raises CollectiveError when a peer failed, when `timeout_s`
        passed, and when an earlier exchange has closed the group.

        Any other WeightError leaves the group open, because all ranks have then agreed to stop.
        """
        if self._said is None:
            raise CollectiveError(
                f"{what}: an earlier exchange failed and closed the process group; join a new group on all ranks"
            )
        try:
            return _within(self._timeout_s, lambda: function(self), what=what)
        except BaseException as error:
            if not isinstance(error, WeightError) or isinstance(error, CollectiveError):
                self.close()
            raise

    def receives(self, root: int) -> bool:
        """Returns True if this rank takes part in the broadcasts of train rank `root`."""
        return root in self._sent

    def broadcast(self, bytes_: torch.Tensor, *, root: int) -> None:
        """Broadcasts a tensor on `device` from train rank `root`. Call it inside an exchange, on all ranks that take
        part."""
        if self.device.type == "cpu":
            _finish(self._sent[root].broadcast(bytes_, 0))
        else:
            _finish(self._sent[root].broadcast(bytes_, root))
            torch.cuda.synchronize(self.device)

    def say(self, message: bytes, *, root: int) -> bytes:
        """Sends the message of rank `root` to all ranks and returns it; the other messages are ignored. Call it inside
        an exchange."""
        size = torch.tensor([len(message)])
        _finish(self._said.broadcast(size, root))
        text = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == root:
            text.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        _finish(self._said.broadcast(text, root))
        return text.numpy().tobytes()

    def agree(self, refusal: WeightError | None, *, what: str) -> None:
        """Returns on all ranks if no rank refuses. Otherwise a refusing rank raises its refusal, and every other rank
        raises UpdateRefused, which names the refusing ranks. Call it inside an exchange."""
        own = torch.tensor([refusal is not None], dtype=torch.uint8)
        verdicts = [torch.empty_like(own) for _ in range(self.world_size)]
        _finish(self._said.allgather(verdicts, own))
        if refusal is not None:
            raise refusal
        refusing = [rank for rank, verdict in enumerate(verdicts) if verdict.item()]
        if refusing:
            raise UpdateRefused(f"ranks {refusing} of the weights' process group refused {what}; nothing was applied")

    def close(self) -> None:
        """Leaves the group. It may be called more than once."""
        if self.device.type != "cpu":
            for nccl in {*self._sent.values()}:
                nccl.abort()
        # gloo closes its connections when its last reference is deleted; its own `abort` does nothing
        self._said = self._store = None
        self._sent = {}


def _finish(work: Any) -> None:
    try:
        work.wait()
    finally:
        del work  # the traceback of an error would keep it, and with it the connections, alive


def _within(timeout_s: float, function: Callable[[], Answer], *, what: str) -> Answer:
    """Runs `function()` in a thread, which is abandoned at the deadline: a library's own deadline may fail."""
    outcome = in_daemon(function, name=what)
    try:
        return outcome.result(timeout_s)
    except WeightError:
        raise
    except (RuntimeError, OSError) as error:  # the errors of gloo, NCCL and the store; a TimeoutError is an OSError
        if not outcome.done():
            raise CollectiveError(
                f"{what} took longer than weights.load_timeout_s = {timeout_s:g} s; join a new group, and raise the "
                "limit if the network needs more time"
            ) from error
        raise CollectiveError(
            f"{what}: a peer has ended or is late ({type(error).__name__}: {error}); join a new group on all ranks"
        ) from error


def _meet(rendezvous: Rendezvous, *, rank: int, listener: socket.socket | None) -> Any:
    """Returns the store of the group when all ranks have joined. Raises CollectiveError, which names the missing."""
    deadline_s = time.monotonic() + KNOWING_WHO_IS_MISSING * rendezvous.timeout_s
    store = _open_store(rendezvous, is_master=rank == 0, listener=listener)
    keys = [f"joined/{peer}" for peer in range(rendezvous.world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
    except dist.DistStoreError as error:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise CollectiveError(
            f"ranks {missing} of {rendezvous.world_size} did not join the weights' process group at "
            f"{rendezvous.host}:{rendezvous.port} within weights.load_timeout_s = {rendezvous.timeout_s:g} s; "
            "check that these processes run and can reach this address"
        ) from error
    return store


def _open_store(rendezvous: Rendezvous, *, is_master: bool, listener: socket.socket | None) -> Any:
    host, port, timeout = rendezvous.host, rendezvous.port, timedelta(seconds=rendezvous.timeout_s)
    if not is_master:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    # Our own socket listens on this address only; the store's own one would listen on all addresses.
    listener = listener or socket.create_server((host, port))
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _own_address(host: str, port: int) -> str:
    """Returns this machine's address on the route to `host`. By default gloo uses the address of the hostname."""

    address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
        probe.connect(address[4])  # sends nothing
        return str(probe.getsockname()[0])
