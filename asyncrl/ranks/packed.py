"""Puts rows one after another into a single sequence without padding, and takes each row's results out of it again.

Invariants: no token sees another row, and the results equal those of each row alone.

The model gets the boundaries of the rows as `cu_seq_lens_q` and related arguments, which are transformers' names for
flash attention. The attention `ATTENTION`, which is registered here, also reads them. On a GPU in half precision it
uses torch's variable-length kernel. Elsewhere it computes one row after the other, so no mask of N × N is made. Without
boundaries, it is plain causal attention over rows that are padded on the right.

Legend: B rows, S tokens, T = S − 1, N tokens of all rows, H heads, K heads of keys, D head width, C columns.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import ConfigError

ATTENTION = "asyncrl_packed"
"""Name of this attention for `attn_implementation`."""

_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments that some models pass to their attention and that this attention does not implement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The tokens of all rows as `input_ids_1N`. `starts`, int32 [B + 1], has the first position of each row and, at its
    end, N."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    lengths_B: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, input_ids_BS: torch.Tensor, *, lengths_B: torch.Tensor) -> "PackedRows":
        """Packs the first `lengths_B` tokens of every row. An empty row is packed as one padding token."""
        device = input_ids_BS.device
        lengths_B = lengths_B.to(device).clamp(min=1)
        positions_BS = torch.arange(input_ids_BS.shape[1], device=device).expand_as(input_ids_BS)
        inside_BS = positions_BS < lengths_B.unsqueeze(1)
        ends_B = lengths_B.cumsum(0)
        return cls(
            input_ids_1N=input_ids_BS[inside_BS].unsqueeze(0),
            position_ids_1N=positions_BS[inside_BS].unsqueeze(0),
            lengths_B=lengths_B,
            starts=torch.nn.functional.pad(ends_B, (1, 0)).int(),
            longest=int(lengths_B.max()),
        )

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of the model's forward."""
        return {
            "input_ids": self.input_ids_1N,
            "position_ids": self.position_ids_1N,
            "cu_seq_lens_q": self.starts,
            "cu_seq_lens_k": self.starts,
            "max_length_q": self.longest,
            "max_length_k": self.longest,
        }

    def padded(self, values_1NC: torch.Tensor, *, width: int) -> torch.Tensor:
        """Returns [B, T, C]: entry t of a row is the value at token t, which predicts token t + 1. It is 0 beyond the
        row's end. `width` is T.

        `values_1NC` may lack the last token, because no token follows it.
        """
        follows_BT = torch.arange(width, device=values_1NC.device) < (self.lengths_B - 1).unsqueeze(1)
        has_next_N = self.position_ids_1N[0] < (self.lengths_B - 1).repeat_interleave(self.lengths_B)
        chosen_MC = values_1NC[0, has_next_N[: values_1NC.shape[1]]]
        out_BTC = values_1NC.new_zeros(*follows_BT.shape, values_1NC.shape[-1])
        return out_BTC.masked_scatter(follows_BT.unsqueeze(-1), chosen_MC)


def packed_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention [B, S, H, D]. With `cu_seq_lens_q`, B is 1, and attention stays within the rows that it
    bounds. Without it, attention stays within each of the B rows.

    `sliding_window` is the number of tokens that a token sees, including itself. There may be fewer heads of keys and
    values than of queries. Raises ConfigError if the model passes a mask or an argument in `_UNKNOWN`.
    """
    asked = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if attention_mask is not None or asked:
        raise ConfigError(
            f"learner.batching: {type(module).__name__} passes {', '.join(asked) or 'a mask'} to its attention, which "
            "packed rows do not support; set learner.batching to dynamic, which pads rows",
            key="learner.batching",
        )
    if cu_seq_lens_q is None:
        out_BHSD = _causal(query_BHSD, key_BKSD, value_BKSD, scale=scaling, window=sliding_window)
        return out_BHSD.transpose(1, 2).contiguous(), None
    if query_BHSD.is_cuda and query_BHSD.dtype in (torch.bfloat16, torch.float16):
        assert max_length_q is not None
        out_NHD = varlen_attn(
            query_BHSD[0].transpose(0, 1),
            key_BKSD[0].transpose(0, 1),
            value_BKSD[0].transpose(0, 1),
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=query_BHSD.shape[1] != key_BKSD.shape[1],
        )
        assert isinstance(out_NHD, torch.Tensor)
        return out_NHD.unsqueeze(0), None
    bounds = cu_seq_lens_q.tolist()
    rows = [
        _causal(
            query_BHSD[:, :, start:end],
            key_BKSD[:, :, start:end],
            value_BKSD[:, :, start:end],
            scale=scaling,
            window=sliding_window,
        )
        for start, end in pairwise(bounds)
    ]
    return torch.cat(rows, dim=2).transpose(1, 2).contiguous(), None


def _causal(
    query_BHSD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    tokens = query_BHSD.shape[2]
    near_SS = None
    if window is not None and tokens > window:
        distance_SS = torch.arange(tokens, device=query_BHSD.device).unsqueeze(1) - torch.arange(
            tokens, device=query_BHSD.device
        )
        near_SS = (distance_SS >= 0) & (distance_SS < window)
    return scaled_dot_product_attention(
        query_BHSD,
        key_BKSD,
        value_BKSD,
        attn_mask=near_SS,
        is_causal=near_SS is None,
        scale=scale,
        enable_gqa=query_BHSD.shape[1] != key_BKSD.shape[1],
    )


AttentionInterface.register(ATTENTION, packed_attention)
