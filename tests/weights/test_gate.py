"""The broadcast gate publishes when a version is due, or earlier if replicas can start only with newer weights."""

import msgspec
import pytest

from asyncrl.buffer.records import Refusal
from asyncrl.common.version import Version
from asyncrl.coordinator.replicas import ReplicaView
from asyncrl.weights.gate import should_publish

PUBLISHED = Version(1, 4)
NEXT = Version(1, 5)
BLOCKED = ReplicaView(
    replica="a",
    version=PUBLISHED,
    free_slots=1,
    reserved_groups=3,
    live=True,
    silent_s=0.0,
    refused_for=Refusal.STALENESS,
)


def asked(*replicas: ReplicaView, version: Version = NEXT, published: Version | None = PUBLISHED) -> bool:
    return should_publish(version=version, published=published, publish_every_steps=3, replicas=replicas)


def but(**changes: object) -> ReplicaView:
    return msgspec.structs.replace(BLOCKED, **changes)


def test_a_version_is_published_after_its_number_of_steps_and_not_before() -> None:
    assert [asked(version=Version(1, 4 + ahead)) for ahead in range(5)] == [False, False, False, True, True]


def test_the_first_version_of_an_incarnation_is_always_published() -> None:
    assert asked(published=None, version=Version(1, 0))
    assert asked(published=Version(1, 9), version=Version(2, 7))


def test_it_is_published_early_when_all_that_could_start_are_refused_for_staleness() -> None:
    assert asked(BLOCKED, but(replica="b"))


@pytest.mark.parametrize(
    "other",
    [
        but(refused_for=None),
        but(refused_for=Refusal.CAPACITY),
        but(refused_for=Refusal.NO_PROMPTS),
        but(version=Version(1, 3)),
        but(version=None),
    ],
    ids=["was not refused", "capacity", "no prompts", "still loads", "never loaded"],
)
def test_one_that_may_still_start_or_is_blocked_by_something_else_holds_it_back(other: ReplicaView) -> None:
    assert not asked(BLOCKED, other)


def test_replicas_that_are_dead_or_fully_busy_are_not_asked() -> None:
    assert asked(BLOCKED, but(live=False, refused_for=None), but(free_slots=0, refused_for=None))
    assert not asked(but(free_slots=0))
    assert not asked(but(live=False))
    assert not asked()


def test_what_is_published_is_not_published_again_on_demand() -> None:
    assert not asked(BLOCKED, version=PUBLISHED)


def test_an_older_incarnation_never_publishes_over_a_newer_one() -> None:
    assert not asked(version=Version(1, 9), published=Version(2, 1))
