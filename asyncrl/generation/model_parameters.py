"""What a model's weights are, from its config alone: what is offered to an engine is compared with it first."""

from typing import Any


def expected_parameters(model_path: str, *, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every Hugging Face parameter of the model's own config, built without memory.

    vLLM's own parameters are fused (`qkv_proj`, `gate_up_proj`), so a manifest is checked against these. Tied
    parameters appear under each of their names: on CPUs vLLM packs a tied head on its own.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(AutoConfig.from_pretrained(model_path))
    return {name: (tuple(value.shape), dtype) for name, value in model.named_parameters(remove_duplicate=False)}
