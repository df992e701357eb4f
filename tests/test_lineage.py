"""Ancestors and dead versions of a run whose learner was replaced."""

import pytest

from asyncrl.common.version import Lineage, Version


def test_versions_after_a_branch_point_are_dead_and_all_others_are_ancestors() -> None:
    lineage = Lineage().child(Version(1, 4)).child(Version(2, 6)).child(Version(2, 5))
    assert lineage.incarnation == 4
    alive = {(1, 0), (1, 4), (2, 4), (2, 5), (4, 5), (4, 99)}
    dead = {(1, 5), (2, 6), (3, 6), (3, 0), (5, 5), (0, 0)}
    assert all(lineage.has(Version(*each)) for each in alive)
    assert not any(lineage.has(Version(*each)) for each in dead)


def test_a_dead_version_that_is_restored_is_an_ancestor_again() -> None:
    lineage = Lineage().child(Version(1, 4)).child(Version(1, 6))
    assert [lineage.has(Version(*each)) for each in [(1, 5), (1, 6), (2, 4), (3, 7)]] == [True, True, False, True]


def test_no_incarnation_begins_at_a_version_that_never_was() -> None:
    for version in (Version(3, 4), Version(0, 0), Version(1, -1)):
        with pytest.raises(ValueError, match="incarnation 3 cannot begin at version"):
            Lineage().child(Version(1, 4)).child(version)
