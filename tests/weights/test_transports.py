"""Every transport keeps one contract: the bytes of two ranks arrive as they were sent, and lost bytes have an error of
their own type."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import ray
import torch
from local_ray import local_ray

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, FetchFailed, ManifestVoid, WeightError, WeightsDamaged
from asyncrl.weights.manifest import Bytes, Manifest, ParameterSpec, Probe, check_layout, layout
from asyncrl.weights.publisher import (
    MOST_BUCKETS,
    DeliveredBucket,
    Snapshot,
    changed_elements,
    deliver,
    snapshot_of,
)
from asyncrl.weights.staging import Part, StagedWeights
from asyncrl.weights.store import WeightStore
from asyncrl.weights.tensor_views import view_of
from asyncrl.weights.transports import broadcast, filesystem
from asyncrl.weights.transports.broadcast import CollectiveTransport
from asyncrl.weights.transports.filesystem import FilesystemTransport
from asyncrl.weights.transports.interfaces import BroadcastEnd, Transport
from asyncrl.weights.transports.ipc import SharedSnapshotTransport
from asyncrl.weights.transports.object_store import ObjectStoreTransport
from asyncrl.weights.transports.of_config import transport_of

pytestmark = pytest.mark.slow  # imports torch

RANKS = 2
WEIGHTS = {
    "a": torch.arange(12.0).reshape(4, 3),
    "b": torch.arange(5.0) + 100,
    "big": torch.arange(64.0).reshape(2, 32),
}
SPECS = [ParameterSpec(name, tuple(value.shape), "float32", value.nbytes) for name, value in WEIGHTS.items()]
PROBE = Probe(tokens=(), logprobs=())


def snapshots(*, shared: bool, change: float = 0.0, last: Sequence[Snapshot | None] = (None, None)) -> list[Snapshot]:
    """Returns the snapshot of each rank, in the memory of its `last` one. The first has the upper rows of each
    tensor."""
    found = []
    for rank in range(RANKS):
        shards = []
        for name, tensor in WEIGHTS.items():
            start = 0 if rank == 0 else -(-len(tensor) // 2)
            rows = tensor[: -(-len(tensor) // 2)] if rank == 0 else tensor[start:]
            shards.append((name, start * tensor[0].numel(), rows + change))
        found.append(snapshot_of(shards, layout(SPECS), bucket_bytes=100, shared=shared, last=last[rank]))
    return found


class Sending:
    """The learner's ranks with one transport. The weight store `store` offers what they publish, if there is one."""

    def __init__(self, transport: Transport, *, shared: bool, store: Any = None, pointer: Path | None = None) -> None:
        self.staged = StagedWeights(pointer)
        self.transport, self.shared, self.store = transport, shared, store
        self.senders = [transport.sender(rank, RANKS) for rank in range(RANKS)]
        self.kept: list[Snapshot] = []
        self.taken: list[Snapshot] = []
        """The snapshots to publish, if they are not those of `snapshots`."""
        self.before: Sequence[Snapshot | None] = (None, None)

    def publish(self, step: int, *, change: float = 0.0) -> tuple[Manifest, list[Any]]:
        last, self.before = self.before, self.kept or (None, None)
        self.kept = self.taken or snapshots(shared=self.shared, change=change, last=last)
        version = Version(1, step)
        with ThreadPoolExecutor(RANKS) as ranks:
            by_rank = ranks.map(lambda rank: deliver(self.kept[rank], self.senders[rank], version), range(RANKS))
            sent: list[DeliveredBucket] = [bucket for buckets in by_rank for bucket in buckets]
        manifest = Manifest(
            version=version,
            tensors=layout(SPECS),
            buckets=tuple(each.bucket for each in sent),
            probe=PROBE,
        )
        handles = [each.handle for each in sent]
        if self.store is not None:
            ray.get(self.store.publish.remote(manifest, handles))
        return manifest, handles

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        if self.store is not None:
            ray.kill(self.store)

    @asynccontextmanager
    async def replica(
        self,
        *,
        takes_part: bool,
        may_fetch: bool = False,
        ended: Callable[[BroadcastEnd], None] = lambda end: None,
    ) -> AsyncIterator[None]:
        """A replica that `takes_part` in broadcasts, if the transport has any. It must then get all bytes by broadcast,
        unless it `may_fetch`."""
        if self.store is None or not takes_part:
            yield
            return
        taking_part = asyncio.create_task(self.transport.take_part("replica", ended=ended))
        while not await self.store.present.remote((), 1.0):
            await asyncio.sleep(0.01)
        with pytest.MonkeyPatch.context() as patched:
            if not may_fetch:
                patched.setattr(self.transport, "receive", None)
            yield
        taking_part.cancel()
        await asyncio.gather(taking_part, return_exceptions=True)


def collective_sending(folder: Path) -> Sending:
    store = ray.remote(WeightStore).options(num_cpus=0, max_concurrency=100).remote()
    pointer = folder / "pointer"
    transport = CollectiveTransport(lambda: store, timeout_s=30.0, call_timeout_s=30.0, staged_at=pointer)
    return Sending(transport, shared=False, store=store, pointer=pointer)


async def received(sending: Sending, manifest: Manifest, handles: list[Any]) -> dict[str, torch.Tensor]:
    """Stages a version. Returns its tensors."""

    async def fetch(part: Part) -> Bytes:
        return await sending.transport.receive(handles[part.bucket], timeout_s=30.0)

    check_layout(manifest)
    await sending.staged.stage(manifest, fetch)
    sending.transport.staged(manifest.version)
    flat = torch.from_numpy(sending.staged.flat.copy())
    sending.staged.release()
    return {entry.name: view_of(entry, flat) for entry in manifest.tensors}


async def fetch_nothing(part: Part) -> Bytes:
    raise AssertionError("all of it is staged")


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors cannot import a test module
    with local_ray(cpus=1):
        yield


MAKERS: dict[str, Callable[[Path], Sending]] = {
    "object_store": lambda folder: Sending(ObjectStoreTransport(), shared=False),
    "filesystem": lambda folder: Sending(FilesystemTransport(folder / "weights"), shared=False),
    "ipc": lambda folder: Sending(SharedSnapshotTransport(), shared=True),
    "collective": collective_sending,
}
OVER_RAY = ("object_store", "collective")


@pytest.fixture(params=list(MAKERS))
def sending(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sending]:
    if request.param in OVER_RAY:
        request.getfixturevalue("own_ray")
    with closing(MAKERS[request.param](tmp_path)) as sending:
        yield sending


@pytest.mark.asyncio
@pytest.mark.parametrize("takes_part", [True, False])
async def test_the_shards_of_all_ranks_arrive_as_whole_weights(sending: Sending, takes_part: bool) -> None:
    async with sending.replica(takes_part=takes_part):
        for step in range(4):
            manifest, handles = await asyncio.to_thread(sending.publish, step, change=float(step))
            handles = [
                handle if sending.transport.__class__ is ObjectStoreTransport else _over_a_wire(handle)
                for handle in handles
            ]
            found = await received(sending, manifest, handles)
            for name, tensor in WEIGHTS.items():
                assert torch.equal(found[name], tensor + step), name
    assert sending.kept[0].memory is not sending.before[0].memory  # type: ignore[union-attr]
    sending.transport.delete(lambda version: True)


def _over_a_wire(handle: Any) -> Any:
    """Returns the handle as another process gets it."""
    return msgspec.convert(msgspec.to_builtins(handle), type(handle))


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_bytes_that_change_on_their_way_are_refused(sending: Sending) -> None:
    manifest, handles = await asyncio.to_thread(sending.publish, 0)

    async def flipped(part: Part) -> Bytes:
        data = np.array(await sending.transport.receive(handles[part.bucket], timeout_s=30.0))
        data[-1] ^= 1
        return data

    with pytest.raises(WeightsDamaged, match=r"bucket 0 .* has the checksum"):
        await sending.staged.stage(manifest, flipped)


# -- what only one of them does ---------------------------------------------------------------------------------------


def test_the_configuration_names_the_transport(tmp_path: Path) -> None:
    def chosen(**weights: Any) -> Transport:
        return transport_of(
            Config.model_validate({"weights": weights, "run": {"dir": str(tmp_path), "name": "r"}}), nonce="ab12"
        )

    assert isinstance(chosen(), ObjectStoreTransport)
    assert isinstance(chosen(transport="ipc"), SharedSnapshotTransport)
    assert isinstance(chosen(transport="collective"), CollectiveTransport)
    ours, users = chosen(transport="filesystem"), chosen(transport="filesystem", folder=str(tmp_path / "shared"))
    for transport, folder in ((ours, tmp_path / "r" / "weights"), (users, tmp_path / "shared" / "r-ab12")):
        assert isinstance(transport, FilesystemTransport)
        Sending(transport, shared=False).publish(0)
        assert _files(folder) == [folder / "1.0"], "two runs with one folder share no files"


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def test_a_folder_that_cannot_be_used_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    weights = {"transport": "filesystem", "folder": str(tmp_path / "file")}
    config = Config.model_validate({"weights": weights})
    with pytest.raises(ConfigError, match=r"weights\.folder = .*file: the learner cannot make a folder in it"):
        transport_of(config, nonce="ab12")
    transport_of(config)  # a generator gets the paths from the learner


class Publisher:
    """A process that offers bytes which never arrive."""

    def offer(self) -> list[Any]:
        """Returns the reference of an object that this process owns."""
        return [ray.get_runtime_context().current_actor.hang.remote()]

    def hang(self) -> None:
        threading.Event().wait()


@pytest.fixture
def publisher(own_ray: None) -> Iterator[Any]:
    actor = ray.remote(Publisher).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


@pytest.mark.asyncio
@pytest.mark.fault("F11")
async def test_a_sender_that_died_before_its_bytes_arrived_voids_the_manifest(publisher: Any) -> None:
    [handle] = await publisher.offer.remote()
    ray.kill(publisher)
    with pytest.raises(ManifestVoid, match="the process that published these weights has ended"):
        await ObjectStoreTransport().receive(handle, timeout_s=60.0)


@pytest.mark.asyncio
async def test_bytes_that_do_not_arrive_in_time_name_the_deadline(publisher: Any) -> None:
    with pytest.raises(FetchFailed, match=r"took longer than weights\.load_timeout_s"):
        await ObjectStoreTransport().receive(publisher.hang.remote(), timeout_s=0.01)


@pytest.mark.asyncio
@pytest.mark.fault("F38")
async def test_files_of_the_versions_that_are_named_are_deleted_and_no_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sending = Sending(FilesystemTransport(folder), shared=False)
    first = sending.publish(9)
    for step in (10, 11):
        newest = sending.publish(step)
    (folder / "notes.txt").touch()
    sending.transport.delete(lambda version: version.step < 11)
    assert sorted(os.listdir(folder)) == ["1.11", "notes.txt"]
    assert {path.suffix for path in _files(folder / "1.11")} == {".safetensors"}
    assert {path.stat().st_mode & 0o777 for path in _files(folder / "1.11")} == {0o644}, "others may read them"
    with pytest.raises(ManifestVoid, match=r"cannot be read .*check that weights\.folder"):
        await received(sending, *first)
    await received(sending, *newest)
    sending.transport.delete(lambda version: True)
    assert os.listdir(folder) == ["notes.txt"]
    (folder / "notes.txt").unlink()
    sending.transport.delete(lambda version: True)
    assert not folder.exists()
    sending.transport.delete(lambda version: True)


@pytest.mark.parametrize(
    "name", ["1.5/python", "1.5/a.safetensors", "1.5/lib/0-{hash}.safetensors", "1.5/x0-{hash}.safetensors", "1.5"]
)
def test_a_folder_of_another_program_that_looks_like_a_version_stays(name: str, tmp_path: Path) -> None:
    """`weights.folder` may be wrong, or come with a run directory from elsewhere."""
    path = tmp_path / name.format(hash="0" * 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    FilesystemTransport(tmp_path).delete(lambda version: True)
    assert path.read_text() == "mine"


def test_a_version_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    own = tmp_path / "elsewhere" / f"0-{'0' * 32}.safetensors"
    own.parent.mkdir()
    own.touch()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "1.5").symlink_to(own.parent)
    FilesystemTransport(tmp_path / "weights").delete(lambda version: True)
    assert own.exists()


@pytest.mark.asyncio
async def test_a_disk_that_does_not_answer_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending(FilesystemTransport(tmp_path), shared=False)
    _, handles = sending.publish(0)
    may_read = asyncio.Event()

    async def stuck(*_: Any) -> Any:
        await may_read.wait()

    monkeypatch.setattr(filesystem.asyncio, "to_thread", stuck)
    with pytest.raises(FetchFailed, match=r"took longer than weights\.load_timeout_s"):
        await sending.transport.receive(handles[0], timeout_s=0.01)


@pytest.mark.asyncio
@pytest.mark.fault("F38")
async def test_the_memory_of_a_rank_that_has_ended_voids_the_manifest() -> None:
    sending = Sending(SharedSnapshotTransport(), shared=True)
    _, handles = sending.publish(0)
    gone = msgspec.structs.replace(handles[0], path=f"/proc/{os.getpid()}/fd/99999")
    with pytest.raises(ManifestVoid, match="has ended"):
        await sending.transport.receive(gone, timeout_s=1.0)


@pytest.mark.asyncio
async def test_shared_memory_of_another_node_is_refused_with_advice() -> None:
    sending = Sending(SharedSnapshotTransport(), shared=True)
    _, handles = sending.publish(0)
    theirs = msgspec.structs.replace(handles[0], node="elsewhere")
    with pytest.raises(WeightError, match=r"needs learner and generators on one node.*use object_store"):
        await sending.transport.receive(theirs, timeout_s=1.0)


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_shared_memory_that_a_newer_snapshot_overwrites_is_no_whole_version() -> None:
    sending = Sending(SharedSnapshotTransport(), shared=True)
    manifest, handles = sending.publish(0)
    sending.kept[1].memory[:4] ^= 1
    with pytest.raises(WeightsDamaged):
        await received(sending, manifest, handles)


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_a_rank_stores_no_bytes_of_a_snapshot_that_a_newer_one_overwrites(own_ray: None, tmp_path: Path) -> None:
    with closing(collective_sending(tmp_path)) as sending:
        _, handles = sending.publish(0)
        sending.kept[0].memory[:4] ^= 1
        with pytest.raises(FetchFailed, match=r"learner rank 0 did not put its bytes of weights 1\.0"):
            await sending.transport.receive(handles[0], timeout_s=1.0)
        assert len(await sending.transport.receive(handles[-1], timeout_s=30.0))


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_a_replica_takes_part_again_although_the_last_rank_sends_nothing(own_ray: None, tmp_path: Path) -> None:
    """With HSDP, only the ranks of the first copy send."""
    shards = [[(name, 0, tensor) for name, tensor in WEIGHTS.items()], []]
    taken = [snapshot_of(each, layout(SPECS), bucket_bytes=100) for each in shards]
    with closing(collective_sending(tmp_path)) as sending:
        sending.taken = taken
        async with sending.replica(takes_part=True, may_fetch=True):
            with pytest.MonkeyPatch.context() as damaging:
                damaging.setattr(broadcast, "checksum", lambda parts: "damaged")
                published = await asyncio.to_thread(sending.publish, 0)
            for there in (0, 1):
                found = await sending.store.present.remote(("a replica that never comes",), 1.0)
                assert len(found) == there
                await received(sending, *published)


@pytest.mark.asyncio
async def test_a_broadcast_that_comes_while_the_node_loads_other_weights_is_fetched_later(
    own_ray: None, tmp_path: Path
) -> None:
    ends: list[BroadcastEnd] = []
    loads = StagedWeights(tmp_path / "pointer")
    with closing(collective_sending(tmp_path)) as sending:
        async with sending.replica(takes_part=True, may_fetch=True, ended=ends.append):
            for step in range(3):
                published = await asyncio.to_thread(sending.publish, step, change=float(step))
                loads.release()
                found = await received(sending, *published)
                assert torch.equal(found["big"], WEIGHTS["big"] + step)
                if step == 0:
                    await loads.stage(published[0], fetch_nothing)
            there = await sending.store.present.remote((), 1.0)
    assert [end.outcome for end in ends] == ["received", "missed", "received"]
    assert list(there.values()) == [1], "it has not left the membership"


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_reuses_the_memory_of_another_one(shared: bool) -> None:
    [first, *_] = snapshots(shared=shared)
    again = snapshot_of(
        [("a", 0, WEIGHTS["a"][:2] + 1), ("b", 0, WEIGHTS["b"][:3]), ("big", 0, WEIGHTS["big"][:1])],
        layout(SPECS),
        bucket_bytes=100,
        shared=shared,
        last=first,
    )
    assert again.memory is first.memory
    assert again.shared is first.shared
    assert (first.shared is not None) is shared
    assert again.memory[:24].view(np.float32).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_elements_that_changed_between_two_snapshots_are_estimated(dtype: torch.dtype) -> None:
    name, size = str(dtype).removeprefix("torch."), dtype.itemsize
    specs = [ParameterSpec("a", (64, 64), name, 4096 * size), ParameterSpec("b", (3,), name, 3 * size)]

    def taken(a: torch.Tensor, b: torch.Tensor) -> Snapshot:
        return snapshot_of([("a", 0, a), ("b", 0, b)], layout(specs), bucket_bytes=100)

    ones = torch.ones(64, 64)
    before = taken(ones, torch.ones(3))
    columns = ones.clone()
    columns[:, :16] += 1.0
    found = changed_elements(taken(columns, torch.tensor([1.0, 2.0, 1.0])), before)
    assert found is not None
    assert found.elements == 4099
    assert found.changed == pytest.approx(1025, rel=0.02), "a quarter of a, and one element of b"
    moved = changed_elements(taken(ones + 1e-4, torch.ones(3)), before)
    assert moved == (4096.0 if dtype is torch.float32 else 0.0, 4099), "a change below the precision has the same bits"
    assert changed_elements(snapshot_of([("a", 0, ones)], layout(specs), bucket_bytes=100), before) is None


def test_a_large_model_has_larger_buckets_instead_of_more() -> None:
    """Each bucket has a reference that every node fetches (D45)."""
    specs = [ParameterSpec("a", (2, 64_000), "float32", 512_000), ParameterSpec("b", (700,), "float32", 2_800)]
    rows = torch.zeros(2, 64_000)
    for shards in ([rows], [rows[:1], rows[1:]]):
        taken = [
            snapshot_of([("a", index * 64_000, shard)], layout(specs), bucket_bytes=100)
            for index, shard in enumerate(shards)
        ]
        buckets = [bucket for snapshot in taken for bucket in snapshot.buckets]
        assert {bucket.nbytes % 2 for bucket in buckets} == {0}, "deltas count elements of two bytes"
        assert len(buckets) <= MOST_BUCKETS + len(shards)
        assert sum(bucket.nbytes for bucket in buckets) == 512_000
