"""Batches, datasets and tokenizers.

The names of the batch interface are imported on first use, because they need torch: a process that imports only
`asyncrl.data.prompts` must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` makes a name public for type checkers
    from asyncrl.data.batched_data_dict import BatchedDataDict as BatchedDataDict
    from asyncrl.data.batched_data_dict import SlicedDataDict as SlicedDataDict
    from asyncrl.data.packing import get_packer as get_packer
    from asyncrl.data.sharding import DynamicBatchingArgs as DynamicBatchingArgs
    from asyncrl.data.sharding import SequencePackingArgs as SequencePackingArgs
    from asyncrl.data.specs import DP_TRAIN_FIELDS as DP_TRAIN_FIELDS
    from asyncrl.data.specs import LP_SEED_FIELDS as LP_SEED_FIELDS
    from asyncrl.data.specs import GenerationDatumSpec as GenerationDatumSpec
    from asyncrl.data.specs import GenerationOutputSpec as GenerationOutputSpec
    from asyncrl.data.specs import TrainDatumSpec as TrainDatumSpec
    from asyncrl.data.specs import verify_right_padding as verify_right_padding

_MODULES = {
    "BatchedDataDict": "batched_data_dict",
    "SlicedDataDict": "batched_data_dict",
    "get_packer": "packing",
    "DynamicBatchingArgs": "sharding",
    "SequencePackingArgs": "sharding",
    "DP_TRAIN_FIELDS": "specs",
    "LP_SEED_FIELDS": "specs",
    "GenerationDatumSpec": "specs",
    "GenerationOutputSpec": "specs",
    "TrainDatumSpec": "specs",
    "verify_right_padding": "specs",
}
"""Maps each public name to the module that defines it."""

if not TYPE_CHECKING:  # type checkers see the imports above, and would accept any name beside a __getattr__
    __all__ = [*_MODULES]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
