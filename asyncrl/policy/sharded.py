"""Whole weights out of a sharded model.

Every function that returns full tensors is a collective: all ranks call it, in the same order, and exhaust what it
yields; nothing else may communicate in between.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncrl.policy.interfaces import ParameterSpec


def parameter_specs(model: torch.nn.Module, *, dtype: torch.dtype) -> tuple[ParameterSpec, ...]:
    """Every parameter in the order of `gather_weights`. A tied one stands under each of its names: an engine that packs
    `lm_head.weight` separately would otherwise keep the old one."""
    label = str(dtype).removeprefix("torch.")
    return tuple(
        ParameterSpec(name=name, shape=tuple(parameter.shape), dtype=label, nbytes=parameter.numel() * dtype.itemsize)
        for name, parameter in _named_parameters(model)
    )


def _named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Under the names of the model as it was loaded: activation checkpointing wraps its layers."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(_CHECKPOINT_PREFIX, ""), parameter


def reshard(model: torch.nn.Module) -> None:
    """Frees what a forward pass without a backward left whole, in the precision of computation. No collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def gather_weights(model: torch.nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor on the CPU) of every parameter: a copy, which later training does not change.

    One gather a parameter; a tied one is gathered once and yielded, as the same tensor, under each of its names. No
    other is kept here, so that a caller who takes them one by one holds one.
    """
    reshard(model)
    names_to_come = Counter(id(parameter) for _, parameter in _named_parameters(model))
    tied: dict[int, torch.Tensor] = {}
    for name, parameter in _named_parameters(model):
        names_to_come[id(parameter)] -= 1
        if id(parameter) not in tied:
            # cast first: the gather then moves the engine's bytes, not the master weights'
            cast = parameter.detach().to(dtype)
            full = cast.full_tensor() if isinstance(cast, DTensor) else cast
            # with one rank, in float32 and on the CPU nothing has copied yet
            tied[id(parameter)] = full.to("cpu").clone(memory_format=torch.contiguous_format)
        yield name, tied[id(parameter)] if names_to_come[id(parameter)] else tied.pop(id(parameter))


def move_model(model: torch.nn.Module, device: torch.device) -> None:
    """This rank's shards of the weights, to `device`."""
    model.to(device)
    _give_back(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """This rank's shards of the optimizer's state, to `device`; gradients are let go."""
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for name, value in state.items():
            # AdamW counts its steps on the CPU
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device)
    _give_back(device)


def _give_back(device: torch.device) -> None:
    """After a move to `device`: what it has left on a GPU is for other processes, not for torch's cache."""
    if device.type == "cpu":
        torch.cuda.empty_cache()
