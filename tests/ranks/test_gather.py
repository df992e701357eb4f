"""Gathered weights are copies, come in order, and only the weights that the caller holds stay in memory."""

import weakref

import pytest
import torch

from asyncrl.ranks.gather import gather_weights

pytestmark = pytest.mark.slow  # imports torch and transformers


class Tied(torch.nn.Module):
    """The first and the last parameter are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.ones(3))
        self.middle = torch.nn.Parameter(torch.full((2,), 2.0))
        self.end = torch.nn.Parameter(torch.full((2,), 3.0))
        self.head = self.embedding


def test_a_tied_weight_comes_under_both_names_and_is_a_copy() -> None:
    model = Tied()
    weights = dict(gather_weights(model, dtype=torch.float32))
    assert list(weights) == ["embedding", "middle", "end", "head"]
    assert weights["head"] is weights["embedding"]
    with torch.no_grad():
        model.embedding.add_(1.0)
    assert torch.equal(weights["head"], torch.ones(3))


def test_a_weight_that_its_reader_has_dropped_is_gone_unless_its_other_name_is_to_come() -> None:
    kept = [weakref.ref(tensor) for _, tensor in gather_weights(Tied(), dtype=torch.float32)]
    assert [ref() for ref in kept] == [None] * 4

    reader = gather_weights(Tied(), dtype=torch.float32)
    embedding = weakref.ref(next(reader)[1])
    middle = weakref.ref(next(reader)[1])
    next(reader)
    assert middle() is None
    assert embedding() is not None
