"""Model FLOPs: the floating-point operations that the passes of a policy need mathematically, and the peak rate of
devices.

The count is the one of PaLM (Chowdhery et al. 2022, appendix B); an addition and a multiplication count as two. Take a
row of S tokens, and a model of L layers with H heads of width D and W weights in matrix products. Then

    forward = 2 W S + 4 L H D S²,        backward = 2 · forward.

W counts the weights of all layers and of the output head. The head is counted at every token, also if it is tied. The
second term is attention, QKᵀ and the product with V, over all S² pairs. A causal kernel needs about half of these
pairs, but published utilisations count all of them. Not counted are embedding lookups, norms, biases, rotations,
softmax and loss, padding, and activations that are computed again for the backward pass. The count is of rows, not of
what is computed for them: a prompt that packed rows share is computed once and counts for each row.

Invariant: if a count is not known to be right, it is None, never a guess. So only the models in `COUNTED` are counted,
no mixture of experts and no sliding window, and devices are identified by their exact names.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type`. tests/policy/test_flops.py counts the products of one model of each type."""

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
"""Peak rates from NVIDIA's data sheets, without the doubling for sparse weights, by `torch.cuda.get_device_name`.
`torch._inductor.analysis.device_info` is not used. As of torch 2.13, it looks for "NVIDIA H100" and "NVIDIA A100",
which are not the full name of any card, and it has the sparse figure for the L4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """FLOPs of a forward pass: for each token, and for each pair of tokens in a row.

    >>> ForwardCost(per_token=10, per_pair=2).flops([3, 1], backward=False)
    60
    >>> ForwardCost(per_token=10, per_pair=2).flops([3, 1], backward=True)
    180
    """

    per_token: int
    per_pair: int

    def flops(self, lengths: Iterable[int], *, backward: bool) -> int:
        """Returns the FLOPs for rows with these numbers of real tokens: one forward pass and, with `backward`, one
        backward pass."""
        forward = sum(self.per_token * length + self.per_pair * length**2 for length in lengths)
        return 3 * forward if backward else forward


def forward_cost(config: PretrainedConfig) -> ForwardCost | None:
    """Returns the forward cost of a causal language model with its output head, or None for an uncounted model."""
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
    """Returns the peak rate of the device for products of `dtype`, or None if it is not known. Only bfloat16 is known:
    the rate of float32 depends on whether TF32 is allowed.

    >>> peak_flops_per_s("NVIDIA H200", dtype=torch.bfloat16)
    989000000000000.0
    """
    teraflops = _BF16_TFLOPS.get(device_name) if dtype == torch.bfloat16 else None
    return None if teraflops is None else teraflops * 1e12
