"""Yields the trained weights of a sharded model: each rank's own shards, or whole tensors. Frozen weights are left out.

A function that returns full tensors is a collective: all ranks must call it in the same order and exhaust its iterator,
with no other communication in between.
"""

import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.weights.manifest import ParameterSpec


def parameter_specs(model: torch.nn.Module, *, dtype: torch.dtype) -> tuple[ParameterSpec, ...]:
    """Returns the descriptions of all trained parameters in the precision `dtype`, in the order of `gather_weights`. A
    tied parameter appears under each of its names: otherwise an engine that stores `lm_head.weight` separately would
    keep its old value."""
    label = str(dtype).removeprefix("torch.")
    first_names: dict[int, str] = {}
    specs = []
    for name, parameter in _named_parameters(model):
        first = first_names.setdefault(id(parameter), name)
        specs.append(
            ParameterSpec(
                name=name,
                shape=tuple(parameter.shape),
                dtype=label,
                nbytes=parameter.numel() * dtype.itemsize,
                tied_to="" if first == name else first,
            )
        )
    return tuple(specs)


def _named_parameters(
    model: torch.nn.Module, *, first_names_only: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yields trained parameters under the names of the loaded model. A tied parameter comes under each of its names, or
    under the first one only. Activation checkpointing adds a prefix to the names."""
    for name, parameter in model.named_parameters(remove_duplicate=first_names_only):
        if parameter.requires_grad:
            yield name.replace(_CHECKPOINT_PREFIX, ""), parameter


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the live tensors of the model's state dict by name, without frozen parameters. A tied tensor has several
    names."""
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {
        name: tensor
        for name, tensor in state.items()
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)
    }


def reshard(model: torch.nn.Module) -> None:
    """Frees the full weights, in computing precision, that a forward pass without a backward pass keeps. Not a
    collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def own_shards(model: torch.nn.Module, *, rank: int) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yields the shards that this rank has of the parameters: name, index of the first element, elements. Together the
    ranks yield every element once. Not a collective.

    The tensors are the live ones. A tied parameter is yielded under its first name only. A shard is a range of rows, so
    its elements are contiguous in the whole parameter.
    """
    reshard(model)
    for name, parameter in _named_parameters(model, first_names_only=True):
        own = own_rows(name, parameter, rank=rank)
        if own is not None:
            start, rows = own
            yield name, start * math.prod(parameter.shape[1:]), rows


def own_rows(name: str, tensor: torch.Tensor, *, rank: int) -> tuple[int, torch.Tensor] | None:
    """Returns (number of the first row, rows) of this rank's shard of the tensor `name`. Returns None if several ranks
    have these rows and another one of them returns them. Raises NotImplementedError for shards of another dimension
    than 0."""
    if not isinstance(tensor, DTensor):
        return (0, tensor) if rank == 0 else None
    mesh, placements = tensor.device_mesh, tensor.placements
    if not all(placement.is_replicate() or placement == Shard(0) for placement in placements):
        raise NotImplementedError(f"{name} is placed as {placements}; only shards of dimension 0 are supported")
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds no part of a model that it trains"
    if any(at for at, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return offsets[0], tensor.to_local()


@torch.no_grad()
def gather_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, full tensor on the CPU, in the precision `dtype`) of every trained parameter. Each tensor is a
    copy, which later training does not change.

    There is one gather for each parameter. A tied parameter is gathered once, and the same tensor is yielded under each
    of its names. Only tied tensors are kept until their last name, so a caller that takes the tensors one by one holds
    only one other in memory.
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
