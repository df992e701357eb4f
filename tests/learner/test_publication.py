"""Publication by the learner: what slow and failed deliveries do, with ranks and a weight store that the test leads."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.errors import ActorGone, CallTimeout, StallError
from asyncrl.learner import publication
from asyncrl.learner.publication import MOST_REPEATS, Publisher
from asyncrl.learner.recording import described_metrics
from asyncrl.weights.manifest import Bucket, Link, Manifest
from asyncrl.weights.publisher import ChangedElements, DeliveredBucket


class Ranks:
    """One rank. A slot of its memory has the number of the snapshot in it. Each delivery first runs the next of
    `answers`, which may wait or raise. `links` are the steps of the links of a version, by its step."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.used: list[int] = []
        self.taken = 0
        self.answers: list[Callable[[], None]] = []
        self.sending: set[int] = set()
        self.previous: list[Version | None] = []
        self.whole: list[bool] = []
        self.links: dict[int, list[int]] = {}

    def call(self, function: Any, entries: Any, probe_tokens: Any, slot: int) -> list[Any]:
        assert slot not in self.sending, "a snapshot that is being sent must not change"
        assert slot in (0, 1), "memory for two snapshots"
        self.used.append(slot)
        self.slots[slot] = self.taken
        self.taken += 1
        return (
            [([[-1.0]], ChangedElements(1.0, 30)), ([], ChangedElements(2.0, 10))]
            if self.taken > 1
            else [([], None)] * 2
        )

    def beside(
        self, lane: str, method: Any, transport: Any, slot: int, version: Version, previous: Version | None, whole: bool
    ) -> list[list[DeliveredBucket]]:
        self.sending.add(slot)
        self.previous.append(previous)
        self.whole.append(whole)
        try:
            if self.answers:
                self.answers.pop(0)()
            links = tuple(Link(Version(1, step), "", 1, True) for step in self.links.get(version.step, []))
            bucket = Bucket(pieces=(), checksum=str(self.slots[slot]), links=links)
            return [[DeliveredBucket(bucket=bucket, handle="handle")]]
        finally:
            self.sending.discard(slot)


class Scene:
    """A publisher whose deliveries a test can hold up or let fail. `stored` are the manifests in the weight store."""

    def __init__(self, **settings: Any) -> None:
        self.ranks = Ranks()
        self.stored: list[Manifest] = []
        self.told: list[Version] = []
        self.again: list[bool] = []
        self.recorded: list[Version] = []
        self.refusals: asyncio.Queue[int] = asyncio.Queue()
        self.late_refusals = 0
        """Number of calls for a refusal that are late before one gets its answer."""
        config = Config.model_validate(settings)
        self.metrics = described_metrics(config)
        self.deleted: list[int] = []
        policy: Any = SimpleNamespace(ranks=self.ranks)
        anything: Any = self
        self.publisher = Publisher(
            config=config,
            policy=policy,
            entries=(),
            probe_tokens=[],
            transport=anything,
            coordinator=anything,
            weights=anything,
            metrics=self.metrics,
            delivered=lambda manifest: self.recorded.append(manifest.version),
        )

    async def call(self, method: Any, version: Version) -> None:
        self.told.append(version)

    async def refused(self, after: int, *, wait_s: float) -> int | None:
        if self.late_refusals:
            self.late_refusals -= 1
            raise CallTimeout("waiting for refused weights took longer than 30 s")
        return await self.refusals.get()

    async def publish(self, manifest: Manifest, handles: list[Any], *, again: bool) -> int:
        assert self.told[-1] == manifest.version, "the coordinator knows a version before a replica can load it"
        self.again.append(again)
        self.stored.append(manifest)
        return len(self.stored)

    def delete(self, which: Callable[[Version], bool]) -> None:
        """The transport's: lists the steps of all versions that it would delete now."""
        self.deleted = [step for step in range(10) if which(Version(1, step))]

    @property
    def versions(self) -> list[int]:
        return [manifest.version.step for manifest in self.stored]

    @property
    def snapshots(self) -> list[int]:
        """The number of the snapshot of each manifest. Here it equals the step of its version."""
        return [int(manifest.buckets[0].checksum) for manifest in self.stored]

    def deliveries(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("asyncrl_weight_deliveries_total", {"outcome": outcome})

    async def publish_steps(self, *steps: int) -> None:
        for step in steps:
            await self.publisher.publish(Version(1, step))


def fails(error: Exception) -> Callable[[], None]:
    def answer() -> None:
        raise error

    return answer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "PAUSE_S", 0.01)


@pytest.mark.asyncio
async def test_versions_are_delivered_in_order_each_with_its_own_snapshot() -> None:
    scene = Scene()
    for step in range(4):
        await scene.publish_steps(step)
        await scene.publisher.settle()
    assert scene.versions == scene.snapshots == [0, 1, 2, 3]
    assert scene.publisher.published == Version(1, 3)
    assert scene.deleted == [0, 1, 4, 5, 6, 7, 8, 9], "the transport keeps what the weight store offers"
    assert scene.ranks.used == [0, 1, 0, 1], "the snapshot before stays whole, because replicas may still read it"
    assert scene.ranks.previous == [None, *(Version(1, step) for step in range(3))]


@pytest.mark.asyncio
async def test_a_publication_has_the_share_of_changed_elements_of_all_ranks() -> None:
    scene = Scene()
    assert await scene.publisher.publish(Version(1, 0)) is None
    assert await scene.publisher.publish(Version(1, 1)) == 3 / 40
    await scene.publisher.settle()
    assert scene.stored[-1].probe.logprobs == ((-1.0,),), "the probe is that of the first rank"


@pytest.mark.asyncio
async def test_the_transport_keeps_the_versions_that_deltas_build_on() -> None:
    scene = Scene()
    scene.ranks.links = {1: [0, 1], 2: [0, 1, 2], 3: [3]}
    kept = []
    for step in range(5):
        await scene.publish_steps(step)
        await scene.publisher.settle()
        kept.append({*range(10)} - {*scene.deleted})
    assert kept == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {3, 4}]


@pytest.mark.asyncio
async def test_after_a_failed_delivery_the_ranks_hear_which_version_the_store_has() -> None:
    scene = Scene()
    await scene.publish_steps(0)
    await scene.publisher.settle()
    scene.ranks.answers = [fails(OSError("the object store is full"))]
    await scene.publish_steps(1)
    await scene.publisher.settle()
    assert scene.versions == [0, 1]
    assert scene.ranks.previous == [None, Version(1, 0), Version(1, 0)]


@pytest.mark.asyncio
async def test_a_failed_delivery_is_logged_at_once_and_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """D15: with η = 0 nothing else would ask for the result of the delivery."""
    scene = Scene()
    scene.ranks.answers = [fails(OSError("the object store is full")), fails(OSError("still full"))]
    with caplog.at_level(logging.ERROR):
        await scene.publish_steps(0)
        await scene.publisher.settle()
    assert scene.versions == scene.snapshots == [0]
    assert [record.message.split(";")[0] for record in caplog.records] == [
        "delivering weights 1.0 failed (OSError: the object store is full)",
        "delivering weights 1.0 failed (OSError: still full)",
    ]
    assert scene.publisher.trouble == ""
    assert scene.deliveries("failed") == 2


@pytest.mark.asyncio
async def test_newer_weights_replace_those_whose_delivery_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "PAUSE_S", 60.0)
    monkeypatch.setattr(publication, "LONGEST_PAUSE_S", 60.0)
    scene = Scene()
    failed = threading.Event()

    def fail_until_newer() -> None:
        failed.set()
        raise OSError("no route")

    scene.ranks.answers = [fail_until_newer]
    await scene.publish_steps(0)
    await asyncio.to_thread(failed.wait)
    async with asyncio.timeout(10.0):
        await scene.publish_steps(1)
        await scene.publisher.settle()
    assert scene.versions == scene.snapshots == [1]


@pytest.mark.asyncio
async def test_a_slow_delivery_delays_no_step_and_the_newest_weights_follow_it() -> None:
    """D16: three more steps publish while the first delivery is held up. Only the newest of them is delivered."""
    scene = Scene()
    go_on = threading.Event()
    scene.ranks.answers = [lambda: assert_set(go_on)]
    await scene.publish_steps(0)
    await asyncio.sleep(0.05)  # the delivery has begun
    async with asyncio.timeout(5.0):
        await scene.publish_steps(1, 2, 3)
    assert scene.versions == []
    go_on.set()
    await scene.publisher.settle()
    assert scene.versions == scene.snapshots == [0, 3]
    assert scene.deliveries("replaced") == 2


@pytest.mark.asyncio
async def test_a_slow_delivery_is_named(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(weights={"load_timeout_s": 0.05})
    go_on = threading.Event()
    scene.ranks.answers = [lambda: assert_set(go_on)]
    with caplog.at_level(logging.WARNING):
        await scene.publish_steps(0)
        await asyncio.sleep(0.2)
    assert caplog.records[0].message.startswith(
        "delivering weights 1.0 has taken 0 s, more than weights.load_timeout_s"
    )
    assert scene.publisher.trouble.startswith("delivering weights 1.0 has taken")
    go_on.set()
    await scene.publisher.settle()
    assert scene.versions == [0]
    assert scene.publisher.trouble == ""


@pytest.mark.asyncio
async def test_the_death_of_a_rank_is_raised_wherever_the_loop_looks() -> None:
    scene = Scene()
    scene.ranks.answers = [fails(ActorGone("learner rank 1 died"))]
    await scene.publish_steps(0)
    with pytest.raises(ActorGone, match="rank 1 died"):
        await scene.publisher.settle()
    with pytest.raises(ActorGone, match="rank 1 died"):
        scene.publisher.check()
    with pytest.raises(ActorGone, match="rank 1 died"):
        await scene.publish_steps(1)


@pytest.mark.asyncio
async def test_a_delivery_that_never_succeeds_ends_the_wait_for_it_with_its_cause() -> None:
    scene = Scene(run={"stall_timeout_s": 0.2})
    scene.ranks.answers = [fails(OSError("no route"))] * 100
    await scene.publish_steps(0)
    scene.publisher.check()
    with pytest.raises(StallError, match=r"not delivered within run.stall_timeout_s.*OSError: no route"):
        await scene.publisher.settle()
    await scene.publisher.stop()
    left = len(scene.ranks.answers)
    await asyncio.sleep(0.1)
    assert len(scene.ranks.answers) == left, "no repetition after the end"
    with contextlib.suppress(asyncio.CancelledError):
        scene.publisher.check()


@pytest.mark.asyncio
@pytest.mark.fault("F12")
@pytest.mark.fault("F38")
async def test_a_version_that_a_replica_cannot_get_is_delivered_again_whole() -> None:
    """With η = 0 there is no newer version, because the learner waits for groups of this one."""
    scene = Scene()
    scene.ranks.links = {1: [0, 1]}
    for step in range(3):
        await scene.publish_steps(step)
        await scene.publisher.settle()
    await refuse(scene, 3)
    assert (scene.versions, scene.snapshots) == ([0, 1, 2, 2], [0, 1, 2, 2])
    assert (scene.ranks.whole, scene.again) == ([False, False, False, True], [False, False, False, True])
    assert scene.recorded == [Version(1, step) for step in range(3)], "the audit sees each version once"
    assert {*range(10)} - {*scene.deleted} == {0, 1, 2}, "the store still offers version 1, which needs version 0"
    assert (scene.deliveries("delivered"), scene.deliveries("again")) == (3, 1)
    await scene.publish_steps(3)
    await scene.publisher.settle()
    assert scene.ranks.whole[-1] is False
    assert scene.ranks.previous[-1] == Version(1, 2)
    assert {*range(10)} - {*scene.deleted} == {2, 3}


@pytest.mark.asyncio
@pytest.mark.fault("F12")
async def test_while_weights_are_delivered_a_refusal_makes_the_next_ones_whole() -> None:
    scene = Scene()
    await scene.publish_steps(0)
    await scene.publisher.settle()
    go_on = threading.Event()
    scene.ranks.answers = [lambda: assert_set(go_on)]
    await scene.publish_steps(1)
    await asyncio.sleep(0.05)  # the delivery has begun
    scene.refusals.put_nowait(1)
    await asyncio.sleep(0)
    await scene.publish_steps(2)
    go_on.set()
    await scene.publisher.settle()
    assert scene.versions == scene.snapshots == [0, 1, 2]
    assert scene.ranks.whole == [False, False, True]


@pytest.mark.asyncio
async def test_a_failed_repetition_is_repeated_as_a_whole_one() -> None:
    scene = Scene()
    await scene.publish_steps(0)
    await scene.publisher.settle()
    scene.ranks.answers = [fails(OSError("no room"))]
    await refuse(scene, 1)
    assert (scene.versions, scene.ranks.whole) == ([0, 0], [False, True, True])
    await scene.publisher.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "refusals of weights"]


@pytest.mark.asyncio
async def test_weights_are_sent_again_although_the_weight_store_was_late(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.late_refusals = 2
    await scene.publish_steps(0)
    await scene.publisher.settle()
    await refuse(scene, 1)
    assert (scene.versions, scene.late_refusals) == ([0, 0], 0)
    assert caplog.text.count("waiting for refused weights took longer than 30 s; the call is repeated") == 2


@pytest.mark.asyncio
async def test_a_replica_that_never_gets_its_weights_does_not_keep_the_ranks_busy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    await scene.publish_steps(0)
    await scene.publisher.settle()
    for delivery in range(1, MOST_REPEATS + 1):
        await refuse(scene, delivery)
    scene.refusals.put_nowait(MOST_REPEATS + 1)
    async with asyncio.timeout(5.0):
        while "which were sent again" not in caplog.text:
            await asyncio.sleep(0.001)
    assert scene.versions == [0] * (1 + MOST_REPEATS)
    await scene.publish_steps(1)
    await scene.publisher.settle()
    await refuse(scene, MOST_REPEATS + 2)
    assert scene.versions[-2:] == [1, 1], "the next version is sent again too"


async def refuse(scene: Scene, delivery: int) -> None:
    """Lets a replica refuse a delivery while no other one is under way, and waits for the next one."""
    stored = len(scene.stored)
    scene.refusals.put_nowait(delivery)
    async with asyncio.timeout(5.0):
        while len(scene.stored) == stored:
            await asyncio.sleep(0.001)
    await scene.publisher.settle()


def assert_set(event: threading.Event) -> None:
    assert event.wait(10.0)
