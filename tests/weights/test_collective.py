"""Weights by broadcast: either all workers get a whole version, or no worker changes anything. No rank waits forever.

Here ranks are threads of one process, each with its own connections. In tests/integration/test_refits.py they are
processes that are killed, with vLLM on the other side.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from asyncrl.common.version import Version
from asyncrl.errors import CollectiveError, ManifestMismatch, UpdateRefused
from asyncrl.weights.manifest import ParameterSpec, checksum, layout
from asyncrl.weights.publisher import snapshot_of
from asyncrl.weights.tensor_views import view_of
from asyncrl.weights.transports.collective import Received, receive_snapshot, send_snapshot
from asyncrl.weights.transports.peers import Peers, Rendezvous

pytestmark = pytest.mark.slow  # imports torch

FAR_S = 120.0
SOON_S = 5.0
TRAINERS, WORKERS = 2, 2
CPU = torch.device("cpu")
WEIGHTS = {f"layer.{index}": torch.arange(6.0).reshape(2, 3) + index for index in range(5)}
EXPECTED = dict.fromkeys(WEIGHTS, ((2, 3), "float32"))
SPECS = [ParameterSpec(name, (2, 3), "float32", 24) for name in WEIGHTS]
BUCKET_BYTES = 36


class Trainer:
    """A rank that has row `rank` of every tensor of `WEIGHTS`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.peers: Peers
        self.snapshot = snapshot_of(
            [(name, 3 * rank, tensor[rank : rank + 1]) for name, tensor in WEIGHTS.items()],
            layout(SPECS),
            bucket_bytes=BUCKET_BYTES,
        )

    def join(self, meeting: Rendezvous) -> None:
        self.peers = Peers.join(meeting, rank=self._rank, device=CPU)

    def send(self, step: int) -> None:
        send_snapshot(self.peers, self.snapshot, Version(1, step))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Runs all calls at the same time. Returns what each of them returned or raised."""
    outcomes: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            outcomes[index] = call()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + FAR_S
    for thread in threads:
        thread.join(deadline_s - time.monotonic())
        assert not thread.is_alive(), "a call hangs"
    return outcomes


def rendezvous(*, timeout_s: float = FAR_S) -> Rendezvous:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    world = TRAINERS + WORKERS
    return Rendezvous(host="127.0.0.1", port=port, world_size=world, train_world_size=TRAINERS, timeout_s=timeout_s)


class World:
    """Two trainers with snapshots in buckets of three rows, and two workers."""

    def __init__(self, *, timeout_s: float = FAR_S) -> None:
        meeting = rendezvous(timeout_s=timeout_s)
        self.trainers = [Trainer(rank) for rank in range(TRAINERS)]
        *trainers_joined, first, second = at_once(
            *[lambda trainer=trainer: trainer.join(meeting) for trainer in self.trainers],
            *[lambda rank=rank: Peers.join(meeting, rank=TRAINERS + rank, device=CPU) for rank in range(WORKERS)],
        )
        assert [*trainers_joined, type(first), type(second)] == [None, None, Peers, Peers], (trainers_joined, first)
        self.workers: list[Peers] = [first, second]

    def update(self, *, step: int = 3, expected: Any = (EXPECTED, EXPECTED)) -> list[Any]:
        """Runs an update. Returns the outcomes of the trainers, then of the workers."""
        return at_once(
            *[lambda trainer=trainer: trainer.send(step) for trainer in self.trainers],
            *[
                lambda worker=worker, own=own: receive_snapshot(worker, expected=own)
                for worker, own in zip(self.workers, expected, strict=True)
            ],
        )

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.peers.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def tensors_of(received: Received) -> dict[str, torch.Tensor]:
    return {entry.name: view_of(entry, received.flat) for entry in received.manifest.tensors}


def whole(outcomes: list[Any]) -> bool:
    """Returns True if every worker holds exactly the trainers' weights."""
    return outcomes[:TRAINERS] == [None, None] and all(
        list(found) == list(WEIGHTS) and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
        for found in map(tensors_of, outcomes[TRAINERS:])
    )


def test_every_worker_gets_every_tensor_with_its_version(world: World) -> None:
    outcomes = world.update()
    assert whole(outcomes)
    for received in outcomes[TRAINERS:]:
        assert received.manifest.version == Version(1, 3)
        assert [bucket.nbytes for bucket in received.manifest.buckets] == [36, 24, 36, 24], "two of each rank"
    assert whole(world.update(step=4)), "the group can run more than one update"


@pytest.mark.fault("F12")
def test_a_model_that_one_worker_does_not_have_is_refused_by_all_before_a_byte_is_sent(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    broadcast = Peers.broadcast
    monkeypatch.setattr(Peers, "broadcast", lambda *args, **named: (sent.append(1), broadcast(*args, **named)))
    other = EXPECTED | {"layer.0": ((3, 2), "float32")}
    first, second, fits, refuses = world.update(expected=(EXPECTED, other))
    assert isinstance(refuses, ManifestMismatch)
    assert "layer.0 is float32[2, 3]" in str(refuses)
    for outcome in (first, second, fits):
        assert isinstance(outcome, UpdateRefused)
        assert "ranks [3]" in str(outcome)
    assert not sent
    assert whole(world.update()), "the group stays usable"


@pytest.mark.fault("F12")
def test_bytes_that_one_worker_finds_damaged_are_kept_by_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    broadcast = Peers.broadcast
    flipped: list[int] = []

    def flip(self: Peers, bytes_: torch.Tensor, *, root: int) -> None:
        broadcast(self, bytes_, root=root)
        if self.rank == 2 and root == 1:
            flipped.append(int(bytes_[3].bitwise_xor_(1)))
            monkeypatch.undo()

    monkeypatch.setattr(Peers, "broadcast", flip)
    first, second, damaged, undamaged = world.update()
    assert flipped
    assert isinstance(damaged, ManifestMismatch)
    assert "bucket 2 (with layer.0, layer.1, layer.2) has the checksum" in str(damaged)
    assert all(isinstance(outcome, UpdateRefused) for outcome in (first, second, undamaged))
    assert whole(world.update())


@pytest.mark.parametrize(("absent", "named"), [(1, r"ranks \[1\] of 4 did not join"), (3, r"ranks \[3\] of 4")])
def test_who_does_not_come_is_named_within_the_deadline(absent: int, named: str) -> None:
    meeting = rendezvous(timeout_s=SOON_S)
    outcomes = at_once(
        *[lambda rank=rank: Peers.join(meeting, rank=rank, device=CPU) for rank in range(4) if rank != absent]
    )
    assert all(isinstance(outcome, CollectiveError) for outcome in outcomes), outcomes
    with pytest.raises(CollectiveError, match=named):
        raise outcomes[0]


def test_without_rank_0_nobody_waits_for_ever() -> None:
    meeting = rendezvous(timeout_s=SOON_S)
    outcomes = at_once(*[lambda rank=rank: Peers.join(meeting, rank=rank, device=CPU) for rank in (1, 2)])
    assert [type(outcome) for outcome in outcomes] == [CollectiveError, CollectiveError]


@pytest.mark.parametrize("absent", [0, 3])
def test_a_peer_that_does_not_take_part_ends_the_others_wait_and_the_group(absent: int) -> None:
    world = World(timeout_s=SOON_S)
    calls = [
        *[lambda trainer=trainer: trainer.send(0) for trainer in world.trainers],
        *[lambda worker=worker: receive_snapshot(worker, expected=EXPECTED) for worker in world.workers],
    ]
    del calls[absent]
    assert [type(outcome) for outcome in at_once(*calls)] == [CollectiveError] * 3
    again = world.trainers[0 if absent else 1]
    with pytest.raises(CollectiveError, match="join a new group"):
        again.send(0)
    world.close()


@pytest.mark.parametrize("leaver", [1, 3])
def test_a_peer_that_leaves_ends_an_exchange_long_before_its_deadline(leaver: int) -> None:
    world = World(timeout_s=FAR_S)
    leave = [
        *[trainer.peers.close for trainer in world.trainers],
        *[worker.close for worker in world.workers],
    ][leaver]
    calls = [
        *[lambda trainer=trainer: trainer.send(0) for trainer in world.trainers],
        *[lambda worker=worker: receive_snapshot(worker, expected=EXPECTED) for worker in world.workers],
    ]
    del calls[leaver]
    leave()
    assert [type(outcome) for outcome in at_once(*calls)] == [CollectiveError] * 3


def test_a_new_group_replaces_one_that_failed() -> None:
    world = World()
    meeting = rendezvous()
    for worker in world.workers:
        worker.close()
    joined = at_once(
        *[lambda trainer=trainer: trainer.join(meeting) for trainer in world.trainers],
        *[lambda rank=rank: Peers.join(meeting, rank=rank, device=CPU) for rank in (2, 3)],
    )
    world.workers = joined[TRAINERS:]
    assert whole(world.update())
    world.close()


def test_the_checksums_that_travel_are_those_of_the_bytes(world: World) -> None:
    received = world.update()[-1]
    flat = received.flat.numpy()
    for bucket in received.manifest.buckets:
        assert bucket.checksum == checksum(flat[p.offset : p.offset + p.nbytes] for p in bucket.pieces)
