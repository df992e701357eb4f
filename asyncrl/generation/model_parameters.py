"""Lists the parameters of a model from its config. Offered weights are compared with this list before they are used."""

from typing import Any


def expected_parameters(model_path: str, *, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns (shape, dtype) of every Hugging Face parameter by name, from the model's config, without allocating it.

    Manifests are checked against these names because vLLM's own parameters are fused (`qkv_proj`, `gate_up_proj`).
    Tied parameters appear under each of their names: on CPUs vLLM packs a tied head separately.
    """

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(AutoConfig.from_pretrained(model_path))
    return {name: (tuple(value.shape), dtype) for name, value in model.named_parameters(remove_duplicate=False)}
