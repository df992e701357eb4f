"""Model FLOPs: what the mathematics of a policy's passes takes however they are run, and what a device could do.

The count is PaLM's (Chowdhery et al. 2022, appendix B), an addition and a multiplication being two. A row of S tokens,
in a model of L layers with H heads of width D and W weights that are multiplied with, takes

    forward = 2 W S + 4 L H D S²,        backward = 2 · forward.

W are the weights of all layers and of the output head, tied or not, which is counted at every token. The second term is
attention, QKᵀ and what it does to V, over all S² pairs: a causal kernel needs about half of them, but the utilisations
that are published count them whole. Not counted are embedding lookups, norms, biases, rotations, softmax and loss,
padding, and what is computed again for the backward pass.

What must hold: what is not known to be counted right is None, never a guess. That is why no mixture of experts, no
sliding window and no model but `COUNTED` is counted, and why devices are known by their exact names.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type`; tests/policy/test_flops.py counts the products that a model of each makes."""

_BF16_TFLOPS = {
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA B200": 2250.0,
}
"""NVIDIA's data sheets, without the doubling for sparse weights, by what `torch.cuda.get_device_name` says. Not
`torch._inductor.analysis.device_info`: as of torch 2.13 it looks for "NVIDIA H100" and "NVIDIA A100", which is no
card's whole name, and has the sparse figure for the L4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """FLOPs of a forward pass, for each token and for each pair of tokens of a row.

    >>> ForwardCost(per_token=10, per_pair=2).flops([3, 1], backward=False)
    60
    >>> ForwardCost(per_token=10, per_pair=2).flops([3, 1], backward=True)
    180
    """

    per_token: int
    per_pair: int

    def flops(self, lengths: Iterable[int], *, backward: bool) -> int:
        """Of rows of so many real tokens that go forward once and, with `backward`, back too."""
        forward = sum(self.per_token * length + self.per_pair * length**2 for length in lengths)
        return 3 * forward if backward else forward


def forward_cost(config: PretrainedConfig) -> ForwardCost | None:
    """Of a causal language model with its output head; None when it is none of those that are counted."""
    if config.model_type not in COUNTED or getattr(config, "sliding_window", None) is not None:
        return None
    width, layers = config.hidden_size, config.num_hidden_layers
    head_width = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_width, config.num_key_value_heads * head_width
    attention = width * (queries + 2 * keys) + queries * width
    feed_forward = 3 * width * config.intermediate_size
    weights = layers * (attention + feed_forward) + width * config.vocab_size
    return ForwardCost(per_token=2 * weights, per_pair=4 * layers * queries)


def peak_flops_per_s(device_name: str, *, dtype: torch.dtype) -> float | None:
    """What the device could do at most in products of `dtype`; None when it is not known. Only bfloat16's is: what
    float32 comes to depends on whether somebody has allowed TF32.

    >>> peak_flops_per_s("NVIDIA H200", dtype=torch.bfloat16)
    989000000000000.0
    """
    teraflops = _BF16_TFLOPS.get(device_name) if dtype == torch.bfloat16 else None
    return None if teraflops is None else teraflops * 1e12
