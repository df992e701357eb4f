"""The broadcast gate publishes when a version is due, or earlier if replicas can start only with newer weights."""

import pytest

from asyncrl.common.version import Version
from asyncrl.coordinator.registry import AbleReplicas
from asyncrl.weights.gate import should_publish

PUBLISHED = Version(1, 4)
NEXT = Version(1, 5)
BLOCKED = AbleReplicas(version=PUBLISHED, replicas=2, stale=2)


def asked(*able: AbleReplicas, version: Version = NEXT, published: Version | None = PUBLISHED) -> bool:
    return should_publish(version=version, published=published, publish_every_steps=3, able=able)


def test_a_version_is_published_after_its_number_of_steps_and_not_before() -> None:
    assert [asked(version=Version(1, 4 + ahead)) for ahead in range(5)] == [False, False, False, True, True]


def test_the_first_version_of_an_incarnation_is_always_published() -> None:
    assert asked(published=None, version=Version(1, 0))
    assert asked(published=Version(1, 9), version=Version(2, 7))


def test_it_is_published_early_when_all_that_could_start_are_refused_for_staleness() -> None:
    assert asked(BLOCKED)


@pytest.mark.parametrize(
    "able",
    [
        [AbleReplicas(version=PUBLISHED, replicas=3, stale=2)],
        [BLOCKED, AbleReplicas(version=Version(1, 3), replicas=1, stale=1)],
    ],
    ids=["is not refused for staleness", "still loads"],
)
def test_one_that_may_still_start_or_is_blocked_by_something_else_holds_it_back(able: list[AbleReplicas]) -> None:
    assert not asked(*able)


def test_without_a_replica_that_could_start_nothing_is_published_early() -> None:
    assert not asked()


def test_what_is_published_is_not_published_again_on_demand() -> None:
    assert not asked(BLOCKED, version=PUBLISHED)


def test_an_older_incarnation_never_publishes_over_a_newer_one() -> None:
    assert not asked(version=Version(1, 9), published=Version(2, 1))
