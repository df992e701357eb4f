"""The staleness bound: may a replica start another group, and may the learner take a step?

A slot holds a group from reserve to ack. With B groups a step, the limit η and the learner at step v, a replica that
has loaded version r may reserve while

    slots + (v − r) · B < (η + 1) · B                                                            (1)
    v · B + slots < total_steps · B                   (nothing is generated that no step would train)

and the learner may start step s on the earliest deadlines if what remains still fits the steps that remain:

    for every d ≥ s:  #{reserved or ready after the lease, deadline ≤ d} ≤ (d − s) · B           (2)

Together they bound every group's staleness by η and discard none: docs/guarantees.md has the argument,
tests/buffer the histories that try to break it. Pure functions; nothing here holds state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from asyncrl.buffer.records import Refusal
from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a user may set. A version is a step; a group is a prompt with all of its samples.

    `max_staleness_versions` is η, `groups_per_step` B, `group_size` G. `worst_group_bytes` is what a group's rows
    take at most: a reserve books it, the commit refunds what was not needed.
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
    heartbeat_timeout_s: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "max_staleness_versions"):
                raise ConfigError(f"limit {field.name} is {value}: it must be positive")
        if self.capacity_groups < self.groups_per_step:
            raise ConfigError(
                f"buffer.capacity_groups is {self.capacity_groups}, below learner.groups_per_step "
                f"{self.groups_per_step}: a step could never fill; raise the first or lower the second",
                key="buffer.capacity_groups",
            )
        if self.capacity_bytes < self.groups_per_step * self.worst_group_bytes:
            raise ConfigError(
                f"buffer.capacity_bytes is {self.capacity_bytes}, but one step of {self.groups_per_step} groups may "
                f"take {self.groups_per_step * self.worst_group_bytes}: a step could never fill; raise it",
                key="buffer.capacity_bytes",
            )


class Room(NamedTuple):
    """Groups that may be reserved now, and what stops more."""

    groups: int
    refusal: Refusal


# In the order of `bounds` below: of equals, the first is named.
_REFUSALS = (Refusal.NO_STEPS, Refusal.STALENESS, Refusal.CAPACITY, Refusal.CAPACITY)


def admissible(limits: Limits, *, slots: int, booked_bytes: int, learner_step: int, replica_step: int) -> Room:
    """Groups that a replica may reserve now: rule (1), the end of the run, and the buffer's capacity.

    Where several limits tie, the end of the run is named before staleness (new weights would not help), and staleness
    before capacity (the default capacity is what staleness allows).

    >>> limits = Limits(max_staleness_versions=1, groups_per_step=4, group_size=2, capacity_groups=8,
    ...     capacity_bytes=800, worst_group_bytes=100, total_steps=9, max_attempts=3,
    ...     max_data_failures=9, heartbeat_timeout_s=9.0)
    >>> admissible(limits, slots=6, booked_bytes=0, learner_step=3, replica_step=3)
    Room(groups=2, refusal=<Refusal.STALENESS: 'staleness'>)
    >>> admissible(limits, slots=0, booked_bytes=0, learner_step=3, replica_step=1)
    Room(groups=0, refusal=<Refusal.STALENESS: 'staleness'>)
    >>> admissible(limits, slots=6, booked_bytes=650, learner_step=3, replica_step=3)
    Room(groups=1, refusal=<Refusal.CAPACITY: 'capacity'>)
    >>> admissible(limits, slots=3, booked_bytes=0, learner_step=8, replica_step=8)
    Room(groups=1, refusal=<Refusal.NO_STEPS: 'no_steps'>)
    """
    lag = learner_step - replica_step
    bounds = (
        (limits.total_steps - learner_step) * limits.groups_per_step - slots,
        (limits.max_staleness_versions + 1 - lag) * limits.groups_per_step - slots,
        limits.capacity_groups - slots,
        (limits.capacity_bytes - booked_bytes) // limits.worst_group_bytes,
    )
    tightest = min(bounds)
    return Room(max(0, tightest), _REFUSALS[bounds.index(tightest)])


def earliest(ready: Mapping[int, int], count: int) -> dict[int, int]:
    """How many groups of each deadline make up the `count` earliest; `ready` maps deadline to groups.

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


class Violation(NamedTuple):
    """The smallest deadline at which rule (2) fails, and by how many groups."""

    deadline: int
    excess: int


def lease_violation(*, step: int, groups_per_step: int, remaining: Mapping[int, int]) -> Violation | None:
    """Rule (2), for the groups that remain reserved or ready after a lease at `step`; None when it holds.

    `remaining` maps deadline to groups. Two groups due at step 2 do not fit when the learner takes step 1 without
    them and a step trains one; they do when a step trains two:

    >>> lease_violation(step=1, groups_per_step=1, remaining={2: 2})
    Violation(deadline=2, excess=1)
    >>> lease_violation(step=1, groups_per_step=2, remaining={2: 2}) is None
    True
    >>> lease_violation(step=2, groups_per_step=2, remaining={2: 1})
    Violation(deadline=2, excess=1)
    """
    due = 0
    # Between two deadlines that occur, demand is constant and room grows: only those that occur can fail first.
    for deadline in sorted(remaining):
        due += remaining[deadline]
        room = (deadline - step) * groups_per_step
        if due > room:
            return Violation(deadline, due - room)
    return None
