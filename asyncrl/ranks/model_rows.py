"""Rows as the model sees them, and the model's results as columns of the rows.

A row is one sequence, or several if an agent's episode has branches (`Branches`). With packed rows, the model sees all
sequences as one, without padding (`asyncrl.ranks.packed`). Otherwise padding is on the right, where causal attention
does not look, so no attention mask is needed.

Legend: B rows, S tokens, T = S − 1 next tokens, R sequences, L tokens of the longest one, D hidden width, N targets, K
numbers of a token in one of `WIDE_FIELDS`, C columns of results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_BRANCH, WIDE_FIELDS
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.ranks.packed import PackedRows

# Rows of several branches: the sequences that a model sees, and its results as columns of the rows.
#
# An agent may go back and continue an earlier part of its conversation in another way. Its episode then has branches.
# One row has them all, one after the other, so an episode is one row for batches, losses and advantages. The column
# `branch_ids` has the number of each token's branch. A branch is a sequence of its own: it begins at position 0, and no
# token sees another branch. Branches begin with the same tokens, so packed rows compute these once
# (`asyncrl.ranks.prefixes`).
#
# Legend: B rows, S tokens of the longest row, T = S − 1, R branches of all rows, L tokens of the longest branch, M
# tokens of all rows, K numbers of a token.

MIN_WIDTH = 2
"""Width of the narrowest batch, in tokens: one token to predict from, and one token to predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The branches of rows. `rows` has them as rows: `input_ids` [R, L], `input_lengths` [R], and the columns
    `WIDE_FIELDS` [R, L, K] that the batch has. Token m of the batch, without padding, is token `places_M[m]` of the
    branch `branches_M[m]`; `inside_BS` marks these tokens."""

    rows: BatchedDataDict
    inside_BS: torch.Tensor
    branches_M: torch.Tensor
    places_M: torch.Tensor

    @classmethod
    def of(cls, batch: BatchedDataDict) -> "Branches":
        """Cuts rows where the number of the branch changes. The column `branch_ids` is NO_BRANCH for padding.

        >>> rows, numbers = torch.tensor([[5, 6, 5, 7], [8, 9, 0, 0]]), torch.tensor([[0, 0, 1, 1], [0, 0, -1, -1]])
        >>> Branches.of(BatchedDataDict(input_ids=rows, branch_ids=numbers)).rows["input_ids"].tolist()
        [[5, 6], [5, 7], [8, 9]]
        """
        branch_ids_BS = batch[BRANCH]
        inside_BS = branch_ids_BS != NO_BRANCH
        begins_BS = inside_BS.clone()
        begins_BS[:, 1:] &= branch_ids_BS[:, 1:] != branch_ids_BS[:, :-1]
        begins_M = begins_BS[inside_BS]
        branches_M = begins_M.cumsum(0) - 1
        places_M = torch.arange(len(begins_M), device=begins_M.device) - begins_M.nonzero().flatten()[branches_M]
        lengths_R = torch.bincount(branches_M)
        shape = (len(lengths_R), max(MIN_WIDTH, int(lengths_R.max())))
        input_ids_RL = batch["input_ids"].new_zeros(shape)
        input_ids_RL[branches_M, places_M] = batch["input_ids"][inside_BS]
        rows = BatchedDataDict(input_ids=input_ids_RL, input_lengths=lengths_R)
        for name, column_BSK in wide_columns(batch).items():
            rows[name] = column_BSK.new_full((*shape, column_BSK.shape[2]), PAD_VALUES.get(name, 0))
            rows[name][branches_M, places_M] = column_BSK[inside_BS]
        return cls(rows=rows, inside_BS=inside_BS, branches_M=branches_M, places_M=places_M)

    def at_tokens(self, values_RL: torch.Tensor) -> torch.Tensor:
        """Returns [B, S, …]: the value of each token of the rows, and 0 for padding. `values_RL` has the values of the
        branches' tokens, [R, L, …]. Differentiable."""
        values_BS = values_RL.new_zeros(*self.inside_BS.shape, *values_RL.shape[2:])
        values_BS[self.inside_BS] = values_RL[self.branches_M, self.places_M]
        return values_BS


def wide_columns(batch: BatchedDataDict, names: Sequence[str] = WIDE_FIELDS) -> dict[str, torch.Tensor]:
    """Returns those of the columns `names` that a batch has."""
    return {name: batch[name] for name in names if name in batch}


def branches_as_rows(batch: BatchedDataDict) -> tuple[BatchedDataDict, Branches | None]:
    """Returns the sequences that the model sees for a batch, with their lengths, and the columns `WIDE_FIELDS` that the
    rows have. If the rows have branches, also returns these, else None."""
    if BRANCH not in batch:
        return batch, None
    branches = Branches.of(batch)
    return branches.rows, branches


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """Rows for one pass. `inputs` are the keyword arguments of the model's forward. `targets` are the tokens that it
    predicts: [R, L − 1], or packed [1, tokens] with the first token of each sequence, whose result has no meaning.
    `wide` has those of the columns `WIDE_FIELDS` that the pass reads, of the targets, [N, K]."""

    inputs: dict[str, Any]
    targets: torch.Tensor
    wide: Mapping[str, torch.Tensor]
    packed: PackedRows | None
    branches: Branches | None

    @classmethod
    def of(cls, data: BatchedDataDict, *, packed: bool, wide: Sequence[str] = ()) -> "ModelRows":
        """Makes the rows for a pass from the columns `input_ids`, if packed `input_lengths`, and the branches if the
        rows have them. `wide` names the columns in `WIDE_FIELDS` that the pass reads if the rows have them. Packed
        tokens are only shared if their entries in these columns are equal."""
        sequences, branches = branches_as_rows(data)
        input_ids_RL, columns = sequences["input_ids"], wide_columns(sequences, wide)
        if not packed:
            return cls(
                inputs={"input_ids": input_ids_RL},
                targets=input_ids_RL[:, 1:],
                wide={name: column_RLK[:, 1:].flatten(0, 1) for name, column_RLK in columns.items()},
                packed=None,
                branches=branches,
            )
        one = PackedRows.of(input_ids_RL, lengths_B=sequences["input_lengths"], wide=columns)
        return cls(
            inputs=one.model_inputs(),
            targets=one.input_ids_1N,
            wide=one.wide,
            packed=one,
            branches=branches,
        )

    def before_targets(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states of the tokens before the targets. `hidden` has the states of all tokens that the
        model sees, [R, L, D] or [1, tokens, D]."""
        return hidden[:, :-1] if self.packed is None else hidden[:, self.packed.before_N]

    def at_next_tokens(self, results: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, C]: entry t of a row is the result of token t + 1. `results` has C numbers for each target.
        An entry is 0 for the first token of a branch, which nothing predicts. If rows are packed or have branches, it
        is also 0 beyond a row's length."""
        results_RTC = results if self.packed is None else self.packed.at_next_tokens(results)
        if self.branches is None:
            return results_RTC
        return self.joined(torch.nn.functional.pad(results_RTC, (0, 0, 1, 0)))[:, 1:]

    def joined(self, results_RL: torch.Tensor) -> torch.Tensor:
        """Returns [B, S, …]: the results of all tokens of the sequences, [R, L, …], as columns of the rows."""
        return results_RL if self.branches is None else self.branches.at_tokens(results_RL)
