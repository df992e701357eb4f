"""asyncrl's weight-transfer engine inside vLLM's worker processes.

Registered from the `vllm.general_plugins` entry point, so that it exists in every process that vLLM starts. A bucket
arrives as a path of a memory file that all workers of a node map (`/proc/<pid>/fd/<n>` of the generator's process);
its bytes were verified by that process before the first call.
"""

import mmap
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "asyncrl"


@dataclass
class MappedInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: every bucket describes itself."""


@dataclass
class MappedUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: a file to map and (name, shape, dtype, offset, nbytes) of every tensor in it."""

    path: str
    nbytes: int
    tensors: list[list[Any]]


class MappedWeightTransferEngine(WeightTransferEngine[MappedInitInfo, MappedUpdateInfo]):
    """Loads Hugging Face tensors from mapped files, layer by layer.

    The layerwise reload is needed on CPUs, where vLLM packs linear weights and frees the originals.
    """

    init_info_cls = MappedInitInfo
    update_info_cls = MappedUpdateInfo

    def init_transfer_engine(self, init_info: MappedInitInfo) -> None:
        """No connection to make."""

    def start_weight_update(self) -> None:
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises the accelerator, which raises where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MappedUpdateInfo) -> None:
        with open(update_info.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), update_info.nbytes, access=mmap.ACCESS_COPY)
        # The layerwise loaders keep the tensors until their layer is complete; each tensor keeps the map alive.
        weights = [
            (
                name,
                torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)
                .view(getattr(torch, dtype))
                .view(shape),
            )
            for name, shape, dtype, offset, nbytes in update_info.tensors
        ]
        with torch.device(self.device):
            self.model.load_weights(iter(weights))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)  # type: ignore[no-untyped-call]

    def shutdown(self) -> None:
        """No connection to close."""


def register() -> None:
    """Entry point of the plugin; vLLM calls it once or more in every process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MappedWeightTransferEngine)
