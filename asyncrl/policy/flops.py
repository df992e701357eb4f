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

With `model.lora`, the W weights are frozen, and the adapters have A weights. The backward pass then has no products for
the gradients of frozen weights:

    forward = 2 (W + A) S + 4 L H D S²,        backward ≈ 2 W S + 4 A S + 8 L H D S².

The backward pass also ends at the first adapters: the inputs of these adapters and of the layers before them need no
gradient. The products for such gradients are left out of the count (`_backward_of_adapters`).

Invariant: if a count is not known to be right, it is None, never a guess. So only the models in `COUNTED` are counted,
no mixture of experts and no sliding window, and devices are identified by their exact names.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

COUNTED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` of the models that are counted. tests/policy/test_flops.py compares one model of each type
with a count of its products."""

QUERY, KEY, VALUE, OUTPUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))

BF16_TFLOPS = {
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


class PassCost(NamedTuple):
    """FLOPs of a pass: for each token, and for each pair of tokens in a row."""

    per_token: int
    per_pair: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """FLOPs of a forward and of a backward pass.

    >>> cost = ModelCost(forward=PassCost(10, 2), backward=PassCost(15, 4))
    >>> cost.flops([3, 1], backward=False)
    60
    >>> cost.flops([3, 1], backward=True)
    160
    """

    forward: PassCost
    backward: PassCost

    def flops(self, lengths: Iterable[int], *, backward: bool) -> int:
        """Returns the FLOPs for rows with these numbers of real tokens: one forward pass and, with `backward`, one
        backward pass."""
        passes = (self.forward, self.backward) if backward else (self.forward,)
        return sum(cost.per_token * length + cost.per_pair * length**2 for length in lengths for cost in passes)


def model_cost(config: PretrainedConfig, *, adapters: Mapping[str, int] | None = None) -> ModelCost | None:
    """Returns the cost of a causal language model with its output head, or None for a model that is not counted: its
    type is not in `COUNTED`, or it has a sliding window.

    `adapters` has the ranks of the adapters by the names of their layers, if only adapters are trained. Then the result
    is also None if a name is not that of a counted layer.
    """
    if config.model_type not in COUNTED or getattr(config, "sliding_window", None) is not None:
        return None
    shapes, layers = _shapes(config), config.num_hidden_layers
    weights = layers * sum(read * written for read, written in shapes.values()) + config.hidden_size * config.vocab_size
    queries = shapes[QUERY][1]
    forward = PassCost(per_token=2 * weights, per_pair=4 * layers * queries)
    if adapters is None:
        return ModelCost(forward=forward, backward=PassCost(2 * forward.per_token, 2 * forward.per_pair))
    shape_of = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    if not adapters.keys() <= shape_of.keys():
        return None
    added = sum(2 * rank * sum(shape_of[name]) for name, rank in adapters.items())
    return ModelCost(
        forward=forward._replace(per_token=forward.per_token + added),
        backward=_backward_of_adapters(config, adapters),
    )


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Returns how many numbers each linear layer of a block reads and writes for a token."""
    width, hidden = config.hidden_size, config.intermediate_size
    head_width = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_width, config.num_key_value_heads * head_width
    return {
        QUERY: (width, queries),
        KEY: (width, keys),
        VALUE: (width, keys),
        OUTPUT: (queries, width),
        GATE: (width, hidden),
        UP: (width, hidden),
        DOWN: (hidden, width),
    }


def _backward_of_adapters(config: PretrainedConfig, adapters: Mapping[str, int]) -> PassCost:
    """Counts the products of a backward pass that trains only adapters, block by block.

    A product's gradient with respect to what it reads is needed only if an adapter is before it in the
    forward pass.
    """
    shapes = _shapes(config)
    per_token = attention_products = 0
    stream = False  # whether the residual stream depends on an adapter

    def layer(block: int, name: str, *, reads: bool) -> bool:
        """Adds the products of a linear layer to the count. `reads`: its input depends on an adapter. Returns whether
        its output does."""
        nonlocal per_token
        read, written = shapes[name]
        rank = adapters.get(f"model.layers.{block}.{name}", 0)
        # The layer's adapter: the gradients of its two matrices, and of the second one's input.
        per_token += 2 * rank * (read + 2 * written)
        if reads:
            per_token += 2 * read * (written + rank)
        return reads or rank > 0

    for block in range(config.num_hidden_layers):
        query, key, value = (layer(block, name, reads=stream) for name in (QUERY, KEY, VALUE))
        # the gradients of V, of the probabilities, of Q and of K
        attention_products += value + (query or key) + query + key
        stream = layer(block, OUTPUT, reads=query or key or value)
        gate, up = (layer(block, name, reads=stream) for name in (GATE, UP))
        stream = layer(block, DOWN, reads=gate or up)
    if stream:
        per_token += 2 * config.hidden_size * config.vocab_size
    return PassCost(per_token=per_token, per_pair=2 * shapes[QUERY][1] * attention_products)


def peak_flops_per_s(device_name: str, *, dtype: torch.dtype) -> float | None:
    """Returns the peak rate of the device for products of `dtype`, or None if it is not known. Only bfloat16 is known:
    the rate of float32 depends on whether TF32 is allowed.

    >>> peak_flops_per_s("NVIDIA H200", dtype=torch.bfloat16)
    989000000000000.0
    """
    teraflops = BF16_TFLOPS.get(device_name) if dtype == torch.bfloat16 else None
    return None if teraflops is None else teraflops * 1e12


def device_peak_flops_per_s(
    device: torch.device, *, dtype: torch.dtype, name_of: Callable[[torch.device], str] = torch.cuda.get_device_name
) -> float | None:
    """Returns `peak_flops_per_s` of the GPU `device`, whose name `name_of` returns; None for a CPU."""
    return peak_flops_per_s(name_of(device), dtype=dtype) if device.type == "cuda" else None
