"""Stores and moves bulk tensors by name, with interchangeable backends.

The names of the interface are imported on first use, because they need torch: the actors that keep rows and the index
of rows must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data_plane.codec import (
        from_nested,
        materialize,
        pack_jagged_fields,
        to_nested_by_length,
    )
    from asyncrl.data_plane.interfaces import PAD_SEQLEN, DataPlaneClient, KVBatchMeta
    from asyncrl.data_plane.sharding import shard_meta_for_dp

__all__ = [
    "PAD_SEQLEN",
    "DataPlaneClient",
    "KVBatchMeta",
    "from_nested",
    "materialize",
    "pack_jagged_fields",
    "shard_meta_for_dp",
    "to_nested_by_length",
]


_MODULES = ("interfaces", "codec", "sharding")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
