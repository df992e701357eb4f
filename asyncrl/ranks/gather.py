"""Gathers whole weights from a sharded model, and moves its shards between devices.

A function that returns full tensors is a collective: all ranks must call it in the same order and exhaust its iterator,
with no other communication in between.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


class ParameterSpec(NamedTuple):
    """One parameter as the engine receives it: Hugging Face name, shape, torch dtype without `torch.`, size in
    bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def parameter_specs(model: torch.nn.Module, *, dtype: torch.dtype) -> tuple[ParameterSpec, ...]:
    """Returns every parameter in the order of `gather_weights`. A tied parameter appears under each of its names:
    otherwise an engine that stores `lm_head.weight` separately would keep the old one."""
    label = str(dtype).removeprefix("torch.")
    return tuple(
        ParameterSpec(name=name, shape=tuple(parameter.shape), dtype=label, nbytes=parameter.numel() * dtype.itemsize)
        for name, parameter in _named_parameters(model)
    )


def _named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields parameters under the names of the loaded model. Activation checkpointing adds a prefix to the names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(_CHECKPOINT_PREFIX, ""), parameter


def reshard(model: torch.nn.Module) -> None:
    """Frees the full weights, in computing precision, that a forward pass without a backward pass keeps. Not a
    collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor on the CPU) of every parameter. Each tensor is a copy, which later training does not
    change.

    There is one gather for each parameter. A tied parameter is gathered once, and the same tensor is yielded under each
    of its names. No other tensor is kept here, so a caller that takes them one by one holds only one in memory.
    """
    reshard(model)
    names_to_come = Counter(id(parameter) for _, parameter in _named_parameters(model))
    tied: dict[int, torch.Tensor] = {}
    for name, parameter in _named_parameters(model):
        names_to_come[id(parameter)] -= 1
        if id(parameter) not in tied:
            # cast before the gather, so that it transfers the engine's precision and not the float32 master weights
            cast = parameter.detach().to(dtype)
            full = cast.full_tensor() if isinstance(cast, DTensor) else cast
            # clone, because with one rank, in float32 and on the CPU no step above has made a copy
            tied[id(parameter)] = full.to("cpu").clone(memory_format=torch.contiguous_format)
        yield name, tied[id(parameter)] if names_to_come[id(parameter)] else tied.pop(id(parameter))
