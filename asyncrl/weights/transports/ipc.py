"""Shares weights in memory between learner ranks and engines of one node. No byte leaves the node.

For a run (`weights.transport: ipc`), `SharedSnapshotTransport`: a rank's snapshot is in a memory file, and a replica
reads it by its path. Nothing is copied to send. A newer snapshot may overwrite the memory while it is read. The bytes
then do not have the manifest's checksum, and the replica fetches the newest version.

For a synchronous loop, `SharedWeights`: one group of tensors at a time, on the learner's own device. On CPUs a group is
a memory file that the engine's workers map. On GPUs it is a buffer that they open by its CUDA IPC handle. Invariants: a
rank keeps one group at a time. A group does not outlive its rank. The engine verifies a group's checksum before it
applies the group. Names, shapes and dtypes are compared before the first group, with `weights_metadata`.

    sharing = SharedWeights(world_size=2)
    groups = sharing.prepare(specs, weights, 2**30, version=version)  # call all of this on every rank
    for names in groups:
        handles = sharing.next_group(names)  # the engine applies them before the next call
    sharing.release()
"""

import asyncio
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist

from asyncrl.common.version import Version
from asyncrl.errors import FetchFailed, ManifestMismatch, ManifestVoid, WeightError
from asyncrl.weights.manifest import Bytes, ParameterSpec, TensorEntry, aligned, checksum, flat_bytes, layout
from asyncrl.weights.memory_file import MemoryFile
from asyncrl.weights.tensor_views import mapped, view_of
from asyncrl.weights.transports.interfaces import Shipment, StoresBytes

FREE_PART = 0.5
"""Largest share of a device's free memory for one group. The engine needs some of the rest to load the group."""


# -- for an asynchronous run -----------------------------------------------------------------------------------------


class SharedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A range of bytes of a memory file on a node."""

    node: str
    path: str
    start: int
    nbytes: int


class SharedSnapshotTransport(StoresBytes):
    """The handle of a bucket is a range of the memory file with the rank's snapshot. Learner ranks and generators must
    be on one node; otherwise `receive` raises WeightError."""

    def send(self, sent: Shipment) -> list[Any]:
        assert sent.shared is not None, "take the snapshot in shared memory"
        handles, start = [], 0
        for part in sent.parts:
            handles.append(SharedBytes(node=platform.node(), path=sent.shared.path, start=start, nbytes=part.nbytes))
            start += part.nbytes
        return handles

    async def receive(self, handle: SharedBytes, *, timeout_s: float) -> Bytes:
        if handle.node != platform.node():
            raise WeightError(
                f"weights.transport = ipc needs learner and generators on one node, but the learner's rank is on "
                f"{handle.node} and this replica on {platform.node()}; use object_store or filesystem"
            )
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.to_thread(_copied, handle)
        except TimeoutError as error:
            raise FetchFailed("reading weights in memory took longer than weights.load_timeout_s") from error
        except (OSError, ValueError) as error:
            raise ManifestVoid(
                f"the process that published these weights has ended, so their bytes are lost: {error}"
            ) from error


def _copied(handle: SharedBytes) -> Bytes:
    return np.fromfile(handle.path, dtype=np.uint8, offset=handle.start, count=handle.nbytes)


# -- for a synchronous loop ------------------------------------------------------------------------------------------


class SharedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of tensors in shared memory: on CPUs the `path` of a file, on GPUs a CUDA IPC handle of a uint8 storage
    (`cuda`)."""

    version: Version
    entries: tuple[TensorEntry, ...]
    nbytes: int
    checksum: str
    path: str = ""
    cuda: tuple[Any, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Refit:
    """The state of a rank during a refit: the groups that remain, the running gather of weights, and the memory of the
    last group. `is_void` is True if the weights have changed since `prepare`: the remaining groups would be of another
    version."""

    version: Version
    groups: list[list[TensorEntry]]
    weights: Iterator[tuple[str, torch.Tensor]]
    shared: Any = None
    is_void: bool = False

    def free(self) -> None:
        if isinstance(self.shared, MemoryFile):
            self.shared.close()
        self.shared = None


# -- for a synchronous loop: learner ranks ---------------------------------------------------------------------------


class SharedWeights:
    """One learner rank's side of refits, in the memory of its `device`. Every method except `void` and `release` is a
    collective: call it on all ranks."""

    def __init__(self, *, world_size: int, device: torch.device | None = None) -> None:
        self._world_size = world_size
        self._device = device or torch.device("cpu")
        self._refit: _Refit | None = None

    def prepare(
        self,
        specs: Sequence[ParameterSpec],
        weights: Iterator[tuple[str, torch.Tensor]],
        refit_buffer_size_bytes: int | None = None,
        *,
        version: Version,
    ) -> list[list[str]]:
        """Divides the weights into groups. Returns the names of each group, in the order in which to request the
        groups.

        `specs` describe the tensors that `weights` yields. The result is the same on every rank. A group fits into
        `refit_buffer_size_bytes` and into half of the free memory of each rank's device; a larger tensor is a group of
        its own. It frees the memory of an earlier, unfinished refit.
        """
        self.release()
        free = _free_bytes(self._device)
        budget = torch.tensor([min([free] if refit_buffer_size_bytes is None else [free, refit_buffer_size_bytes])])
        if self._world_size > 1:
            dist.all_reduce(budget, op=dist.ReduceOp.MIN)
        groups = [list(layout(group)) for group in _groups(specs, int(budget))]
        self._refit = _Refit(version=version, groups=groups, weights=weights)
        return [[entry.name for entry in group] for group in groups]

    def next_group(self, keys: Sequence[str]) -> dict[str, SharedGroup]:
        """Shares the next group, whose names are `keys`, in the memory of this rank's device, and frees the group
        before.

        Returns the group by `device_key`. Raises WeightError when `keys` is not the next group, and when the weights
        have changed since `prepare`.
        """
        refit = self._refit
        assert refit is not None, "call prepare_weights_for_ipc() first"
        if refit.is_void:
            raise WeightError(
                f"the weights have changed since prepare_weights_for_ipc() announced them as {refit.version}; call "
                "it again and send all groups again"
            )
        refit.free()
        group = refit.groups[0] if refit.groups else []
        if [entry.name for entry in group] != list(keys):
            raise WeightError(
                f"the weights {', '.join(keys)} were requested, but the next group is "
                f"{', '.join(entry.name for entry in group) or 'none'}; use the order of prepare_weights_for_ipc"
            )
        del refit.groups[0]
        parts = list(_parts(group, refit.weights))
        refit.shared, where = _share(parts, device=self._device)
        shared = SharedGroup(
            version=refit.version,
            entries=tuple(group),
            nbytes=flat_bytes(group),
            checksum=checksum(part.numpy() for part in parts),
            **where,
        )
        return {device_key(self._device): shared}

    def void(self) -> None:
        """Ends a refit by groups because training has changed the weights. The groups of weights that were not sent yet
        are refused, since they would be of another version. It may be called again."""
        if self._refit is not None:
            self._refit.is_void = True

    def release(self) -> None:
        """Frees the shared memory of this rank. It may be called again. An engine's worker keeps a mapped group until
        it is loaded."""
        refit, self._refit = self._refit, None
        if refit is not None:
            refit.free()


def _groups(specs: Sequence[ParameterSpec], budget_bytes: int) -> Iterator[list[ParameterSpec]]:
    """Divides parameters into groups of at most `budget_bytes`. A larger parameter is a group of its own. A tied one is
    sent like any other, because its group must not depend on another group."""
    group: list[ParameterSpec] = []
    size = 0
    for spec in specs:
        if group and size + spec.nbytes > budget_bytes:
            yield group
            group, size = [], 0
        group.append(spec._replace(tied_to=""))
        size += aligned(spec.nbytes)
    if group:
        yield group


def _parts(group: Sequence[TensorEntry], weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yields the group's bytes from first to last, including the gaps between aligned tensors."""
    end = 0
    for entry in group:
        name, tensor = next(weights)
        assert name == entry.name, f"gathered {name}, but {entry.name} comes next"
        yield torch.zeros(entry.offset - end, dtype=torch.uint8)
        yield tensor.contiguous().view(-1).view(torch.uint8)
        end = entry.offset + entry.nbytes


def _share(parts: Sequence[torch.Tensor], *, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Copies the parts into shared memory, one after the other. Returns the object that keeps the memory alive, and
    where another process finds it."""
    if device.type == "cpu":
        file = MemoryFile(sum(part.numel() for part in parts))
        torch.cat(list(parts), out=torch.from_numpy(file.data))
        return file, {"path": file.path}
    shared = torch.cat(list(parts)).to(device)
    torch.cuda.synchronize(device)
    storage: Any = shared.untyped_storage()
    return shared, {"cuda": storage._share_cuda_()}


def _free_bytes(device: torch.device) -> int:
    free = psutil.virtual_memory().available if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return int(FREE_PART * free)


# -- for a synchronous loop: learner ranks and engine workers --------------------------------------------------------


def device_key(device: torch.device) -> str:
    """Returns the name of the device. It is the same in every process that can share the device's memory."""
    if device.type == "cpu":
        return f"cpu:{platform.node()}"
    return str(torch.cuda.get_device_properties(device).uuid)


# -- for a synchronous loop: engine workers --------------------------------------------------------------------------


def open_group(group: SharedGroup, *, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Returns the group's tensors in place. Each of them keeps the memory alive. Raises ManifestMismatch when a byte
    has changed."""
    if device.type == "cpu":
        data = mapped(group.path, group.nbytes)
    else:
        # The first entry of the handle is the device's number in the process that shares it, so our own is used.
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *group.cuda[1:])
        data = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: group.nbytes]
    found = checksum([data.cpu().numpy()])
    if found != group.checksum:
        names = ", ".join(entry.name for entry in group.entries[:3])
        raise ManifestMismatch(
            f"the group of tensors with {names} has the checksum {found}, but the learner computed {group.checksum}: "
            "its bytes have changed since then; start the refit again"
        )

    return [(entry.name, view_of(entry, data)) for entry in group.entries]
