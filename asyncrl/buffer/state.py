"""The state that the parts of the replay buffer share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.buffer.failures import FailureLog
from asyncrl.buffer.groups import Groups
from asyncrl.buffer.holders import Holders
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.records import Lease
from asyncrl.buffer.staleness import Limits
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version


@dataclass(slots=True, kw_only=True)
class BufferState:
    """The state of a `ReplayBuffer`.

    `step` is the number of acked steps, `lease` the lease that the learner holds, and `holders` the replicas that send
    heartbeats. A restore replaces `groups`.
    """

    limits: Limits
    clock: Callable[[], float]
    ledger: Ledger
    failures: FailureLog
    groups: Groups
    step: int
    lineage: Lineage = field(default_factory=Lineage)
    lease: Lease | None = None
    holders: Holders = field(default_factory=Holders)

    @property
    def version(self) -> Version:
        """The learner's version: the incarnation, and the number of acked steps."""
        return Version(self.lineage.incarnation, self.step)
