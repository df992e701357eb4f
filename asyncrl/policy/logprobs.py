"""Log-probs and entropies of next tokens, from a pass of a model that never holds all of its logits in memory.

Legend: B rows, S tokens, T = S − 1 next tokens, D hidden width, K tokens of a support, L most likely tokens of the
sampler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from asyncrl.algorithms.token_terms import centering_slopes
from asyncrl.data.specs import SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.errors import ConfigError
from asyncrl.ranks.model_rows import ModelRows

_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def model_logprobs(
    model: PreTrainedModel,
    rows: ModelRows,
    *,
    temperature: float,
    with_entropy: bool,
    centered_kernel: tuple[float, float] | None = None,
    chunk_logits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns log-probs [B, T] of the next tokens and, if `with_entropy`, the entropies [B, T] of their distributions,
    as float32. With a `centered_kernel` (lo, hi), also returns the centering [B, T] of an objective with this kernel
    (`Objective.centering`); the rows then need the columns `top_ids` and `top_logprobs`.

    All are of softmax(logits / temperature), and all are differentiable. The model's own forward runs, including the
    hooks of FSDP. For this one call, its head returns these numbers instead of logits. If the rows are packed, results
    beyond a row's length are 0, and the model's attention must be the one of `asyncrl.ranks.packed`. If they have
    supports, the softmax of each token is over its support only, and all results are 0 for tokens without a support.
    For the first token of a branch, all results are 0. At most `chunk_logits` logits exist at a time, or those of 64
    tokens of the vocabulary if these are more. Raises ConfigError for a model whose logits are not a plain product with
    the head.
    """
    head = _plain_head(model)
    made: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        _check_positions(hidden, rows.inputs["input_ids"], model=model)
        columns = head_logprobs(
            rows.before_targets(hidden).flatten(0, 1),
            head.weight,
            targets_N=rows.targets.flatten(),
            support_NK=rows.wide.get(SUPPORT),
            temperature=temperature,
            with_entropy=with_entropy,
            centered=None if centered_kernel is None else Centered.of(rows, kernel=centered_kernel),
            chunk_logits=chunk_logits,
        )
        stacked = torch.stack([column for column in columns if column is not None], dim=-1)
        made.append(stacked.view(*rows.targets.shape, stacked.shape[-1]))
        return made[-1]

    with _forward_replaced(head, forward):
        returned = model(**rows.inputs, use_cache=False).logits
    if len(made) != 1 or returned is not made[0]:
        raise ConfigError(
            f"model.path: {type(model).__name__} changes its logits after the output head, so log-probs that are "
            f"computed from the head would be wrong; choose a model that does not do this"
        )
    logprobs_BT, *others_BT = rows.at_next_tokens(returned).unbind(-1)
    centering_BT = None if centered_kernel is None else others_BT.pop()
    return logprobs_BT, others_BT[0] if with_entropy else None, centering_BT


@contextmanager
def rounded_weights(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Lets the model compute in this block with weights that are rounded to `dtype`, as an engine has them. The passes
    keep their own precision, and the weights do not change."""
    kept: dict[torch.nn.Module, dict[str, torch.nn.Parameter | None]] = {}

    def put_rounded(module: torch.nn.Module, _: object) -> None:
        kept[module] = dict(module._parameters)
        for name, parameter in kept[module].items():
            if parameter is not None:
                rounded = parameter.detach().to(dtype).to(parameter.dtype)
                module._parameters[name] = torch.nn.Parameter(rounded, requires_grad=False)

    def put_back(module: torch.nn.Module, *_: object) -> None:
        module._parameters.update(kept.pop(module, {}))

    # FSDP gathers the weights of a block of modules before these hooks, and drops them afterwards
    own = [module for module in model.modules() if module._parameters]
    hooks = [module.register_forward_pre_hook(put_rounded) for module in own]
    hooks += [module.register_forward_hook(put_back, always_call=True) for module in own]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def head_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    support_NK: torch.Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    centered: "Centered | None" = None,
    chunk_logits: int | None = None,
    bfloat16_products: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns log softmax(hidden · weightᵀ / temperature) at the targets [N], the entropies [N] if `with_entropy`, and
    the centering [N] of `centered` if it is given.

    Results are float32 (float64 for float64 inputs) and differentiable once in hidden and weight. Gradients have the
    dtypes of the inputs. `chunk_logits` is by default the one of CHUNK_LOGITS for the device. On a CPU, bfloat16 inputs
    are multiplied without a cast to float32 if `bfloat16_products` is True. By default, it is True if the CPU has
    instructions for bfloat16.

    With `support_NK`, the softmax is over the support of each token. A support has token ids, each once, and negative
    numbers as padding. Each target must be in its support. All results are 0 for a token without a support.
    """
    chunk_logits = chunk_logits or CHUNK_LOGITS[hidden_ND.device.type]
    products = _has_bfloat16_products() if bfloat16_products is None else bfloat16_products
    options = (centered, temperature, chunk_logits, with_entropy, products)
    if support_NK is None:
        results = ChunkedHead.apply(hidden_ND, weight_VD, targets_N, *options)  # type: ignore[no-untyped-call]
    else:
        results = SupportHead.apply(hidden_ND, weight_VD, targets_N, support_NK.long(), *options)  # type: ignore[no-untyped-call]
    logprobs_N, entropy_N, centering_N = results
    return logprobs_N, entropy_N, centering_N


@dataclass(frozen=True, slots=True, kw_only=True)
class Centered:
    """The sampler's most likely tokens for N targets, and the kernel of the objective, from which the centering
    C = Σ_v g_v · log p_v of each target follows (`Objective.centering`). The coefficients g are detached.

    `ids_NL` are −1 beyond the tokens of a list, and `logprobs_NL` are the sampler's log-probs of these tokens."""

    ids_NL: torch.Tensor
    logprobs_NL: torch.Tensor
    kernel: tuple[float, float]

    @classmethod
    def of(cls, rows: ModelRows, *, kernel: tuple[float, float]) -> "Centered":
        return cls(ids_NL=rows.wide[TOP_IDS].long(), logprobs_NL=rows.wide[TOP_LOGPROBS], kernel=kernel)

    def slopes(self, log_p_NL: torch.Tensor, *, possible: torch.Tensor | int) -> torch.Tensor:
        """Returns the coefficients g [N, L], 0 for padding, from the log-probs of the trained policy. `possible` is the
        number of tokens that the sampler could have sampled."""
        listed_NL = self.ids_NL >= 0
        return centering_slopes(
            log_p=log_p_NL,
            log_q=self.logprobs_NL,
            listed=listed_NL,
            has_rest=listed_NL.sum(dim=1) < possible,
            kernel=self.kernel,
        )


def _check_positions(hidden_BSD: torch.Tensor, tokens_BS: torch.Tensor, *, model: PreTrainedModel) -> None:
    if hidden_BSD.shape[:2] != tokens_BS.shape:
        raise ConfigError(
            f"model.path: the output head of {type(model).__name__} gets hidden states of shape "
            f"{tuple(hidden_BSD.shape)} for tokens of shape {tuple(tokens_BS.shape)}; choose a model whose head reads "
            "every position"
        )


def _plain_head(model: PreTrainedModel) -> torch.nn.Linear:
    """Returns the model's output head. Raises ConfigError if it is not a linear layer without a bias, or if the config
    has a key in `_LOGIT_KEYS` that changes logits after the head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        found = "with a bias" if isinstance(head, torch.nn.Linear) else f"of type {type(head).__name__}"
        raise ConfigError(
            f"model.path: {type(model).__name__} has an output head {found}, but log-probs can only be computed "
            "for a torch.nn.Linear without bias; choose another model"
        )
    config = model.config.get_text_config()
    for key in _LOGIT_KEYS:
        value = getattr(config, key, None)
        if value is not None and value != 1.0:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {key} = {value} in its config, which changes logits after the "
                f"output head, so log-probs that are computed from the head would be wrong; choose a model without it"
            )
    return head


@contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replaces the module's forward within the block. Its hooks still run, and its class is unchanged. A forward that
    another library has set on the module is restored afterwards."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own


# Log-probs and entropies of tokens that were sampled from a part of the vocabulary, their support (`generator.top_k`).
#
# With logits z, the temperature τ and the support U of a token, p_i = exp(z_i / τ) / Σ_{j ∈ U} exp(z_j / τ) for i ∈ U.
# It is the distribution from which the engine sampled, if U is the engine's. All other tokens have the probability 0
# under all weights, so that ratios and gradients are those of the policy that is in use.
#
# Only the support's rows of the head are read for the values and for the gradient of the hidden states, a chunk of the
# tokens at a time. The gradient of the head has the size of the head. It is computed in chunks of the vocabulary, like
# that of all logits, and without adding to the same number from several threads, so equal inputs give equal bits. For
# 256 tokens with supports of 20, width 1,024 and a vocabulary of 151,936, forward and backward took 2.5 s in float32 on
# one thread of a CPU; those of all logits took 7.0 s.
#
# Legend: N tokens, D hidden width, V vocabulary, K tokens of the largest support, C vocabulary rows of a chunk.


class SupportHead(torch.autograd.Function):
    """Output head, log-softmax over the support, entropy, and centering as one autograd function.

    The gradients have the formulas of `ChunkedHead`, with a softmax over the support. The gradients of the logits of
    all other tokens are 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        support_NK: torch.Tensor,
        centered: Centered | None,
        temperature: float,
        chunk_logits: int,
        with_entropy: bool,
        bfloat16_products: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logits_NK = hidden_ND.new_zeros(support_NK.shape, dtype=dtype)
        for part, rows_nKD in _rows(weight_VD, support_NK, dtype=dtype, chunk_logits=chunk_logits):
            logits_NK[part] = torch.bmm(rows_nKD, hidden_ND[part].to(dtype).unsqueeze(2)).squeeze(2)
        inside_NK = support_NK >= 0
        logits_NK = (logits_NK / temperature).masked_fill_(~inside_NK, -torch.inf)
        # 0 for a token without a support, because it has no finite logit
        normalizer_N = torch.where(inside_NK.any(dim=1), logits_NK.logsumexp(dim=1), 0.0)
        logp_NK = logits_NK - normalizer_N.unsqueeze(1)
        is_target_NK = support_NK == targets_N.unsqueeze(1)
        logprobs_N = torch.where(is_target_NK, logp_NK, 0.0).sum(dim=1)
        entropy_N = -torch.where(inside_NK, logp_NK.exp() * logp_NK, 0.0).sum(dim=1) if with_entropy else None
        centers_NK = centering_N = None
        if centered is not None:
            found_NL, column_NL = _columns_of(centered.ids_NL, support_NK)
            log_p_NL = torch.where(found_NL, logp_NK.gather(1, column_NL), -torch.inf)
            centers_NL = centered.slopes(log_p_NL, possible=inside_NK.sum(dim=1))
            # adds instead of writes: an id that was not found also has a column, to which it must not write 0
            centers_NK = torch.zeros_like(logp_NK).scatter_add_(1, column_NL, torch.where(found_NL, centers_NL, 0.0))
            centering_N = torch.where(centers_NK != 0, centers_NK * logp_NK, 0.0).sum(dim=1)
        ctx.save_for_backward(hidden_ND, weight_VD, support_NK, is_target_NK, logp_NK, entropy_N, centers_NK)
        ctx.temperature, ctx.chunk_logits, ctx.bfloat16_products = temperature, chunk_logits, bfloat16_products
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, centering_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs_N: torch.Tensor | None,
        grad_entropy_N: torch.Tensor | None,
        grad_centering_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, support_NK, is_target_NK, logp_NK, entropy_N, centers_NK = ctx.saved_tensors
        inside_NK, probs_NK = support_NK >= 0, logp_NK.exp()
        # −∂L/∂z · τ with the loss L, the logits z and the temperature τ; it is 0 outside the support
        slope_NK = torch.zeros_like(logp_NK)
        if grad_logprobs_N is not None:
            slope_NK += grad_logprobs_N.unsqueeze(1) * (probs_NK - is_target_NK.to(probs_NK.dtype))
        if grad_entropy_N is not None:
            slope_NK += grad_entropy_N.unsqueeze(1) * probs_NK * (logp_NK + entropy_N.unsqueeze(1))
        if grad_centering_N is not None:
            of_softmax_NK = centers_NK.sum(dim=1, keepdim=True) * probs_NK
            slope_NK += grad_centering_N.unsqueeze(1) * (of_softmax_NK - centers_NK)
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
                bfloat16_products=ctx.bfloat16_products,
            )
            for rows, slope_NC in chunks.buffers():
                is_here_NK, column_NK = located(support_NK, rows)
                slope_NC.zero_().scatter_add_(1, column_NK, torch.where(is_here_NK, slope_NK, 0.0))
                chunks.add_gradients(rows, slope_NC, grad_hidden_ND=None, grad_weight_VD=grad_weight_VD)
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None, None, None


def _columns_of(ids_NL: torch.Tensor, support_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (which ids are in the support of their token, the column of each in the support). The column of an id
    that is not in the support is a valid index without a meaning. Needs memory of the size of the supports, not of
    N · L · K comparisons."""
    sorted_NK, order_NK = support_NK.sort(dim=1)
    place_NL = torch.searchsorted(sorted_NK, ids_NL.contiguous()).clamp(max=support_NK.shape[1] - 1)
    found_NL = (ids_NL >= 0) & (sorted_NK.gather(1, place_NL) == ids_NL)
    return found_NL, order_NK.gather(1, place_NL)


def _rows(
    weight_VD: torch.Tensor, support_NK: torch.Tensor, *, dtype: torch.dtype, chunk_logits: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Iterates over (a slice of tokens, the head's rows [n, K, D] for their supports). At most `chunk_logits` numbers
    are gathered at a time, or those of one token. For padding of a support, the head's first row is gathered."""
    tokens, width = support_NK.shape
    step = max(1, chunk_logits // (width * weight_VD.shape[1]))
    for start in range(0, tokens, step):
        part = slice(start, min(start + step, tokens))
        yield part, weight_VD[support_NK[part].clamp(min=0)].to(dtype)


# Log-probs and entropies of next tokens without their logits: output head, softmax and gradient are computed in
# chunks.
#
# A chunk is a part of the vocabulary, not of the tokens. Each chunk is applied to all tokens, so one product gives the
# chunk's rows of the weight's gradient. With weights and gradients in bfloat16, no float32 tensor of the weight's size
# is needed.
#
# Invariants:
#
# - Values and gradients equal those of log-softmax over full float32 logits, up to rounding.
# - The buffers of a chunk have together at most the bytes of `chunk_logits` logits, in forward and in backward. A chunk
#   has at least `_MIN_CHUNK_ROWS` tokens of the vocabulary, also if these need more.
# - Between forward and backward, only the inputs and two numbers for each token are kept. With centering, also the id
#   and the coefficient of each of the sampler's most likely tokens.
# - Products have float32 accumulators. On a GPU the operands keep their own precision, and the product's `out_dtype` is
#   float32. PyTorch has no such product on a CPU. There, operands are cast to float32, one chunk of the weight at a
#   time, unless the CPU has instructions for bfloat16.
#
# With these instructions, a product of bfloat16 operands takes 0.45 times as long as one of float32 operands, but its
# result is rounded to bfloat16. The error of such a rounding is at most 2⁻⁸ of the rounded number. A number near the
# result is therefore subtracted before the rounding: the target's logit z_t in forward, the logarithm of the softmax's
# denominator in backward. Then the error of a log-prob is about 2⁻⁸ · Σ p · |z − z_t| at most, and not 2⁻⁸ · |z|. For
# logits with a standard deviation of 3 and a mean of 20, it is 1e-3 (root mean square); logits in bfloat16 give 4e-2.
#
# Legend: N tokens, D hidden width, V vocabulary, C vocabulary rows of a chunk.

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""The size of a chunk's buffers by type of device, in float32 numbers: 64 and 256 MiB. benchmarks/chunked_head.py and
benchmarks/gpu/measure.py measure the choice: an H100 needs 1.22 times the time with 2²⁴, and 0.94 times with 2²⁸."""

_MIN_CHUNK_ROWS = 64


class ChunkedHead(torch.autograd.Function):
    """Output head, log-softmax, entropy and centering as one autograd function.

    Let z be the logits divided by the temperature, p their softmax, H its entropy, t the target, and
    C = Σ_v g_v · log p_v the centering with the detached coefficients g. The gradients are

    ∂ log p_t / ∂z = 1_t − p,  ∂H / ∂z = −p · (log p + H),  ∂C / ∂z = g − (Σ_v g_v) · p
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        centered: Centered | None,
        temperature: float,
        chunk_logits: int,
        with_entropy: bool,
        bfloat16_products: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        chunks = Chunks.of(
            hidden_ND,
            weight_VD,
            temperature=temperature,
            chunk_logits=chunk_logits,
            with_spare=with_entropy,
            bfloat16_products=bfloat16_products,
        )
        # log-probs and entropies do not change if the same number is subtracted from all logits of a token
        base_N = chunks.coarse_logits(targets_N) if chunks.rounds else None
        chosen_N = hidden_ND.new_zeros(targets_N.shape, dtype=chunks.dtype)
        # the logits of the sampler's most likely tokens
        listed_NL = chosen_N.new_zeros(0 if centered is None else centered.ids_NL.shape)
        normalizers: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for rows, logits_NC in chunks.logits(base_N):
            inside_N, column_N = located(targets_N, rows)
            chosen_N = torch.where(inside_N, logits_NC.gather(1, column_N.unsqueeze(1)).squeeze(1), chosen_N)
            if centered is not None:
                here_NL, columns_NL = located(centered.ids_NL, rows)
                listed_NL = torch.where(here_NL, logits_NC.gather(1, columns_NL), listed_NL)
            peak_N1 = logits_NC.amax(dim=1, keepdim=True)
            logits_NC.sub_(peak_N1)
            odds_NC = torch.exp(logits_NC, out=logits_NC if chunks.spare is None else shaped(chunks.spare, logits_NC))
            total_N = odds_NC.sum(dim=1)
            normalizers.append(total_N.log() + peak_N1.squeeze(1))
            if with_entropy:
                entropies.append(total_N.log() - odds_NC.mul_(logits_NC).sum(dim=1) / total_N)
        normalizers_KN = torch.stack(normalizers)
        normalizer_N = normalizers_KN.logsumexp(dim=0)
        entropy_N = None
        if with_entropy:
            # the entropy over chunks plus the entropy within a chunk: all terms are at least 0, so nothing cancels
            log_share_KN = normalizers_KN - normalizer_N
            entropy_N = (log_share_KN.exp() * (torch.stack(entropies) - log_share_KN)).sum(dim=0)
        ids_NL = centers_NL = centering_N = None
        if centered is not None:
            ids_NL, log_p_NL = centered.ids_NL, listed_NL - normalizer_N.unsqueeze(1)
            centers_NL = centered.slopes(log_p_NL, possible=len(weight_VD))
            centering_N = (centers_NL * log_p_NL).sum(dim=1)
        saved_N = normalizer_N if base_N is None else normalizer_N + base_N
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, saved_N, entropy_N, ids_NL, centers_NL)
        ctx.temperature, ctx.chunk_logits, ctx.bfloat16_products = temperature, chunk_logits, bfloat16_products
        ctx.set_materialize_grads(False)
        return chosen_N - normalizer_N, entropy_N, centering_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs_N: torch.Tensor | None,
        grad_entropy_N: torch.Tensor | None,
        grad_centering_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N, ids_NL, centers_NL = ctx.saved_tensors
        # if the entropy is only reported, its gradient arrives as zeros, because all results share one stacked tensor
        if grad_entropy_N is not None and not bool(grad_entropy_N.any()):
            grad_entropy_N = None
        chunks = Chunks.of(
            hidden_ND,
            weight_VD,
            temperature=ctx.temperature,
            chunk_logits=ctx.chunk_logits,
            with_spare=grad_entropy_N is not None,
            bfloat16_products=ctx.bfloat16_products,
        )
        grad_N = torch.zeros_like(normalizer_N) if grad_logprobs_N is None else grad_logprobs_N
        of_softmax_N = grad_N  # the derivative of the loss by the log of the softmax's denominator, negated
        if grad_centering_N is not None:
            centers_NL = centers_NL * grad_centering_N.unsqueeze(1)
            of_softmax_N = grad_N + centers_NL.sum(dim=1)
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=chunks.dtype) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for rows, logp_NC in chunks.logits(normalizer_N):
            if chunks.spare is None or grad_entropy_N is None:
                slope_NC = logp_NC.exp_().mul_(of_softmax_N.unsqueeze(1))
            else:
                probs_NC = torch.exp(logp_NC, out=shaped(chunks.spare, logp_NC))
                slope_NC = logp_NC.add_(entropy_N.unsqueeze(1)).mul_(grad_entropy_N.unsqueeze(1))
                slope_NC.add_(of_softmax_N.unsqueeze(1)).mul_(probs_NC)
            inside_N, column_N = located(targets_N, rows)
            slope_NC.scatter_add_(1, column_N.unsqueeze(1), torch.where(inside_N, -grad_N, 0.0).unsqueeze(1))
            if grad_centering_N is not None:
                here_NL, columns_NL = located(ids_NL, rows)
                slope_NC.scatter_add_(1, columns_NL, torch.where(here_NL, -centers_NL, 0.0))
            # slope is −∂L/∂z; the products below contain the sign
            chunks.add_gradients(rows, slope_NC, grad_hidden_ND=grad_hidden_ND, grad_weight_VD=grad_weight_VD)
        grad_hidden = None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden, grad_weight_VD, None, None, None, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The chunks of the vocabulary, and the buffers that all chunks use in turn.

    `hidden_ND` has the precision of the products' operands. `dtype` is the dtype of logits and accumulators.
    """

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    dtype: torch.dtype
    temperature: float
    chunk_rows: int
    buffer: torch.Tensor
    spare: torch.Tensor | None
    """A second buffer like that of the logits, for the caller."""
    narrow: torch.Tensor | None
    """A buffer for a chunk in the precision of the operands. None if this is the precision of the logits."""

    @classmethod
    def of(
        cls,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        *,
        temperature: float,
        chunk_logits: int,
        with_spare: bool,
        bfloat16_products: bool,
    ) -> "Chunks":
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        keeps = hidden_ND.is_cuda or (hidden_ND.dtype == weight_VD.dtype == torch.bfloat16 and bfloat16_products)
        operand_ND = hidden_ND if keeps else hidden_ND.to(dtype)
        is_narrow = operand_ND.dtype != dtype
        logit_bytes = dtype.itemsize * (1 + with_spare) + operand_ND.dtype.itemsize * is_narrow
        # tensor cores are fastest with aligned rows, so the number of rows is a multiple of _MIN_CHUNK_ROWS
        rows = chunk_logits * dtype.itemsize // logit_bytes // max(len(hidden_ND), 1)
        rows = min(max(rows // _MIN_CHUNK_ROWS * _MIN_CHUNK_ROWS, _MIN_CHUNK_ROWS), len(weight_VD))
        size = len(hidden_ND) * rows
        return cls(
            hidden_ND=operand_ND,
            weight_VD=weight_VD,
            dtype=dtype,
            temperature=temperature,
            chunk_rows=rows,
            buffer=operand_ND.new_empty(size, dtype=dtype),
            spare=operand_ND.new_empty(size, dtype=dtype) if with_spare else None,
            narrow=operand_ND.new_empty(size) if is_narrow else None,
        )

    @property
    def rounds(self) -> bool:
        """Whether the results of products are rounded to the precision of the operands."""
        return self.narrow is not None and not self.narrow.is_cuda

    def coarse_logits(self, targets_N: torch.Tensor) -> torch.Tensor:
        """Returns the targets' logits [N] divided by the temperature, computed in the precision of the operands."""
        weight_ND = self.weight_VD[targets_N]
        return weight_ND.mul_(self.hidden_ND).sum(dim=1).div_(self.temperature).to(self.dtype)

    def buffers(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Iterates over (vocabulary rows of a chunk, buffer [N, C] with room for a number of each token and row). All
        chunks get the same memory, whose content has no meaning yet."""
        for start in range(0, len(self.weight_VD), self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, len(self.weight_VD)))
            width = rows.stop - rows.start
            yield rows, self.buffer[: len(self.hidden_ND) * width].view(-1, width)

    def logits(self, base_N: torch.Tensor | None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Iterates over (vocabulary rows, logits [N, C] divided by the temperature, minus `base_N`). All logits are in
        one buffer, which the caller may overwrite. If products are rounded (`rounds`), `base_N` must be given: the
        nearer it is to the logits, the smaller is the rounding error."""
        scale = 1 / self.temperature
        for rows, logits_NC in self.buffers():
            weight_DC = self._weight_CD(rows).t()
            if self.narrow is not None and self.rounds:
                assert base_N is not None
                # near = base rounded to the narrow dtype. The product begins with −near, so that the difference is
                # rounded and not the large logit. base − near is subtracted afterwards.
                near_N1 = base_N.to(self.narrow.dtype).unsqueeze(1)
                narrow_NC = shaped(self.narrow, logits_NC).copy_(-near_N1)
                _multiply(self.hidden_ND, weight_DC, out=narrow_NC, scale=scale, add=True)
                logits_NC.copy_(narrow_NC).sub_(base_N.unsqueeze(1) - near_N1)
            else:
                _multiply(self.hidden_ND, weight_DC, out=logits_NC, scale=scale)
                if base_N is not None:
                    logits_NC.sub_(base_N.unsqueeze(1))
            yield rows, logits_NC

    def add_gradients(
        self,
        rows: slice,
        slope_NC: torch.Tensor,
        *,
        grad_hidden_ND: torch.Tensor | None,
        grad_weight_VD: torch.Tensor | None,
    ) -> None:
        """Adds one chunk's part of the gradient of `hidden`, and writes the chunk's rows of the weight's gradient."""
        scale = -1 / self.temperature
        if self.narrow is not None:
            slope_NC = shaped(self.narrow, slope_NC).copy_(slope_NC)
        if grad_hidden_ND is not None and self.rounds:
            grad_hidden_ND.add_(slope_NC @ self._weight_CD(rows), alpha=scale)
        elif grad_hidden_ND is not None:
            _multiply(slope_NC, self._weight_CD(rows), out=grad_hidden_ND, scale=scale, add=True)
        if grad_weight_VD is not None:
            grad_CD = grad_weight_VD[rows]
            out = grad_CD if grad_CD.dtype == slope_NC.dtype else torch.empty_like(grad_CD, dtype=self.dtype)
            _multiply(slope_NC.t(), self.hidden_ND, out=out, scale=scale)
            if out is not grad_CD:
                grad_CD.copy_(out)

    def _weight_CD(self, rows: slice) -> torch.Tensor:
        return self.weight_VD[rows].to(self.hidden_ND.dtype)


def _has_bfloat16_products() -> bool:
    """Returns whether the CPU has x86 instructions that multiply bfloat16 numbers and add the products in float32
    (AVX-512 or AMX). Returns False on every ARM CPU."""
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


def _multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, scale: float, add: bool = False) -> None:
    """Computes out = scale · left · right (+ out), accumulated in float32 or wider. `out` has the dtype of the operands
    or, on a GPU, a wider one."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=int(add), alpha=scale, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(add), alpha=scale, out=out)


def located(tokens: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (which tokens are among the vocabulary rows `rows`, the column of each token in a chunk of these rows).
    The column of a token outside is a valid index without a meaning."""
    columns = tokens - rows.start
    width = rows.stop - rows.start
    # no boolean indexing: the size of its result would have to be copied from the GPU to the CPU
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


def shaped(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.numel()].view(like.shape)
