"""Whole weights out of a sharded model.

Every function that returns full tensors is a collective: all ranks call it, in the same order, and exhaust what it
yields; nothing else may communicate in between.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

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


def save_hf(model: PreTrainedModel, *, tokenizer_path: str, path: Path, dtype: torch.dtype, is_writer: bool) -> None:
    """Writes a Hugging Face directory that vLLM serves: safetensors, config, tokenizer. One rank writes.

    Not `model.save_pretrained`: FSDP renames the model's class, and the config would name one that no one knows;
    the config itself still says what the model was loaded from.
    """
    weights: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in gather_weights(model, dtype=dtype):
        # safetensors refuses shared memory, and the format leaves the second name of a tied weight out
        if is_writer and tensor.data_ptr() not in pointers:
            pointers.add(tensor.data_ptr())
            weights[name] = tensor
    if not is_writer:
        return
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(path)


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
