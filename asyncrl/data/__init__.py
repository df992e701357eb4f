"""Batches, datasets and tokenizers.

The names of the batch interface are imported on first use, because they need torch: a process that imports only
`asyncrl.data.prompts` must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict, SlicedDataDict
    from asyncrl.data.packing import get_packer
    from asyncrl.data.sharding import DynamicBatchingArgs, SequencePackingArgs
    from asyncrl.data.specs import (
        DP_TRAIN_FIELDS,
        LP_SEED_FIELDS,
        GenerationDatumSpec,
        GenerationOutputSpec,
        TrainDatumSpec,
        verify_right_padding,
    )

_MODULES = {
    "batched_data_dict": ("BatchedDataDict", "SlicedDataDict"),
    "packing": ("get_packer",),
    "sharding": ("DynamicBatchingArgs", "SequencePackingArgs"),
}
"""The names of each module. All other names are in `specs`."""

__all__ = [
    "DP_TRAIN_FIELDS",
    "LP_SEED_FIELDS",
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "SequencePackingArgs",
    "SlicedDataDict",
    "TrainDatumSpec",
    "get_packer",
    "verify_right_padding",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((module for module, names in _MODULES.items() if name in names), "specs")
    return getattr(import_module(f"{__name__}.{module}"), name)
