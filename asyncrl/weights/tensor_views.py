"""Tensors in place, out of a bucket of bytes."""

import torch

from asyncrl.weights.manifest import TensorEntry


def view_of(entry: TensorEntry, bucket: torch.Tensor) -> torch.Tensor:
    """The tensor that `entry` describes within `bucket`, a uint8 tensor whose memory it shares and keeps."""
    data = bucket[entry.offset : entry.offset + entry.nbytes]
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return data.view(dtype).view(entry.shape)
