"""The process group in which weights travel: learner ranks first, then the engines' workers.

A group of its own, beside the learner's: gloo for what is said, and on CPUs for the bytes too; on GPUs the bytes take
NCCL. What must hold: every wait ends. A rank whose exchange fails or outlasts its deadline closes the group, which ends
the waits of its neighbours with a broken connection; to go on, all join a new one.
"""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import CollectiveError, UpdateRefused, WeightError

Answer = TypeVar("Answer")

KNOWING_WHO_IS_MISSING = 0.9
"""Part of the deadline after which a rank that waits for others gives up, to have time left to say for whom."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with whom to meet: ranks 0 … train_world_size − 1 train, the others serve; rank 0 listens at host:port.

    `timeout_s`, `weights.load_timeout_s` of the config, limits the joining, and each exchange as a whole. Every group
    takes a port of its own.
    """

    host: str
    port: int
    world_size: int
    train_world_size: int
    timeout_s: float


class Peers:
    """This process's place in the group; made by `join`. One exchange at a time."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, device: torch.device, store: Any) -> None:
        self.rank, self.device = rank, device
        self.world_size, self.train_world_size = rendezvous.world_size, rendezvous.train_world_size
        self._timeout_s = rendezvous.timeout_s
        self._store = store  # rank 0's serves the others
        backends: Any = dist
        gloo = backends.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        options._devices = [gloo.create_device(hostname=_own_address(rendezvous.host, rendezvous.port))]
        self._said = gloo(PrefixStore("said", store), rank, self.world_size, options)
        self._sent = self._said
        if device.type != "cpu":
            # Not vLLM's own NCCL engine: it sends from rank 0 alone, without a checksum and without a deadline, and
            # applies while it receives, so that a peer's death tears every replica.
            self._sent = backends.ProcessGroupNCCL(PrefixStore("sent", store), rank, self.world_size, options._timeout)

    @classmethod
    def join(cls, rendezvous: Rendezvous, *, rank: int, device: torch.device) -> "Peers":
        """Returns when all have joined. CollectiveError after `timeout_s`, naming who is missing."""
        if rank >= rendezvous.world_size:
            raise CollectiveError(
                f"rank {rank} has no place in the weights' process group at {rendezvous.host}:{rendezvous.port}, whose "
                f"world_size is {rendezvous.world_size}"
            )
        return _within(
            rendezvous.timeout_s,
            lambda: cls._joined(rendezvous, rank=rank, device=device),
            what=f"joining the weights' process group at {rendezvous.host}:{rendezvous.port} as rank {rank}",
        )

    @classmethod
    def _joined(cls, rendezvous: Rendezvous, *, rank: int, device: torch.device) -> "Peers":
        deadline_s = time.monotonic() + KNOWING_WHO_IS_MISSING * rendezvous.timeout_s
        store = _open_store(rendezvous, is_master=rank == 0)
        keys = [f"joined/{peer}" for peer in range(rendezvous.world_size)]
        store.set(keys[rank], "")
        try:
            store.wait(keys, timedelta(seconds=max(0.01, deadline_s - time.monotonic())))
        except dist.DistStoreError as error:
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
            raise CollectiveError(
                f"ranks {missing} of {rendezvous.world_size} did not come to the weights' process group at "
                f"{rendezvous.host}:{rendezvous.port} within weights.load_timeout_s = {rendezvous.timeout_s:g} s"
            ) from error
        return cls(rendezvous, rank=rank, device=device, store=store)

    def exchange(self, function: Callable[["Peers"], Answer], *, what: str) -> Answer:
        """`function(self)`, which communicates. CollectiveError when a peer failed or `timeout_s` passed.

        Any other WeightError passes and leaves the group as it is: then all ranks have agreed to stop.
        """
        if self._said is None:
            raise CollectiveError(f"{what}: an earlier exchange failed and closed the group; join a new one")
        try:
            return _within(self._timeout_s, lambda: function(self), what=what)
        except BaseException as error:
            if not isinstance(error, WeightError) or isinstance(error, CollectiveError):
                self.close()
            raise

    def broadcast(self, bytes_: torch.Tensor, *, root: int) -> None:
        """A tensor on `device` from rank `root` to all. Inside an exchange."""
        _finish(self._sent.broadcast(bytes_, root))
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)

    def say(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank. Inside an exchange."""
        size = torch.tensor([len(message)])
        _finish(self._said.broadcast(size, 0))
        text = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            text.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        _finish(self._said.broadcast(text, 0))
        return text.numpy().tobytes()

    def agree(self, refusal: WeightError | None, *, what: str) -> None:
        """Returns, on all ranks, when none refuses. Otherwise a rank that does raises its refusal, and the others
        UpdateRefused, which names the ranks. Inside an exchange."""
        own = torch.tensor([refusal is not None], dtype=torch.uint8)
        verdicts = [torch.empty_like(own) for _ in range(self.world_size)]
        _finish(self._said.allgather(verdicts, own))
        if refusal is not None:
            raise refusal
        refusing = [rank for rank, verdict in enumerate(verdicts) if verdict.item()]
        if refusing:
            raise UpdateRefused(f"ranks {refusing} of the weights' process group refused {what}; nothing was applied")

    def close(self) -> None:
        """Leaves the group; idempotent."""
        if self._sent is not self._said:
            self._sent.abort()
        # gloo hangs up when its last reference goes; its own `abort` does nothing
        self._said = self._sent = self._store = None


def _finish(work: Any) -> None:
    try:
        work.wait()
    finally:
        del work  # it would keep the connections open for as long as someone looks at the error's traceback


def _within(timeout_s: float, function: Callable[[], Answer], *, what: str) -> Answer:
    """`function()` in a thread that is left behind when it takes longer: no library's own deadline is trusted alone."""
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return outcome.result(timeout_s)
    except WeightError:
        raise
    except (RuntimeError, OSError) as error:  # what gloo, NCCL and the store raise; a TimeoutError is an OSError
        if not outcome.done():
            raise CollectiveError(f"{what} took longer than weights.load_timeout_s = {timeout_s:g} s") from error
        raise CollectiveError(f"{what}: a peer is gone or late ({type(error).__name__}: {error})") from error


def _open_store(rendezvous: Rendezvous, *, is_master: bool) -> Any:
    host, port, timeout = rendezvous.host, rendezvous.port, timedelta(seconds=rendezvous.timeout_s)
    if not is_master:
        return TCPStore(host, port, is_master=False, timeout=timeout)
    # our own listening socket: bound to this address alone
    listener = socket.create_server((host, port))
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _own_address(host: str, port: int) -> str:
    """The address under which this machine reaches `host`: gloo would take what its own name resolves to."""
    address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
        probe.connect(address[4])  # sends nothing
        return str(probe.getsockname()[0])
