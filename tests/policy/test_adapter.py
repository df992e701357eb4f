"""An adapter in a model: which layers have one, what is trained, and the files that peft reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from tiny_groups import make_model
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import LoraSection
from asyncrl.errors import ConfigError
from asyncrl.generation.model_parameters import adapted_modules, expected_parameters
from asyncrl.policy.adapter import adapter_off, with_adapter, write_adapter
from asyncrl.ranks.gather import parameter_specs

pytestmark = pytest.mark.slow  # imports transformers

ROWS = torch.tensor([[3, 9, 14, 2, 30]])
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("adapter") / "model"))


def adapted(path: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    return with_adapter(model, LoraSection(rank=4, alpha=8, **lora), seed=seed)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ROWS).logits
    return found


@torch.no_grad()
def disturb(model: Any) -> None:
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)


def test_a_new_adapter_changes_nothing_and_can_be_turned_off_later(path: str) -> None:
    base, model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), adapted(path)
    assert torch.equal(logits(model), logits(base))
    disturb(model)
    changed = logits(model)
    assert not torch.allclose(changed, logits(base), atol=1e-2)
    with adapter_off(model):
        assert torch.equal(logits(model), logits(base))
    assert torch.equal(logits(model), changed)
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())


def test_equal_seeds_give_equal_adapters(path: str) -> None:
    first, again, other = (
        {name: value for name, value in adapted(path, seed=seed).named_parameters() if "lora_A" in name}
        for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_adapter_of_a_model_in_bfloat16_is_float32(path: str) -> None:
    dtypes = {".lora_" in name: value.dtype for name, value in adapted(path, dtype=torch.bfloat16).named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize(("targets", "layers"), [
    ("all-linear", LAYERS), (["q_proj", "v_proj"], ["q_proj", "v_proj"]), (["self_attn.o_proj"], ["o_proj"]),
])  # fmt: skip
def test_an_engine_expects_the_parameters_that_the_learner_sends(
    path: str, targets: str | list[str], layers: list[str]
) -> None:
    lora = LoraSection(rank=4, alpha=8, target_modules=targets)  # type: ignore[arg-type]
    specs = parameter_specs(adapted(path, target_modules=targets), dtype=torch.bfloat16)
    assert expected_parameters(path, dtype="bfloat16", lora=lora) == {
        spec.name: (spec.shape, "bfloat16") for spec in specs
    }
    assert adapted_modules(path, lora) == sorted(layers)
    assert len(specs) == 2 * 2 * len(layers)


@pytest.mark.parametrize("target", ["qkv_proj", "lm_head", "embed_tokens", "proj", "q_norm"])
def test_a_layer_that_does_not_exist_is_refused_with_those_that_do(path: str, target: str) -> None:
    with pytest.raises(ConfigError, match=rf"no linear layer {target}; choose from {', '.join(LAYERS)}, or set all-l"):
        adapted(path, target_modules=["q_proj", target])
    with pytest.raises(ConfigError, match="names no layer"):
        adapted(path, target_modules=[])


def test_peft_reads_the_files_and_computes_the_same(path: str, tmp_path: Path) -> None:
    model = adapted(path, target_modules=["q_proj", "down_proj"])
    disturb(model)
    trained = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    write_adapter(tmp_path, trained, LoraSection(rank=4, alpha=8, target_modules=["q_proj", "down_proj"]), base=path)
    with safe_open(tmp_path / "adapter_model.safetensors", framework="pt") as file:
        ends = {name.rpartition("lora_")[2] for name in file.keys()}  # noqa: SIM118 - it is not a dict
    assert ends == {"A.weight", "B.weight"}, "vLLM accepts no other names"
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    assert torch.allclose(logits(loaded), logits(model), atol=1e-6)
    assert len({file.stat().st_mode for file in tmp_path.glob("adapter*")}) == 1, "the files have different permissions"
