"""Log-probs and entropies of next tokens without their logits: output head, softmax and gradient are computed in
chunks.

A chunk is a part of the vocabulary, not of the tokens. Each chunk is applied to all tokens, so one product gives the
chunk's rows of the weight's gradient. With weights and gradients in bfloat16, no float32 tensor of the weight's size is
needed.

Invariants:

- Values and gradients equal those of log-softmax over full float32 logits, up to rounding.
- The buffers of a chunk have together at most the bytes of `chunk_logits` float32 numbers, in forward and in backward.
- Between forward and backward, only the inputs and two numbers for each token are kept.
- Products have float32 accumulators. On a GPU the operands keep their own precision, and the product's `out_dtype` is
  float32. PyTorch has no such product on a CPU. There, operands are cast to float32, one chunk of the weight at a time,
  unless the CPU has instructions for bfloat16.

With these instructions, a product of bfloat16 operands takes 0.45 times as long as one of float32 operands, but its
result is rounded to bfloat16. The error of such a rounding is at most 2⁻⁸ of the rounded number. A number near the
result is therefore subtracted before the rounding: the target's logit z_t in forward, the logarithm of the softmax's
denominator in backward. Then the error of a log-prob is about 2⁻⁸ · Σ p · |z − z_t| at most, and not 2⁻⁸ · |z|. For
logits with a standard deviation of 3 and a mean of 20, it is 1e-3 (root mean square); logits in bfloat16 give 4e-2.

Legend: N tokens, D hidden width, V vocabulary, C vocabulary rows of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""The size of a chunk's buffers by type of device, in float32 numbers: 64 and 256 MiB. benchmarks/chunked_head.py and
benchmarks/gpu/measure.py measure the choice: an H100 needs 1.22 times the time with 2²⁴, and 0.94 times with 2²⁸."""

_MIN_CHUNK_ROWS = 64


class ChunkedHead(torch.autograd.Function):
    """Output head, log-softmax and entropy as one autograd function.

    Let z be the logits divided by the temperature, p their softmax, H its entropy, and t the target. The gradients
    are

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
        chunks = Chunks.of(
            hidden_ND, weight_VD, temperature=temperature, chunk_logits=chunk_logits, with_spare=with_entropy
        )
        # log-probs and entropies do not change if the same number is subtracted from all logits of a token
        base_N = chunks.coarse_logits(targets_N) if chunks.rounds else None
        chosen_N = hidden_ND.new_zeros(targets_N.shape, dtype=chunks.dtype)
        normalizers: list[torch.Tensor] = []
        entropies: list[torch.Tensor] = []
        for rows, logits_NC in chunks.logits(base_N):
            inside_N, column_N = located(targets_N, rows)
            chosen_N = torch.where(inside_N, logits_NC.gather(1, column_N.unsqueeze(1)).squeeze(1), chosen_N)
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
        saved_N = normalizer_N if base_N is None else normalizer_N + base_N
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, saved_N, entropy_N)
        ctx.temperature, ctx.chunk_logits = temperature, chunk_logits
        ctx.set_materialize_grads(False)
        return chosen_N - normalizer_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        # if the entropy is only reported, its gradient arrives as zeros, because both results share one stacked tensor
        if grad_entropy_N is not None and not bool(grad_entropy_N.any()):
            grad_entropy_N = None
        chunks = Chunks.of(
            hidden_ND,
            weight_VD,
            temperature=ctx.temperature,
            chunk_logits=ctx.chunk_logits,
            with_spare=grad_entropy_N is not None,
        )
        grad_N = torch.zeros_like(normalizer_N) if grad_logprobs_N is None else grad_logprobs_N
        grad_hidden_ND = torch.zeros_like(hidden_ND, dtype=chunks.dtype) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.empty_like(weight_VD) if ctx.needs_input_grad[1] else None
        for rows, logp_NC in chunks.logits(normalizer_N):
            if chunks.spare is None or grad_entropy_N is None:
                slope_NC = logp_NC.exp_().mul_(grad_N.unsqueeze(1))
            else:
                probs_NC = torch.exp(logp_NC, out=shaped(chunks.spare, logp_NC))
                slope_NC = logp_NC.add_(entropy_N.unsqueeze(1)).mul_(grad_entropy_N.unsqueeze(1))
                slope_NC.add_(grad_N.unsqueeze(1)).mul_(probs_NC)
            inside_N, column_N = located(targets_N, rows)
            slope_NC.scatter_add_(1, column_N.unsqueeze(1), torch.where(inside_N, -grad_N, 0.0).unsqueeze(1))
            # slope is −∂L/∂z; the products below contain the sign
            chunks.add_gradients(rows, slope_NC, grad_hidden_ND=grad_hidden_ND, grad_weight_VD=grad_weight_VD)
        grad_hidden = None if grad_hidden_ND is None else grad_hidden_ND.to(hidden_ND.dtype)
        return grad_hidden, grad_weight_VD, None, None, None, None


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
    ) -> "Chunks":
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        keeps = hidden_ND.is_cuda or (hidden_ND.dtype == weight_VD.dtype == torch.bfloat16 and _has_bfloat16_products())
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
        """Returns the targets' logits [N] divided by the temperature, in the precision of the operands."""
        weight_ND = self.weight_VD[targets_N]
        return weight_ND.mul_(self.hidden_ND).sum(dim=1).div_(self.temperature).to(self.dtype)

    def buffers(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Iterates over (vocabulary rows, buffer [N, C] for a number of each token and row). It is one buffer, whose
        content has no meaning yet."""
        for start in range(0, len(self.weight_VD), self.chunk_rows):
            rows = slice(start, min(start + self.chunk_rows, len(self.weight_VD)))
            width = rows.stop - rows.start
            yield rows, self.buffer[: len(self.hidden_ND) * width].view(-1, width)

    def logits(self, base_N: torch.Tensor | None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Iterates over (vocabulary rows, logits [N, C] divided by the temperature, minus `base_N`). All logits are in
        one buffer, which the caller may overwrite. If results are rounded, a base near the logits is needed."""
        scale = 1 / self.temperature
        for rows, logits_NC in self.buffers():
            weight_DC = self._weight_CD(rows).t()
            if self.narrow is not None and self.rounds:
                assert base_N is not None
                # the rounded base is subtracted inside the product, before the rounding, and its remainder afterwards
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
    """Returns whether the CPU has instructions that multiply bfloat16 numbers and add the products in float32."""
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
    """Returns which tokens are among the vocabulary rows `rows`, and the column of each token. The column of a token
    outside is a valid index without a meaning."""
    columns = tokens - rows.start
    width = rows.stop - rows.start
    # no boolean indexing: the size of its result would have to be copied from the GPU to the CPU
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


def shaped(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.numel()].view(like.shape)
