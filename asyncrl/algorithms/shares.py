"""Coefficients of tokens that depend on counts over a whole optimizer update. The loss sees one micro-batch at a time
and cannot compute them.

This module counts the trained tokens of an update over all micro-batches and ranks. From the counts and a column of the
rows it makes another column:

| column of the rows | column that the loss reads | value |
|---|---|---|
| `group_ids`, equal for the rows of one prompt | `prompt_share` | 1 / (P · T_g) |
| `rewards` | `positive_share` | 1 / T₊ where the reward is above 0, else 0 |

P: number of prompt groups with a trained token. T_g: trained tokens of the row's group. T₊: trained tokens of rows with
a reward above 0. A token counts with its weight: token mask times sample mask.

`Policy.train` adds these columns. If your own loop calls an `ObjectiveLoss`, call `with_shares` on a whole global batch
first, and split the batch into micro-batches afterwards.

Legend: B rows, S tokens. Both input columns are [B], or [B, S] if a row packs several sequences. Each output column has
the shape of its input column.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict

SHARES: Mapping[str, str] = {"group_ids": "prompt_share", "rewards": "positive_share"}
"""Name of the input column → name of the column that is made from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Weighted numbers of trained tokens: by prompt group, and of all rows with a positive reward. `+` adds the counts
    of two micro-batches or ranks."""

    by_group: Mapping[int, float] = field(default_factory=dict)
    positive: float = 0.0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        groups = {*self.by_group, *other.by_group}
        by_group = {group: self.by_group.get(group, 0.0) + other.by_group.get(group, 0.0) for group in groups}
        return TokenCounts(by_group=by_group, positive=self.positive + other.positive)


def count_tokens(data: BatchedDataDict) -> TokenCounts:
    """Returns the counts of one batch: by group if it has `group_ids`, and of positive rows if it has `rewards`. The
    first token of a row is never trained, because it has no prefix; it does not count."""
    weight_BS = data["token_mask"].double() * data["sample_mask"].double().unsqueeze(1)
    weight_BS[:, 0] = 0.0
    mask_BS = weight_BS > 0
    by_group: dict[int, float] = {}
    if "group_ids" in data:
        ids, index = torch.unique(_by_token(data["group_ids"], mask_BS)[mask_BS], return_inverse=True)
        tokens = weight_BS.new_zeros(len(ids)).index_add(0, index, weight_BS[mask_BS])
        by_group = dict(zip(ids.tolist(), tokens.tolist(), strict=True))
    positive = 0.0
    if "rewards" in data:
        positive = float(weight_BS[mask_BS & (_by_token(data["rewards"], mask_BS) > 0)].sum())
    return TokenCounts(by_group=by_group, positive=positive)


def add_shares(data: BatchedDataDict, counts: TokenCounts) -> None:
    """Adds to a micro-batch, float32, the columns of `SHARES` whose input columns it has. `counts` are the counts of
    its whole update."""
    if "group_ids" in data:
        groups = sum(tokens > 0 for tokens in counts.by_group.values())
        ids, index = torch.unique(data["group_ids"], return_inverse=True)
        # a group without a trained token gets coefficient 0, because none of its tokens is in the loss
        tokens = [counts.by_group.get(group, 0) for group in ids.tolist()]
        shares = [1 / (groups * count) if count else 0.0 for count in tokens]
        data["prompt_share"] = torch.tensor(shares, device=ids.device)[index]
    if "rewards" in data:
        data["positive_share"] = (data["rewards"] > 0).float() / (counts.positive or 1.0)


def with_shares(data: BatchedDataDict) -> BatchedDataDict:
    """Returns the batch with the columns of `SHARES` added whose input columns it has. `data` must be a whole global
    batch: all rows of one optimizer update."""
    data = copy.copy(data)
    add_shares(data, count_tokens(data))
    return data


def _by_token(column: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
    return column if column.ndim == 2 else column.unsqueeze(1).expand_as(mask_BS)
