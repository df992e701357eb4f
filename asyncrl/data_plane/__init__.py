"""Stores and moves bulk tensors by name, with interchangeable backends.

The names of the interface are imported on first use, because they need torch: the actors that keep rows and the index
of rows must not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.data_plane.interfaces import PAD_SEQLEN, DataPlaneClient, KVBatchMeta
    from asyncrl.data_plane.jagged import (
        from_nested,
        materialize,
        pack_jagged_fields,
        response_from_nested,
        to_nested_by_length,
    )
    from asyncrl.data_plane.sharding import shard_meta_for_dp

_MODULES = {
    "PAD_SEQLEN": "interfaces",
    "DataPlaneClient": "interfaces",
    "KVBatchMeta": "interfaces",
    "from_nested": "jagged",
    "materialize": "jagged",
    "pack_jagged_fields": "jagged",
    "response_from_nested": "jagged",
    "to_nested_by_length": "jagged",
    "shard_meta_for_dp": "sharding",
}

__all__ = [
    "PAD_SEQLEN",
    "DataPlaneClient",
    "KVBatchMeta",
    "from_nested",
    "materialize",
    "pack_jagged_fields",
    "response_from_nested",
    "shard_meta_for_dp",
    "to_nested_by_length",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
