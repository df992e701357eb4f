"""The replay buffer: a pure state machine that admits groups, leases them to the learner, and accounts for each.

           reserve           commit           lease            ack
    free ──────────▶ reserved ──────▶ ready ─────────▶ leased ──────▶ trained
      ▲                │ fail, expire   │ rows_lost      │ give_back: ready again; skip: slot freed
      └────────────────┴────────────────┴────────────────┘

These statements are true after every call:

- Every slot was admitted under rule (1), and every lease was started under rule (2) of `staleness.py`. So every
  admitted group can be trained by its deadline.
- A lease holds its slots until it ends, and it never ends by time.
- The ledger's account is closed.
- Calls are idempotent by id. A repeated, late or unknown call is counted and changes nothing.

`Tickets` is the generators' side, and `Leases` the learner's side. `Unneeded` tells which rows and partial generations
may be cleared. These parts decide, and `Groups` applies the decisions to the state that they share.

The state machine has no threads and no sockets, and the clock is an argument. `asyncrl.coordinator` runs it.
"""

from collections.abc import Callable, Mapping
from functools import partial

from asyncrl.buffer.failures import FailureLog
from asyncrl.buffer.fleet import NO_STEP, Fleet
from asyncrl.buffer.groups import Groups
from asyncrl.buffer.leases import Leases
from asyncrl.buffer.ledger import Account, Ledger, LedgerEntry
from asyncrl.buffer.records import Counts
from asyncrl.buffer.snapshot import BufferSnapshot, restore, take_snapshot
from asyncrl.buffer.staleness import Limits
from asyncrl.buffer.state import BufferState
from asyncrl.buffer.tickets import Tickets
from asyncrl.buffer.unneeded import Unneeded
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.config.schema import OnDeadline
from asyncrl.data.prompts import PromptSource


class ReplayBuffer:
    """The groups between the generators and the learner.

    `prompts` issues the new prompts: group n has the n-th one. `clock` returns monotonic seconds. A lease has the tasks
    of its first `groups_logged` groups. Before each lease, up to `most_filtered` groups whose rewards are all equal are
    filtered. The order of the prompts and their seeds depend only on their source, so that a run with η = 0 trains the
    same batches as a sequential loop.

    Attributes for the owner of the buffer:

    - `tickets`: answers the generators.
    - `leases`: answers the learner.
    - `fleet`: the lives of the replicas.
    - `unneeded`: the keys whose rows or partial generations may be cleared.
    - `failures`: the failed rollouts so far.
    - `limits`: its limits.
    - `ledger`: counts fates and events. The owner counts the events that it finds itself, such as a lost replica.
    """

    def __init__(
        self,
        *,
        limits: Limits,
        prompts: PromptSource,
        clock: Callable[[], float],
        drop_last: bool = False,
        on_deadline: OnDeadline = "wait",
        groups_logged: int = 0,
        most_filtered: int = 0,
    ) -> None:
        self.limits = limits
        self.ledger = Ledger()
        self.failures = FailureLog(max_streak=limits.max_data_failures)
        self.fleet = Fleet(
            max_infra_failures=limits.max_infra_failures, timeout_s=limits.heartbeat_timeout_s, clock=clock
        )
        self._new_groups = partial(
            Groups,
            limits=limits,
            prompts=prompts,
            ledger=self.ledger,
            fleet=self.fleet,
        )
        self._state = BufferState(
            limits=limits,
            clock=clock,
            ledger=self.ledger,
            failures=self.failures,
            groups=self._new_groups(),
            fleet=self.fleet,
            most_filtered=most_filtered,
        )
        self.tickets = Tickets(self._state)
        self.leases = Leases(self._state, drop_last=drop_last, on_deadline=on_deadline, groups_logged=groups_logged)
        self.unneeded = Unneeded(self._state)

    @property
    def version(self) -> Version:
        """The learner's version: the incarnation, and the number of acked steps."""
        return self._state.version

    @property
    def lineage(self) -> Lineage:
        """The incarnations of the learner so far."""
        return self._state.lineage

    @property
    def account(self) -> Account:
        """The account at this moment, including open groups. Takes O(1) in the number of groups."""
        return self._state.groups.fates.account()

    def recount(self) -> Account:
        """Returns the account with all open groups counted one by one. It equals `account`, or there is a bug."""
        return self._state.groups.fates.recount()

    def ledger_entry(self, *, of_ack: bool) -> LedgerEntry:
        """Returns the ledger's entry of this moment, for the audit. `of_ack` begins a new list of ended groups."""
        return self._state.groups.fates.entry(of_ack=of_ack)

    def counts(self) -> Counts:
        """Returns the current contents of the buffer."""
        groups = self._state.groups.table
        oldest = next(iter(groups.open.values()), None)
        return Counts(
            reserved=len(groups.reserved),
            ready=len(groups.ready),
            leased=len(groups.leased),
            waiting=len(groups.front),
            booked_bytes=groups.booked_bytes,
            oldest_group_age_s=0.0 if oldest is None else self._state.clock() - oldest.reserved_at_s,
            lease_wait=self.leases.wait,
        )

    def snapshot(self) -> BufferSnapshot:
        """Returns the present state. A leased group counts as ready, because its step has not been trained."""
        return take_snapshot(self._state.groups, version=self.version, failures=self.failures.state())

    def restore(self, snapshot: BufferSnapshot, *, lineage: Lineage, loaded: Mapping[str, Version] = {}) -> int:
        """Continues from a snapshot as the live incarnation of `lineage`, which began at `snapshot.version`.

        The source of the prompts must continue after the first `snapshot.next_group` prompts. The rows of the groups
        that were ready must be loaded before the next call of `Leases.lease`; `Leases.rows_lost` names those that are
        not there.

        If this buffer has groups, its learner has died and another one goes back to the snapshot. The groups that only
        ancestors of `lineage` made stay, also those that a lost step trained and that are retained. Replicas go on with
        their tickets. `loaded` has the last version that each replica reported. The ledger is that of the snapshot and
        of the groups that stay. A group that an ancestor began and lost weights finished is generated again, and
        continues what is stored of its first tokens. Returns the number of these tokens.
        """
        earlier, self._state.groups = self._state.groups, self._new_groups()
        self._state.lineage, self._state.step = lineage, snapshot.version.step
        for life in self.fleet.lives().values():
            life.step = NO_STEP  # the weights that it has reported may be lost ones
        self.leases.restored()
        self.ledger.restore(snapshot.ledger)
        self.failures.restore(snapshot.failures)
        restore(
            self._state.groups, snapshot, earlier=earlier, lineage=lineage, loaded=loaded, now_s=self._state.clock()
        )
        # Some of the replicas' tickets may have ended.
        self._state.groups.table.to_ask.update(life.actor for life in self.fleet.lives().values())
        return earlier.prefixes.split_tokens(lineage)
