"""The staleness bound: decides whether a replica may start another group, and whether the learner may start a step.

A slot holds a group from reserve to ack. With B groups a step, the limit η and the learner at step v, a replica that
has loaded version r may reserve while

    slots + (v − r) · B < (η + 1) · B                                                            (1)
    v · B + slots < total_steps · B                   (otherwise the run would end before it trains the group)

The learner may start step s on the groups with the earliest deadlines if the remaining groups fit into the remaining
steps:

    for every d ≥ s:  #{reserved or ready after the lease, deadline ≤ d} ≤ (d − s) · B           (2)

Together the rules bound the staleness of every group by η, and no group is discarded. (`staleness.on_deadline` may ask
for another treatment of groups that arrive too late.) docs/guarantees.md has the proof.
tests/buffer tests it with random histories. All functions here are pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from asyncrl.buffer.records import Refusal
from asyncrl.config.row_bytes import worst_case_group_bytes
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the buffer, from the config. A version is a step; a group is a prompt with all of its samples.

    `max_staleness_versions` is η, `groups_per_step` B, `group_size` G. `worst_group_bytes` is the size of the rows of
    the largest possible group. A reserve books this size, and the commit returns the difference to the real size.
    """

    max_staleness_versions: int
    groups_per_step: int
    group_size: int
    capacity_groups: int
    capacity_bytes: int
    worst_group_bytes: int
    total_steps: int
    max_attempts: int
    max_data_failures: int
    max_infra_failures: int
    heartbeat_timeout_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "max_staleness_versions"):
                raise ConfigError(f"the limit {field.name} is {value}, but it must be positive; raise it")
        if self.capacity_groups < self.groups_per_step:
            raise ConfigError(
                f"buffer.capacity_groups is {self.capacity_groups}, but it must be at least learner.groups_per_step = "
                f"{self.groups_per_step}, because the buffer must hold the groups of a step; raise the first or lower "
                "the second"
            )
        if self.capacity_bytes < self.groups_per_step * self.worst_group_bytes:
            raise ConfigError(
                f"buffer.capacity_bytes is {self.capacity_bytes}, but one step of {self.groups_per_step} groups may "
                f"take {self.groups_per_step * self.worst_group_bytes} bytes, and the buffer must hold a step; raise "
                "buffer.capacity_bytes"
            )


def limits_of(config: Config) -> Limits:
    """Returns the buffer's limits from the config."""
    learner, staleness = config.learner, config.staleness
    return Limits(
        max_staleness_versions=staleness.max_versions,
        groups_per_step=learner.groups_per_step,
        group_size=learner.group_size,
        capacity_groups=config.buffer.capacity_groups or (staleness.max_versions + 1) * learner.groups_per_step,
        capacity_bytes=config.buffer.capacity_bytes,
        worst_group_bytes=worst_case_group_bytes(config),
        total_steps=learner.total_steps,
        max_attempts=config.buffer.max_attempts,
        max_data_failures=config.generator.max_data_failures,
        max_infra_failures=config.generator.max_infra_failures,
        heartbeat_timeout_s=config.buffer.heartbeat_timeout_s,
    )


class Admission(NamedTuple):
    """The number of groups that may be reserved now, and the reason why there are not more."""

    groups: int
    refusal: Refusal


# One refusal for each entry of `bounds` in `admissible`, in the same order. If several bounds are equal, the first
# counts.
_REFUSALS = (Refusal.NO_STEPS, Refusal.STALENESS, Refusal.CAPACITY, Refusal.CAPACITY)


def admissible(limits: Limits, *, slots: int, booked_bytes: int, learner_step: int, replica_step: int) -> Admission:
    """Returns how many groups a replica may reserve now. There are three limits: the staleness by rule (1), the end of
    the run, and the buffer's capacity.

    If several limits are equally tight, the refusal names the end of the run rather than staleness, because newer
    weights would not help. It names staleness rather than capacity, because the default capacity equals the number of
    groups that the staleness limit admits.

    >>> limits = Limits(max_staleness_versions=1, groups_per_step=4, group_size=2, capacity_groups=8,
    ...     capacity_bytes=800, worst_group_bytes=100, total_steps=9, max_attempts=3,
    ...     max_data_failures=9, max_infra_failures=9, heartbeat_timeout_s=9.0)
    >>> admissible(limits, slots=6, booked_bytes=0, learner_step=3, replica_step=3)
    Admission(groups=2, refusal=<Refusal.STALENESS: 'staleness'>)
    >>> admissible(limits, slots=0, booked_bytes=0, learner_step=3, replica_step=1)
    Admission(groups=0, refusal=<Refusal.STALENESS: 'staleness'>)
    >>> admissible(limits, slots=6, booked_bytes=650, learner_step=3, replica_step=3)
    Admission(groups=1, refusal=<Refusal.CAPACITY: 'capacity'>)
    >>> admissible(limits, slots=3, booked_bytes=0, learner_step=8, replica_step=8)
    Admission(groups=1, refusal=<Refusal.NO_STEPS: 'no_steps'>)
    """
    lag = learner_step - replica_step
    bounds = (
        (limits.total_steps - learner_step) * limits.groups_per_step - slots,
        (limits.max_staleness_versions + 1 - lag) * limits.groups_per_step - slots,
        limits.capacity_groups - slots,
        (limits.capacity_bytes - booked_bytes) // limits.worst_group_bytes,
    )
    tightest = min(bounds)
    return Admission(max(0, tightest), _REFUSALS[bounds.index(tightest)])


def earliest(ready: Mapping[int, int], count: int) -> dict[int, int]:
    """Returns how many of the `count` groups with the earliest deadlines have each deadline. `ready` maps a deadline to
    its number of groups.

    >>> earliest({7: 1, 5: 2, 6: 3}, 4)
    {5: 2, 6: 2}
    """
    taken: dict[int, int] = {}
    for deadline in sorted(ready):
        if count <= 0:
            break
        if share := min(count, ready[deadline]):
            taken[deadline] = share
            count -= share
    return taken


def prefix_fits(*, step: int, leased: bool, groups_per_step: int, deadline: int, unleased: Mapping[int, int]) -> bool:
    """Returns whether a group that is due at `deadline` may get a slot although rule (1) does not admit that deadline.

    Rule (1) admits a group because its deadline is that of the replica's version. A group that continues a prefix is
    due earlier. So the invariant of docs/guarantees.md is checked for each deadline: the groups that are due fit into
    the remaining steps. With a lease of `step`, the remaining steps begin after it, as in rule (2). `unleased` maps a
    deadline to the number of reserved and ready groups.

    >>> prefix_fits(step=3, leased=False, groups_per_step=1, deadline=3, unleased={4: 1})
    True
    >>> prefix_fits(step=3, leased=True, groups_per_step=1, deadline=3, unleased={4: 1})
    False
    >>> prefix_fits(step=3, leased=False, groups_per_step=1, deadline=3, unleased={4: 2})
    False
    """
    trained = step if leased else step - 1  # the last step that is not open to the group
    if deadline <= trained:
        return False
    remaining = {**unleased, deadline: unleased.get(deadline, 0) + 1}
    return lease_violation(step=trained, groups_per_step=groups_per_step, remaining=remaining) is None


class Violation(NamedTuple):
    """The smallest deadline at which rule (2) fails, and the number of groups due by it that do not fit into the
    remaining steps up to it."""

    deadline: int
    excess: int


def lease_violation(*, step: int, groups_per_step: int, remaining: Mapping[int, int]) -> Violation | None:
    """Checks rule (2): the groups that remain reserved or ready after a lease at `step` fit into the steps up to their
    deadlines. Returns None if it holds.

    `remaining` maps a deadline to its number of groups. In the examples, two groups have the deadline 2, and the
    learner starts step 1 without them. They do not fit if a step trains one group; they fit if a step trains two:

    >>> lease_violation(step=1, groups_per_step=1, remaining={2: 2})
    Violation(deadline=2, excess=1)
    >>> lease_violation(step=1, groups_per_step=2, remaining={2: 2}) is None
    True
    >>> lease_violation(step=2, groups_per_step=2, remaining={2: 1})
    Violation(deadline=2, excess=1)
    """
    due = 0
    # Only deadlines that occur need a check: between two of them, the demand is constant and the room grows.
    for deadline in sorted(remaining):
        due += remaining[deadline]
        room = (deadline - step) * groups_per_step
        if due > room:
            return Violation(deadline, due - room)
    return None
