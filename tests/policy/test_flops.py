"""Model FLOPs equal the products that real models make, and unknown values are None."""

import doctest
import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.schema import Config, LoraSection
from asyncrl.policy import flops
from asyncrl.policy.adapter import ranks_of, with_adapter
from asyncrl.policy.flops import COUNTED, ModelCost, device_peak_flops_per_s, model_cost, peak_flops_per_s
from asyncrl.ranks.accelerator import compute_dtype
from asyncrl.ranks.gather import parameter_specs

SMALL = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "as many keys as queries": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32},
    "grouped, tied": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "heads wider than the model": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 48},
    "more of all": {
        **{"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "tie_word_embeddings": False},
    },
}


def counted(config: PretrainedConfig, tokens: int, *, attention: str = "eager") -> tuple[int, int]:
    """Returns the FLOPs of the products in a forward and in a backward pass of one row, as torch counts them.

    `eager` attention is two products, which torch counts over all pairs. torch does not count its CPU kernels.
    """
    return counted_in(AutoModelForCausalLM.from_config(config, attn_implementation=attention), tokens)


def counted_in(model: Any, tokens: int) -> tuple[int, int]:
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=torch.arange(tokens).unsqueeze(0), use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def cost_of(config: PretrainedConfig, adapters: dict[str, int] | None = None) -> ModelCost:
    cost = model_cost(config, adapters=adapters)
    assert cost is not None
    return cost


def test_examples_in_docstrings_are_true() -> None:
    results = doctest.testmod(flops)
    assert (results.attempted > 2, results.failed) == (True, 0)


@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_count_is_that_of_the_products_which_the_model_makes(shape: str, tokens: int) -> None:
    config = Qwen3Config(**(SMALL | SHAPES[shape]))
    forward, backward = counted(config, tokens)
    assert cost_of(config).flops([tokens], backward=False) == forward
    assert cost_of(config).flops([tokens], backward=True) == forward + backward


@pytest.mark.parametrize("kind", sorted(COUNTED))
def test_every_kind_of_model_that_is_counted_is_counted_right(kind: str) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = {"sliding_window": None} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, **SMALL, **heads, **window)
    forward, backward = counted(config, 9)
    assert cost_of(config).flops([9], backward=False) == forward
    assert cost_of(config).flops([9], backward=True) == forward + backward


def test_the_term_of_attention_is_what_torch_leaves_out_for_the_kernel_of_cpus() -> None:
    """The whole difference to the count with a fused kernel is the quadratic term, so the test sees this term alone."""
    config = Qwen3Config(**(SMALL | SHAPES["grouped, tied"]))
    without, _ = counted(config, 9, attention="sdpa")
    assert (
        cost_of(config).flops([9], backward=False) - without
        == cost_of(config).forward.per_pair * 9**2
        == 4 * 2 * 64 * 9**2
    )


def test_rows_do_not_see_each_other() -> None:
    cost = cost_of(Qwen3Config(**SMALL))
    assert cost.flops([3, 5], backward=True) == sum(cost.flops([row], backward=True) for row in (3, 5))
    assert cost.flops([3, 5], backward=True) < cost.flops([8], backward=True)
    assert cost.flops([], backward=True) == 0


def test_a_model_of_known_size_takes_six_flops_a_weight_and_token() -> None:
    """Qwen2.5-0.5B has 494 million weights. 136 million of them are the tied embeddings, which are also the head."""
    config = Qwen2Config(
        **{"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "use_sliding_window": False, "sliding_window": 32768},
    )
    assert 3 * cost_of(config).forward.per_token / 6 == pytest.approx(494e6, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("kind", sorted(COUNTED))
@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["q_proj", "v_proj"],
        ["k_proj"],
        ["v_proj"],
        ["o_proj"],
        ["up_proj"],
        ["down_proj"],
        ["layers.1.self_attn.q_proj"],
        ["layers.1.mlp.down_proj", "layers.0.mlp.gate_proj"],
    ],
    ids=str,
)
def test_with_adapters_the_count_is_that_of_the_products_which_the_model_makes(
    targets: Any, kind: str, tokens: int
) -> None:
    """Frozen weights have no gradients, and nothing that stands before the first adapter has one."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    window = {"sliding_window": None} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, **SMALL, **heads, **window)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with_adapter(model, LoraSection(rank=3, alpha=8, target_modules=targets), seed=0)
    forward, backward = counted_in(model, tokens)
    cost = cost_of(config, ranks_of(parameter_specs(model, dtype=torch.float32)))
    assert cost.flops([tokens], backward=False) == forward
    assert cost.flops([tokens], backward=True) == forward + backward


def test_the_count_with_an_adapter_by_hand() -> None:
    """Two blocks of width 4 with 8 hidden numbers and one head, a vocabulary of 10, and adapters of rank 1 on both
    layers `o`. W = 2 · (4 · 16 + 3 · 32) + 40 = 360 and A = 2 · 8 = 16."""
    sizes = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    cost = cost_of(config, {f"model.layers.{layer}.self_attn.o_proj": 1 for layer in (0, 1)})
    assert cost.forward == (2 * (360 + 16), 4 * 2 * 4)
    # The first block: what its o writes goes on through the feed-forward layers. Q, K, V and what o reads have no
    # gradient. The second block has all of them.
    frozen = 2 * 3 * 32 + (2 * 4 * 16 + 2 * 3 * 32) + 2 * 40
    adapters = 4 * 16 - 2 * 4  # without what the adapter of the first block reads
    assert cost.backward == (frozen + adapters, 2 * 4 * 4)
    assert cost_of(config, {}).backward == (0, 0)
    whole = cost_of(config)
    assert whole.backward == (4 * 360, 2 * whole.forward.per_pair)


def test_an_adapter_of_a_layer_that_is_not_counted_makes_the_count_unknown() -> None:
    assert model_cost(Qwen3Config(**SMALL), adapters={"model.layers.0.mlp.experts.0.up_proj": 4}) is None
    assert model_cost(Qwen3Config(**SMALL), adapters={"model.layers.2.mlp.up_proj": 4}) is None


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**SMALL),
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=0),
        AutoConfig.for_model("mistral", **SMALL, sliding_window=4),
        AutoConfig.for_model("gemma2", **SMALL),
    ],
    ids=["mixture of experts", "window", "always a window", "unknown"],
)
def test_what_is_not_known_to_be_counted_right_is_not_counted(config: PretrainedConfig) -> None:
    assert model_cost(config) is None


def test_a_device_is_known_by_its_whole_name_and_only_in_bfloat16() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", dtype=torch.bfloat16) == 989e12
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", dtype=torch.float32) is None
    for name in ("NVIDIA H100", "nvidia h200", "NVIDIA H200 NVL", "NVIDIA L40", ""):
        assert peak_flops_per_s(name, dtype=torch.bfloat16) is None, name
    assert all(math.isfinite(known) and 100 < known < 1e4 for known in flops.BF16_TFLOPS.values())


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [("cuda:0", "bfloat16", 989e12), ("cuda:0", "float32", None), ("cpu", "bfloat16", None)],
)
def test_a_rank_tells_the_peak_of_its_device_in_the_precision_of_its_passes(
    device: str, dtype: str, peak: float | None
) -> None:
    passes = compute_dtype(Config.model_validate({"model": {"path": "m", "dtype": dtype}}))
    names = {torch.device("cuda:0"): "NVIDIA H200"}
    assert device_peak_flops_per_s(torch.device(device), dtype=passes, name_of=names.__getitem__) == peak
