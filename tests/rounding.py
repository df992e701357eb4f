"""Bounds for the difference of two float32 results that differ only in the order of their sums.

The order in which the terms of a sum are added depends on the processor, the BLAS kernel, the number of threads and of
ranks, and the shape of the batch. Results with the same order are compared bit for bit. All others are compared with
the bounds of this module.

A sum of n terms rounds n times. Each rounding error is at most u = 2⁻²⁴ of the sum, in either direction, so the errors
add up like a random walk. The error of the sum is less than λ·√n·u of the size of its terms, except with a probability
of 2·exp(−λ²/2) (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, theorem 2.4). With
λ = 8 this probability is 3e-14. A result of a model comes from a chain of sums, and n counts the terms of all of them.
"""

import math
from typing import Any

import numpy as np
import torch

UNIT = 2.0**-24
"""u, the largest relative error of one float32 operation."""
LAMBDA = 8.0


def spread(terms: int) -> float:
    """Returns the bound for the difference of two sums of the same `terms` terms in different orders, relative to the
    size of the terms."""
    return math.sqrt(2) * LAMBDA * math.sqrt(terms) * UNIT


# The models of the tests have two layers. They are at most 64 wide (96 in the MLP), and rows have at most 40 tokens.
# The longest chain of sums in a layer is: two norms and four products with 64 terms each, a head norm and the attention
# scores with 32 terms each, a softmax and its product with the values with 40 terms each, and a product with 96 terms.
# After the layers follow a norm, the output head and a log-softmax.
LAYER_TERMS = 2 * 64 + 4 * 64 + 2 * 32 + 2 * 40 + 96
FORWARD_TERMS = 2 * LAYER_TERMS + 3 * 64
OUTPUT = spread(FORWARD_TERMS)
"""2.6e-5: the bound for log-probs, entropies and values, relative to the largest of them."""

# A gradient goes forward through the chain and back through it. On the way back, each operation has a product with its
# input and one with its weight. Then there is a sum over the tokens of a batch, which has fewer than 512 tokens.
GRADIENT_TERMS = 3 * FORWARD_TERMS + 512
GRADIENT = spread(GRADIENT_TERMS)
"""4.7e-5: the bound for a gradient and for the optimizer's moments, relative to the largest element of the tensor."""

LOGPROB_NATS = 8 * OUTPUT
"""2.0e-4: the absolute bound for log-probs above −8 nats."""

LOSS = 2 * LOGPROB_NATS
"""The absolute bound for a policy's loss. It is a mean over tokens of A·ρ·exp(new − old), where |A·ρ| is below 1 on
average and both log-probs have errors."""

SMOOTH_OPTIMIZER = {"learning_rate": 1e-2, "eps": 0.1}
"""Settings of AdamW that do not amplify rounding errors. The step of AdamW is lr · m/(√v + ε). If a gradient is as
small as its own rounding error, an ε of 1e-8 turns the sign of the error into a whole step. If ε has the size of the
gradients, the step is a smooth function of them, as with SGD, and the second moment still has an effect."""


def weight_spread(updates: int) -> float:
    """Returns the absolute bound for the difference of weights after `updates` updates with `SMOOTH_OPTIMIZER`.

    Gradients are clipped to a norm of 1, so the error of an element is at most δ = `GRADIENT`. m is a weighted mean of
    gradients and √v a weighted root mean square, so the error of each is at most δ. Then the error of m/(√v + ε) is at
    most δ/ε · (1 + |m|/(√v + ε)). For the few updates and the decay rates of the tests, |m| ≤ 1.01·√v (Cauchy-Schwarz).
    So the error is less than 3·δ/ε. Adding the step to a weight of at most 2 has a rounding error of 2·u.
    """
    step = SMOOTH_OPTIMIZER["learning_rate"] * 3 * GRADIENT / SMOOTH_OPTIMIZER["eps"]
    return updates * (step + 4 * UNIT)


def assert_within(found: Any, wanted: Any, *, bound: float, name: str = "") -> None:
    """Asserts that two results differ by at most `bound`, which is absolute. NaN is never equal."""
    np.testing.assert_allclose(_array(found), _array(wanted), rtol=0, atol=bound, equal_nan=False, err_msg=name)


def assert_reordered(found: Any, wanted: Any, *, spread: float, name: str = "") -> None:
    """Asserts that two results differ by at most `spread`, relative to the largest element of `wanted`.

    The bound is not relative to each element, because an element near 0 may be a sum of larger terms.
    """
    assert_within(found, wanted, bound=spread * float(np.abs(_array(wanted)).max(initial=0.0)), name=name)


def _array(values: Any) -> np.ndarray:
    return values.detach().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
