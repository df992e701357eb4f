"""The rules as pure functions: doctests, and properties that are checked against the definitions."""

import doctest
import importlib

import pytest
from buffer_scenes import limits
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.records import Refusal
from asyncrl.buffer.staleness import admissible, earliest, lease_violation
from asyncrl.errors import ConfigError

DEADLINES = st.dictionaries(st.integers(3, 9), st.integers(0, 5))


@pytest.mark.parametrize(
    "module",
    ["asyncrl.buffer.records", "asyncrl.buffer.staleness", "asyncrl.common.version", "asyncrl.weights.gate"],
)
def test_the_examples_in_the_docstrings_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


@given(
    eta=st.integers(0, 4),
    per_step=st.integers(1, 4),
    slots=st.integers(0, 25),
    learner_step=st.integers(0, 12),
    lag=st.integers(0, 8),
    capacity_groups=st.integers(4, 30),
    free_bytes=st.integers(0, 2000),
)
def test_the_room_is_the_largest_number_that_breaks_no_rule(
    eta: int, per_step: int, slots: int, learner_step: int, lag: int, capacity_groups: int, free_bytes: int
) -> None:
    given_limits = limits(eta=eta, per_step=per_step, capacity_groups=capacity_groups, total_steps=12)

    def fits(more: int) -> bool:
        before_the_last = slots + more - 1
        return (
            before_the_last + lag * per_step < (eta + 1) * per_step
            and learner_step * per_step + before_the_last < 12 * per_step
            and slots + more <= capacity_groups
            and more * given_limits.worst_group_bytes <= free_bytes
        )

    room = admissible(
        given_limits,
        slots=slots,
        booked_bytes=given_limits.capacity_bytes - free_bytes,
        learner_step=learner_step,
        replica_step=learner_step - lag,
    )
    assert room.groups == 0 or fits(room.groups)
    assert not fits(room.groups + 1)


def test_a_tie_names_the_end_of_the_run_then_staleness_then_capacity() -> None:
    def refusal(*, learner_step: int, total_steps: int, eta: int, capacity_groups: int) -> Refusal:
        given_limits = limits(eta=eta, per_step=2, capacity_groups=capacity_groups, total_steps=total_steps)
        return admissible(
            given_limits, slots=4, booked_bytes=0, learner_step=learner_step, replica_step=learner_step
        ).refusal

    assert refusal(learner_step=8, total_steps=10, eta=1, capacity_groups=4) is Refusal.NO_STEPS
    assert refusal(learner_step=5, total_steps=10, eta=1, capacity_groups=4) is Refusal.STALENESS
    assert refusal(learner_step=5, total_steps=10, eta=2, capacity_groups=4) is Refusal.CAPACITY


@given(ready=DEADLINES, count=st.integers(0, 12))
def test_a_lease_takes_the_earliest_deadlines(ready: dict[int, int], count: int) -> None:
    in_order = sorted(deadline for deadline, groups in ready.items() for _ in range(groups))
    taken = earliest(ready, count)
    assert sorted(deadline for deadline, groups in taken.items() for _ in range(groups)) == in_order[:count]
    assert 0 not in taken.values()


@given(remaining=DEADLINES, per_step=st.integers(1, 3))
def test_rule_2_is_checked_at_every_deadline_and_names_the_first_that_fails(
    remaining: dict[int, int], per_step: int
) -> None:
    step = 3

    def excess(deadline: int) -> int:
        return sum(n for d, n in remaining.items() if d <= deadline) - (deadline - step) * per_step

    broken = [deadline for deadline in range(step, 12) if excess(deadline) > 0]
    violation = lease_violation(step=step, groups_per_step=per_step, remaining=remaining)
    if broken:
        assert violation is not None
        assert (violation.deadline, violation.excess) == (broken[0], excess(broken[0]))
    else:
        assert violation is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"capacity_groups": 3}, "buffer.capacity_groups is 3, but it must be at least learner.groups_per_step = 4"),
        ({"capacity_bytes": 399}, "buffer.capacity_bytes is 399"),
        ({"total_steps": 0}, "total_steps is 0"),
        ({"max_staleness_versions": -1}, "max_staleness_versions is -1"),
    ],
)
@pytest.mark.fault("F28")
def test_limits_under_which_no_step_could_ever_fill_are_refused(changes: dict[str, int], named: str) -> None:
    limits(per_step=4, capacity_groups=4, capacity_bytes=400)
    with pytest.raises(ConfigError, match=named):
        limits(per_step=4, **changes)
