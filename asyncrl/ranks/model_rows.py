"""Rows as the model sees them, and the model's results as columns of the rows.

Each branch of a row is a sequence of its own (`asyncrl.ranks.branches`). Packed, the model sees all sequences as one,
without padding (`asyncrl.ranks.packed`). Otherwise padding is on the right, where causal attention does not look, so no
attention mask is needed.

Legend: B rows, S tokens, T = S − 1 next tokens, R sequences, L tokens of the longest one, D hidden width, K tokens of a
support, C columns of results.
"""

from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import SUPPORT
from asyncrl.ranks.branches import Branches, branches_as_rows
from asyncrl.ranks.packed import PackedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """Rows for one pass. `inputs` are the keyword arguments of the model's forward. `targets` are the tokens that it
    predicts: [R, L − 1], or packed [1, tokens] with the first token of each sequence, whose result has no meaning.
    `support_NK` has the support of each target if the rows have supports."""

    inputs: dict[str, Any]
    targets: torch.Tensor
    support_NK: torch.Tensor | None
    packed: PackedRows | None
    branches: Branches | None

    @classmethod
    def of(cls, data: BatchedDataDict, *, packed: bool, with_supports: bool = False) -> "ModelRows":
        """Takes the columns `input_ids`, if packed `input_lengths`, and the branches if the rows have them.
        `with_supports` also takes the supports if the rows have them."""
        sequences, branches = branches_as_rows(data)
        input_ids_RL, support_RLK = sequences["input_ids"], sequences.get(SUPPORT) if with_supports else None
        if not packed:
            return cls(
                inputs={"input_ids": input_ids_RL},
                targets=input_ids_RL[:, 1:],
                support_NK=None if support_RLK is None else support_RLK[:, 1:].flatten(0, 1),
                packed=None,
                branches=branches,
            )
        one = PackedRows.of(input_ids_RL, lengths_B=sequences["input_lengths"], support_BSC=support_RLK)
        return cls(
            inputs=one.model_inputs(),
            targets=one.input_ids_1N,
            support_NK=one.support_NC,
            packed=one,
            branches=branches,
        )

    def before_targets(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states of the tokens before the targets. `hidden` are those of all tokens that the model
        sees, [R, L, D] or [1, tokens, D]."""
        return hidden[:, :-1] if self.packed is None else hidden[:, self.packed.before_N]

    def at_next_tokens(self, results: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, C]: entry t of a row is the result of token t + 1. `results` are those of the targets. It is 0
        for the first token of a branch, which nothing predicts, and, if packed, beyond a row's length."""
        results_RTC = results if self.packed is None else self.packed.at_next_tokens(results)
        if self.branches is None:
            return results_RTC
        return self.joined(torch.nn.functional.pad(results_RTC, (0, 0, 1, 0)))[:, 1:]

    def joined(self, results_RL: torch.Tensor) -> torch.Tensor:
        """Returns [B, S, …]: the results of all tokens of the sequences, [R, L, …], as columns of the rows."""
        return results_RL if self.branches is None else self.branches.at_tokens(results_RL)
