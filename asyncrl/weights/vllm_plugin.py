"""asyncrl's weight-transfer engine, which runs inside vLLM's worker processes.

The `vllm.general_plugins` entry point registers it in every process that vLLM starts. The bytes of an update arrive in
one of three ways:

- Mapped: all workers of a node map the flat buffer by its path (`/proc/<pid>/fd/<n>` of the generator's process). The
  generator's process has verified the bytes before the first call. On CPUs, `prepare` makes the new weights ready while
  the engine decodes.
- Received: the workers take part in a process group with the learner's ranks. The bytes are verified here and applied
  from the worker's own memory.
- Shared: a learner rank on the same device shares its memory. The bytes are verified here.
"""

# If vLLM is not installed, as after `make unit`, mypy does not know its classes.
# mypy: allow-subclassing-any, no-warn-unused-ignores

import contextlib
import logging
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.common.tasks import in_daemon
from asyncrl.errors import WeightError
from asyncrl.parent_death import die_with
from asyncrl.vllm_internals import finalize_layerwise_reload, initialize_layerwise_reload
from asyncrl.weights.manifest import Parameters, TensorEntry
from asyncrl.weights.read_back import read_back
from asyncrl.weights.remote_errors import as_text
from asyncrl.weights.tensor_views import mapped, view_of
from asyncrl.weights.transports.collective import Received, receive_snapshot
from asyncrl.weights.transports.ipc import SharedGroup, device_key, open_group
from asyncrl.weights.transports.peers import Peers, Rendezvous
from asyncrl.weights.vllm_swap import WeightSwap

logger = logging.getLogger(__name__)

BACKEND = "asyncrl"
WORKER_EXTENSION = f"{__name__}.WorkerExtension"
_PROCESSES_OF_VLLM = ("EngineCore", "VllmWorker")
"""The names that vLLM gives to the engine's process, and to the worker processes of tensor parallelism."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Describes the process group to join.

    `rendezvous` is a `Rendezvous` as a dict, `first_rank` the rank of this engine's first worker, and `parameters`
    gives (shape, dtype) of every Hugging Face parameter by name. An engine that only maps files needs none of them,
    because each mapped update describes itself.
    """

    rendezvous: dict[str, Any] | None = None
    first_rank: int = 0
    parameters: dict[str, list[Any]] | None = None


class AsyncRLWeightTransferEngine(WeightTransferEngine[InitInfo, Any]):
    """Loads Hugging Face tensors: with vLLM's layerwise reload, which suits every model and device, or by a swap of
    prepared weights."""

    init_info_cls = InitInfo
    _peers: Peers | None = None
    _expected: Parameters = {}  # noqa: RUF012 -- replaced, never changed
    _received: Received | None = None
    _reloading = False
    _swap: WeightSwap | None = None
    _may_learn = True
    _preparing: "Preparing | None" = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.rendezvous is None:
            return
        self.shutdown()
        rendezvous = msgspec.convert(init_info.rendezvous, Rendezvous)
        workers = self.parallel_config.data_parallel_index * self.parallel_config.world_size
        rank = init_info.first_rank + workers + self.parallel_config.rank
        self._expected = {name: (tuple(shape), dtype) for name, (shape, dtype) in (init_info.parameters or {}).items()}
        with _errors_as_text():
            self._peers = Peers.join(rendezvous, rank=rank, device=self.device)

    def receive(self) -> bytes:
        """Waits for one version from the process group and keeps it in the worker's memory. Returns its manifest. Does
        not touch the model."""
        self._received = None
        with _errors_as_text():
            if self._peers is None:
                raise WeightError(
                    "this engine has not joined a process group for weights; call init_collective() on both sides first"
                )
            self._received = receive_snapshot(self._peers, expected=self._expected)
        return msgspec.msgpack.encode(self._received.manifest)

    def prepare(self, update_info: dict[str, Any], pipe: str, message: bytes) -> None:
        """Starts a thread that prepares an update from a memory-mapped file. `update_weights` with the same
        `update_info` then applies it. At its end, the thread writes `message` to `pipe`, also if it has failed or had
        nothing to prepare."""
        if self._preparing is not None:
            wait([self._preparing.ended])  # the thread still prepares an update that was given up
        swap = None if self._reloading else self._swap
        ended = in_daemon(partial(_prepare, update_info, swap, pipe, message), name="new weights")
        self._preparing = Preparing(update_info, swap, ended)

    def start_weight_update(self) -> None:
        if self._reloading:
            # The last update stopped half way. Otherwise vLLM would count its tensors as tensors of the new update, and
            # treat a layer as complete too early.
            self._finish_reload()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class also synchronises the accelerator, which raises on machines without one.
        self.receive_weights(update_info)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Applies an update, or a part of one. `update_info` is a dict of Python's built-in types. Its fields say where
        the tensors are:

        - In a file to map: its `path`, its size `nbytes`, and `tensors`, the `TensorEntry` of each tensor in it.
        - In this worker, which got them by `receive` before: `received`, their version as text.
        - In memory of the learner: `shared`, which maps the `device_key` of each device to a `SharedGroup`.
        """
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            error = preparing.ended.exception()  # waits for the thread
            if preparing.swap is not None and preparing.update_info == update_info:
                if error is None:
                    preparing.swap.apply()
                    return
                logger.error("weights could not be prepared while the engine decodes, so it pauses longer: %s", error)
                self._swap, self._may_learn = None, False
        match update_info:
            case {"path": _, "nbytes": _, "tensors": _}:
                weights = mapped_weights(update_info)
                if self._learned(weights):
                    return
            case {"received": version}:
                weights = self._taken(version)
            case {"shared": groups}:
                weights = self._opened(msgspec.convert(groups, dict[str, SharedGroup]))
            case _:
                raise WeightError(f"cannot apply an update with the fields {sorted(update_info)}")
        # `weights` need not be kept: the layerwise loaders keep each tensor, and so its memory, until its layer is
        # complete.
        with torch.device(self.device):
            if not self._reloading:
                # The layerwise reload wraps the loaders that a swap would use.
                self._reloading, self._swap, self._may_learn = True, None, False
                initialize_layerwise_reload(self.model)
            self.model.load_weights(iter(weights))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        if self._reloading:
            self._finish_reload()
        self._received = None

    def _finish_reload(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        self._reloading = False

    def _learned(self, weights: list[tuple[str, torch.Tensor]]) -> bool:
        """Loads a whole version by `WeightSwap.learn`, so that later versions can be prepared while the engine decodes.
        Returns False if the model does not allow this; the caller then uses vLLM's layerwise reload."""
        if self._reloading or not self._may_learn or not WeightSwap.suits(self.model, self.device):
            return False
        with torch.device(self.device):
            swap = WeightSwap(self.model)
            self._may_learn = swap.learn(weights)
        self._swap = swap if self._may_learn else None
        return self._may_learn

    def read_back(self, update_info: dict[str, Any], seed: int) -> bytes:
        """Compares samples of the live parameters with a mapped update. Returns a `ReadBack` as MessagePack."""
        return msgspec.msgpack.encode(read_back(self.model, mapped_weights(update_info), seed=seed))

    def forget(self) -> None:
        """Drops what earlier updates have left here, but not the weights themselves, nor whether swaps suit the model.
        Call it between two updates: the next one must be whole, and is then loaded as the first one of a new engine."""
        if self._preparing is not None:
            wait([self._preparing.ended])  # the thread still prepares an update that was given up
        self.shutdown()
        self._preparing = self._received = self._swap = None
        self._expected = {}

    def shutdown(self) -> None:
        """Leaves the process group, if any."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _taken(self, version: str) -> list[tuple[str, torch.Tensor]]:
        received = self._received
        if received is None or str(received.manifest.version) != version:
            raise WeightError(
                f"cannot apply weights {version}: they are not the version that was received last; "
                "receive and apply one version at a time"
            )
        return [(entry.name, view_of(entry, received.flat)) for entry in received.manifest.tensors]

    def _opened(self, groups: dict[str, SharedGroup]) -> list[tuple[str, torch.Tensor]]:
        own = device_key(self.device)
        if own not in groups:
            raise WeightError(
                f"the learner shares weights on {', '.join(groups)}, but this engine is on {own}; place "
                "both on the same device, or refit by broadcast"
            )
        return open_group(groups[own], device=self.device)


@dataclass(frozen=True, slots=True)
class Preparing:
    """An update that a thread prepares, with `swap` if there is one. `ended` is the outcome of the thread."""

    update_info: dict[str, Any]
    swap: WeightSwap | None
    ended: Future[None]


def _prepare(update_info: dict[str, Any], swap: WeightSwap | None, pipe: str, message: bytes) -> None:
    try:
        if swap is not None:
            swap.prepare(mapped_weights(update_info))
    finally:
        with contextlib.suppress(OSError), open(pipe, "wb", buffering=0) as file:  # the generator may have ended
            file.write(message)


def mapped_weights(update_info: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a mapped update by name. They share the memory of the file."""
    flat = mapped(update_info["path"], update_info["nbytes"])
    return [(entry.name, view_of(entry, flat)) for entry in msgspec.convert(update_info["tensors"], list[TensorEntry])]


class WorkerExtension:
    """Methods that vLLM adds to its worker, so that the generator's process can call them by `collective_rpc`."""

    weight_transfer_engine: AsyncRLWeightTransferEngine

    def process_id(self) -> int:
        """Returns the pid of the worker's process. A single worker may run in the process of the engine's core."""
        return os.getpid()

    def prepare_weights(self, update_info: dict[str, Any], pipe: str, message: bytes) -> None:
        """Starts a thread that prepares an update from a memory-mapped file. At its end, the thread writes `message` to
        `pipe`."""
        self.weight_transfer_engine.prepare(update_info, pipe, message)

    def read_weights_back(self, update_info: dict[str, Any], seed: int) -> bytes:
        """Compares samples of the live parameters with a mapped update that was applied."""
        return self.weight_transfer_engine.read_back(update_info, seed)

    def forget_updates(self) -> None:
        """Drops what earlier updates have left in the worker, as `AsyncRLWeightTransferEngine.forget` does."""
        self.weight_transfer_engine.forget()

    def seed_samples(self, seed: int) -> None:
        """Lets the random numbers of requests without a seed of their own begin anew, from `seed`."""
        torch.manual_seed(seed)

    def receive_weights(self) -> bytes:
        """Receives a version without applying it. Returns its manifest as MessagePack."""
        return self.weight_transfer_engine.receive()


def register() -> None:
    """Entry point of the plugin. vLLM calls it one or more times in every process.

    It also makes each process that vLLM starts end together with its parent. vLLM's engine does not notice that its
    parent was killed, and would keep its memory. If the parent ended while vLLM was being imported, the process ends
    here.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_PROCESSES_OF_VLLM):
        assert parent.pid is not None, "multiprocessing gives the pid of the parent"
        die_with(parent.pid)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, AsyncRLWeightTransferEngine)


@contextlib.contextmanager
def _errors_as_text() -> Iterator[None]:
    """Turns a WeightError in the block into a RuntimeError whose text has the error's type, because vLLM sends only the
    text to the generator's process."""
    try:
        yield
    except WeightError as error:
        raise RuntimeError(as_text(error)) from error
