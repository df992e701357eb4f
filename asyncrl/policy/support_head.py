"""Log-probs and entropies of tokens that were sampled from a part of the vocabulary, their support (`generator.top_k`).

With logits z, the temperature τ and the support U of a token, p_i = exp(z_i / τ) / Σ_{j ∈ U} exp(z_j / τ) for i ∈ U. It
is the distribution from which the engine sampled, if U is the engine's. All other tokens have the probability 0 under
all weights, so that ratios and gradients are those of the policy that is in use.

Only the support's rows of the head are read for the values and for the gradient of the hidden states, a chunk of the
tokens at a time. The gradient of the head has the size of the head. It is computed in chunks of the vocabulary, like
that of all logits, and without adding to the same number from several threads, so equal inputs give equal bits.
For 256 tokens with supports of 20, width 1,024 and a vocabulary of 151,936, forward and backward took 2.5 s in float32
on one thread of a CPU; those of all logits took 7.0 s.

Legend: N tokens, D hidden width, V vocabulary, K tokens of the largest support, C vocabulary rows of a chunk.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from asyncrl.policy.chunked_head import Chunks, located


class SupportHead(torch.autograd.Function):
    """Output head, log-softmax over the support, and entropy as one autograd function.

    The gradients are those of `asyncrl.policy.chunked_head` for the tokens of the support, and 0 for all others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        support_NK: torch.Tensor,
        temperature: float,
        chunk_logits: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logits_NK = hidden_ND.new_zeros(support_NK.shape, dtype=dtype)
        for part, rows_nKD in _rows(weight_VD, support_NK, dtype=dtype, chunk_logits=chunk_logits):
            logits_NK[part] = torch.bmm(rows_nKD, hidden_ND[part].to(dtype).unsqueeze(2)).squeeze(2)
        inside_NK = support_NK >= 0
        logits_NK = (logits_NK / temperature).masked_fill_(~inside_NK, -torch.inf)
        # a token without a support would have no finite logit
        normalizer_N = torch.where(inside_NK.any(dim=1), logits_NK.logsumexp(dim=1), 0.0)
        logp_NK = logits_NK - normalizer_N.unsqueeze(1)
        is_target_NK = support_NK == targets_N.unsqueeze(1)
        logprobs_N = torch.where(is_target_NK, logp_NK, 0.0).sum(dim=1)
        entropy_N = -torch.where(inside_NK, logp_NK.exp() * logp_NK, 0.0).sum(dim=1) if with_entropy else None
        ctx.save_for_backward(hidden_ND, weight_VD, support_NK, is_target_NK, logp_NK, entropy_N)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, support_NK, is_target_NK, logp_NK, entropy_N = ctx.saved_tensors
        inside_NK, probs_NK = support_NK >= 0, logp_NK.exp()
        # −∂L/∂z · τ, which is 0 outside the support
        slope_NK = torch.zeros_like(logp_NK)
        if grad_logprobs_N is not None:
            slope_NK += grad_logprobs_N.unsqueeze(1) * (probs_NK - is_target_NK.to(probs_NK.dtype))
        if grad_entropy_N is not None:
            slope_NK += grad_entropy_N.unsqueeze(1) * probs_NK * (logp_NK + entropy_N.unsqueeze(1))
        slope_NK = torch.where(inside_NK, slope_NK, 0.0)
        grad_hidden_ND = grad_weight_VD = None
        if ctx.needs_input_grad[0]:
            grad_hidden_ND = torch.zeros_like(hidden_ND)
            for part, rows_nKD in _rows(weight_VD, support_NK, dtype=logp_NK.dtype, chunk_logits=ctx.chunk_logits):
                grad_n1D = torch.bmm(slope_NK[part].unsqueeze(1), rows_nKD)
                grad_hidden_ND[part] = (grad_n1D.squeeze(1) * (-1 / ctx.temperature)).to(hidden_ND.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight_VD = torch.empty_like(weight_VD)
            chunks = Chunks.of(
                hidden_ND,
                weight_VD,
                temperature=ctx.temperature,
                chunk_logits=ctx.chunk_logits,
                with_spare=False,
            )
            for rows, slope_NC in chunks.buffers():
                is_here_NK, column_NK = located(support_NK, rows)
                slope_NC.zero_().scatter_add_(1, column_NK, torch.where(is_here_NK, slope_NK, 0.0))
                chunks.add_gradients(rows, slope_NC, grad_hidden_ND=None, grad_weight_VD=grad_weight_VD)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _rows(
    weight_VD: torch.Tensor, support_NK: torch.Tensor, *, dtype: torch.dtype, chunk_logits: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Iterates over (tokens, the rows [n, K, D] of their supports). At most `chunk_logits` numbers are gathered at a
    time, or those of one token. Padding gathers the first row."""
    tokens, width = support_NK.shape
    step = max(1, chunk_logits // (width * weight_VD.shape[1]))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        yield part, weight_VD[support_NK[part].clamp(min=0)].to(dtype)
