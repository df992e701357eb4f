"""The coordinator's views of the replicas: slots, versions, refusals, silence and endpoints."""

from collections import Counter

import msgspec
import pytest
from buffer_scenes import Clock, Scene
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.fleet import Fleet, actor_of
from asyncrl.buffer.records import Failure, Refusal, Reservation, Ticket
from asyncrl.common.device_time import Device, Devices, Pool, device_time
from asyncrl.common.version import Version
from asyncrl.coordinator.registry import ReplicaReport, Replicas, ReplicaView, mean_states
from asyncrl.errors import FailureClass


class Seen(Scene):
    """The scene of a buffer with the replicas that reserve in it."""

    def __init__(self, **changes: int) -> None:
        super().__init__(**changes)
        self.replicas = Replicas(
            may_come_back=lambda replica: self.buffer.fleet.life(replica) is not None,
            clock=self.clock,
            gone_reports=2,
        )

    def reserve(self, count: int, *, step: int | None = None, replica: str = "a") -> tuple[Ticket, ...]:
        version = self.buffer.version if step is None else Version(1, step)
        self.buffer.fleet.heartbeat(replica, has_weights=True)
        answer = self.buffer.reserve(replica, version=version, count=count)
        self.replicas.reserved(replica, version=version, asked=count, answer=answer)
        return answer.tickets

    def views(self) -> tuple[ReplicaView, ...]:
        buffer = self.buffer
        return self.replicas.views(
            buffer.fleet.lives(), reserved_groups=buffer.tickets_by_actor(), refusal_at=buffer.refusal
        )

    def heard(self, name: str, *, version: Version | None, free_slots: int) -> None:
        self.buffer.fleet.heartbeat(name, has_weights=version is not None)
        self.replicas.heard(name, version=version, free_slots=free_slots)

    def forget_silent(self) -> list[str]:
        self.buffer.expire()
        return self.replicas.forget_unless(self.buffer.fleet.may_be_used)


def test_replicas_are_seen_with_their_slots_what_they_were_refused_for_and_whether_they_live() -> None:
    scene = Seen(eta=0, per_step=2)
    scene.heard("a", version=Version(1, 0), free_slots=3)
    scene.heard("loading", version=None, free_slots=4)
    scene.clock.now_s += 9.0
    scene.reserve(3, replica="a")
    scene.clock.now_s += 2.0
    scene.clock.now_s -= 1.0
    assert scene.forget_silent() == [], "silence of exactly the timeout still counts as live"
    assert [view.live for view in scene.views()] == [True, True]
    scene.clock.now_s += 1.0
    assert scene.forget_silent() == ["loading"]
    asking, loading = scene.views()
    assert (asking.replica, asking.free_slots, asking.reserved_groups) == ("a", 1, 2)
    assert (asking.refused_for, asking.live, asking.silent_s) == (Refusal.STALENESS, True, 2.0)
    assert (loading.version, loading.refused_for, loading.live) == (None, None, False)


def test_a_replica_holds_the_groups_that_it_reserved_until_they_are_committed_or_failed() -> None:
    scene = Seen(eta=1, per_step=2)
    first, second, third = scene.reserve(3, replica="a")
    scene.reserve(1, replica="b")
    assert [view.reserved_groups for view in scene.views()] == [3, 1]
    scene.commit(first)
    scene.buffer.fail(second.key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))
    assert [view.reserved_groups for view in scene.views()] == [1, 1]
    scene.commit(third)
    assert [view.reserved_groups for view in scene.views()] == [0, 1]


def test_a_refusal_is_forgotten_with_the_version_it_was_for_and_with_the_next_full_answer() -> None:
    scene = Seen(eta=0, per_step=1)
    scene.commit(*scene.reserve(2))
    assert scene.views()[0].refused_for is Refusal.STALENESS
    scene.heard("a", version=Version(1, 0), free_slots=2)
    assert scene.views()[0].refused_for is Refusal.STALENESS
    scene.train()
    scene.heard("a", version=Version(1, 1), free_slots=2)
    assert scene.views()[0].refused_for is None
    scene.reserve(2)
    assert scene.views()[0].refused_for is Refusal.STALENESS
    scene.replicas.forget("a")
    scene.buffer.leave("a")
    scene.reserve(1)
    assert scene.views()[0].refused_for is None


def test_a_replica_that_reserves_before_its_first_heartbeat_is_known_by_what_it_asked_for() -> None:
    scene = Seen(eta=0, per_step=2)
    scene.reserve(3, replica="new")
    (view,) = scene.views()
    assert (view.replica, view.version, view.free_slots, view.reserved_groups) == ("new", Version(1, 0), 1, 2)


def test_a_silent_replica_is_removed_and_counted_once() -> None:
    scene = Seen()
    scene.heard("silent", version=Version(1, 0), free_slots=2)
    scene.clock.now_s += 10.0
    scene.heard("alive", version=Version(1, 0), free_slots=2)
    assert scene.forget_silent() == [], "silence of exactly the timeout still counts as live"
    scene.clock.now_s += 0.1
    assert scene.forget_silent() == ["silent"]
    assert scene.forget_silent() == []
    assert [(view.replica, view.live) for view in scene.views()] == [("alive", True), ("silent", False)]


def test_a_replica_reports_each_version_that_it_has_loaded_once() -> None:
    replicas = Seen().replicas
    assert not replicas.heard("a", version=None, free_slots=2)
    assert replicas.heard("a", version=Version(1, 0), free_slots=2)
    assert not replicas.heard("a", version=Version(1, 0), free_slots=1)
    assert not replicas.heard("a", version=None, free_slots=1), "a torn replica has loaded no other version"
    assert replicas.loaded.get("a") == Version(1, 0)
    assert replicas.heard("a", version=Version(1, 1), free_slots=2)
    replicas.forget("a")
    assert replicas.loaded.get("a") is None


def report(samples: int, *, actor: str = "a") -> ReplicaReport:
    return ReplicaReport(
        actor=actor, deployment="d", metrics_address="", state_seconds={"generating": float(samples)}, slots=2,
        running_groups=0, samples=samples, completion_tokens=10 * samples, weight_updates=1,
        parity_max_nats=samples / 8, prompt_tokens=4 * samples, cached_prompt_tokens=3 * samples,
    )  # fmt: skip


@pytest.mark.parametrize("silent", [False, True])
def test_replicas_that_are_gone_for_long_are_kept_as_one_sum(silent: bool) -> None:
    scene = Seen()
    for number in range(6):
        name = f"generator-{number}"
        scene.replicas.reported(report(number, actor=name))
        scene.heard(name, version=Version(1, 0), free_slots=2)
        if silent:
            scene.clock.now_s += 10.1
            assert scene.forget_silent() == [name]
            scene.clock.now_s += 30.0
            scene.forget_silent()
            assert scene.buffer.fleet.life(name) is None, "it was silent for so long that it does not come back"
        else:
            scene.buffer.fleet.retire(name)
            scene.replicas.forget(name)
        assert scene.replicas.loaded.get(name) is None
    scene.replicas.forget("unknown")
    reports = scene.replicas.reports
    assert list(reports) == ["gone replicas", "generator-4", "generator-5"]
    assert sum(each.samples for each in reports.values()) == 0 + 1 + 2 + 3 + 4 + 5
    assert mean_states(reports.values()) == {"generating": 15 / 6}
    gone = reports["gone replicas"]
    assert (gone.replicas, gone.completion_tokens, gone.weight_updates, gone.parity_max_nats) == (4, 60, 4, 3 / 8)
    assert (gone.prompt_tokens, gone.cached_prompt_tokens) == (24, 18)


def test_the_device_time_of_the_generators_is_the_integral_over_all_replicas_that_existed() -> None:
    """Replica a has one GPU and is started again, b has four and is drained, c runs on CPUs. All beat every second."""
    scene = Seen()
    lives = {"a": (0, 5, 1.0), "a.2": (7, 20, 1.0), "b": (3, 9, 4.0), "c": (0, 20, 0.0)}
    for now_s in range(1, 21):
        for actor, (begun_s, ended_s, gpus) in lives.items():
            if begun_s < now_s <= ended_s:
                scene.heard(actor, version=Version(1, 0), free_slots=2)
                states = {"generating": float(now_s - begun_s)}
                time = device_time(Pool.GENERATORS, Devices.of(gpus=gpus, processes=2), states)
                scene.replicas.reported(msgspec.structs.replace(report(1, actor=actor), device_time=(time,)))
        if now_s == 9:
            scene.buffer.fleet.retire("b")
            scene.replicas.forget("b")
    times = {time.device: time.total_s for time in scene.replicas.totals.device_time}
    assert times == {Device.GPU: 1.0 * (5 + 13) + 4.0 * 6, Device.PROCESS: 2.0 * 20}
    by_replica = [time.total_s for each in scene.replicas.reports.values() for time in each.device_time]
    assert sum(by_replica) == sum(times.values())


def test_replicas_that_were_all_silent_for_a_while_are_counted_once() -> None:
    scene = Seen()
    names = [f"generator-{number}" for number in range(6)]
    for _ in range(2):
        for name in names:
            scene.heard(name, version=Version(1, 0), free_slots=2)
            scene.replicas.reported(report(10, actor=name))
        assert (scene.replicas.totals.samples, scene.replicas.totals.replicas) == (60, 6)
        scene.clock.now_s += 10.1
        scene.forget_silent()


MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just("heard"), st.sampled_from("abc"), st.sampled_from([None, 0, 1]), st.integers(0, 2)),
        st.tuples(st.just("reserved"), st.sampled_from("abc"), st.sampled_from([0, 1]), st.integers(0, 2)),
        st.tuples(st.just("forget"), st.sampled_from("abc"), st.none(), st.just(0)),
        st.tuples(st.just("restarted"), st.sampled_from("abc"), st.none(), st.just(0)),
        st.tuples(st.just("time passes"), st.just(""), st.none(), st.just(0)),
    ),
    max_size=40,
)


@given(MESSAGES)
def test_the_running_numbers_are_those_of_all_replicas_after_every_message(
    messages: list[tuple[str, str, int | None, int]],
) -> None:
    clock = Clock()
    fleet = Fleet(max_infra_failures=5, timeout_s=10.0, clock=clock)
    replicas = Replicas(may_come_back=lambda replica: fleet.life(replica) is not None, clock=clock)
    refusals = {Version(1, 0): Refusal.STALENESS, Version(1, 1): Refusal.CAPACITY}
    samples: Counter[str] = Counter()
    starts = Counter("abc")
    for what, replica, step, number in messages:
        version = None if step is None else Version(1, step)
        name = actor_of(replica, starts[replica])
        match what:
            case "heard":
                fleet.heartbeat(name, has_weights=version is not None)
                replicas.heard(name, version=version, free_slots=number)
                samples[name] += number
                replicas.reported(report(samples[name], actor=name))
            case "reserved":
                assert version is not None
                fleet.heartbeat(name, has_weights=True)
                answer = Reservation(tickets=(), refusal=Refusal.CAPACITY if number else None)
                replicas.reserved(name, version=version, asked=number, answer=answer)
            case "forget":
                replicas.forget(name)
            case "restarted":
                starts[replica] += 1
            case _:
                clock.now_s += 6.0
                fleet.quarantine_silent()
        replicas.forget_unless(fleet.may_be_used)
        views = replicas.views(fleet.lives(), reserved_groups={}, refusal_at=refusals.get)
        able = [view for view in views if view.free_slots]
        assert {each.version: (each.replicas, each.stale) for each in replicas.able(refusals.get)} == {
            version: (
                sum(view.version == version for view in able),
                sum(view.version == version and view.refused_for is Refusal.STALENESS for view in able),
            )
            for version in {view.version for view in able} - {None}
        }
        assert replicas.oldest_step() == min((v.version.step for v in views if v.version is not None), default=None)
        reports = replicas.reports.values()
        assert replicas.totals.samples == sum(each.samples for each in reports)
        assert replicas.totals.replicas == len(reports)
        assert mean_states([replicas.totals]) == pytest.approx(mean_states(reports))
        assert replicas.totals.parity_max_nats == max((each.parity_max_nats for each in reports), default=0.0)
