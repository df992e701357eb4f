"""The state that the parts of the replay buffer share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.buffer.failures import FailureLog
from asyncrl.buffer.fleet import Fleet
from asyncrl.buffer.groups import Groups
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.records import FilteredGroup, Lease
from asyncrl.buffer.staleness import Limits
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version


@dataclass(slots=True, kw_only=True)
class BufferState:
    """The state of a `ReplayBuffer`.

    `step` is the number of acked steps, and `lease` the lease that the learner holds. A restore replaces `groups`.
    `filtered` are the groups that were filtered since the last lease, at most `most_filtered`.
    """

    limits: Limits
    clock: Callable[[], float]
    ledger: Ledger
    failures: FailureLog
    groups: Groups
    fleet: Fleet
    step: int = 0
    lineage: Lineage = field(default_factory=Lineage)
    lease: Lease | None = None
    most_filtered: int = 0
    filtered: list[FilteredGroup] = field(default_factory=list)

    @property
    def version(self) -> Version:
        """The learner's version: the incarnation, and the number of acked steps."""
        return Version(self.lineage.incarnation, self.step)
