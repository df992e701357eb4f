"""The ledger: every group that was issued has one fate, and the account closes.

    issued = trained + leased + ready + reserved + filtered + skipped + dropped + failed + rows_lost
             + returned_on_resume                                       in groups, in samples and in tokens

The ledger itself counts what was issued and the fates that are final; the buffer adds what it holds open, counted
from its own slots and not from these numbers, so that a leak on either side shows as an account that does not close.

Tokens are generated tokens. A group has none until its commit, which adds its tokens to `issued` and to where the
group stands: a reserved group's tokens are 0, and so are those of a group that failed.

An expired or retried attempt is no fate: its group stays `reserved` while its prompt waits at the front for the next
attempt. A group whose rows were lost has the fate `rows_lost`, and the prompt's next attempt is issued anew.
"""

from collections import Counter
from enum import StrEnum

import msgspec


class Fate(StrEnum):
    """Where an issued group stands. The first three are open, the others final."""

    RESERVED = "reserved"
    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    FILTERED = "filtered"
    SKIPPED = "skipped"
    DROPPED = "dropped"
    FAILED = "failed"
    ROWS_LOST = "rows_lost"
    RETURNED_ON_RESUME = "returned_on_resume"


OPEN_FATES = frozenset({Fate.RESERVED, Fate.READY, Fate.LEASED})


class Event(StrEnum):
    """What happened and is no fate; each is counted. Refused calls changed nothing."""

    ATTEMPT = "attempt"
    RETRY = "retry"
    TICKET_EXPIRED = "ticket_expired"
    REPLICA_LOST = "replica_lost"
    COMMIT_DUPLICATE = "commit_duplicate"
    COMMIT_LATE = "commit_late"
    COMMIT_UNKNOWN = "commit_unknown"
    COMMIT_OLD_INCARNATION = "commit_old_incarnation"
    RESERVE_OLD_INCARNATION = "reserve_old_incarnation"
    FAIL_REFUSED = "fail_refused"
    LEASE_REPEATED = "lease_repeated"
    LEASE_GIVEN_BACK = "lease_given_back"
    LEASE_CALL_REFUSED = "lease_call_refused"
    PUBLISH_REFUSED = "publish_refused"
    ROWS_LOST_REFUSED = "rows_lost_refused"


class Amount(msgspec.Struct, frozen=True):
    """So many groups, samples and generated tokens."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.groups + other.groups, self.samples + other.samples, self.tokens + other.tokens)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger at one moment, open groups included: what is exported, shown and checked."""

    issued: Amount
    fates: dict[Fate, Amount]
    events: dict[Event, int]

    @property
    def closed(self) -> bool:
        """Whether every issued group, sample and token is accounted for."""
        return sum(self.fates.values(), start=Amount()) == self.issued


class Ledger:
    """Counts what was issued, what became of it, and events. Nothing ever leaves a final fate."""

    def __init__(self) -> None:
        self._issued = Amount()
        self._final: dict[Fate, Amount] = {fate: Amount() for fate in Fate if fate not in OPEN_FATES}
        self._events: Counter[Event] = Counter()

    def issue(self, *, samples: int) -> None:
        """One group was issued; its tokens follow at its commit."""
        self._issued += Amount(1, samples, 0)

    def generated(self, tokens: int) -> None:
        """An issued group was committed with so many generated tokens."""
        self._issued += Amount(0, 0, tokens)

    def settle(self, fate: Fate, amount: Amount) -> None:
        """Issued groups met their fate."""
        self._final[fate] += amount

    def count(self, event: Event, times: int = 1) -> None:
        self._events[event] += times

    def account(self, *, reserved: Amount, ready: Amount, leased: Amount) -> Account:
        """The whole account, with what the buffer holds open."""
        open_ = {Fate.RESERVED: reserved, Fate.READY: ready, Fate.LEASED: leased}
        return Account(
            issued=self._issued,
            fates={fate: open_[fate] if fate in OPEN_FATES else self._final[fate] for fate in Fate},
            events={event: self._events[event] for event in Event},
        )
