"""The files of a checkpoint with the tensors of a sharded model or of its optimizer: copies in host memory, one file
for each rank, and a reader.

The files have the safetensors format of torch's distributed checkpoint (DCP): every rank writes one file with its own
shards, and DCP's reader loads it. DCP also plans which rank writes a tensor that several ranks hold. DCP's own
functions do not write the files: its writer first makes two more copies of all bytes, and holds Python's global lock
for so long that the next steps wait (1.8 s for 400 MB, measured with torch 2.13). DCP's default format is not used,
because loading it unpickles data.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY, _gen_file_name
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from asyncrl.atomic_write import sync
from asyncrl.errors import CheckpointDamaged, CheckpointError
from asyncrl.ranks.collectives import gather_objects

STATE = "state"
"""Folder of the files, inside a checkpoint's directory."""

Tensors = dict[str, torch.Tensor]


class HostCopies:
    """Copies of the tensors that this rank writes, in host memory that the next save uses again.

    The memory is pinned if the tensors are on a GPU. A tensor that several ranks hold is copied and written by one of
    them.
    """

    def __init__(self) -> None:
        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items: list[WriteItem] = []
        self._copies: Tensors = {}
        self._names: frozenset[str] | None = None

    def plan(self, tensors: Tensors, *, group: dist.ProcessGroup) -> None:
        """Decides which rank writes which shard of `tensors`, unless on all ranks the last plan was for the same names:
        the shapes and shards of a name never change. A later save may have new names, because AdamW makes the state of
        a tensor only at the tensor's first gradient.

        Raises CheckpointError if the names differ between the ranks. A collective."""
        names = frozenset(tensors)
        if not any(gather_objects(names != self._names, group=group)):
            return
        rank = dist.get_rank(group)
        first, *others = gather_objects(names, group=group)  # all ranks compare the same names, and raise together
        for other, found in enumerate(others, start=1):
            if apart := sorted(first ^ found):
                raise CheckpointError(
                    f"{apart[0]} is a tensor of the checkpoint on rank {0 if apart[0] in first else other}, but not on "
                    f"rank {other if apart[0] in first else 0}; let all ranks make the same entries of the optimizer's "
                    "state in a step"
                )
        self._planner.set_up_planner(tensors, is_coordinator=rank == 0)
        local = gather_objects(self._planner.create_local_plan(), group=group)
        plans, _ = self._planner.create_global_plan(local)  # every rank computes the same plans
        self._items, self._names = plans[rank].items, names
        self._copies = {}  # by the new plan, another rank may write a tensor that this rank wrote before

    def take(self, tensors: Tensors) -> None:
        """Copies the shards of `tensors` that this rank writes by the plan to host memory. Not a collective."""
        self._planner.set_up_planner(tensors)
        on_gpu = False
        for item in self._items:
            live = self._planner.resolve_data(item)
            assert isinstance(live, torch.Tensor)
            on_gpu |= live.is_cuda
            name = item.index.fqn
            if name not in self._copies:
                self._copies[name] = torch.empty(live.shape, dtype=live.dtype, pin_memory=live.is_cuda)
            self._copies[name].copy_(live.detach(), non_blocking=True)
        self._planner.set_up_planner({})  # otherwise the planner would keep the memory of a model that is offloaded
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    def write(self, folder: Path, *, shard: int) -> None:
        """Writes this rank's file, number `shard` (from 1), in DCP's format, and flushes it to the disk. A rank that
        has nothing to write by the plan makes no file. Not a collective."""
        if not self._items:
            return
        folder.mkdir(exist_ok=True)
        offsets = {item.index.fqn: {SAVED_OFFSETS_KEY: _offsets(item)} for item in self._items}
        write_tensors(self._copies, folder / _gen_file_name(1, 1, shard), {CUSTOM_METADATA_KEY: json.dumps(offsets)})


def _offsets(item: WriteItem) -> list[int]:
    """Returns the index at which the item's shard begins in the whole tensor, for each dimension."""
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)


def write_tensors(tensors: Tensors, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file, and flushes it to the disk. Its permissions are those of any new file of this process,
    so that another user can read it."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)  # safetensors makes its file readable only for the owner
    sync(path)


class SavedTensors:
    """Reads whole tensors from the files that any number of ranks wrote to `weights_path`. Only one tensor at a time is
    in memory."""

    def __init__(self, weights_path: Path) -> None:
        self._parts: dict[str, list[tuple[Any, list[int]]]] = {}
        for path in sorted((weights_path / STATE).glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            offsets = json.loads(file.metadata()[CUSTOM_METADATA_KEY])
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                self._parts.setdefault(name, []).append((file, offsets[name][SAVED_OFFSETS_KEY]))

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def read(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor in the precision `dtype`, put together from the parts of all ranks. The parts stay on the
        disk: safetensors maps their files. Raises CheckpointDamaged if the parts cannot make up a tensor: one begins at
        a negative index, or together they have more or fewer elements than the tensor."""
        parts = [(file.get_tensor(name), offsets) for file, offsets in self._parts[name]]
        ends = [[at + length for at, length in zip(offsets, part.shape, strict=True)] for part, offsets in parts]
        shape = [max(lengths) for lengths in zip(*ends, strict=True)]
        starts = [at for _, offsets in parts for at in offsets]
        if min(starts, default=0) < 0 or math.prod(shape) != sum(part.numel() for part, _ in parts):
            raise CheckpointDamaged(
                f"the files of {name} have parts at {[offsets for _, offsets in parts]} with the shapes "
                f"{[list(part.shape) for part, _ in parts]}, which do not make one tensor; export another checkpoint"
            )
        whole = torch.zeros(shape, dtype=dtype)  # not `empty`: beside parts that overlap, a gap would show old memory
        for part, offsets in parts:
            whole[tuple(slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True))] = part
        return whole
