"""Weights to an engine on the learner's own device, group by group: no byte leaves the device.

On CPUs a group is a memory file that the engine's workers map; on GPUs a buffer that they open by its CUDA IPC handle.
What must hold: a rank keeps one group at a time; nothing of it outlives the rank; the engine checks a group's checksum
before it applies it. Which names there are, and their shapes and dtypes, is checked before the first group, from
`weights_metadata`.

    groups = prepare_weights_for_ipc(worker, 2**30, version=version)  # on every rank, as is all of this
    for names in groups:
        handles = get_weights_ipc_handles(worker, names)  # the engine applies them before the next ones are asked for
    release_weights_for_ipc(worker)
"""

import mmap
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import psutil
import torch
import torch.distributed as dist
import xxhash

from asyncrl.buffer.records import Version
from asyncrl.errors import ManifestMismatch, WeightError
from asyncrl.weights.manifest import TensorEntry, bucket_sizes, checksum, layout
from asyncrl.weights.memory_file import MemoryFile
from asyncrl.weights.tensor_views import view_of

FREE_PART = 0.5
"""Part of a device's free memory that a group may take; the engine needs some of the rest to load it."""


class SharedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of tensors in shared memory: a file's `path` on CPUs, `cuda` (CUDA IPC, of a uint8 storage) on GPUs."""

    version: Version
    entries: tuple[TensorEntry, ...]
    nbytes: int
    checksum: str
    path: str = ""
    cuda: tuple[Any, ...] = ()


class SharingRank(Protocol):
    """One learner rank. `refit` is what these functions keep on it between their calls, None at first."""

    world_size: int
    refit: "Refit | None"

    def weights_metadata(self) -> Sequence[tuple[str, tuple[int, ...], str, int]]: ...
    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


@dataclass(slots=True, kw_only=True)
class Refit:
    """A rank's way through its groups: those still to come, the gather under way, and the memory of the last one.
    `is_void`: the weights have changed since; what is still to come would be of another version."""

    version: Version
    groups: list[list[TensorEntry]]
    weights: Iterator[tuple[str, torch.Tensor]]
    device: torch.device
    shared: Any = None
    is_void: bool = False

    def free(self) -> None:
        if isinstance(self.shared, MemoryFile):
            self.shared.close()
        self.shared = None


# -- learner ranks ---------------------------------------------------------------------------------------------------


def prepare_weights_for_ipc(
    worker: SharingRank, refit_buffer_size_bytes: int | None = None, device: str = "cpu", *, version: Version
) -> list[list[str]]:
    """Names by group, in the order in which they are to be asked for; the same on every rank.

    A group fits `refit_buffer_size_bytes` and half of the free memory of each rank's device; a tensor that does not is
    a group of its own. A collective. What an earlier, unfinished pass shares is freed.
    """
    release_weights_for_ipc(worker)
    free = _free_bytes(torch.device(device))
    budget = torch.tensor([min([free] if refit_buffer_size_bytes is None else [free, refit_buffer_size_bytes])])
    if worker.world_size > 1:
        dist.all_reduce(budget, op=dist.ReduceOp.MIN)
    entries = layout(worker.weights_metadata(), int(budget))
    groups = [[entry for entry in entries if entry.bucket == bucket] for bucket in bucket_sizes(entries)]
    worker.refit = Refit(
        version=version, groups=groups, weights=iter(worker.gather_weights()), device=torch.device(device)
    )
    return [[entry.name for entry in group] for group in groups]


def get_weights_ipc_handles(worker: SharingRank, keys: Sequence[str]) -> dict[str, SharedGroup]:
    """The next group, `keys`, in shared memory of this rank's device, by `device_key`; the one before it is freed.

    A collective. WeightError out of order, and when the weights have changed since `prepare_weights_for_ipc`.
    """
    refit = worker.refit
    assert refit is not None, "prepare_weights_for_ipc() comes first"
    if refit.is_void:
        raise WeightError(
            f"the weights have changed since prepare_weights_for_ipc() announced them as {refit.version}: call "
            "it again and send all groups anew"
        )
    refit.free()
    group = refit.groups[0] if refit.groups else []
    if [entry.name for entry in group] != list(keys):
        raise WeightError(
            f"the weights {', '.join(keys)} were asked for, the next group is "
            f"{', '.join(entry.name for entry in group) or 'none'}: ask in the order of prepare_weights_for_ipc"
        )
    del refit.groups[0]
    parts = list(_parts(group, refit.weights))
    refit.shared, where = _share(parts, device=refit.device)
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part.numpy().data)
    nbytes = sum(part.numel() for part in parts)
    shared = SharedGroup(
        version=refit.version, entries=tuple(group), nbytes=nbytes, checksum=hashed.hexdigest(), **where
    )
    return {device_key(refit.device): shared}


def void_weights_for_ipc(worker: SharingRank) -> None:
    """The weights have changed: groups that were not asked for yet are not to be had any more. Idempotent."""
    if worker.refit is not None:
        worker.refit.is_void = True


def release_weights_for_ipc(worker: SharingRank) -> None:
    """Frees what this rank shares; idempotent. What an engine's worker has mapped it keeps until it has loaded it."""
    refit, worker.refit = worker.refit, None
    if refit is not None:
        refit.free()


def _parts(group: Sequence[TensorEntry], weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """The group's bytes from its first to its last, the gaps between aligned tensors included."""
    end = 0
    for entry in group:
        name, tensor = next(weights)
        assert name == entry.name, f"gathered {name} where {entry.name} was to come"
        yield torch.zeros(entry.offset - end, dtype=torch.uint8)
        yield tensor.contiguous().view(-1).view(torch.uint8)
        end = entry.offset + entry.nbytes


def _share(parts: Sequence[torch.Tensor], *, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """What keeps the parts' bytes, one after the other, in memory, and where another process finds them."""
    if device.type == "cpu":
        file = MemoryFile(*[part.numpy().data for part in parts])
        return file, {"path": file.path}
    shared = torch.cat(list(parts)).to(device)
    torch.cuda.synchronize(device)
    storage: Any = shared.untyped_storage()
    return shared, {"cuda": storage._share_cuda_()}


def _free_bytes(device: torch.device) -> int:
    free = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return int(FREE_PART * free)


# -- both sides ------------------------------------------------------------------------------------------------------


def device_key(device: torch.device) -> str:
    """The device's name, the same in every process that can share its memory."""
    if device.type == "cpu":
        return f"cpu:{platform.node()}"
    return str(torch.cuda.get_device_properties(device).uuid)


# -- engine workers --------------------------------------------------------------------------------------------------


def open_group(group: SharedGroup, *, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """The group's tensors, in place; each keeps the memory alive. ManifestMismatch when a byte is not what it was."""
    if device.type == "cpu":
        with open(group.path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), group.nbytes, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapped, dtype=torch.uint8)
    else:
        # the first entry is the device's number in the process that shares it
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *group.cuda[1:])
        data = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: group.nbytes]
    found = checksum(data.cpu().numpy().data)
    if found != group.checksum:
        names = ", ".join(entry.name for entry in group.entries[:3])
        raise ManifestMismatch(f"checksum of the group with {names} is {found}, the learner's was {group.checksum}")
    return [(entry.name, view_of(entry, data)) for entry in group.entries]
