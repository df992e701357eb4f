"""Checkpoints of one group of ranks: weights and optimizer. N ranks write them, and any number of ranks can load them.

    <weights_path>/    state/shard-*.safetensors  COMPLETE
    <optimizer_path>/  state/shard-*.safetensors  training.json  COMPLETE

A save has two parts. `stage` copies the tensors that this rank writes, and the ranks wait for it between two steps.
`write` writes the copies, and may run in a thread beside the next steps.

`asyncrl.ranks.shard_files` writes `state/`. `training.json` has the state that is not a tensor. Hyperparameters are not
saved, because they are in the configuration.

Invariants: a directory with a file `COMPLETE` is complete, and a directory without it is refused. If a save is
interrupted, the last complete checkpoint can still be loaded. If a load fails, weights and optimizer are unchanged on
every rank. Every function that takes `group` is a collective over that group. If it fails on one rank, it raises on all
ranks.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from asyncrl import complete_directory
from asyncrl.atomic_write import write_atomically
from asyncrl.errors import AsyncRLError, CheckpointError, CheckpointMismatch
from asyncrl.ranks.collectives import gather_objects, on_all_ranks, on_first_rank
from asyncrl.ranks.gather import reshard, trained_state
from asyncrl.ranks.shard_files import STATE, HostCopies, Tensors
from asyncrl.run_files import read, sizes_below

_TRAINING = "training.json"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_TRAINED = StateDictOptions(ignore_frozen_params=True)
_IN_PART = StateDictOptions(strict=False)
"""The loaded tensors may lack names of the model, because frozen parameters are not in a checkpoint. `_ExactPlanner`
has compared all other names before."""
_MOMENTS = "state."
"""Prefix of the optimizer's tensors in its flat state dict. The other entries are hyperparameters."""


class _Generators(msgspec.Struct, frozen=True, kw_only=True):
    """States of torch's random generators on one rank."""

    cpu: bytes
    cuda: bytes | None


class _Training(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `training.json`. `generators` has the states of each rank that saved."""

    train_calls: int
    has_moments: bool
    """False if the optimizer has no state, and the checkpoint therefore has none. AdamW has no state before its first
    update, and SGD without momentum never has one."""
    generators: tuple[_Generators, ...]


@dataclass
class ShardedState:
    """This rank's part of a sharded model and its optimizer, which can be saved and loaded.

        state.stage(train_calls=7, optimizer=True)   # between two steps
        state.write(weights_path=…, optimizer_path=…)   # in any thread, while the next steps run

    `stage` and `load` are collectives over `group`. `write` is a collective over `saving`, which has no other traffic,
    so that it can run beside other collectives.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    group: dist.ProcessGroup
    saving: dist.ProcessGroup

    def __post_init__(self) -> None:
        self._weight_copies, self._moment_copies = HostCopies(), HostCopies()
        self._staged: _Training | None = None
        """The state of the last `stage` that is not a tensor; None if it did not copy the optimizer."""
        self._writing = False

    def stage(self, *, train_calls: int, optimizer: bool) -> None:
        """Copies to host memory this rank's part of the weights, and with `optimizer` of the optimizer's state, for
        `write`.

        Raises CheckpointError if a `write` of the last copies is not finished, if there is no memory for the copies, or
        if the optimizer's state has other names or numbers on another rank.
        """
        on_all_ranks(self._check_written, group=self.group)
        reshard(self.model)
        self._copy(self._weight_copies, self._weights())
        self._staged = None
        if optimizer:
            # An optimizer without state is not saved: SGD without momentum never has a state. To save one that has no
            # state yet, DCP would make an optimizer step, and AdamW's bias correction would count this step
            has_moments = self._has_moments()
            if has_moments:
                self.check_numbers()
                self._copy(self._moment_copies, self._moments())
            generators = tuple(gather_objects(_generators(), group=self.group))
            self._staged = _Training(train_calls=train_calls, has_moments=has_moments, generators=generators)

    def _copy(self, copies: HostCopies, tensors: Tensors) -> None:
        copies.plan(tensors, group=self.group)
        on_all_ranks(lambda: copies.take(tensors), group=self.group)

    def _has_moments(self) -> bool:
        """Returns whether the optimizer has a state. Raises CheckpointError on all ranks if it has a state on only some
        of them. A collective."""
        has = gather_objects(bool(self.optimizer.state), group=self.group)
        if any(has) and not all(has):
            raise CheckpointError(
                f"the optimizer has no state at all on rank {has.index(False)}, but has a state on other ranks; let it "
                "make a state for each parameter in the first step, also for a parameter whose shard is empty"
            )
        return all(has)

    def check_numbers(self) -> None:
        """Raises CheckpointError on all ranks if a number of an optimizer of the user's own differs between the ranks,
        or if only some ranks have a state: a checkpoint has one number for all of them. AdamW is not checked, because
        its numbers are counts of steps. A collective."""
        if type(self.optimizer) is torch.optim.AdamW or not self._has_moments():
            return
        # The numbers are compared as text, because NaN differs from itself.
        own = {
            name: str(value.item())
            for name, value in self._moments().items()
            if not isinstance(value, DTensor) and value.ndim == 0
        }
        first, *others = gather_objects(own, group=self.group)
        for rank, found in enumerate(others, start=1):
            for name in sorted(first.keys() | found.keys()):
                if (here := first.get(name)) != (there := found.get(name)):
                    raise CheckpointError(
                        f"the optimizer's state has {name} = {here} on rank 0 and {there} on rank {rank}, and a "
                        "checkpoint keeps one number for all ranks; compute it from the whole tensor and not a rank's "
                        "shard, or keep it in a tensor made with torch.zeros_like(parameter)"
                    )

    def _check_written(self) -> None:
        if self._writing:
            raise CheckpointError("the previous checkpoint is still being written; save again when it is complete")

    def write(self, *, weights_path: Path, optimizer_path: Path | None) -> None:
        """Writes the copies of the last `stage`: the weights, and the optimizer if it has a path. Each goes to its own
        directory, which all ranks must share. Reads no tensor of the live model, so training may go on meanwhile.

        A complete checkpoint at a path is replaced after the new one is complete. Raises CheckpointError if something
        else is at a path, if one path is inside the other, if a rank cannot write, or if the ranks do not share a path.
        """
        self._writing = True
        try:
            self._write(weights_path, optimizer_path)
        finally:
            self._writing = False

    def _write(self, weights_path: Path, optimizer_path: Path | None) -> None:
        group = self.saving
        paths = [weights_path] if optimizer_path is None else [weights_path, optimizer_path]
        on_first_rank(lambda: _check_apart(paths), group=group)
        on_first_rank(lambda: list(map(complete_directory.prepare, paths)), group=group)
        unfinished = [complete_directory.unfinished(path) for path in paths]
        shard = dist.get_rank(group) + 1
        on_all_ranks(lambda: self._weight_copies.write(unfinished[0] / STATE, shard=shard), group=group)
        if optimizer_path is not None:
            assert self._staged is not None, "stage the optimizer first"
            training = self._staged
            if training.has_moments:
                on_all_ranks(lambda: self._moment_copies.write(unfinished[1] / STATE, shard=shard), group=group)
            encoded = msgspec.json.encode(training)
            on_first_rank(lambda: write_atomically(unfinished[1] / _TRAINING, encoded), group=group)
        for path in unfinished:
            _check_shared(path, group=group)
        save_id = uuid.uuid4().hex
        on_first_rank(lambda: list(map(partial(complete_directory.finish, save_id=save_id), paths)), group=group)
        on_first_rank(lambda: list(map(complete_directory.publish, paths)), group=group)

    def load(self, *, weights_path: Path, optimizer_path: Path | None) -> int | None:
        """Loads the weights. With `optimizer_path`, also loads the optimizer and the random generators, and returns
        `train_calls`; else returns None.

        Raises CheckpointIncomplete if a directory has no `COMPLETE`, and CheckpointDamaged if its files are not those
        that `COMPLETE` lists. Raises CheckpointMismatch if the directories are of different saves, or with the first
        tensor of a directory whose name, shape or dtype differs from the live one.

        DCP writes into the tensors that it gets, in any order. So it gets new tensors of the size of this rank's shards
        of the weights and of the optimizer's state. An error while reading therefore changes nothing, either.
        """
        reshard(self.model)
        found = on_all_ranks(lambda: _locate(weights_path, optimizer_path), group=self.group)
        weights = self._read(self._weights(), found.weights)
        fresh = not self.optimizer.state
        try:
            moments = None
            if found.optimizer is not None and found.training is not None and found.training.has_moments:
                moments = self._read(self._moments(), found.optimizer, optimizer=True)
        except BaseException:
            if fresh:
                self.optimizer.state.clear()
            raise
        named: dict[str, Any] = {name: weights[first] for name, first in _names(self.model).items()}
        set_model_state_dict(self.model, named, options=_IN_PART)
        if found.training is None:
            return None
        if moments is None:
            self.optimizer.state.clear()
        else:
            flat = self._flat()
            for name, tensor in moments.items():
                flat[name] = tensor if isinstance(flat[name], torch.Tensor) else tensor.item()
            set_optimizer_state_dict(self.model, self.optimizer, flat, options=_FLAT)
            stepped, first = {name.rpartition(".")[0] for name in moments}, _names(self.model)
            for name, parameter in trained_state(self.model).items():
                if f"{_MOMENTS}{first[name]}" not in stepped:
                    self.optimizer.state.pop(parameter, None)
        # if more ranks load than saved, the additional ranks reuse the generator states of ranks that saved
        generators = found.training.generators
        _set_generators(generators[dist.get_rank(self.group) % len(generators)])
        return found.training.train_calls

    def _weights(self) -> Tensors:
        """Returns this rank's shards of the trained weights. A tied tensor appears once."""
        tensors: dict[str, Any] = get_model_state_dict(self.model, options=_TRAINED)
        return {first: tensors[first] for first in _names(self.model).values()}

    def _moments(self) -> Tensors:
        """Returns this rank's shards of the optimizer's state, and its numbers as tensors. If the optimizer has no
        state, this creates one of zeros."""
        return {name: _tensor(value) for name, value in self._flat().items() if name.startswith(_MOMENTS)}

    def _flat(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)

    def _read(self, live: Tensors, path: Path, *, optimizer: bool = False) -> Tensors:
        """Reads the tensors named in `live` from `path`. Returns new tensors with the same sharding as `live`. Those of
        an `optimizer` are left out for a parameter of which the checkpoint has no state."""
        staged = {name: torch.empty_like(tensor) for name, tensor in live.items()}
        reader, planner = HuggingFaceStorageReader(str(path / STATE)), _ExactPlanner(path, optimizer=optimizer)
        try:
            load(staged, storage_reader=reader, planner=planner, process_group=self.group)
        except CheckpointException as error:
            raise _first_failure(error, f"cannot load the checkpoint {path}") from error
        return {name: tensor for name, tensor in staged.items() if name not in planner.left_out}


def _tensor(value: torch.Tensor | float) -> torch.Tensor:
    """Returns a number of an optimizer's state as a tensor that keeps all of its bits."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def save_tokenizer(model_path: str, path: Path, *, group: dist.ProcessGroup) -> None:
    """Writes the tokenizer of the model at `model_path` to the directory `path`. Rank 0 writes. If it cannot, all ranks
    raise CheckpointError. Rank 0 first makes the directory, because transformers only logs a message if `path` is a
    file. A collective."""

    def save() -> None:
        path.mkdir(parents=True, exist_ok=True)
        AutoTokenizer.from_pretrained(model_path, trust_remote_code=False).save_pretrained(path)

    on_first_rank(save, group=group)


# -- parts of a save and of a load -----------------------------------------------------------------------------------


def _check_apart(paths: Sequence[Path]) -> None:
    """Raises CheckpointError if one path equals the other or is inside it: publishing one directory would then replace
    the other."""
    for path, other in permutations([path.resolve() for path in paths], 2):
        if path.is_relative_to(other):
            raise CheckpointError(
                f"weights and optimizer would be written to {paths[0]} and {paths[1]}, but one of these directories "
                "must not be inside the other; nothing was written; name two separate directories"
            )


def _check_shared(path: Path, *, group: dist.ProcessGroup) -> None:
    """Raises CheckpointError if the ranks see different files at `path`, because they wrote to different disks. Without
    this check, rank 0 would mark a checkpoint as complete that has only a part of the shards. A collective."""
    seen = gather_objects(sizes_below(path), group=group)
    apart = next((rank for rank, files in enumerate(seen) if files != seen[0]), None)
    if apart is not None:
        raise CheckpointError(
            f"{path}: rank 0 sees the files {_sizes(seen[0])}, but rank {apart} sees {_sizes(seen[apart])}; name a "
            "path on a file system that all ranks share"
        )


def _sizes(files: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({size} bytes)" for name, size in sorted(files.items())) or "no files"


class _Found(NamedTuple):
    weights: Path
    optimizer: Path | None
    training: _Training | None


def _locate(weights_path: Path, optimizer_path: Path | None) -> _Found:
    """Returns the complete directories at the two paths, and the content of `training.json`. Raises CheckpointMismatch
    if the directories belong to different saves, and the errors of `complete_directory.complete`."""
    weights, weights_marker = complete_directory.complete(weights_path)
    if optimizer_path is None:
        return _Found(weights, None, None)
    optimizer, optimizer_marker = complete_directory.complete(optimizer_path)
    if optimizer_marker.save_id != weights_marker.save_id:
        raise CheckpointMismatch(
            f"{weights} and {optimizer} belong to different saves ({weights_marker.save_id} and "
            f"{optimizer_marker.save_id}); load two directories that were written together"
        )
    return _Found(weights, optimizer, msgspec.json.decode(read(optimizer / _TRAINING), type=_Training))


class _ExactPlanner(DefaultLoadPlanner):
    """Refuses a checkpoint whose tensors differ from the live ones in name, shape or dtype. DCP alone would accept
    tensors that the live state does not have, and another dtype.

    The checkpoint of an `optimizer` may have no state of a parameter, because the parameter had no gradient before the
    save. The live tensors of this state, which are zeros, are then `left_out`."""

    def __init__(self, path: Path, *, optimizer: bool = False) -> None:
        super().__init__()
        self._path = path
        self._optimizer = optimizer
        self.left_out: frozenset[str] = frozenset()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        if self._optimizer:
            stepped = {name.rpartition(".")[0] for name in metadata.state_dict_metadata}
            self.left_out = frozenset(name for name in state_dict if name.rpartition(".")[0] not in stepped)
        state_dict = {name: tensor for name, tensor in state_dict.items() if name not in self.left_out}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        saved = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state_dict.items()}
        if mismatch := first_mismatch(saved, wanted):
            raise CheckpointMismatch(f"{self._path}: {mismatch}; load it into the model that saved it")


Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def first_mismatch(saved: Layout, wanted: Layout) -> str | None:
    """Compares a checkpoint's tensors with the live ones. Describes the first difference by name; None if there is
    none.

    >>> first_mismatch({"a": ((2, 3), torch.float32)}, {"a": ((3, 2), torch.float32)})
    'a is (2, 3) in the checkpoint and (3, 2) here'
    """
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved:
            return f"{name} is not in the checkpoint"
        if name not in wanted:
            return f"{name} is in the checkpoint, but not here"
        for theirs, ours in zip(saved[name], wanted[name], strict=True):
            if theirs != ours:
                return f"{name} is {theirs} in the checkpoint and {ours} here"
    return None


def _names(model: torch.nn.Module) -> dict[str, str]:
    """Maps every name of a trained tensor to the first name of this tensor. A tied tensor has several names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in trained_state(model).items()}


def _generators() -> _Generators:
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
    return _Generators(cpu=torch.get_rng_state().numpy().tobytes(), cuda=cuda)


def _set_generators(saved: _Generators) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(saved.cpu), dtype=torch.uint8))
    if saved.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(saved.cuda), dtype=torch.uint8))


def _first_failure(error: CheckpointException, what: str) -> AsyncRLError:
    """Returns the error of the first rank that failed. DCP sends all failures to every rank, so every rank raises the
    same error. DCP's own error is a BaseException, not an Exception, so `except Exception` would not catch it."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, AsyncRLError):
        return cause
    return CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}")
