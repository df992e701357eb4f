"""The lives of replicas: which get tickets, which are quarantined, and which attempts count. Random histories, too."""

import random

import msgspec
import pytest
from buffer_scenes import Clock, Scene
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.fleet import (
    BACK_OFF_S,
    FORGET_S,
    FORGET_TIMEOUTS,
    LONGEST_BACK_OFF_S,
    NOT_ITS_OWN,
    Cause,
    Fleet,
    ReplicaState,
    actor_of,
    replica_of,
    start_of,
)
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.records import Failure, Lease, Refusal
from asyncrl.common.version import Version
from asyncrl.errors import ActorGone, EngineDied, FailureClass, ParityError

TIMEOUT_S = 10.0
MOST = 3
INFRA = Failure(failure_class=FailureClass.INFRA, reason="engine")


def fleet_of(clock: Clock) -> Fleet:
    return Fleet(max_infra_failures=MOST, timeout_s=TIMEOUT_S, clock=clock)


def found_silent(fleet: Fleet) -> list[str]:
    """Returns the actors that a check quarantines."""
    before = [life.actor for life in fleet.lives().values() if life.may_be_used]
    fleet.quarantine_silent()
    return [actor for actor in before if not fleet.may_be_used(actor)]


def state_of(fleet: Fleet, replica: str) -> ReplicaState | None:
    life = fleet.life(replica)
    return None if life is None else life.state


@pytest.mark.fault("F4")
def test_a_replica_is_stale_until_it_has_weights_and_stale_again_after_a_restart() -> None:
    fleet = fleet_of(Clock())
    assert fleet.heartbeat("a", has_weights=False)
    assert state_of(fleet, "a") is ReplicaState.STALE
    fleet.heartbeat("a", has_weights=True)
    assert state_of(fleet, "a") is ReplicaState.HEALTHY
    fleet.restarting("a", Cause.ENGINE_DIED, "killed")
    assert fleet.heartbeat("a.2", has_weights=False)
    assert state_of(fleet, "a") is ReplicaState.STALE
    assert not fleet.heartbeat("a", has_weights=True), "the earlier actor is not heard any more"
    assert state_of(fleet, "a") is ReplicaState.STALE


def test_a_restart_that_is_reported_twice_counts_once_and_is_not_taken_back() -> None:
    fleet = fleet_of(Clock())
    fleet.heartbeat("a", has_weights=True)
    for _ in range(2):
        fleet.restarting("a", Cause.NO_HEARTBEATS, "no answer")
    assert fleet.restarts == {Cause.NO_HEARTBEATS: 1}
    assert not fleet.quarantine("a", Cause.INFRA_FAILURES, "the process has woken up")
    assert state_of(fleet, "a") is ReplicaState.RESTARTING
    fleet.heartbeat("a.2", has_weights=True)
    life = fleet.life("a")
    assert life is not None
    assert (life.state, life.cause, life.reason) == (ReplicaState.HEALTHY, Cause.NO_HEARTBEATS, "no answer")


def test_a_silent_replica_is_suspect_then_quarantined_and_comes_back_when_it_is_heard() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    fleet.heartbeat("a", has_weights=True)
    clock.now_s += TIMEOUT_S / 2
    assert fleet.refusal("a") is None
    clock.now_s += 0.1
    assert (state_of(fleet, "a"), fleet.refusal("a")) == (ReplicaState.SUSPECT, Refusal.UNHEALTHY)
    assert found_silent(fleet) == []
    clock.now_s += TIMEOUT_S / 2
    assert found_silent(fleet) == ["a"]
    assert found_silent(fleet) == [], "it is quarantined once"
    assert (state_of(fleet, "a"), fleet.is_excused("a")) == (ReplicaState.QUARANTINED, True)
    assert fleet.heartbeat("a", has_weights=True)
    assert (state_of(fleet, "a"), fleet.refusal("a")) == (ReplicaState.HEALTHY, None)
    assert fleet.is_excused("a"), "its earlier attempts do not count afterwards either"


def test_a_replica_that_comes_after_a_check_is_found_silent_in_time() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    fleet.heartbeat("a", has_weights=True)
    fleet.quarantine("a", Cause.ENGINE_DIED, "killed")
    assert found_silent(fleet) == []
    clock.now_s += 1.0
    fleet.heartbeat("b", has_weights=True)
    clock.now_s += TIMEOUT_S + 0.1
    assert found_silent(fleet) == ["b"]


def test_infra_failures_in_a_row_make_a_replica_wait_longer_and_longer_and_then_quarantine_it() -> None:
    clock = Clock()
    fleet = Fleet(max_infra_failures=10, timeout_s=10**6, clock=clock)
    fleet.heartbeat("a", has_weights=True)
    assert not fleet.failed("a", INFRA)
    assert fleet.refusal("a") is None, "one failure is nothing special"
    pauses = []
    for _ in range(8):
        assert not fleet.failed("a", INFRA)
        pauses.append(fleet.lives()["a"].blocked_until_s - clock.now_s)
        assert fleet.refusal("a") is Refusal.UNHEALTHY
    assert pauses == [min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2**n) for n in range(8)]
    assert not fleet.back_off_ended()
    clock.now_s += LONGEST_BACK_OFF_S
    assert fleet.back_off_ended()
    assert not fleet.back_off_ended(), "a back-off ends once"
    assert fleet.refusal("a") is None
    fleet.lives()["a"].committed()
    for _ in range(9):
        assert not fleet.failed("a", INFRA), "a commit ends the failures in a row"
    assert fleet.failed("a", msgspec.structs.replace(INFRA, message="the disk is full"))
    life = fleet.life("a")
    assert life is not None
    assert (life.cause, life.reason) == (
        Cause.INFRA_FAILURES,
        "10 INFRA failures in a row, the last one: the disk is full",
    )
    assert not fleet.failed("a", INFRA)
    assert fleet.quarantines == {Cause.INFRA_FAILURES: 1}


@pytest.mark.parametrize("reason", sorted(NOT_ITS_OWN))
def test_failures_that_are_not_of_the_replica_do_not_count(reason: str) -> None:
    fleet = fleet_of(Clock())
    fleet.heartbeat("a", has_weights=True)
    for _ in range(10):
        assert not fleet.failed("a", msgspec.structs.replace(INFRA, reason=reason))
    assert fleet.refusal("a") is None


def test_replicas_that_are_silent_for_long_are_forgotten_and_may_come_back() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    for name in ("silent", "broken"):
        fleet.heartbeat(name, has_weights=True)
    fleet.quarantine("broken", Cause.ENGINE_DIED, "killed")
    clock.now_s += TIMEOUT_S + 1
    assert found_silent(fleet) == ["silent"]
    clock.now_s += FORGET_TIMEOUTS * TIMEOUT_S
    fleet.quarantine_silent()
    assert fleet.lives().keys() == {"broken"}, "its deployment may still start it again"
    assert fleet.heartbeat("silent", has_weights=True)
    clock.now_s += FORGET_S + 1
    fleet.quarantine_silent()
    assert fleet.lives() == {}


@pytest.mark.parametrize("cause", [Cause.ENGINE_DIED, Cause.INFRA_FAILURES, Cause.WEIGHTS])
def test_a_replica_that_is_quarantined_for_a_failure_never_comes_back_as_it_was(cause: Cause) -> None:
    fleet = fleet_of(Clock())
    fleet.heartbeat("a", has_weights=True)
    assert fleet.quarantine("a", cause, "broken")
    assert not fleet.quarantine("a", Cause.OTHER, "again")
    assert not fleet.heartbeat("a", has_weights=True)
    assert (fleet.refusal("a"), state_of(fleet, "a")) == (Refusal.QUARANTINED, ReplicaState.QUARANTINED)
    fleet.restarting("a", Cause.PROCESS_DIED, "killed by its deployment")
    assert fleet.restarts == {cause: 1}, "the first cause counts"
    assert fleet.heartbeat("a.2", has_weights=True)
    life = fleet.life("a")
    assert life is not None
    assert (life.state, life.restarts, fleet.refusal("a.2")) == (ReplicaState.HEALTHY, 1, None)
    assert fleet.is_excused("a")
    assert not fleet.is_excused("a.2")


def test_a_silent_replica_that_is_being_started_again_does_not_come_back() -> None:
    clock = Clock()
    fleet = fleet_of(clock)
    fleet.heartbeat("a", has_weights=True)
    clock.now_s += TIMEOUT_S + 1
    fleet.quarantine_silent()
    fleet.restarting("a", Cause.NO_HEARTBEATS, "no answer")
    assert not fleet.heartbeat("a", has_weights=True)
    assert state_of(fleet, "a") is ReplicaState.RESTARTING


def test_a_replica_that_left_is_refused_unless_its_deployment_starts_it_again() -> None:
    fleet = fleet_of(Clock())
    fleet.heartbeat("a", has_weights=True)
    fleet.retire("a")
    assert state_of(fleet, "a") is None
    for actor in ("a", "a.2"):
        assert fleet.refusal(actor) is Refusal.QUARANTINED
        assert not fleet.heartbeat(actor, has_weights=True)
        assert not fleet.quarantine(actor, Cause.OTHER, "")


def test_a_replica_that_the_end_of_a_pod_drained_is_started_again_by_its_deployment() -> None:
    fleet = fleet_of(Clock())
    fleet.heartbeat("a", has_weights=True)
    fleet.retire("a")
    fleet.restarting("a", Cause.OTHER, "its rollout loop returned without an error")
    assert state_of(fleet, "a") is ReplicaState.RESTARTING
    assert fleet.refusal("a") is Refusal.QUARANTINED
    assert fleet.heartbeat("a.2", has_weights=True)
    assert state_of(fleet, "a") is ReplicaState.HEALTHY
    assert fleet.refusal("a.2") is None


def test_an_actor_that_dies_before_its_first_heartbeat_is_restarted_too() -> None:
    fleet = fleet_of(Clock())
    fleet.restarting("a", Cause.START_FAILED, "no memory")
    assert state_of(fleet, "a") is ReplicaState.RESTARTING
    assert fleet.restarts == {Cause.START_FAILED: 1}


def test_names_of_actors_tell_the_replica_and_the_start() -> None:
    for start in (1, 2, 17):
        actor = actor_of("generator-1a2b3c", start)
        assert (replica_of(actor), start_of(actor)) == ("generator-1a2b3c", start)


def test_the_cause_of_an_error_is_the_most_special_one() -> None:
    assert Cause.of(EngineDied("x")) is Cause.ENGINE_DIED
    assert Cause.of(ParityError("x")) is Cause.WEIGHTS
    assert Cause.of(ActorGone("x")) is Cause.PROCESS_DIED
    assert Cause.of(ValueError("x")) is Cause.OTHER


# --- tickets --------------------------------------------------------------------------------------------------------


def scene_of(*replicas: str, **changes: int) -> Scene:
    scene = Scene(eta=3, per_step=4, max_infra_failures=MOST, **changes)
    for replica in replicas:
        scene.buffer.fleet.heartbeat(replica, has_weights=True)
    return scene


def fail(scene: Scene, key: str) -> None:
    assert scene.buffer.fail(key, incarnation=1, failure=INFRA)


def test_a_prompt_that_failed_on_a_replica_is_left_to_a_healthy_one() -> None:
    scene = scene_of("a", "b")
    [ticket] = scene.reserve(1, replica="a")
    fail(scene, ticket.key)
    [other] = scene.reserve(1, replica="a")
    assert (other.group, other.attempt) == (1, 0), "another prompt"
    [again] = scene.reserve(1, replica="b")
    assert (again.group, again.attempt, again.failed_on) == (0, 1, ("a",))
    fail(scene, again.key)
    [third] = scene.reserve(1, replica="a")
    assert (third.group, third.attempt) == (0, 2), "both have tried it, so any replica may try again"


def test_a_prompt_that_failed_on_an_earlier_process_of_a_replica_is_left_to_a_healthy_one_too() -> None:
    scene = scene_of("a.1", "b.1")
    [ticket] = scene.reserve(1, replica="a.1")
    fail(scene, ticket.key)
    scene.buffer.fleet.heartbeat("a.2", has_weights=True)
    [other] = scene.reserve(1, replica="a.2")
    assert (other.group, other.attempt) == (1, 0), "another prompt"
    [again] = scene.reserve(1, replica="b.1")
    assert (again.group, again.attempt) == (0, 1)


def test_a_prompt_that_another_replica_could_try_does_not_wait_for_it_when_there_is_no_other_prompt() -> None:
    scene = Scene(eta=3, per_step=4, prompts=1)
    for replica in ("a", "b"):  # b drains, so it never reserves
        scene.buffer.fleet.heartbeat(replica, has_weights=True)
    [ticket] = scene.reserve(1, replica="a")
    fail(scene, ticket.key)
    [again] = scene.reserve(1, replica="a")
    assert (again.group, again.attempt) == (0, 1)


def test_a_prompt_goes_back_to_the_only_replica_that_is_healthy() -> None:
    scene = scene_of("a", "b")
    [ticket] = scene.reserve(1, replica="a")
    fail(scene, ticket.key)
    scene.buffer.fleet.quarantine("b", Cause.ENGINE_DIED, "killed")
    [again] = scene.reserve(1, replica="a")
    assert (again.group, again.attempt) == (0, 1)


def test_attempts_on_a_quarantined_replica_do_not_count_even_those_from_before() -> None:
    scene = scene_of("a", max_attempts=2)
    first, *others = scene.reserve(4, replica="a")
    fail(scene, first.key)
    scene.buffer.fleet.quarantine("a", Cause.ENGINE_DIED, "killed")
    scene.buffer.leave("a")
    assert scene.buffer.counts().waiting == 1 + len(others)
    for attempt in (1, 2):
        scene.buffer.fleet.heartbeat("b", has_weights=True)
        [again] = scene.reserve(1, replica="b")
        assert (again.group, again.attempt) == (0, attempt)
        fail(scene, again.key)
    assert [count.groups for count in scene.buffer.failures.counts()] == [1], "two attempts on a live replica do count"


def test_a_prompt_that_ends_every_engine_fails_after_twice_the_attempts() -> None:
    scene = scene_of(max_attempts=2)
    for start in range(1, 5):
        actor = actor_of("a", start)
        scene.buffer.fleet.heartbeat(actor, has_weights=True)
        [ticket] = scene.reserve(1, replica=actor)
        assert (ticket.group, ticket.attempt) == (0, start - 1)
        scene.buffer.fleet.restarting(actor, Cause.ENGINE_DIED, "killed")
        scene.buffer.leave(actor)
    scene.buffer.fleet.heartbeat("b", has_weights=True)
    assert scene.reserve(1, replica="b")[0].group == 1


def test_of_200_prompts_none_fails_beside_a_replica_whose_every_rollout_fails() -> None:
    scene = scene_of("good", "dead", prompts=200, total_steps=50)
    fleet, start, committed = scene.buffer.fleet, 1, 0
    for _ in range(2000):
        dead = actor_of("dead", start)
        fleet.heartbeat(dead, has_weights=True)
        fleet.heartbeat("good", has_weights=True)
        for ticket in scene.buffer.reserve(dead, version=scene.buffer.version, count=8).tickets:
            fail(scene, ticket.key)
        if fleet.refusal(dead) is Refusal.QUARANTINED:
            fleet.restarting(dead, Cause.ENGINE_DIED, "started again, and as broken as before")
            start += 1
        tickets = scene.buffer.reserve("good", version=scene.buffer.version, count=4).tickets
        scene.commit(*tickets)
        committed += len(tickets)
        if scene.buffer.counts().ready >= 4:
            scene.train()
        scene.clock.now_s += 0.1
    assert (committed, scene.buffer.failures.counts()[0].groups) == (200, 0)
    assert start > 2


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_random_histories_of_failures_never_stop_the_pool_and_lose_no_prompt(seed: int) -> None:
    """Replicas fail, fall silent, are restarted and scaled in at random. A replica that is refused is so for one of the
    known reasons, a healthy one always gets tickets, and in the end all prompts are trained or have failed."""
    rng = random.Random(seed)
    scene = scene_of(prompts=40, total_steps=10, max_attempts=20)
    fleet, buffer = scene.buffer.fleet, scene.buffer
    starts = dict.fromkeys("abc", 1)
    quiet_until_s = dict.fromkeys("abc", 0.0)
    for _ in range(3000):
        name = rng.choice("abc")
        actor = actor_of(name, starts[name])
        calm = scene.clock.now_s > 1200
        match "work" if calm else rng.choice(["work"] * 8 + ["fail", "die", "silent"]):
            case "work" if scene.clock.now_s >= quiet_until_s[name]:
                if not fleet.heartbeat(actor, has_weights=True):
                    life = fleet.life(name)
                    assert life is not None
                    assert life.cause is not Cause.NO_HEARTBEATS or life.state is ReplicaState.RESTARTING
                    fleet.restarting(actor, life.cause or Cause.OTHER, "")
                    buffer.leave(actor)
                    starts[name] += 1
                    continue
                granted = buffer.reserve(actor, version=Version(1, scene.buffer.version.step), count=3)
                assert granted.tickets or granted.refusal is not Refusal.QUARANTINED
                if granted.refusal is Refusal.UNHEALTHY:
                    assert fleet.lives()[name].blocked_until_s > scene.clock.now_s
                scene.commit(*granted.tickets)
            case "fail":
                granted = buffer.reserve(actor, version=Version(1, scene.buffer.version.step), count=2)
                for ticket in granted.tickets:
                    fail(scene, ticket.key)
            case "die":
                granted = buffer.reserve(actor, version=scene.buffer.version, count=2)
                fleet.restarting(actor, Cause.PROCESS_DIED, "")
                assert {ticket.key for ticket in granted.tickets} <= set(buffer.leave(actor))
                starts[name] += 1
            case "silent":
                buffer.reserve(actor, version=scene.buffer.version, count=1)
                quiet_until_s[name] = scene.clock.now_s + rng.uniform(0, 2 * TIMEOUT_S)
        buffer.expire()
        if isinstance(lease := scene.buffer.lease(), Lease):
            scene.buffer.ack(lease.incarnation, lease.step)
        scene.clock.now_s += 0.2
        assert scene.buffer.account.closed
    fates = scene.buffer.account.fates
    assert fates[Fate.TRAINED].groups + fates[Fate.FAILED].groups == 40
