"""asyncrl's weight-transfer engine inside vLLM's worker processes.

Registered from the `vllm.general_plugins` entry point, so that it exists in every process that vLLM starts. Bytes come
in one of three ways. Mapped: as the path of a memory file that all workers of a node map (`/proc/<pid>/fd/<n>` of the
generator's process), verified by that process before the first call. Received: from a process group with the learner's
ranks, verified here, and applied from this worker's own memory. Shared: by a learner rank on the same device, and
verified here.
"""

import mmap
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import WeightError
from asyncrl.parent_death import die_with
from asyncrl.weights.manifest import Parameters, TensorEntry
from asyncrl.weights.remote_errors import as_text
from asyncrl.weights.tensor_views import view_of
from asyncrl.weights.transports.collective import Received, receive_snapshot
from asyncrl.weights.transports.ipc import SharedGroup, device_key, open_group
from asyncrl.weights.transports.peers import Peers, Rendezvous

BACKEND = "asyncrl"
WORKER_EXTENSION = f"{__name__}.WorkerExtension"
_PROCESSES_OF_VLLM = ("EngineCore", "VllmWorker")
"""How vLLM names the engine's process, and its workers' for tensor parallelism."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The group to join: a `Rendezvous` in builtins, the rank of this engine's first worker, and (shape, dtype) of
    every Hugging Face parameter by name. Nothing for an engine that only maps files: each describes itself."""

    rendezvous: dict[str, Any] | None = None
    first_rank: int = 0
    parameters: dict[str, list[Any]] | None = None


@dataclass
class MappedUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: a file to map and the `TensorEntry` of every tensor in it, in builtins."""

    path: str
    nbytes: int
    tensors: list[dict[str, Any]]


@dataclass
class ReceivedUpdateInfo(WeightTransferUpdateInfo):
    """All buckets of the version that `receive_weights` has received last."""

    received: str


@dataclass
class SharedUpdateInfo(WeightTransferUpdateInfo):
    """One group in memory of the learner's: a `SharedGroup` in builtins by `device_key`."""

    shared: dict[str, dict[str, Any]]


UpdateInfo = MappedUpdateInfo | ReceivedUpdateInfo | SharedUpdateInfo


class AsyncRLWeightTransferEngine(WeightTransferEngine[InitInfo, Any]):
    """Loads Hugging Face tensors layer by layer.

    The layerwise reload is needed on CPUs, where vLLM packs linear weights and frees the originals.
    """

    init_info_cls = InitInfo
    update_info_cls: type[Any] = WeightTransferUpdateInfo
    _peers: Peers | None = None
    _expected: Parameters = {}  # noqa: RUF012 -- replaced, never changed
    _received: Received | None = None
    _reloading = False

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
        """Waits for one version from the group and keeps it; its manifest. The model is not touched."""
        self._received = None
        with _errors_as_text():
            if self._peers is None:
                raise WeightError("this engine has joined no process group of weights")
            self._received = receive_snapshot(self._peers, expected=self._expected)
        return msgspec.msgpack.encode(self._received.manifest)

    def start_weight_update(self) -> None:
        with torch.device(self.device):
            if self._reloading:
                # A torn update: vLLM would count its tensors into this one's and call a layer whole too early.
                finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
            self._reloading = True
            initialize_layerwise_reload(self.model)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        kinds = {"received": ReceivedUpdateInfo, "shared": SharedUpdateInfo, "path": MappedUpdateInfo}
        [kind] = [kind for key, kind in kinds.items() if key in update_dict]
        parsed: UpdateInfo = kind(**update_dict)
        return parsed

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises the accelerator, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        match update_info:
            case MappedUpdateInfo():
                weights = _mapped(update_info)
            case ReceivedUpdateInfo():
                weights = self._taken(update_info)
            case SharedUpdateInfo():
                weights = self._opened(update_info)
        # The layerwise loaders keep the tensors until their layer is complete; each tensor keeps its memory alive.
        with torch.device(self.device):
            self.model.load_weights(iter(weights))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]
        self._reloading = False
        self._received = None

    def shutdown(self) -> None:
        """Leaves the process group, if any."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _taken(self, update_info: ReceivedUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        received = self._received
        if received is None or str(received.manifest.version) != update_info.received:
            raise WeightError(f"weights {update_info.received} are not those that were received last")
        manifest, buckets = received.manifest, received.buckets
        return [(entry.name, view_of(entry, buckets[entry.bucket])) for entry in manifest.tensors]

    def _opened(self, update_info: SharedUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        own = device_key(self.device)
        if own not in update_info.shared:
            raise WeightError(f"the learner shares weights on {', '.join(update_info.shared)}, this engine is on {own}")
        return open_group(msgspec.convert(update_info.shared[own], SharedGroup), device=self.device)


class WorkerExtension:
    """What vLLM's worker gains: a call with an answer, which `update_weights` has not."""

    weight_transfer_engine: AsyncRLWeightTransferEngine

    def receive_weights(self) -> bytes:
        """Manifest, as MessagePack, of the version that this worker has received and not yet applied."""
        return self.weight_transfer_engine.receive()


def register() -> None:
    """Entry point of the plugin; vLLM calls it once or more in every process.

    It also makes the processes that vLLM starts end with the process that started them: vLLM's engine does not notice
    that its parent was killed, and would keep its memory. One whose parent ended while it imported vLLM ends here.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.current_process().name.startswith(_PROCESSES_OF_VLLM):
        assert parent.pid is not None, "multiprocessing knows the process that started this one"
        die_with(parent.pid)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, AsyncRLWeightTransferEngine)


def _mapped(update_info: MappedUpdateInfo) -> list[tuple[str, torch.Tensor]]:
    with open(update_info.path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), update_info.nbytes, access=mmap.ACCESS_COPY)
    bucket = torch.frombuffer(mapped, dtype=torch.uint8)
    entries = msgspec.convert(update_info.tensors, list[TensorEntry])
    return [(entry.name, view_of(entry, bucket)) for entry in entries]


@contextmanager
def _errors_as_text() -> Iterator[None]:
    """vLLM sends only an error's text to the generator's process."""
    try:
        yield
    except WeightError as error:
        raise RuntimeError(as_text(error)) from error
