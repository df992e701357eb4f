"""Model FLOPs equal the products that real models make, and unknown values are None."""

import doctest
import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.schema import Config
from asyncrl.policy import flops
from asyncrl.policy.flops import COUNTED, ForwardCost, forward_cost, peak_flops_per_s
from asyncrl.policy.worker import PolicyWorker

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
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with FlopCounterMode(display=False) as forward:
        logits = model(input_ids=torch.arange(tokens).unsqueeze(0), use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def cost_of(config: PretrainedConfig) -> ForwardCost:
    cost = forward_cost(config)
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
    assert cost_of(config).flops([9], backward=False) - without == cost_of(config).per_pair * 9**2 == 4 * 2 * 64 * 9**2


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
    assert 3 * cost_of(config).per_token / 6 == pytest.approx(494e6, rel=1e-3)


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
    assert forward_cost(config) is None


def test_a_device_is_known_by_its_whole_name_and_only_in_bfloat16() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", dtype=torch.bfloat16) == 989e12
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", dtype=torch.float32) is None
    for name in ("NVIDIA H100", "nvidia h200", "NVIDIA H200 NVL", "NVIDIA L40", ""):
        assert peak_flops_per_s(name, dtype=torch.bfloat16) is None, name
    assert all(math.isfinite(known) and 100 < known < 1e4 for known in flops._BF16_TFLOPS.values())


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [("cuda:0", "bfloat16", 989e12), ("cuda:0", "float32", None), ("cpu", "bfloat16", None)],
)
def test_a_rank_tells_the_peak_of_its_device_in_the_precision_of_its_passes(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, peak: float | None
) -> None:
    """This machine has no GPU, so the test replaces the functions of torch that describe one."""
    monkeypatch.setattr(torch.cuda, "get_device_name", {torch.device("cuda:0"): "NVIDIA H200"}.__getitem__)
    rank = object.__new__(PolicyWorker)
    rank._config = Config.model_validate({"model": {"path": "m", "dtype": dtype}})
    rank._device = torch.device(device)
    assert rank._peak_flops_per_s() == peak
