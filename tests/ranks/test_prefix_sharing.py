"""Rows share a prefix only with neighbours, only if the tokens are equal, and so that most tokens are saved."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.specs import SUPPORT, TOP_LOGPROBS
from asyncrl.ranks.prefixes import SharedPrefixes, shared_prefixes


def found(rows: list[list[int]]) -> SharedPrefixes:
    width = max(map(len, rows))
    # padding is equal in all rows, so that rows would share it if lengths were not read
    tokens_BS = torch.tensor([row + [7] * (width - len(row)) for row in rows])
    return shared_prefixes(tokens_BS, torch.tensor([len(row) for row in rows]))


def most_saved(rows: list[list[int]]) -> int:
    """Finds the largest number of saved tokens by trying all cuts into runs."""
    if not rows:
        return 0
    best = 0
    for end in range(1, len(rows) + 1):
        common = 0
        while all(common < len(row) and row[common] == rows[0][min(common, len(rows[0]) - 1)] for row in rows[:end]):
            common += 1
        best = max(best, (end - 1) * common + most_saved(rows[end:]))
    return best


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_shared_tokens_are_equal_and_no_other_cut_into_runs_saves_more(rows: list[list[int]]) -> None:
    shared = found(rows)
    for row, (leader, tokens) in enumerate(zip(shared.leaders, shared.tokens, strict=True)):
        assert rows[row][:tokens] == rows[leader][:tokens]
        assert tokens <= len(rows[row])
        assert shared.tokens[leader] == 0
        assert (tokens == 0) == (leader == row)
        assert leader <= row
    assert sum(shared.tokens) == most_saved(rows)


def test_tokens_with_other_supports_are_not_shared() -> None:
    rows = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    support_BSK = torch.tensor([[[-1, -1], [2, 5], [3, 4]], [[-1, -1], [2, 5], [3, 9]], [[-1, -1], [2, 6], [3, 9]]])
    lengths = torch.tensor([3, 3, 3])
    wide = {SUPPORT: support_BSK}
    assert shared_prefixes(rows, lengths, wide) == SharedPrefixes(leaders=[0, 0, 0], tokens=[0, 1, 1])
    assert shared_prefixes(rows[:2], lengths[:2], {SUPPORT: support_BSK[:2]}).tokens == [0, 2]
    equal = {SUPPORT: support_BSK[[0, 0]]}
    assert shared_prefixes(rows[:2], lengths[:2], equal).tokens == [0, 3]
    top_BSK = torch.tensor([[[0.0], [-1.0], [-1.0]], [[0.0], [-1.0], [-2.0]]])
    assert shared_prefixes(rows[:2], lengths[:2], {**equal, TOP_LOGPROBS: top_BSK}).tokens == [0, 2]


@pytest.mark.parametrize(
    ("rows", "leaders", "tokens"),
    [
        ([[1, 2, 3]], [0], [0]),
        ([[1, 2, 3], [1, 2, 4], [1, 2]], [0, 0, 0], [0, 2, 2]),
        ([[1, 2, 3], [1, 2, 3]], [0, 0], [0, 3]),
        # all rows begin with 1, but the rows of a group have more in common than those of all groups
        ([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7]], [0, 0, 2, 2], [0, 2, 0, 2]),
        # the second group has one row here, and must not cost the first its prefix
        ([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9]], [0, 0, 2], [0, 3, 0]),
        ([[1, 2, 3], [4, 2, 3], [1, 2, 3]], [0, 1, 2], [0, 0, 0]),
        ([[1, *range(2, 10)], [1, *range(20, 28)]], [0, 1], [0, 0]),
    ],
    ids=["one row", "group", "equal rows", "groups", "part of a group", "not neighbours", "under an eighth"],
)
def test_by_hand(rows: list[list[int]], leaders: list[int], tokens: list[int]) -> None:
    assert found(rows) == SharedPrefixes(leaders=leaders, tokens=tokens)
