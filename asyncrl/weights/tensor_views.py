"""Views tensors in place in a bucket of bytes."""

import torch

from asyncrl.weights.manifest import TensorEntry


def view_of(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that `entry` describes in `bucket` (uint8). It shares the bucket's memory, and keeps it."""

    data = bucket[entry.offset : entry.offset + entry.nbytes]
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return data.view(dtype).view(entry.shape)
