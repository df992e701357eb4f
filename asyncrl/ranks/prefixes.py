"""Finds rows that begin with the same tokens, such as the rows of a group, so that a model computes these tokens once.

Causal attention gives equal hidden states to equal tokens at equal positions. So the tokens themselves decide what rows
share, and no hint about groups is needed. Rows share with their neighbours only: a run is a number of consecutive rows,
and its first row, the leader, computes the prefix for all of them.

Shared tokens must also have the same entries in the columns on which the results for a token depend: the support
(`generator.top_k`), and for an objective with centering the most likely tokens (`generator.logprobs`). These entries
differ where weights of different versions have sampled the tokens.

Invariants: a leader shares nothing with an earlier row, and no row shares more tokens than it has.

Legend: B rows, S tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

_SMALLEST_SHARE = 1 / 8
"""A row shares its first tokens only if they are at least this part of the row: the attention must gather the shared
tokens of each row, which takes time. Sharing an eighth of the row made a model of width 64 on a CPU 0.89 to 0.94 times
as fast, and a model of width 256 1.05 times as fast. Sharing a third of the row made the model of width 64 1.05 to 1.6
times as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Row b has its first `tokens[b]` tokens in common with row `leaders[b]`, which computes them. For a row that
    computes all of its tokens, such as a leader, `tokens[b]` is 0 and `leaders[b]` is b."""

    leaders: list[int]
    tokens: list[int]


def shared_prefixes(
    input_ids_BS: torch.Tensor, lengths_B: torch.Tensor, wide: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> SharedPrefixes:
    """Cuts the rows into runs of neighbours that share their first tokens, so that sharing saves as many tokens as
    possible. A row that would share less than an eighth of its tokens computes all of them.

    `lengths_B` has the number of tokens of each row; later tokens are padding. `wide` has those of the columns
    `WIDE_FIELDS` that the pass reads. Waits for the device, because it needs two numbers of each row on the host.

    >>> rows = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 9, 9, 9]])
    >>> shared_prefixes(rows, torch.tensor([4, 4, 4]))
    SharedPrefixes(leaders=[0, 0, 2], tokens=[0, 3, 0])
    """
    shorter_B = torch.minimum(lengths_B[1:], lengths_B[:-1])
    inside_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device) < shorter_B.unsqueeze(1)
    equal_BS = inside_BS & (input_ids_BS[1:] == input_ids_BS[:-1])
    for column_BSK in wide.values():
        equal_BS &= (column_BSK[1:] == column_BSK[:-1]).all(dim=-1)
    found = _best_runs(equal_BS.cumprod(1).sum(1).tolist())
    for row, length in enumerate(lengths_B.tolist()):
        if found.tokens[row] < _SMALLEST_SHARE * length:
            found.leaders[row], found.tokens[row] = row, 0
    return found


def _best_runs(common: list[int]) -> SharedPrefixes:
    """Cuts rows into the runs of neighbours whose sharing saves the most tokens. `common[b]` is the number of first
    tokens that row b and row b + 1 have in common.

    The rows of a run share the smallest `common` between them. The first row, the leader, computes these tokens, and
    each other row saves them. The best cut of the first rows is found for each number of rows in turn, from the best
    cuts of fewer rows.
    """
    rows = len(common) + 1
    saved = np.zeros(rows + 1, dtype=np.int64)  # saved[n]: the most tokens that sharing saves in the first n rows
    best_leader = np.zeros(rows + 1, dtype=np.int64)
    best_prefix = np.zeros(rows + 1, dtype=np.int64)
    prefix = np.zeros(rows, dtype=np.int64)  # prefix[b]: tokens that the rows from b to the last one have in common
    for last in range(rows):
        if last > 0:
            prefix[last - 1] = common[last - 1]
            np.minimum(prefix[:last], common[last - 1], out=prefix[:last])
        totals = saved[: last + 1] + np.arange(last, -1, -1) * prefix[: last + 1]
        leader = int(totals.argmax())
        saved[last + 1], best_leader[last + 1], best_prefix[last + 1] = totals[leader], leader, prefix[leader]
    leaders, tokens = list(range(rows)), [0] * rows
    end = rows
    while end > 0:
        leader = int(best_leader[end])
        for row in range(leader + 1, end):
            if best_prefix[end] > 0:
                leaders[row], tokens[row] = leader, int(best_prefix[end])
        end = leader
    return SharedPrefixes(leaders=leaders, tokens=tokens)
