"""Reads tensors in place: maps a file of bytes, and views the tensors in it."""

import mmap

import torch

from asyncrl.weights.manifest import TensorEntry


def mapped(path: str, nbytes: int) -> torch.Tensor:
    """Maps a file of `nbytes` bytes into memory. Returns its bytes as a uint8 tensor, without a copy. The mapping lives
    as long as the tensor. Writes to the tensor do not change the file."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def view_of(entry: TensorEntry, flat: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that `entry` describes in the flat buffer (uint8). It shares the buffer's memory, and keeps
    this memory alive."""
    return flat[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry)).view(entry.shape)


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Returns the type of the tensor that `entry` describes."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype
