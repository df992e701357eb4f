"""Lists the parameters of a model from its config. Names, shapes and dtypes of weights that a learner offers are
compared with this list before an engine loads them."""

from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import LoraSection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def expected_parameters(
    model_path: str, *, dtype: str, lora: LoraSection | None = None
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns (shape, dtype) of every parameter by its Hugging Face name, or with `lora` of every parameter of the
    adapter, from the model's config, without allocating it.

    Manifests are checked against these names because vLLM's own parameters are fused (`qkv_proj`, `gate_up_proj`).
    Tied parameters appear under each of their names: on CPUs vLLM packs a tied head separately.
    """
    named = model_without_weights(model_path, lora=lora).named_parameters(remove_duplicate=False)
    return {name: (tuple(value.shape), dtype) for name, value in named if value.requires_grad}


def model_without_weights(model_path: str, *, lora: LoraSection | None = None) -> "PreTrainedModel":
    """Builds the model, with `lora` its adapter too, from the model's config alone. No memory is allocated for its
    parameters. Raises OSError or ValueError for a config that cannot be read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    # Without `trust_remote_code`, transformers asks on the terminal whether it may run code that comes with the model.
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(
            AutoConfig.from_pretrained(model_path, trust_remote_code=False), trust_remote_code=False
        )
        if lora is not None:
            from asyncrl.policy.adapter import with_adapter

            with_adapter(model, lora, seed=0)
    return model


def adapted_modules(model_path: str, lora: LoraSection) -> list[str]:
    """Returns the last parts of the names of the layers that have an adapter, each once, such as `q_proj`."""
    from asyncrl.policy.adapter import module_of

    return sorted({module_of(name) for name in expected_parameters(model_path, dtype="", lora=lora)})
