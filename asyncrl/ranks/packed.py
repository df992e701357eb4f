"""Puts rows one after another into a single sequence without padding, and takes each row's results out of it again.

Rows may share their first tokens. One of these rows, the leader, is in the sequence as a whole. The others are in it
only with their own tokens, which come after the shared ones. So the prompt of a group is computed once, forward and
backward, and its gradient is the sum over the group's rows. `asyncrl.ranks.prefixes` decides which rows share.

Invariants: a token sees a token of another row only if that is one of the first tokens that both rows share. The
results equal those of each row alone.

The model gets the segments of the sequence as the argument `segments`, which transformers passes on to the attention
`ATTENTION` that is registered here. On a GPU in half precision it uses torch's variable-length kernel. Elsewhere it
computes rows of one shape together and one shape after the other, so no mask of N × N is made. Without segments, it is
plain causal attention over rows that are padded on the right.

Legend: B rows, R rows with own tokens, A rows of one shape, S tokens, T = S − 1, P shared tokens of a row, Q = S − P
own tokens of a row, N tokens of the sequence, M tokens of all rows, H heads, K heads of keys, D head width, C columns
of results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from asyncrl.errors import ConfigError
from asyncrl.ranks.prefixes import shared_prefixes

ATTENTION = "asyncrl_packed"
"""Name of this attention for `attn_implementation`."""

_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments that some models pass to their attention and that this attention does not implement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Rows of the sequence with equally many tokens of their own and equally many shared ones.

    `rows` rows have `own` tokens Q each, one row after the other in the sequence, and P = `shared` tokens elsewhere in
    it. With shared tokens, `places_AS` has the positions of all S = P + Q tokens of each row; without, it is None.
    """

    rows: int
    own: int
    shared: int
    places_AS: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The sequence as the attention sees it: all rows with tokens of their own, in the order of the sequence.

    `places_M` has the positions of all tokens of these rows, one row after the other. `query_starts` and `key_starts`,
    int32 [rows + 1], have the first position of each row in the sequence and in `places_M`, and at their ends N and M.
    """

    alike: list[Alike]
    places_M: torch.Tensor
    query_starts: torch.Tensor
    key_starts: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """The rows as one sequence of N tokens. First tokens that several rows share are in the sequence once, and rows of
    one shape are neighbours. Token s of row b is at position `places_BS[b, s]` of the sequence. Beyond the row's end,
    the entry is a valid position without a meaning. `before_N` has the position of the token before each token; for the
    first token of a row, 0. `wide` has the columns `WIDE_FIELDS` of the rows, [N, numbers of a token]."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    before_N: torch.Tensor
    places_BS: torch.Tensor
    lengths_B: torch.Tensor
    segments: Segments
    wide: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        input_ids_BS: torch.Tensor,
        *,
        lengths_B: torch.Tensor,
        wide: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> "PackedRows":
        """Packs the first `lengths_B` tokens of every row, with their entries in the columns `wide`. An empty row is
        packed as one padding token."""
        device = input_ids_BS.device
        lengths_B = lengths_B.to(device).clamp(min=1)
        prefixes = shared_prefixes(input_ids_BS, lengths_B, wide)
        shapes = [(shared, length - shared) for length, shared in zip(lengths_B.tolist(), prefixes.tokens, strict=True)]
        # rows of one shape (shared tokens, own tokens) are neighbours, so that the attention takes them together
        order = sorted((row for row, (_, own) in enumerate(shapes) if own > 0), key=shapes.__getitem__)
        starts = [0] * len(shapes)
        for row, start in zip(order, accumulate((shapes[row][1] for row in order), initial=0), strict=False):
            starts[row] = start
        order_R = torch.tensor(order, device=device)
        leaders_B, shared_B, starts_B = torch.tensor([prefixes.leaders, prefixes.tokens, starts], device=device)
        positions_BS = torch.arange(input_ids_BS.shape[1], device=device).expand_as(input_ids_BS)
        is_shared_BS = positions_BS < shared_B.unsqueeze(1)
        places_BS = positions_BS + torch.where(
            is_shared_BS, starts_B[leaders_B].unsqueeze(1), (starts_B - shared_B).unsqueeze(1)
        )
        inside_BS = positions_BS < lengths_B.unsqueeze(1)
        own_BS = (inside_BS & ~is_shared_BS)[order_R]
        before_BS = torch.nn.functional.pad(places_BS[:, :-1], (1, 0))
        input_ids_N = input_ids_BS[order_R][own_BS]
        return cls(
            input_ids_1N=input_ids_N.unsqueeze(0),
            position_ids_1N=positions_BS[order_R][own_BS].unsqueeze(0),
            before_N=before_BS[order_R][own_BS],
            places_BS=places_BS.clamp(max=len(input_ids_N) - 1),
            lengths_B=lengths_B,
            segments=_segments(
                [shapes[row] for row in order], places_M=places_BS[order_R][inside_BS[order_R]], device=device
            ),
            wide={name: column_BSK[order_R][own_BS] for name, column_BSK in wide.items()},
        )

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of the model's forward."""
        return {"input_ids": self.input_ids_1N, "position_ids": self.position_ids_1N, "segments": self.segments}

    def at_tokens(self, values_1NC: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, C]: entry t of a row is the value at token t. It is 0 for the last token and beyond."""
        return self._padded(values_1NC, self.places_BS[:, :-1])

    def at_next_tokens(self, values_1NC: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, C]: entry t of a row is the value at token t + 1. It is 0 beyond the row's end."""
        return self._padded(values_1NC, self.places_BS[:, 1:])

    def _padded(self, values_1NC: torch.Tensor, places_BT: torch.Tensor) -> torch.Tensor:
        follows_BT = torch.arange(places_BT.shape[1], device=values_1NC.device) < (self.lengths_B - 1).unsqueeze(1)
        return values_1NC[0, places_BT].masked_fill(~follows_BT.unsqueeze(-1), 0)


def _segments(shapes: Sequence[tuple[int, int]], *, places_M: torch.Tensor, device: torch.device) -> Segments:
    """Returns the segments of sorted rows with these numbers of (shared, own) tokens."""
    alike, start = [], 0
    for (shared, own), group in groupby(shapes):
        rows = len(list(group))
        end = start + rows * (shared + own)
        places_AS = places_M[start:end].view(rows, -1) if shared > 0 else None
        alike.append(Alike(rows=rows, own=own, shared=shared, places_AS=places_AS))
        start = end
    ends = [[0, *accumulate(own for _, own in shapes)], [0, *accumulate(map(sum, shapes))]]
    query_starts, key_starts = torch.tensor(ends, dtype=torch.int32, device=device)
    return Segments(alike=alike, places_M=places_M, query_starts=query_starts, key_starts=key_starts)


def packed_attention(
    module: torch.nn.Module,
    query_BHSD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention [B, S, H, D]. With `segments`, B is 1, and attention stays within the rows that they
    describe. Without them, attention stays within each of the B rows.

    `sliding_window` is the number of tokens that a token sees, including itself. There may be fewer heads of keys and
    values than of queries. Raises ConfigError if the model passes a mask or an argument in `_UNKNOWN`.
    """
    asked = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if attention_mask is not None or asked:
        raise ConfigError(
            f"learner.batching: {type(module).__name__} passes {', '.join(asked) or 'a mask'} to its attention, which "
            "packed rows do not support; set learner.batching to dynamic, which pads rows"
        )
    if segments is None:
        out_BHSD = _causal(query_BHSD, key_BKSD, value_BKSD, scale=scaling, window=sliding_window)
        return out_BHSD.transpose(1, 2).contiguous(), None
    if query_BHSD.is_cuda and query_BHSD.dtype in (torch.bfloat16, torch.float16):
        out_NHD = _by_kernel(query_BHSD[0], key_BKSD[0], value_BKSD[0], segments, scale=scaling, window=sliding_window)
    else:
        out_NHD = _by_shape(query_BHSD[0], key_BKSD[0], value_BKSD[0], segments, scale=scaling, window=sliding_window)
    return out_NHD.unsqueeze(0), None


def _by_kernel(
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KND: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Computes the attention of all rows [N, H, D] with one kernel, which aligns the last query of a row with its last
    key."""
    keys_MKD, values_MKD = key_KND.transpose(0, 1), value_KND.transpose(0, 1)
    if any(part.shared for part in segments.alike):
        keys_MKD, values_MKD = keys_MKD[segments.places_M], values_MKD[segments.places_M]
    # passed only if needed, because torch 2.11, with which benchmarks/gpu also runs, does not know this argument
    grouped: dict[str, Any] = {} if len(query_HND) == len(key_KND) else {"enable_gqa": True}
    out_NHD = varlen_attn(
        query_HND.transpose(0, 1),
        keys_MKD,
        values_MKD,
        segments.query_starts,
        segments.key_starts,
        max(part.own for part in segments.alike),
        max(part.shared + part.own for part in segments.alike),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out_NHD, torch.Tensor)
    return out_NHD


def _by_shape(
    query_HND: torch.Tensor,
    key_KND: torch.Tensor,
    value_KND: torch.Tensor,
    segments: Segments,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Computes the attention of all rows [N, H, D]: rows of one shape (P shared and Q own tokens) together, and one
    shape after the other.

    A row has Q queries and P + Q keys. Fewer queries than keys need a mask, for which all Q · (P + Q) pairs are
    computed. For Q above P it is faster to compute the queries of the shared tokens again, because a causal kernel
    skips half of (P + Q)² pairs: 2.6 times as fast for P = 7 and Q = 200.
    """
    # split and not slices: the gradient of each slice is a tensor of all N tokens, 22 times slower for 384 rows
    tokens = [part.rows * part.own for part in segments.alike]
    found = []
    for part, *own in zip(
        segments.alike,
        *(heads_HND.split_with_sizes(tokens, dim=1) for heads_HND in (query_HND, key_KND, value_KND)),
        strict=True,
    ):
        query_AHQD, key_AKSD, value_AKSD = (one_HND.unflatten(1, (part.rows, -1)).transpose(0, 1) for one_HND in own)
        if part.places_AS is not None:
            key_AKSD, value_AKSD = _rows(key_KND, part.places_AS), _rows(value_KND, part.places_AS)
            if part.own > part.shared:
                query_AHQD = _rows(query_HND, part.places_AS)
        out_AHQD = _causal(query_AHQD, key_AKSD, value_AKSD, scale=scale, window=window)
        found.append(out_AHQD[:, :, -part.own :].transpose(1, 2).flatten(0, 1))
    return torch.cat(found)


def _rows(heads_HND: torch.Tensor, places_AS: torch.Tensor) -> torch.Tensor:
    """Returns the queries, keys or values at these positions of the sequence: [A, H, S, D] for A rows of S tokens."""
    return heads_HND.transpose(0, 1)[places_AS].transpose(1, 2)


def _causal(
    query_BHQD: torch.Tensor,
    key_BKSD: torch.Tensor,
    value_BKSD: torch.Tensor,
    *,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """Computes causal attention of the last Q tokens of each row to all S tokens of the row."""
    queries, tokens = query_BHQD.shape[2], key_BKSD.shape[2]
    seen_QS = None
    if queries < tokens or (window is not None and tokens > window):
        # is_causal cannot be used for fewer queries than keys: it would take the queries for the row's first tokens
        places_S = torch.arange(tokens, device=query_BHQD.device)
        distance_QS = places_S[tokens - queries :].unsqueeze(1) - places_S
        seen_QS = (distance_QS >= 0) & (distance_QS < (window or tokens))
    return scaled_dot_product_attention(
        query_BHQD,
        key_BKSD,
        value_BKSD,
        attn_mask=seen_QS,
        is_causal=seen_QS is None,
        scale=scale,
        enable_gqa=query_BHQD.shape[1] != key_BKSD.shape[1],
    )


AttentionInterface.register(ATTENTION, packed_attention)
