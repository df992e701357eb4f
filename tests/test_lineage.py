"""Ancestors and dead versions of a run whose learner was replaced."""

import pytest

from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version


def test_versions_after_a_branch_point_are_dead_and_all_others_are_ancestors() -> None:
    lineage = Lineage().child(Version(1, 4)).child(Version(2, 6)).child(Version(2, 5))
    assert lineage.incarnation == 4
    alive = {(1, 0), (1, 4), (2, 4), (2, 5), (4, 5), (4, 99)}
    dead = {(1, 5), (2, 6), (3, 6), (3, 0), (5, 5), (0, 0)}
    assert all(lineage.has(Version(*each)) for each in alive)
    assert not any(lineage.has(Version(*each)) for each in dead)


def test_no_incarnation_begins_at_a_dead_version() -> None:
    lineage = Lineage().child(Version(1, 4))
    with pytest.raises(ValueError, match=r"incarnation 3 cannot begin at 1\.5"):
        lineage.child(Version(1, 5))
