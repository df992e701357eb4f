"""A plain pass of one sequence through the model: no padding, no packing, no shared prompt, transformers' own
attention, full logits.

The temperature τ, supports (the tokens among which a token was sampled) and the softmax are applied in float64. The
gradients of a log-prob and of the entropy H by the logits z are stated, and not derived by autograd:
∂ log p_t / ∂z = (1_t − p) / τ, and ∂H / ∂z = −p · (log p + H) / τ. The centering is a sum of log-probs with fixed
coefficients.

Legend: S tokens of the sequence, V vocabulary, N tokens that are computed at once.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncrl.witness.objective import Axes, Derivatives, centers

AT_ONCE = 64
"""Tokens whose softmax over the vocabulary is computed at once, in float64."""


LONGEST_EAGER = 1024
"""Tokens of the longest sequence that is computed with eager attention. It keeps a number for each pair of tokens, head
and layer: 4 GB for 1024 tokens, 32 heads and 32 layers."""


@contextmanager
def plain_attention(model: Any, *, longest: int) -> Iterator[None]:
    """Lets a model of transformers compute with its eager attention within the block, or with sdpa if the `longest`
    sequence is longer than `LONGEST_EAGER`."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager" if longest <= LONGEST_EAGER else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


def plain_pass(
    model: Any,
    tokens: Sequence[int],
    *,
    temperature: float,
    device: torch.device,
    supports: Sequence[Sequence[int]] | None = None,
    slopes: Derivatives | None = None,
    axes: Axes | None = None,
    tops: Sequence[Mapping[int, float]] = (),
    rounded: Sequence[float] | None = None,
    factor: float = 1.0,
) -> list[float]:
    """Returns the log-prob of each token but the first, given the tokens before it, in nats.

    `supports` has the ids among which each of these tokens was sampled. For a token that was not sampled, the list is
    empty and the returned log-prob is 0. With `slopes`, there is also a backward pass, which adds `factor` times the
    gradient of Σ_t logprobs_t · log p_t + entropies_t · H_t + centering_t · C_t to the gradients of the weights. The
    coefficients are the fields of `slopes`. The centering C is that of the objective `axes`, and `tops` has for each
    token the ids of the sampler's most likely tokens with their log-probs. Sharded models communicate in both passes,
    so all ranks must call this function.

    `rounded` are log-probs of the same tokens by another pass in bfloat16, whose logits were rounded in another way.
    The gradient of log p has the size 1 − p. So the gradient of each token is multiplied by 1 − p of the other pass
    over 1 − p of this pass. Logits near 20 are rounded to multiples of 0.125: without this factor, the gradients of 40
    tokens differed by up to 0.34 of their norm.
    """
    ids_1S = torch.tensor([list(tokens)], device=device)
    with torch.set_grad_enabled(slopes is not None):
        logits_SV: torch.Tensor = model(input_ids=ids_1S, use_cache=False).logits[0, :-1]
    slopes_SV, found = None if slopes is None else torch.zeros_like(logits_SV), list[float]()
    for start in range(0, len(logits_SV), AT_ONCE):
        stop = min(start + AT_ONCE, len(logits_SV))
        z_NV = logits_SV[start:stop].detach().double() / temperature
        targets_N = ids_1S[0, start + 1 : stop + 1]
        inside = [True] * (stop - start)
        if supports is not None:
            allowed_NV = torch.zeros_like(z_NV, dtype=torch.bool)
            for n, support in enumerate(supports[start:stop]):
                inside[n] = len(support) > 0
                allowed_NV[n, list(support) or slice(None)] = True
            z_NV = z_NV.masked_fill(~allowed_NV, -torch.inf)
        logp_NV = z_NV - z_NV.logsumexp(1, keepdim=True)
        own_N = logp_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1).tolist()
        found += [own if sampled else 0.0 for own, sampled in zip(own_N, inside, strict=True)]
        if slopes_SV is None or slopes is None:
            continue
        p_NV = logp_NV.exp()
        for n in (n for n, sampled in enumerate(inside) if sampled):
            slope, by_entropy, by_centering = (of_tokens[start + n] for of_tokens in slopes)
            if rounded is not None and own_N[n] < 0:
                slope *= math.expm1(rounded[start + n]) / math.expm1(own_N[n])
            by_z_V = -slope * p_NV[n]
            by_z_V[targets_N[n]] += slope
            if by_centering and axes is not None:
                ids, log_q = [*tops[start + n]], [*tops[start + n].values()]
                has_rest = int(logp_NV[n].isfinite().sum()) > len(ids)
                own = by_z_V.new_tensor(centers(axes, logp_NV[n, ids].tolist(), log_q, has_rest=has_rest))
                by_z_V -= by_centering * own.sum() * p_NV[n]
                by_z_V[ids] += by_centering * own
            if by_entropy:
                parts_V = torch.special.entr(p_NV[n])  # −p · log p
                by_z_V -= by_entropy * (p_NV[n] * parts_V.sum() - parts_V)
            slopes_SV[start + n] = (factor / temperature * by_z_V).to(slopes_SV.dtype)
    if slopes_SV is not None:
        torch.autograd.backward([logits_SV], [slopes_SV])
    return found
