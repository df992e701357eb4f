"""The LoRA adapter of a policy (`model.lora`): peft's layers in a transformers model, and an adapter's directory.

peft puts two matrices A [rank, in] and B [out, rank] beside each chosen linear layer, which then computes
W x + (alpha / rank) · B A x (Hu et al. 2021, LoRA). B starts as zeros, so the first adapter changes nothing. The model
keeps its class, and its own weights W are frozen: all code that reads trained parameters sees the adapter only.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from transformers import PreTrainedModel

from asyncrl.config.schema import LoraSection
from asyncrl.errors import ConfigError
from asyncrl.weights.manifest import ParameterSpec

WEIGHTS = "adapter_model.safetensors"
_ADAPTER = "default"
"""Name of the adapter inside of the model."""


def with_adapter(model: PreTrainedModel, lora: LoraSection, *, seed: int) -> PreTrainedModel:
    """Freezes the model and puts a new adapter into it. Returns the same model. Equal seeds give equal adapters.

    The adapter is float32, whatever the precision of the model is. Raises ConfigError if
    `model.lora.target_modules` is empty, or if a name in it is not the end of the name of a linear layer, not counting
    the output head.
    """
    targets = _targets(model, lora)
    model.requires_grad_(False)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft gives it the precision of its layer
    return model


@contextmanager
def adapter_off(model: torch.nn.Module) -> Iterator[None]:
    """Lets the model compute without its adapter in this block: exactly what the model at `model.path` computes.

    The adapter's output is multiplied by 0. peft's `enable_adapters` would also change `requires_grad`, which FSDP
    copies between sharded and gathered parameters.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    try:
        for layer in layers:
            layer.set_scale(_ADAPTER, 0.0)
        yield
    finally:
        for layer in layers:
            layer.set_scale(_ADAPTER, 1.0)


def is_of_adapter(name: str) -> bool:
    """Returns whether this is the name of an adapter's parameter.

    >>> is_of_adapter("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    True
    """
    return ".lora_" in name


def module_of(name: str) -> str:
    """Returns the last part of the name of the layer to which an adapter's parameter belongs.

    >>> module_of("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'q_proj'
    """
    return name.partition(".lora_")[0].rpartition(".")[2]


def ranks_of(parameters: Iterable[ParameterSpec]) -> dict[str, int]:
    """Returns the rank of each adapter's matrices by the name of its layer.

    >>> ranks_of([ParameterSpec("model.layers.0.mlp.up_proj.lora_A.default.weight", (16, 64), "float32", 4096)])
    {'model.layers.0.mlp.up_proj': 16}
    """
    return {spec.name.partition(".lora_")[0]: spec.shape[0] for spec in parameters if ".lora_A." in spec.name}


def saved_name(name: str) -> str:
    """Returns the name that a parameter has in an adapter's file, as peft and vLLM read it.

    >>> saved_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], lora: LoraSection, *, base: str) -> None:
    """Writes an adapter into an existing folder, as peft and vLLM load it. `tensors` have their names in the model.
    `base` is the path or the Hub id of the model to which it belongs."""
    modules = sorted({module_of(name) for name in tensors})
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=modules,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    # not `save_file`: it would make the file readable only for the owner
    named = {saved_name(name): tensor for name, tensor in tensors.items()}
    (folder / WEIGHTS).write_bytes(save(named, metadata={"format": "pt"}))


def _targets(model: PreTrainedModel, lora: LoraSection) -> list[str]:
    """Returns the ends of the names of the linear layers that get an adapter. With `all-linear`, these are all linear
    layers but the output head. Raises ConfigError for a target that is not one of these layers, and if there is no
    target."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if lora.target_modules == "all-linear":
        return known
    unknown = [
        target
        for target in lora.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in layers)
    ]
    if unknown or not lora.target_modules:
        raise ConfigError(
            f"model.lora.target_modules = {lora.target_modules}: "
            + (f"{type(model).__name__} has no linear layer {', '.join(unknown)}" if unknown else "names no layer")
            + f"; choose from {', '.join(known)}, or set all-linear. The output head and the embeddings cannot have "
            "an adapter"
        )
    return list(lora.target_modules)
