"""The replay buffer on the generators' side: tickets, failures, commits, capacity, and the views for other parts."""

import math

import msgspec
import pytest
from buffer_scenes import Scene, finished, progress_of
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.buffer import groups
from asyncrl.buffer.groups import seed_of_group
from asyncrl.buffer.ledger import Amount, Event, Fate
from asyncrl.buffer.records import CommitOutcome, Failure, HeldReport, LeaseWait, Refusal, Renewal, Ticket
from asyncrl.common.version import Lineage, Version
from asyncrl.errors import DataError, FailureClass, StalenessViolation

OLD = Version(0, 0)


# Tickets.


def test_groups_are_numbered_in_prompt_order_and_seeds_leave_room_for_every_sample() -> None:
    scene = Scene(group_size=3, seed=5)
    tickets = scene.reserve(4)
    assert [(ticket.group, ticket.task.prompt, ticket.attempt) for ticket in tickets] == [
        (0, "0", 0), (1, "1", 0), (2, "2", 0), (3, "3", 0),
    ]  # fmt: skip
    first = tickets[0].seed
    assert first % 3 == 0
    assert [ticket.seed for ticket in tickets] == [first + group * 3 for group in range(4)]


def sample_seeds(run_seed: int, group: int, size: int) -> range:
    first = seed_of_group(run_seed, group, group_size=size)
    return range(first, first + size)


def test_seed_0_gives_group_n_the_seed_n_times_the_group_size() -> None:
    assert [ticket.seed for ticket in Scene(group_size=3, seed=0).reserve(4)] == [0, 3, 6, 9]


@given(
    run_seeds=st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2, unique=True),
    groups=st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)),
    sizes=st.tuples(st.integers(1, 4096), st.integers(1, 4096)),
)
@example(run_seeds=[0, 1], groups=(2**20, 0), sizes=(4, 4))
@example(run_seeds=[0, 1], groups=(2**32 - 1, 0), sizes=(1, 1))
@example(run_seeds=[2**31 - 2, 2**31 - 1], groups=(10**12, 10**12), sizes=(4095, 7))
def test_runs_with_different_seeds_never_draw_a_sample_with_the_same_seed(
    run_seeds: list[int], groups: tuple[int, int], sizes: tuple[int, int]
) -> None:
    first, second = map(sample_seeds, run_seeds, groups, sizes)
    assert first.stop <= second.start or second.stop <= first.start
    for samples, size in zip((first, second), sizes, strict=True):
        assert samples.start % size == 0
        assert samples.start >= 0
        assert samples.stop <= 2**63


@given(
    run_seed=st.integers(0, 2**31 - 1),
    group=st.integers(0, 2**22),
    apart=st.integers(1, 2**20 - 2),
    size=st.integers(1, 4096),
)
def test_two_groups_of_a_run_have_different_seeds_until_four_billion_samples_are_drawn(
    run_seed: int, group: int, apart: int, size: int
) -> None:
    assert sample_seeds(run_seed, group, size) != sample_seeds(run_seed, group + apart, size)


def test_a_ticket_carries_the_limit_and_the_deadline_of_its_reserve() -> None:
    scene = Scene(eta=2)
    scene.commit(*scene.reserve(2))
    scene.train()
    (late,) = scene.reserve(1, step=0)
    assert (late.version, late.max_staleness_versions, late.deadline) == (Version(1, 0), 2, 2)


def test_eta_0_keeps_exactly_one_step_in_flight_and_trains_in_prompt_order() -> None:
    scene = Scene(eta=0, per_step=3)
    for step in range(3):
        tickets = scene.reserve(10)
        assert len(tickets) == 3
        scene.commit(*reversed(tickets))
        assert scene.reserve(1) == ()
        assert scene.groups(scene.train()) == [3 * step, 3 * step + 1, 3 * step + 2]


def test_nothing_is_generated_that_no_step_would_train() -> None:
    scene = Scene(eta=3, per_step=2, total_steps=2)
    answer = scene.buffer.reserve("a", version=Version(1, 0), count=9)
    assert (len(answer.tickets), answer.refusal) == (4, Refusal.NO_STEPS)
    scene.commit(*answer.tickets)
    scene.train()
    scene.train()
    assert scene.buffer.lease() is LeaseWait.FINISHED


def test_a_replica_is_refused_while_paused_and_when_it_holds_weights_of_an_older_incarnation() -> None:
    scene = Scene()
    scene.buffer.paused = True
    assert scene.buffer.reserve("a", version=Version(1, 0), count=1).refusal is Refusal.PAUSED
    scene.buffer.paused = False
    assert scene.buffer.reserve("a", version=OLD, count=1).refusal is Refusal.OLD_INCARNATION
    assert scene.buffer.account.events[Event.RESERVE_OLD_INCARNATION] == 1
    assert len(scene.reserve(1)) == 1


def test_a_replica_ahead_of_the_learner_is_our_bug_and_takes_nothing() -> None:
    scene = Scene()
    with pytest.raises(ValueError, match=r"version 1\.1.*acked only 0 steps"):
        scene.reserve(1, step=1)
    assert scene.prompts.taken == 0


def ended(scene: Scene, held: HeldReport) -> tuple[str, ...]:
    """Returns the tickets of which the answer to a heartbeat of replica a says that they have ended."""
    renewal = scene.buffer.renew("a", held=held)
    assert renewal is not None
    return renewal.ended


def test_a_ticket_whose_reply_was_lost_expires_although_its_replica_sends_heartbeats() -> None:
    """The reply with the second ticket was lost: the replica lives but does not know the ticket."""
    scene = Scene()
    kept, lost = scene.reserve(2)
    for _ in range(3):
        scene.clock.now_s += 8.0
        scene.buffer.renew("a", held=progress_of(kept))
    assert scene.buffer.expire() == (lost.key,)
    scene.commit(kept)


def test_a_heartbeat_names_the_held_tickets_that_have_ended_without_a_commit() -> None:
    """A restart of the buffer forgets tickets, so a ticket that was never issued has ended too."""
    scene = Scene()
    reserved, ready, expired = scene.reserve(3)
    scene.commit(ready)
    scene.clock.now_s += 8.0
    scene.buffer.renew("a", held=progress_of(reserved))
    scene.clock.now_s += 8.0
    assert scene.buffer.expire() == (expired.key,)
    held = progress_of(reserved, ready, expired, also=["99.0"])
    assert ended(scene, held) == (expired.key, "99.0")
    (again,) = scene.reserve(1)
    assert (again.group, again.attempt) == (expired.group, 1)
    scene.commit(again)
    assert ended(scene, progress_of(expired, again)) == (expired.key,)


def test_a_ticket_that_was_named_once_lives_as_long_as_its_replica_sends_heartbeats() -> None:
    scene = Scene()
    (ticket,) = scene.reserve(1)
    scene.buffer.renew("a", held=progress_of(ticket, tokens=3))
    for _ in range(5):
        scene.clock.now_s += 8.0
        assert scene.buffer.renew("a", held=progress_of(complete=False)) is not None
        assert scene.buffer.expire() == ()
    scene.clock.now_s += 10.1
    assert scene.buffer.expire() == (ticket.key,)


def test_a_ticket_that_a_complete_heartbeat_does_not_name_any_longer_expires() -> None:
    """The replica could not report that its rollout failed, or it was started again."""
    scene = Scene()
    kept, forgotten = scene.reserve(2)
    scene.buffer.renew("a", held=progress_of(kept, forgotten))
    scene.clock.now_s += 8.0
    scene.buffer.renew("a", held=progress_of(kept))
    scene.clock.now_s += 8.0
    scene.buffer.renew("a", held=progress_of(complete=False))
    assert scene.buffer.expire() == (), "it gets the time of a ticket whose reply was lost"
    scene.clock.now_s += 2.1
    assert scene.buffer.expire() == (forgotten.key,)


def test_a_heartbeat_that_was_overtaken_changes_nothing() -> None:
    scene = Scene()
    first, second = scene.reserve(2)
    late = progress_of(first, tokens=1)
    scene.buffer.renew("a", held=progress_of(first, second, tokens=5))
    scene.clock.now_s += 8.0
    assert scene.buffer.renew("a", held=late, version=Version(1, 0)) is None
    slots = scene.buffer.groups.reserved
    assert [slots[ticket.key].sampled_tokens for ticket in (first, second)] == [5, 5]
    scene.clock.now_s += 2.1
    assert set(scene.buffer.expire()) == {first.key, second.key}, "it does not show that the replica lives"


def test_a_replica_has_to_name_all_its_tickets_when_the_buffer_has_ended_one_or_does_not_know_it() -> None:
    scene = Scene(eta=1, per_step=1)
    first, second = scene.reserve(2)
    assert scene.buffer.renew("a", held=progress_of(first, second)) == Renewal(report_all=True), "it is new"
    assert scene.buffer.renew("a", held=progress_of(first, second)) == Renewal()
    scene.clock.now_s += 10.1
    scene.buffer.expire()
    for _ in range(2):  # the first answer may be lost
        assert scene.buffer.renew("a", held=progress_of(complete=False)) == Renewal(report_all=True)
    answer = scene.buffer.renew("a", held=progress_of(first, second))
    assert answer == Renewal(ended=(first.key, second.key))


def test_a_heartbeat_does_not_keep_another_replicas_ticket() -> None:
    scene = Scene()
    (ticket,) = scene.reserve(1, replica="a")
    scene.clock.now_s += 8.0
    scene.buffer.renew("b", held=progress_of(ticket))
    scene.clock.now_s += 8.0
    assert scene.buffer.expire() == (ticket.key,)


def test_a_replica_that_leaves_frees_its_tickets_at_once_and_only_its_own() -> None:
    scene = Scene()
    (first,) = scene.reserve(1, replica="a")
    (second,) = scene.reserve(1, replica="b")
    assert scene.buffer.leave("a") == (first.key,)
    scene.commit(second)


def test_a_freed_slot_is_admitted_again_under_the_bound_of_the_replica_that_takes_it() -> None:
    """η = 1, B = 1: at v = 1 and with one slot in use, a replica at version 0 may not reserve, and one at version 1
    may."""
    scene = Scene(eta=1, per_step=1)
    first, second = scene.reserve(2)
    scene.commit(first)
    scene.train()
    scene.buffer.fail(second.key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine"))
    (fresh,) = scene.reserve(1, step=1)
    assert (fresh.group, fresh.attempt, fresh.deadline) == (second.group, 1, 2)
    assert scene.reserve(1, step=0) == ()
    assert len(scene.reserve(1, step=1)) == 1


# Failures.


def test_an_infra_failure_goes_to_the_front_with_the_same_seed_until_attempts_run_out() -> None:
    scene = Scene(max_attempts=2)
    first, second = scene.reserve(2)
    assert scene.buffer.fail(
        second.key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine")
    )
    assert scene.buffer.fail(
        first.key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine")
    )
    again = scene.reserve(3)
    assert [(t.group, t.attempt, t.seed) for t in again] == [(0, 1, first.seed), (1, 1, second.seed), (2, 0, 4)]
    assert scene.buffer.fail(
        again[0].key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine")
    )
    (replacement,) = scene.reserve(1, step=0)
    assert (replacement.group, replacement.attempt) == (3, 0)
    account = scene.buffer.account
    assert account.fates[Fate.FAILED] == Amount(1, 2, 0)
    [count] = scene.buffer.failures.counts()
    assert (count.first.label, count.rollouts, count.groups) == ("infra/engine", 3, 1)
    assert account.closed


def test_a_data_failure_is_not_tried_again_and_another_prompt_takes_the_slot() -> None:
    scene = Scene()
    tickets = scene.reserve(4)
    for ticket in tickets[:2]:
        assert scene.buffer.fail(
            ticket.key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="reward_raised")
        )
    assert scene.buffer.failures.streak is not None
    assert scene.buffer.failures.streak.groups == 2
    assert [ticket.group for ticket in scene.reserve(9)] == [4, 5]
    scene.commit(tickets[2])
    assert scene.buffer.failures.streak is None
    assert scene.buffer.account.fates[Fate.FAILED].groups == 2


def failed(text: str, *, failure_class: FailureClass = FailureClass.DATA, reason: str = "reward_raised") -> Failure:
    return Failure(failure_class=failure_class, reason=reason, message=text)


def test_the_first_failure_of_each_kind_is_kept_with_its_prompt_and_all_are_counted() -> None:
    scene = Scene()
    first, second, third, fourth = scene.reserve(4)
    for ticket, failure in [
        (first, failed("one")),
        (second, failed("two")),
        (third, failed("late", reason="reward_timeout")),
        (fourth, failed("engine", failure_class=FailureClass.INFRA, reason="engine")),
    ]:
        assert scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    counts = scene.buffer.failures.counts()
    assert [(each.first.message, each.first.prompt, each.rollouts, each.groups) for each in counts] == [
        ("one", "0", 2, 2),
        ("late", "2", 1, 1),
        ("engine", "3", 1, 0),
    ], "after an INFRA failure the group is tried again, so it has not failed yet"
    assert scene.buffer.failures.total == 4


@pytest.mark.fault("F19")
def test_failed_samples_of_committed_groups_are_counted_and_are_no_failed_rollouts() -> None:
    scene = Scene(max_data_failures=2)
    [ticket] = scene.reserve(1)
    scene.buffer.fail(ticket.key, incarnation=1, failure=failed("one"))
    for _ in range(3):
        scene.buffer.failures.count(failed("two"), samples=5)
    [count] = scene.buffer.failures.counts()
    assert (count.rollouts, count.groups, count.samples, count.first.message) == (1, 1, 15, "one")
    assert scene.buffer.failures.total == 16
    assert not scene.buffer.failures.too_many, "they do not end the run"


@pytest.mark.fault("F19")
def test_a_group_is_committed_without_some_rewards_but_not_without_all_of_them() -> None:
    scene = Scene()
    [ticket] = scene.reserve(1)
    meta = finished(ticket)
    for rewards in ((None, None), (1.0, math.nan), (None, math.inf)):
        with pytest.raises(ValueError, match="at least one sample must have a reward"):
            scene.buffer.commit(msgspec.structs.replace(meta, rewards=rewards))
    assert scene.buffer.commit(msgspec.structs.replace(meta, rewards=(None, 1.0))) is CommitOutcome.ACCEPTED


def test_texts_of_failures_are_cut() -> None:
    long = "x" * 5000
    failure = Failure.of(DataError(long, reason="r", completion=long), prompt=long)
    assert {len(text) for text in (failure.message, failure.prompt, failure.completion)} == {1001}
    strange = Failure.of(DataError("lone \ud800", reason="r"))
    assert msgspec.json.decode(msgspec.json.encode(strange), type=Failure) == strange


def test_too_many_data_failures_in_a_row_end_tickets_and_leases_at_that_number() -> None:
    scene = Scene(max_data_failures=2)
    ready = scene.reserve(2)
    scene.commit(*ready)
    first, second = scene.reserve(2)
    scene.buffer.fail(first.key, incarnation=1, failure=failed("one"))
    assert not scene.buffer.failures.too_many
    again = scene.reserve(1)
    scene.buffer.fail(second.key, incarnation=1, failure=failed("two"))
    refused = scene.buffer.reserve("a", version=scene.buffer.version, count=1)
    assert (refused.tickets, refused.refusal) == ((), Refusal.TOO_MANY_FAILURES)
    assert scene.buffer.lease() is LeaseWait.TOO_MANY_FAILURES, (
        "no lease is issued, although the groups of a step are ready"
    )
    scene.buffer.fail(again[0].key, incarnation=1, failure=failed("under way"))
    streak = scene.buffer.failures.streak
    assert streak is not None
    assert (streak.groups, streak.first.message, streak.last.message) == (2, "one", "two")


def test_a_group_that_was_under_way_when_there_were_too_many_failures_does_not_take_the_end_back() -> None:
    scene = Scene(max_data_failures=1)
    bad, good = scene.reserve(2)
    scene.buffer.fail(bad.key, incarnation=1, failure=failed("one"))
    scene.commit(good)
    assert scene.buffer.failures.too_many


def test_a_failure_of_a_ticket_that_is_over_or_of_an_older_incarnation_changes_nothing() -> None:
    scene = Scene()
    done, open_ = scene.reserve(2)
    scene.commit(done)
    before = scene.buffer.counts()
    for key, incarnation in [(done.key, 1), ("77.0", 1), ("no key", 1), (open_.key, 0)]:
        assert not scene.buffer.fail(
            key, incarnation=incarnation, failure=Failure(failure_class=FailureClass.DATA, reason="late")
        )
    assert scene.buffer.counts() == before
    assert scene.buffer.account.events[Event.FAIL_REFUSED] == 4
    assert scene.buffer.failures.counts() == ()


@pytest.mark.fault("F2")
def test_tickets_of_a_killed_generator_expire_and_go_elsewhere_with_the_same_seeds() -> None:
    scene = Scene()
    lost = scene.reserve(2, replica="killed")
    scene.commit(lost[0])
    scene.clock.now_s += 10.0
    scene.buffer.renew("survivor", held=progress_of())
    assert scene.buffer.expire() == ()
    scene.clock.now_s += 0.1
    assert scene.buffer.expire() == (lost[1].key,)
    assert scene.buffer.expire() == ()
    (again,) = scene.reserve(1, replica="survivor")
    assert (again.group, again.attempt, again.seed, again.task) == (1, 1, lost[1].seed, lost[1].task)
    scene.commit(again)
    assert scene.groups(scene.train()) == [0, 1]
    account = scene.buffer.account
    assert account.closed
    assert account.fates[Fate.TRAINED] == account.issued == Amount(2, 4, 6)
    assert account.events[Event.TICKET_EXPIRED] == 1


@pytest.mark.fault("F40")
def test_a_generator_that_comes_back_from_the_dead_is_refused_by_its_attempt() -> None:
    scene = Scene()
    (zombie,) = scene.reserve(1, replica="zombie")
    scene.buffer.leave("zombie")
    assert scene.buffer.commit(finished(zombie)) is CommitOutcome.LATE  # while the prompt waits
    (winner,) = scene.reserve(1, replica="b")
    assert winner.key != zombie.key
    assert scene.buffer.commit(finished(zombie)) is CommitOutcome.LATE  # while another replica holds the prompt
    scene.commit(winner)
    assert scene.buffer.commit(finished(zombie)) is CommitOutcome.LATE  # while the group is ready
    scene.commit(*scene.reserve(1, replica="b"))
    (trained, _) = scene.train().groups
    assert (trained.meta.attempt, trained.meta.replica) == (1, "b")
    assert scene.buffer.commit(finished(zombie)) is CommitOutcome.LATE  # after the group was trained
    assert scene.buffer.commit(finished(winner)) is CommitOutcome.DUPLICATE
    assert scene.buffer.account.events[Event.COMMIT_LATE] == 4
    assert scene.buffer.account.closed


# Commits.


@pytest.mark.fault("F18")
def test_a_commit_twice_late_unknown_or_after_a_restore_is_counted_and_changes_nothing() -> None:
    scene = Scene()
    first, second, third = scene.reserve(3)
    scene.commit(first, second)
    scene.buffer.leave("a")  # the third ticket expires
    before, account = scene.buffer.counts(), scene.buffer.account
    never = msgspec.structs.replace(finished(first), group=9)
    future = msgspec.structs.replace(finished(first), attempt=1)
    negative = msgspec.structs.replace(finished(first), attempt=-1)
    older = msgspec.structs.replace(finished(third), incarnation=0)
    for meta, outcome in [
        (finished(first), CommitOutcome.DUPLICATE),
        (finished(third), CommitOutcome.LATE),
        (never, CommitOutcome.UNKNOWN),
        (future, CommitOutcome.UNKNOWN),
        (negative, CommitOutcome.UNKNOWN),
        (older, CommitOutcome.OLD_INCARNATION),
    ]:
        assert scene.buffer.commit(meta) is outcome
    assert scene.buffer.counts() == before
    after = scene.buffer.account
    assert (after.issued, after.fates) == (account.issued, account.fates)
    events = after.events
    assert events[Event.COMMIT_DUPLICATE] == events[Event.COMMIT_LATE] == events[Event.COMMIT_OLD_INCARNATION] == 1
    assert events[Event.COMMIT_UNKNOWN] == 3
    scene.train()
    assert scene.buffer.commit(finished(first)) is CommitOutcome.DUPLICATE  # also after the group was trained


@pytest.mark.fault("F18")
def test_a_ticket_of_an_older_incarnation_never_meets_the_same_key_of_this_one() -> None:
    scene = Scene()
    (ticket,) = scene.reserve(1)
    older = msgspec.structs.replace(finished(ticket), incarnation=0)
    assert scene.buffer.commit(older) is CommitOutcome.OLD_INCARNATION
    scene.commit(ticket)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"oldest": 0}, StalenessViolation),
        ({"oldest": 2, "newest": 1}, ValueError),
        ({"newest": 2}, ValueError),
        ({"rewards": (1.0,)}, ValueError),
        ({"completion_tokens": (1, 2, 3)}, ValueError),
        ({"truncated": ()}, ValueError),
        ({"rewards": (1.0, float("nan"))}, ValueError),
        ({"row_bytes": 101}, ValueError),
        ({"row_bytes": -1}, ValueError),
    ],
)
def test_metadata_that_contradicts_its_ticket_is_our_bug_and_leaves_the_ticket_as_it_was(
    changes: dict[str, object], error: type[Exception]
) -> None:
    scene = Scene(eta=1, per_step=1)
    scene.commit(*scene.reserve(1))
    scene.train()
    (ticket,) = scene.reserve(1, step=1)
    with pytest.raises(error, match=f"group {ticket.key}"):
        scene.buffer.commit(msgspec.structs.replace(finished(ticket), **changes))
    scene.commit(ticket)


@pytest.mark.fault("F15")
def test_a_group_may_be_newer_than_its_ticket_but_keeps_the_deadline_of_its_reserve() -> None:
    scene = Scene(eta=1, per_step=1)
    first, second = scene.reserve(2)
    scene.commit(first)
    scene.train()
    scene.buffer.commit(finished(second, newest=1))
    (leased,) = scene.lease().groups
    assert (leased.meta.oldest, leased.meta.newest, leased.deadline) == (0, 1, 1)
    assert (leased.reserved_step, leased.ready_step) == (0, 1)


# Capacity.


@pytest.mark.fault("F16")
def test_a_full_buffer_refuses_and_a_wait_that_is_given_up_leaks_no_slot() -> None:
    scene = Scene(eta=3, per_step=2, capacity_groups=3)
    tickets = scene.reserve(3)
    for _ in range(5):  # each time, a generator reserves, is refused, and gives up
        answer = scene.buffer.reserve("b", version=Version(1, 0), count=2)
        assert (answer.tickets, answer.refusal) == ((), Refusal.CAPACITY)
    assert scene.prompts.taken == 3
    scene.commit(*tickets)
    scene.train()
    assert len(scene.reserve(9)) == 2


@pytest.mark.fault("F16")
def test_bytes_are_booked_at_their_worst_and_refunded_at_commit() -> None:
    scene = Scene(eta=3, per_step=2, capacity_bytes=250, worst_group_bytes=100)
    answer = scene.buffer.reserve("a", version=Version(1, 0), count=9)
    assert (len(answer.tickets), answer.refusal) == (2, Refusal.CAPACITY)
    assert scene.buffer.counts().booked_bytes == 200
    scene.commit(answer.tickets[0])
    assert scene.buffer.counts().booked_bytes == 110
    (third,) = scene.reserve(9)
    scene.buffer.fail(third.key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))
    scene.commit(answer.tickets[1])
    scene.train()
    assert scene.buffer.counts().booked_bytes == 0


# The views for other parts.


def test_a_replica_holds_the_groups_that_it_reserved_until_they_are_committed_or_failed() -> None:
    scene = Scene(eta=1, per_step=2)
    first, second, third = scene.reserve(3, replica="a")
    scene.reserve(1, replica="b")
    assert scene.buffer.tickets_by_actor() == {"a": 3, "b": 1}
    scene.commit(first)
    scene.buffer.fail(second.key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))
    assert scene.buffer.tickets_by_actor() == {"a": 1, "b": 1}
    scene.commit(third)
    assert scene.buffer.tickets_by_actor() == {"b": 1}


def test_the_age_is_that_of_the_group_reserved_longest_ago() -> None:
    scene = Scene(eta=1, per_step=1)
    assert scene.buffer.counts().oldest_group_age_s == 0.0
    (first,) = scene.reserve(1)
    scene.clock.now_s += 3.0
    (second,) = scene.reserve(1)
    scene.clock.now_s += 4.0
    scene.commit(second)
    assert scene.buffer.counts().oldest_group_age_s == 7.0
    scene.commit(first)
    scene.train()
    assert scene.buffer.counts().oldest_group_age_s == 4.0


def test_what_the_buffer_keeps_does_not_grow_with_the_run() -> None:
    scene = Scene(eta=1, per_step=2, total_steps=10**6)
    for _ in range(60):
        scene.commit(*scene.reserve(2))
        scene.train()
    kept = scene.buffer.groups
    sizes = [len(kept.open), len(kept.reserved), len(kept.ready), len(kept.unleased_by_deadline)]
    assert sizes == [0, 0, 0, 0]
    assert (kept.booked_bytes, kept.last_of_ended, kept.ready_by_deadline) == (0, {}, {})


def test_what_the_buffer_knows_of_replicas_does_not_grow_with_those_that_have_ended() -> None:
    scene = Scene()
    for number in range(6):
        name = f"replica-{number}"
        (ticket,) = scene.reserve(1, replica=name)
        for _ in range(2):
            scene.buffer.renew(name, held=progress_of(ticket))
        if number % 2:
            scene.buffer.leave(name)
        else:
            scene.clock.now_s += 10.1
            assert scene.buffer.expire() == (ticket.key,)
    table = scene.buffer.groups
    assert (table.held, table.unconfirmed, table.must_report_all) == ({}, {}, set())


@pytest.mark.fault("F40")
def test_only_attempts_that_ended_without_a_commit_have_rows_that_no_group_needs() -> None:
    scene = Scene(eta=1, per_step=2)
    expired, ready, lost = scene.reserve(3)
    scene.clock.now_s += 11.0
    scene.buffer.renew("a", held=progress_of(ready, lost))
    scene.buffer.expire()
    scene.commit(ready, lost)
    scene.buffer.rows_lost([lost.key])
    (reserved,) = scene.reserve(1)
    assert reserved.key == "0.1"
    keys = [expired.key, ready.key, lost.key, reserved.key, "99.0", "0.7", "of a user"]
    assert scene.buffer.never_committed(keys) == (expired.key, lost.key)
    scene.commit(reserved)
    scene.train()
    assert scene.buffer.never_committed(keys) == (expired.key, lost.key), "the learner clears what it has trained"


def test_only_the_newest_ended_groups_with_a_retry_or_a_failure_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "LAST_ATTEMPTS", 2)
    scene = Scene(max_data_failures=100)
    tickets = [scene.reserve(1)[0] for _ in range(1)]
    for _ in range(4):
        scene.buffer.fail(tickets[-1].key, incarnation=1, failure=Failure(failure_class=FailureClass.DATA, reason="x"))
        tickets += scene.reserve(1)
    assert list(scene.buffer.snapshot().last_attempts) == [2, 3]
    assert scene.buffer.commit(finished(tickets[3])) is CommitOutcome.LATE


def scene_with_a_forgotten_attempt(monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, list[Ticket]]:
    """Returns a buffer, and tickets of four groups: trained and retained, failed and forgotten, failed, reserved."""
    monkeypatch.setattr(groups, "LAST_ATTEMPTS", 1)
    scene = Scene(eta=2, per_step=1, max_data_failures=100)
    scene.buffer.snapshot()  # from now on, groups that are trained are retained
    (retained,) = scene.reserve(1)
    scene.commit(retained)
    scene.train()
    failed = [scene.reserve(1)[0] for _ in range(2)]
    for ticket in failed:
        failure = Failure(failure_class=FailureClass.DATA, reason="x")
        scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    return scene, [retained, *failed, *scene.reserve(1)]


@pytest.mark.fault("F40")
@pytest.mark.parametrize("restored", [False, True])
def test_a_late_commit_of_a_forgotten_attempt_is_unknown_so_that_its_rows_are_cleared(
    restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, (_, forgotten, failed, reserved) = scene_with_a_forgotten_attempt(monkeypatch)
    if restored:
        scene.buffer.restore(scene.buffer.snapshot(), lineage=Lineage().child(scene.buffer.version))
    before = scene.buffer.counts()
    assert scene.buffer.commit(finished(forgotten)) is CommitOutcome.UNKNOWN
    assert scene.buffer.commit(finished(failed)) is CommitOutcome.LATE
    assert scene.buffer.counts() == before
    keys = (forgotten.key, failed.key)
    assert scene.buffer.never_committed([*keys, reserved.key]) == keys
    renewal = scene.buffer.renew("a", held=progress_of(forgotten, failed, reserved))
    assert renewal is not None
    assert renewal.ended == keys
    scene.commit(reserved)


def test_the_rows_of_a_retained_group_stay_also_if_attempts_at_later_groups_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, (retained, *_) = scene_with_a_forgotten_attempt(monkeypatch)
    assert scene.buffer.commit(finished(retained)) is CommitOutcome.DUPLICATE
    assert scene.buffer.never_committed([retained.key]) == ()
    assert scene.buffer.release(complete=None) == (retained.key,)
    assert scene.buffer.commit(finished(retained)) is CommitOutcome.UNKNOWN, "it looks like a forgotten attempt"
