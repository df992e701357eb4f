"""The ledger: every issued group has exactly one fate, and the sum over all fates equals the issued amount.

    issued = trained + leased + ready + reserved + filtered + skipped + dropped + failed + rows_lost
             + returned_on_resume                                       in groups, in samples and in tokens

The account is closed if this equation holds. The ledger itself counts the issued amount and the final fates. The buffer
adds the open groups. It counts them from its own containers, and not from the ledger's numbers, so that a leak on
either side shows as an account that is not closed. An account takes no longer with more groups: the number of groups is
the size of a container, and the tokens are running sums. `Groups.recount` counts all open groups one by one. The entry
at the end of a run is such a recount, and every snapshot compares the two.

Tokens are generated tokens. A group has none until its commit, which adds its tokens to `issued` and to its fate. So
the tokens of a reserved or failed group are 0. A reserved group that `staleness.on_deadline: drop` drops gets the
tokens that its replica reported last.

The end of an attempt by expiry or retry is not a fate. The group stays `reserved` while its prompt waits for the
next attempt. A group whose rows were lost has the fate `rows_lost`, and the next attempt at its prompt counts
as newly issued.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from asyncrl.buffer.records import Failure, FailureCount, FailureStreak
from asyncrl.errors import FailureClass


class Fate(StrEnum):
    """The current or final state of an issued group. The first three are open, the others final."""

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
    """Events that are counted but are not fates of groups. Some count calls that the buffer refused: such a call has
    changed nothing but this count.

    FILTER_LIMIT: a group with equal rewards was not filtered, because the largest allowed number of groups was already
    filtered for this step. PREFIX_CONTINUED: a group was committed whose attempt began with the stored tokens of an
    earlier one. PREFIX_DROPPED: stored tokens of an attempt were not continued by a later one. TOKENS_CONTINUED and
    TOKENS_DROPPED count the tokens of these prefixes. TOKENS_THROWN_AWAY counts sampled tokens that are lost because
    their attempt ended without a commit, and that are not stored for the next attempt. Such an attempt is a straggler
    that begins again, a failed rollout, a rollout on a lost replica, or one with tokens of weights that the learner has
    lost. Its replica has reported the number.
    """

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
    LEARNER_FENCED = "learner_fenced"
    ROWS_LOST_REFUSED = "rows_lost_refused"
    FILTER_LIMIT = "filter_limit"
    STRAGGLER_REQUEUED = "straggler_requeued"
    STRAGGLER_DROPPED = "straggler_dropped"
    STRAGGLER_MASKED = "straggler_masked"
    PREFIX_CONTINUED = "prefix_continued"
    PREFIX_DROPPED = "prefix_dropped"
    TOKENS_CONTINUED = "tokens_continued"
    TOKENS_DROPPED = "tokens_dropped"
    TOKENS_THROWN_AWAY = "tokens_thrown_away"


TOKEN_EVENTS = frozenset({Event.TOKENS_CONTINUED, Event.TOKENS_DROPPED, Event.TOKENS_THROWN_AWAY})
"""Events that count tokens. All others count groups, tickets, prefixes, replicas or calls."""


class Amount(msgspec.Struct, frozen=True):
    """A number of groups, of their samples, and of their generated tokens."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.groups + other.groups, self.samples + other.samples, self.tokens + other.tokens)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the ledger at one moment, including open groups. Metrics and views show it, and checks compare
    it."""

    issued: Amount
    fates: dict[Fate, Amount]
    events: dict[Event, int]

    @property
    def closed(self) -> bool:
        """Whether the groups, samples and tokens of all fates add up to the issued ones."""
        return sum(self.fates.values(), start=Amount()) == self.issued


class EndedGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that reached a final fate, with its last attempt and its amounts.

    After `rows_lost` and `returned_on_resume` the prompt is issued again, under the same group and the next attempt.
    """

    group: int
    attempt: int
    fate: Fate
    samples: int
    tokens: int


REISSUED_FATES = frozenset({Fate.ROWS_LOST, Fate.RETURNED_ON_RESUME})
"""Final fates of an attempt whose prompt is issued again."""


class LedgerEntry(msgspec.Struct, frozen=True, array_like=True):
    """The ledger at one moment, for the audit (`asyncrl.audit`).

    `prompts` is the number of prompts that were issued, so groups 0 to `prompts` − 1 exist. `open` are the groups
    without a final fate: those that hold a slot and those that wait for another attempt. `ended` are the groups that
    reached a final fate since the entry of the previous ack. Fates with an amount of 0 are left out of `fates`.
    """

    prompts: int
    open: tuple[int, ...]
    ended: tuple[EndedGroup, ...]
    issued: Amount
    fates: dict[Fate, Amount]


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of the ledger: issued groups, groups by final fate, and events."""

    issued: Amount
    final: dict[Fate, Amount]
    events: dict[Event, int]


class Ledger:
    """Counts the issued amount, the final fates, and events. A final fate never changes.

    `ended` has the groups that reached a final fate since the last ack.
    """

    def __init__(self) -> None:
        self._issued = Amount()
        self._final: dict[Fate, Amount] = {fate: Amount() for fate in Fate if fate not in OPEN_FATES}
        self._events: Counter[Event] = Counter()
        self.ended: list[EndedGroup] = []

    def state(self) -> LedgerState:
        """Returns the counts, for a snapshot."""
        return LedgerState(issued=self._issued, final=dict(self._final), events=dict(self._events))

    def restore(self, state: LedgerState, *, ended: Iterable[EndedGroup]) -> None:
        """Continues from the counts of a snapshot, and from the groups that had ended since the ack before it."""
        self._issued = state.issued
        self._final |= state.final
        self._events = Counter(state.events)
        self.ended = list(ended)

    def issue(self, *, samples: int) -> None:
        """Counts one issued group. Its tokens are counted at its commit."""
        self._issued += Amount(1, samples, 0)

    def generated(self, tokens: int) -> None:
        """Counts the generated tokens of an issued group that was committed, filtered, or dropped before its commit."""
        self._issued += Amount(0, 0, tokens)

    def settle(self, ended: EndedGroup) -> None:
        """Counts an issued group that reached a final fate, and notes it in `ended`."""
        self._final[ended.fate] += Amount(1, ended.samples, ended.tokens)
        self.ended.append(ended)

    def count(self, event: Event, times: int = 1) -> None:
        self._events[event] += times

    def account(self, *, reserved: Amount, ready: Amount, leased: Amount) -> Account:
        """Returns the account. The arguments are the open groups of the buffer."""
        return Account(
            issued=self._issued,
            fates={Fate.RESERVED: reserved, Fate.READY: ready, Fate.LEASED: leased} | self._final,
            events={event: self._events[event] for event in Event},
        )


# Counts failed rollouts, rewards and tool calls, keeps the first failure of each kind, and detects too many DATA
# failures of groups without a commit in between.
#
# Memory is bounded, because the set of reasons is bounded and texts are cut (`Failure`). The names of tools and of
# types of errors come from user code, and may be any number. So from `MAX_KINDS` kinds of failures on, a failure of a
# new kind counts under its reason only. This module is pure.

MAX_KINDS = 200
"""Number of kinds of failures from which on a new tool or type of error is not counted as a kind of its own."""


class FailureState(msgspec.Struct, frozen=True, kw_only=True):
    """The failures of a run. `counts` has one entry for each class, reason, tool and type of error. `streak` counts the
    groups that failed because of their data since the last committed group."""

    counts: tuple[FailureCount, ...]
    streak: FailureStreak | None


class FailureLog:
    """The failures of a run. `max_streak` is `generator.max_data_failures`."""

    def __init__(self, *, max_streak: int) -> None:
        self._max_streak = max_streak
        self._counts: dict[str, FailureCount] = {}
        self.streak: FailureStreak | None = None

    @property
    def total(self) -> int:
        """The number of failures: rollouts, single completions, and calls of tools."""
        return sum(count.failures for count in self._counts.values())

    @property
    def too_many(self) -> bool:
        """Whether `max_streak` groups failed because of their data (class DATA) without a commit in between. Failures
        of other classes neither count nor end the streak. Once it is True, it stays True until `restore`.

        Groups that are in flight at that moment may still be committed or fail. They change neither this nor the
        streak.
        """
        return self.streak is not None and self.streak.groups >= self._max_streak

    def failed(self, failure: Failure, *, ended_group: bool) -> None:
        """Counts a failed rollout. `ended_group` is False if the prompt of the group is tried again."""
        self.count(failure, rollouts=1, groups=int(ended_group))
        if failure.failure_class is FailureClass.DATA and not self.too_many:
            streak = self.streak
            self.streak = FailureStreak(
                groups=(streak.groups if streak else 0) + 1, first=streak.first if streak else failure, last=failure
            )

    def count(
        self, failure: Failure, *, rollouts: int = 0, groups: int = 0, samples: int = 0, tool_calls: int = 0
    ) -> None:
        """Counts failures without changing the streak: rollouts of a held-out evaluation, which belong to no group,
        and completions whose reward failed, and failed calls of tools, in groups that were committed. `failed` also
        counts its rollout with it."""
        if failure.label not in self._counts and len(self._counts) >= MAX_KINDS:
            failure = msgspec.structs.replace(failure, tool="", error="")
        known = self._counts.get(failure.label, FailureCount(first=failure))
        self._counts[failure.label] = FailureCount(
            rollouts=known.rollouts + rollouts,
            groups=known.groups + groups,
            samples=known.samples + samples,
            tool_calls=known.tool_calls + tool_calls,
            first=known.first,
        )

    def succeeded(self) -> None:
        """Ends the streak, because a group was committed."""
        if not self.too_many:
            self.streak = None

    def state(self) -> FailureState:
        """Returns the failures, for a snapshot."""
        return FailureState(counts=self.counts(), streak=self.streak)

    def restore(self, state: FailureState) -> None:
        """Continues from the failures of a snapshot. A streak of failures that had ended the run is left out, so that a
        resumed run can continue."""
        self._counts = {count.first.label: count for count in state.counts}
        self.streak = state.streak
        if self.too_many:
            self.streak = None

    def counts(self) -> tuple[FailureCount, ...]:
        """Returns one count for each class, reason, tool and type of error, in the order of the first failures."""
        return tuple(self._counts.values())
