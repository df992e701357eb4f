"""The digest of a sharded model's trained weights: 64 bits that do not depend on the number of ranks.

The digest is a sum over the rows of all tensors, modulo 2⁶⁴. The summand of a row is the xxh3 hash of its bytes, with a
seed for the name of the tensor and the number of the row. The rows of a vector are single elements. Their summands are
mixes of their bits and the seed (splitmix64), not hashes. FSDP2 cuts tensors between rows (dimension 0), so the ranks
add up the digests of their own rows, and no weight is gathered. The digest finds errors. It does not resist an attacker
who makes weights for a given digest.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import xxhash

from asyncrl.ranks.gather import own_rows, reshard, trained_state

_MODULUS = 2**64
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd constants of the generator splitmix64 (Steele, Lea and Flood 2014)."""

_AT_ONCE = 2**20
"""Elements of a vector that are mixed at once. Each needs 32 bytes meanwhile."""


def model_digest(model: torch.nn.Module, *, rank: int, frozen: bool = False) -> int:
    """Returns this rank's part of the digest. `combined` adds up the parts of all ranks. With `frozen`, parameters that
    are not trained count too."""
    return combined(digests_by_tensor(model, rank=rank, frozen=frozen).values())


@torch.no_grad()
def digests_by_tensor(model: torch.nn.Module, *, rank: int, frozen: bool = False) -> dict[str, int]:
    """Returns this rank's part of the digest of each tensor, by name, with `frozen` also of parameters that are not
    trained.

    A tied tensor counts once, under its first name. A replicated shard counts on the first rank that holds it.
    """
    reshard(model)
    state = model.state_dict(keep_vars=True) if frozen else trained_state(model)
    first = {id(tensor): (name, tensor) for name, tensor in reversed(state.items())}
    parts = [(name, own_rows(name, tensor, rank=rank)) for name, tensor in first.values()]
    return {name: tensor_digest(name, own[1], start=own[0]) for name, own in parts if own is not None}


def combined(parts: Iterable[int]) -> int:
    """Returns the digest of the parts of all ranks, or of all tensors."""
    return sum(parts) % _MODULUS


def tensor_digest(name: str, rows: torch.Tensor, *, start: int = 0) -> int:
    """Returns the digest of consecutive rows of the tensor `name`. `start` is the number of the first row in the whole
    tensor. `combined` makes the digest of all rows from the digests of parts.

    >>> whole = torch.arange(6.0).reshape(3, 2)
    >>> parts = tensor_digest("w", whole[:1]), tensor_digest("w", whole[1:], start=1)
    >>> combined(parts) == tensor_digest("w", whole)
    True
    """
    seed = xxhash.xxh3_64_intdigest(name.encode()) + start
    values = rows.detach().cpu().contiguous()
    if values.ndim < 2:
        return _vector_digest(values, seed=seed)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    width = values[0].nbytes if len(values) else 0
    return combined(
        xxhash.xxh3_64_intdigest(data[i * width : (i + 1) * width], (seed + i) % _MODULUS) for i in range(len(values))
    )


def _vector_digest(values: torch.Tensor, *, seed: int) -> int:
    """Returns the part of a vector, whose rows are single elements: too many for one call each.

    The summand of an element is a mix of its bits and its place (the finalizer of splitmix64).
    """
    kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[values.element_size()]
    bits = values.reshape(-1).view(torch.uint8).numpy().view(kind)
    return combined(
        _elements_digest(bits[at : at + _AT_ONCE], seed=(seed + at) % _MODULUS) for at in range(0, len(bits), _AT_ONCE)
    )


def _elements_digest(bits: np.ndarray[Any, Any], *, seed: int) -> int:
    mixed = bits.astype(np.uint64)
    mixed ^= (np.arange(len(bits), dtype=np.uint64) + np.uint64(seed)) * np.uint64(_FACTORS[0])
    for factor in _FACTORS:
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(factor)
    return int(mixed.sum(dtype=np.uint64))
