"""Log-probs and entropies of next tokens without their logits: the output head, its softmax and its gradient in chunks.

Chunks run over the vocabulary, not over the tokens: each one then meets every token, so that its rows of the weight's
gradient come out of a single product, and nothing of the weight's size is held in float32 beside weights and gradients
in bfloat16.

What must hold: the numbers and the gradients are those of log-softmax over full float32 logits, to rounding; never more
than `chunk_logits` logits exist at once, in forward or backward; between the two only the inputs and two numbers a
token are kept. Products have float32 accumulators and float32 results: on a GPU the operands stay in their own
precision and the product's `out_dtype` is float32; CPUs have no such product, so operands are cast there, a chunk of
the weight at a time.

Legend: B rows, S tokens, T = S − 1 next tokens, N = B · T, D hidden width, V vocabulary, C vocabulary rows of a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.policy.packed import PackedRows

CHUNK_LOGITS = 2**24
"""64 MiB of float32. Measured by benchmarks/chunked_head.py."""

_MIN_CHUNK_ROWS = 64
_LOGIT_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def model_logprobs(
    model: PreTrainedModel,
    input_ids_BS: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    packed_lengths_B: torch.Tensor | None = None,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log-probs [B, T] of the tokens that follow and, if asked for, the entropies [B, T] they were drawn at; float32.

    Both of softmax(logits / temperature), both differentiable. The model's own forward runs, hooks of FSDP included;
    its head returns these numbers instead of logits for the one call. No attention mask: padding is on the right,
    where causal attention never looks. With `packed_lengths_B` the model, whose attention must be
    `asyncrl.policy.packed`'s, sees no padding at all, and what lies beyond a row's length is 0. ConfigError for a model
    whose logits are not a plain product with the head.
    """
    head = _plain_head(model)
    packed = None if packed_lengths_B is None else PackedRows.of(input_ids_BS, lengths_B=packed_lengths_B)
    model_inputs = {"input_ids": input_ids_BS} if packed is None else packed.model_inputs()
    tokens: torch.Tensor = model_inputs["input_ids"]
    made: list[torch.Tensor] = []

    def forward(hidden_BSD: torch.Tensor) -> torch.Tensor:
        if hidden_BSD.shape[:2] != tokens.shape:
            raise ConfigError(
                f"model.path: the output head of {type(model).__name__} gets hidden states of shape "
                f"{tuple(hidden_BSD.shape)} for tokens of shape {tuple(tokens.shape)}; "
                f"name a model whose head reads every position",
                key="model.path",
            )
        columns = chunked_logprobs(
            hidden_BSD[:, :-1].flatten(0, 1),
            head.weight,
            targets_N=tokens[:, 1:].flatten(),
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_logits=chunk_logits,
        )
        stacked = torch.stack([column for column in columns if column is not None], dim=-1)
        made.append(stacked.view(*tokens[:, 1:].shape, stacked.shape[-1]))
        return made[-1]

    with _forward_replaced(head, forward):
        returned = model(**model_inputs, use_cache=False).logits
    if len(made) != 1 or returned is not made[0]:
        raise ConfigError(
            f"model.path: {type(model).__name__} changes its logits after the output head, and log-probs taken from "
            f"the head would be others; name a model that does not",
            key="model.path",
        )
    if packed is not None:
        returned = packed.padded(returned, width=input_ids_BS.shape[1] - 1)
    logprobs_BT, *entropy_BT = returned.unbind(-1)
    return logprobs_BT, entropy_BT[0] if entropy_BT else None


def chunked_logprobs(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden · weightᵀ / temperature) at the targets [N], and the entropies [N] if asked for.

    float32 (float64 for float64 inputs), differentiable once in hidden and weight; gradients in the inputs' dtypes.
    """
    logprobs_N, entropy_N = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N, temperature, chunk_logits, with_entropy
    )
    return logprobs_N, entropy_N


class _ChunkedHead(torch.autograd.Function):
    """With z the logits over the temperature, p their softmax, H its entropy and t the target:

    ∂ log p_t / ∂z = 1_t − p,  ∂H / ∂z = −p · (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        chunk_logits: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # entropies need logits and probabilities side by side
        chunks = _Chunks.of(hidden_ND, weight_VD, temperature=temperature, chunk_logits=chunk_logits >> with_entropy)
        chosen_N = hidden_ND.new_zeros(targets_N.shape, dtype=chunks.dtype)
        normalizers: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        spare = chunks.scratch() if with_entropy else None
        for rows, logits_NC in chunks:
            inside_N, column_N1 = _located(targets_N, rows)
            chosen_N = torch.where(inside_N, logits_NC.gather(1, column_N1).squeeze(1), chosen_N)
            peak_N1 = logits_NC.amax(dim=1, keepdim=True)
            logits_NC.sub_(peak_N1)
            odds_NC = torch.exp(logits_NC, out=logits_NC if spare is None else _shaped(spare, logits_NC))
            total_N = odds_NC.sum(dim=1)
            normalizers.append(total_N.log() + peak_N1.squeeze(1))
            if with_entropy:
                entropies.append(total_N.log() - odds_NC.mul_(logits_NC).sum(dim=1) / total_N)
        normalizers_KN = torch.stack(normalizers)
        normalizer_N = normalizers_KN.logsumexp(dim=0)
        entropy_N = None
        if with_entropy:
            # which chunk a token is in, and then which token of it: a sum of terms that are never negative
            log_share_KN = normalizers_KN - normalizer_N
            entropy_N = (log_share_KN.exp() * (torch.stack(entropies) - log_share_KN)).sum(dim=0)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        ctx.set_materialize_grads(False)
        return chosen_N - normalizer_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        # an entropy that is only reported comes back with zeros when both numbers share one tensor
        if grad_entropy_N is not None and not bool(grad_entropy_N.any()):
            grad_entropy_N = None
        chunk_logits = ctx.chunk_logits >> (grad_entropy_N is not None)
        chunks = _Chunks.of(hidden_ND, weight_VD, temperature=ctx.temperature, chunk_logits=chunk_logits)
        grad_N = torch.zeros_like(normalizer_N) if grad_logprobs_N is None else grad_logprobs_N
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=chunks.dtype) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        spare = None if grad_entropy_N is None else chunks.scratch()
        for rows, logits_NC in chunks:
            logits_NC.sub_(normalizer_N.unsqueeze(1))
            if spare is None or grad_entropy_N is None:
                slope_NC = logits_NC.exp_().mul_(grad_N.unsqueeze(1))
            else:
                probs_NC = torch.exp(logits_NC, out=_shaped(spare, logits_NC))
                slope_NC = logits_NC.add_(entropy_N.unsqueeze(1)).mul_(grad_entropy_N.unsqueeze(1))
                slope_NC.add_(grad_N.unsqueeze(1)).mul_(probs_NC)
            inside_N, column_N1 = _located(targets_N, rows)
            slope_NC.scatter_add_(1, column_N1, torch.where(inside_N, -grad_N, 0.0).unsqueeze(1))
            # slope is −∂L/∂z: the sign goes into the products
            chunks.add_gradients(
                rows, slope_NC.to(chunks.hidden_ND.dtype), grad_hidden_ND=grad_hidden_ND, grad_weight_VD=grad_weight_VD
            )
        grad_hidden = None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden, grad_weight_VD, None, None, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """Iterates over (vocabulary rows, logits [N, C] over the temperature), all in one buffer, free to be overwritten.

    `dtype` is that of logits and accumulators; `hidden_ND` is in the precision in which products take their operands.
    """

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    dtype: torch.dtype
    temperature: float
    chunk_rows: int

    @classmethod
    def of(
        cls, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, *, temperature: float, chunk_logits: int
    ) -> "_Chunks":
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        # tensor cores want aligned rows
        rows = chunk_logits // max(len(hidden_ND), 1) // _MIN_CHUNK_ROWS * _MIN_CHUNK_ROWS
        return cls(
            hidden_ND=hidden_ND if hidden_ND.is_cuda else hidden_ND.to(dtype),
            weight_VD=weight_VD,
            dtype=dtype,
            temperature=temperature,
            chunk_rows=min(max(rows, _MIN_CHUNK_ROWS), len(weight_VD)),
        )

    def scratch(self) -> torch.Tensor:
        return self.hidden_ND.new_empty(len(self.hidden_ND) * self.chunk_rows, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor]]:
        buffer = self.scratch()
        for start in range(0, len(self.weight_VD), self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, len(self.weight_VD)))
            width = rows.stop - rows.start
            logits_NC = buffer[: len(self.hidden_ND) * width].view(-1, width)
            _multiply(self.hidden_ND, self._weight_CD(rows).t(), out=logits_NC, scale=1 / self.temperature)
            yield rows, logits_NC

    def add_gradients(
        self,
        rows: slice,
        slope_NC: torch.Tensor,
        *,
        grad_hidden_ND: torch.Tensor | None,
        grad_weight_VD: torch.Tensor | None,
    ) -> None:
        """Takes one chunk's −∂L/∂z to the inputs: adds to the one, writes the rows of the other."""
        scale = -1 / self.temperature
        if grad_hidden_ND is not None:
            _multiply(slope_NC, self._weight_CD(rows), out=grad_hidden_ND, scale=scale, add=True)
        if grad_weight_VD is not None:
            grad_CD = grad_weight_VD[rows]
            out = grad_CD if grad_CD.dtype == slope_NC.dtype else torch.empty_like(grad_CD, dtype=self.dtype)
            _multiply(slope_NC.t(), self.hidden_ND, out=out, scale=scale)
            if out is not grad_CD:
                grad_CD.copy_(out)

    def _weight_CD(self, rows: slice) -> torch.Tensor:
        return self.weight_VD[rows].to(self.hidden_ND.dtype)


def _multiply(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor, scale: float, add: bool = False) -> None:
    """out = scale · left · right (+ out), accumulated in float32 or better."""
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=int(add), alpha=scale, out=out)
    else:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(add), alpha=scale, out=out)


def _located(targets_N: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are among `rows`, and the column [N, 1] of each; that of another is valid and meaningless."""
    column_N = targets_N - rows.start
    width = rows.stop - rows.start
    # no selection by mask: its size would have to be known to the CPU
    return (column_N >= 0) & (column_N < width), column_N.clamp(0, width - 1).unsqueeze(1)


def _shaped(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.numel()].view(like.shape)


def _plain_head(model: PreTrainedModel) -> torch.nn.Linear:
    """The model's output head, if its product with the hidden states is all that logits are."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        found = "with a bias" if isinstance(head, torch.nn.Linear) else f"of type {type(head).__name__}"
        raise ConfigError(
            f"model.path: {type(model).__name__} has an output head {found}; log-probs are computed for "
            f"torch.nn.Linear without bias only",
            key="model.path",
        )
    config = model.config.get_text_config()
    for key in _LOGIT_KEYS:
        value = getattr(config, key, None)
        if value is not None and value != 1.0:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {key} = {value} in its config, which changes logits after the "
                f"output head, and log-probs taken from the head would be others; name a model without it",
                key="model.path",
            )
    return head


@contextmanager
def _forward_replaced(module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hooks of the module still run, and the class stays as it is. What other libraries put there comes back."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
