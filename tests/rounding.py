"""How far apart two float32 results may be that differ only in the order of their sums.

A processor, a BLAS kernel, a number of threads or of ranks, and the shape of a batch each choose an order in which the
terms of a sum are added. Results that are added in the same order are compared bit for bit; all others with the bounds
of this module.

A sum of n terms rounds n times. Each time it is off by at most u = 2⁻²⁴ of its size, in either direction, so that the
errors add up like a random walk: the sum is off by less than λ·√n·u of the size of its terms, but for a probability of
2·exp(−λ²/2) (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, theorem 2.4). With λ = 8
this is 3e-14. A result of a model went through a chain of sums, one after the other, and n counts the terms of all.
"""

import math
from typing import Any

import numpy as np
import torch

UNIT = 2.0**-24
"""u, the largest relative error of one float32 operation."""
LAMBDA = 8.0


def spread(terms: int) -> float:
    """Relative to the size of the terms: how far apart two results may be that added up `terms` in two orders."""
    return math.sqrt(2) * LAMBDA * math.sqrt(terms) * UNIT


# The tests' models have two layers and are at most 64 wide, 96 in the MLP, over rows of at most 40 tokens. A layer's
# longest chain: two norms and four products of 64, a head norm and the attention's scores of 32 each, a softmax and its
# product with the values of 40 each, and a product of 96. Then a norm, the output head and a log-softmax.
LAYER_TERMS = 2 * 64 + 4 * 64 + 2 * 32 + 2 * 40 + 96
FORWARD_TERMS = 2 * LAYER_TERMS + 3 * 64
OUTPUT = spread(FORWARD_TERMS)
"""2.6e-5: of log-probs, entropies and values, relative to the largest of them."""

# Forward, back through the same chain, where each operation has a product with its input and one with its weight, and
# a sum over the tokens of a batch, of which there are fewer than 512.
GRADIENT_TERMS = 3 * FORWARD_TERMS + 512
GRADIENT = spread(GRADIENT_TERMS)
"""4.7e-5: of a gradient and of the optimizer's moments, relative to the largest element of the tensor."""

LOGPROB_NATS = 8 * OUTPUT
"""2.0e-4: of log-probs that are above −8 nats."""

LOSS = 2 * LOGPROB_NATS
"""Of a policy's loss, absolute: a mean over tokens of A·ρ·exp(new − old) where |A·ρ| is below 1 on average, and both
log-probs are off."""

SMOOTH_OPTIMIZER = {"learning_rate": 1e-2, "eps": 0.1}
"""AdamW that does not amplify rounding. Its step is lr · m/(√v + ε). Where a gradient is as small as its own rounding
error, an ε of 1e-8 makes a whole step out of the error's sign. An ε of the size of the gradients makes the step a
smooth function of them, as that of SGD is, while the second moment still counts."""


def weight_spread(updates: int) -> float:
    """How far apart weights may be after `updates` of `SMOOTH_OPTIMIZER`, in the weights' own unit.

    Gradients are clipped to a norm of 1, so an element is off by at most δ = `GRADIENT`. m is a weighted mean of
    gradients and √v a weighted root mean square: each is off by at most δ. Then m/(√v + ε) is off by at most
    δ/ε · (1 + |m|/(√v + ε)), and |m| ≤ 1.01·√v for the tests' few updates and decay rates (Cauchy and Schwarz). That is
    less than 3·δ/ε. Adding the step to a weight that is at most 2 rounds by 2·u.
    """
    step = SMOOTH_OPTIMIZER["learning_rate"] * 3 * GRADIENT / SMOOTH_OPTIMIZER["eps"]
    return updates * (step + 4 * UNIT)


def assert_within(found: Any, wanted: Any, *, bound: float, name: str = "") -> None:
    """`bound` is absolute. NaN is equal to nothing."""
    np.testing.assert_allclose(_array(found), _array(wanted), rtol=0, atol=bound, equal_nan=False, err_msg=name)


def assert_reordered(found: Any, wanted: Any, *, spread: float, name: str = "") -> None:
    """`spread` is relative to the largest element of `wanted`, because an element near 0 is a sum of larger terms."""
    assert_within(found, wanted, bound=spread * float(np.abs(_array(wanted)).max(initial=0.0)), name=name)


def _array(values: Any) -> np.ndarray:
    return values.detach().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
