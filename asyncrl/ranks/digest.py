"""The digest of a sharded model's trained weights: 64 bits that do not depend on the number of ranks.

The digest is a sum over the rows of all tensors, modulo 2⁶⁴. FSDP2 cuts tensors between rows (dimension 0), so the
ranks add up the digests of their own rows, and no weight is gathered. There are two kinds of digest
(`learner.weights_digest`), and the records of a run name the kind.

- `xxh3`, on the CPU: the summand of a row is the xxh3 hash of its bytes, with a seed for the name of the tensor and the
  number of the row. The rows of a vector are single elements. Their summands are mixes of their bits and the seed
  (splitmix64), not hashes.
- `multilinear`: torch computes it where the tensor is, which is meant for GPUs. A row is a sequence of words of at most
  32 bits. Their sum with odd factors that depend on the column (multilinear hashing: Lemire and Kaser 2014) is mixed
  with the seed and the number of the row. A row with one changed element always has another summand. A change of
  several elements of one row is missed with a probability of up to 2⁻³², for example if only signs change.

On one core of a CPU, xxh3 reads a matrix of 896 columns at 5.3 GB/s and a vector at 0.5, and the multilinear kind at
1.3 and 0.1. The digest finds errors. It does not resist an attacker who makes weights for a given digest.
"""

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from asyncrl.ranks.gather import own_rows, reshard, trained_state

XXH3 = "xxh3"
MULTILINEAR = "multilinear"
KINDS = (XXH3, MULTILINEAR)

_MODULUS = 2**64
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Odd constants of the generator splitmix64 (Steele, Lea and Flood 2014)."""

_AT_ONCE = 2**20
"""Elements of a vector that are mixed at once. Each needs 32 bytes meanwhile."""
_WORDS_AT_ONCE = 2**21
"""Most words, and most rows, that the multilinear kind computes at once. Each needs about 50 bytes meanwhile."""


def model_digest(model: torch.nn.Module, *, rank: int, kind: str, frozen: bool = False) -> int:
    """Returns this rank's part of the digest of the model's weights. `combined` adds up the parts of all ranks. With
    `frozen`, parameters that are not trained count too."""
    return combined(digests_by_tensor(model, rank=rank, kind=kind, frozen=frozen).values())


@torch.no_grad()
def digests_by_tensor(model: torch.nn.Module, *, rank: int, kind: str, frozen: bool = False) -> dict[str, int]:
    """Returns this rank's part of the digest of each tensor, by name, with `frozen` also of parameters that are not
    trained.

    A tied tensor counts once, under its first name. A replicated shard counts on the first rank that holds it. The
    multilinear kind waits for the device once.
    """
    reshard(model)
    state = model.state_dict(keep_vars=True) if frozen else trained_state(model)
    first = {id(tensor): (name, tensor) for name, tensor in reversed(state.items())}
    parts = [(name, own_rows(name, tensor, rank=rank)) for name, tensor in first.values()]
    shards = [_Shard(name, *own) for name, own in parts if own is not None]
    return dict(zip((shard.name for shard in shards), _digests(shards, kind), strict=True))


class _Shard(NamedTuple):
    """Consecutive rows of the tensor `name`. `start` is the number of the first one in the whole tensor."""

    name: str
    start: int
    rows: torch.Tensor

    @property
    def seed(self) -> int:
        """The seed of the first row. That of each further row is 1 more."""
        return (xxhash.xxh3_64_intdigest(self.name.encode()) + self.start) % _MODULUS


class StepDigests:
    """The digests of a rank's trained weights at the start and at the end of its steps. The digests at the start of a
    step are those at the end of the step before, unless something may have written the weights in between.

    These writes between two steps are seen:

    - steps of the optimizer,
    - other memory: tensors that were replaced, or moved to another device and back,
    - operations of torch that write one tensor in place, as in `load_state_dict`; they increment a counter of the
      tensor.

    These are not seen:

    - writes through `.data` and through numpy,
    - `torch._foreach_` functions, and other fused optimizers than that of the rank, on sharded parameters,
    - faults of the memory.

    A write that is not seen counts as a part of the next step. So it is found only if the digests at the start of that
    step are computed anew.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, kind: str) -> None:
        self.kind = kind
        self._model = model
        self._rank = rank
        self._known: tuple[list[_Stamp], dict[str, int]] | None = None
        # a fused optimizer does not increment the counters of sharded parameters
        optimizer.register_step_post_hook(lambda *_: self.forget())

    def now(self, *, anew: bool) -> dict[str, int]:
        """Returns this rank's part of the digest of each trained tensor. They are computed if `anew`, or if something
        may have written a tensor since the last call. Otherwise they are those of the last call."""
        stamps = _stamps(self._model)
        if anew or self._known is None or self._known[0] != stamps:
            self._known = stamps, digests_by_tensor(self._model, rank=self._rank, kind=self.kind)
        return self._known[1]

    def forget(self) -> None:
        """Makes the next call of `now` compute the digests anew."""
        self._known = None


class _Stamp(NamedTuple):
    """The memory of a rank's shard of a tensor, and the number of its writes. Stamps of different memory differ, also
    if the address is the same: a weak reference equals only references to the same, living storage."""

    name: str
    storage: weakref.ref[torch.UntypedStorage]
    address: int
    writes: tuple[int, int]


@torch.no_grad()
def _stamps(model: torch.nn.Module) -> list[_Stamp]:
    reshard(model)
    found = []
    for name, tensor in trained_state(model).items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # torch counts the writes of a sharded tensor and those of its shard separately
        writes = (tensor._version, own._version)
        found.append(_Stamp(name, weakref.ref(own.untyped_storage()), own.data_ptr(), writes))
    return found


def combined(parts: Iterable[int]) -> int:
    """Returns the digest of a whole: the sum of the digests of its parts, such as all ranks or tensors, mod 2^64."""
    return sum(parts) % _MODULUS


def tensor_digest(name: str, rows: torch.Tensor, *, start: int = 0, kind: str = XXH3) -> int:
    """Returns the digest of consecutive rows of the tensor `name`. `start` is the number of the first row in the whole
    tensor. `combined` makes the digest of all rows from the digests of parts. A digest of either `kind` has the same
    value on every device.

    >>> whole = torch.arange(6.0).reshape(3, 2)
    >>> parts = tensor_digest("w", whole[:1]), tensor_digest("w", whole[1:], start=1)
    >>> combined(parts) == tensor_digest("w", whole)
    True
    """
    return _digests([_Shard(name, start, rows)], kind)[0]


def _digests(shards: Sequence[_Shard], kind: str) -> list[int]:
    assert kind in KINDS, kind
    return _multilinear(shards) if kind == MULTILINEAR else [_xxh3(shard) for shard in shards]


# xxh3, on the CPU.


def _xxh3(shard: _Shard) -> int:
    values, seed = shard.rows.detach().cpu().contiguous(), shard.seed
    if values.ndim < 2:
        return _vector_digest(values, seed=seed)
    data = values.reshape(-1).view(torch.uint8).numpy().data
    width = values[0].nbytes if len(values) else 0
    return combined(
        xxhash.xxh3_64_intdigest(data[i * width : (i + 1) * width], (seed + i) % _MODULUS) for i in range(len(values))
    )


def _vector_digest(values: torch.Tensor, *, seed: int) -> int:
    """Returns the digest of a vector. Its rows are single elements, too many for one call of xxh3 each.

    The summand of an element is a mix of its bits and its position (the finalizer of splitmix64).
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


# The multilinear kind. Its numbers are int64: torch's products and sums of them are those of integers modulo 2⁶⁴.
# N rows, W words of a row.


@torch.no_grad()
def _multilinear(shards: Sequence[_Shard]) -> list[int]:
    """Returns the digests of shards on one device. Waits for the device once, at the end.

    The rows of many small tensors are mixed together, because a GPU takes longer to start a kernel than to mix a
    thousand rows.
    """
    if not shards:
        return []
    device = shards[0].rows.device
    words = [_words(shard.rows.to(device)) for shard in shards]
    most = max(max(bits_NW.shape) for bits_NW in words)
    places = torch.arange(min(most, _WORDS_AT_ONCE), device=device)
    factors = _column_factors(places)
    totals = torch.zeros(len(shards), dtype=torch.int64, device=device)
    waiting: list[_Rows] = []
    for shard, bits_NW, total in zip(shards, words, totals.unbind(), strict=True):
        for first in range(0, len(bits_NW), _WORDS_AT_ONCE):
            block_NW = bits_NW[first : first + _WORDS_AT_ONCE]
            if waiting and sum(rows.number for rows in waiting) + len(block_NW) > _WORDS_AT_ONCE:
                _mix_rows(waiting)
                waiting = []
            seeds_N = places[: len(block_NW)] + _signed(shard.seed + first)
            waiting.append(_Rows(len(block_NW), _row_sums(block_NW, places, factors), seeds_N, total))
    if waiting:
        _mix_rows(waiting)
    return [total % _MODULUS for total in totals.tolist()]


class _Rows(NamedTuple):
    """Rows that are not mixed yet: their number, the sums of their words, their seeds, and the total of their shard."""

    number: int
    sums_N: torch.Tensor
    seeds_N: torch.Tensor
    total: torch.Tensor


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Returns the bits of N rows as integers [N, W], W words for each row. Elements of 64 bits become two words: in one
    word, a change of the highest bit would change the product with any odd factor by the same 2⁶³ (modulo 2⁶⁴)."""
    flat = rows.detach().contiguous().reshape(len(rows) if rows.ndim else 1, math.prod(rows.shape[1:]))
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.element_size(), torch.int32))


def _row_sums(bits_NW: torch.Tensor, places: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Returns for each of N rows the sum of its words times the factors of their columns, plus its length in bytes:
    without the length, zeros at the end of a row would not count. `places` are the numbers 0, 1, … of the first
    columns, and `factors` their factors."""
    nbytes = bits_NW.shape[1] * bits_NW.element_size()
    sums_N = torch.full((len(bits_NW),), nbytes, dtype=torch.int64, device=bits_NW.device)
    for left in range(0, bits_NW.shape[1], _WORDS_AT_ONCE):
        part_NW = bits_NW[:, left : left + _WORDS_AT_ONCE]
        width = part_NW.shape[1]
        own = factors[:width] if not left else _column_factors(places[:width] + left)
        height = max(1, _WORDS_AT_ONCE // width)
        for top in range(0, len(bits_NW), height):
            sums_N[top : top + height].add_((part_NW[top : top + height] * own).sum(dim=1))
    return sums_N


def _column_factors(columns: torch.Tensor) -> torch.Tensor:
    """Returns the odd factor of each column, from the numbers of the columns."""
    return _mixed(columns + 1).bitwise_or_(1)


def _mix_rows(waiting: Sequence[_Rows]) -> None:
    """Mixes the sum of each row with its seed, and adds the results to the totals of the rows' shards."""
    sums, seeds = (torch.cat(parts) for parts in zip(*((rows.sums_N, rows.seeds_N) for rows in waiting), strict=True))
    summands, first = _mixed(sums + _mixed(seeds)), 0
    for rows in waiting:
        rows.total.add_(summands[first : first + rows.number].sum())
        first += rows.number


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Mixes each number in place (the finalizer of splitmix64), and returns the tensor. Different numbers stay
    different."""
    for factor in _FACTORS:
        numbers ^= (numbers >> 32).bitwise_and_(0xFFFFFFFF)  # torch's shift copies the sign
        numbers *= _signed(factor)
    numbers ^= (numbers >> 32).bitwise_and_(0xFFFFFFFF)
    return numbers


def _signed(number: int) -> int:
    """Returns the number between −2⁶³ and 2⁶³ that is equal modulo 2⁶⁴."""
    return (number + _MODULUS // 2) % _MODULUS - _MODULUS // 2
