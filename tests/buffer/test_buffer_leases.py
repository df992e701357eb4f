"""The replay buffer on the learner's side: leases, the ways in which a lease ends, and the end of the run."""

import msgspec
import pytest
from buffer_scenes import Scene, finished

from asyncrl.buffer.ledger import Amount, Event, Fate
from asyncrl.buffer.records import CommitOutcome, Failure, LeaseWait, Refusal
from asyncrl.common.version import Version
from asyncrl.errors import FailureClass, StalenessViolation


def test_the_stragglers_of_the_design_are_waited_for() -> None:
    """η = 2, B = 1: k0, k1 and k2 are due at step 2. If step 1 trained the new group k3, both k1 and k2 would be left
    for step 2, which trains only one group."""
    scene = Scene(eta=2, per_step=1)
    k0, k1, k2 = scene.reserve(3, step=0)
    scene.commit(k0)
    assert scene.groups(scene.train()) == [0]
    (k3,) = scene.reserve(1, step=1)
    scene.commit(k3)
    assert scene.buffer.lease() is LeaseWait.STRAGGLER
    assert scene.buffer.counts().lease_wait is LeaseWait.STRAGGLER
    scene.commit(k2)
    assert [scene.groups(scene.train())] == [[2]]
    assert scene.buffer.lease() is LeaseWait.STRAGGLER
    scene.commit(k1)
    assert [scene.groups(scene.train()) for _ in range(2)] == [[1], [3]]


def test_without_rule_2_the_same_history_meets_a_group_beyond_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.buffer.replay_buffer.lease_violation", lambda **_: None)
    scene = Scene(eta=2, per_step=1)
    k0, k1, k2 = scene.reserve(3, step=0)
    scene.commit(k0)
    scene.train()
    (k3,) = scene.reserve(1, step=1)
    scene.commit(k3)
    scene.train()
    scene.commit(k1, k2)
    scene.train()
    with pytest.raises(StalenessViolation, match=r"due at step 2 is still ready at step 3.*max_versions = 2"):
        scene.buffer.lease()


def test_a_lease_that_was_given_back_still_counts_among_what_is_due() -> None:
    scene = Scene(eta=2, per_step=1)
    k0, *_ = scene.reserve(3, step=0)
    scene.commit(k0)
    scene.lease()
    scene.buffer.give_back(1, 0)
    scene.train()
    scene.commit(*scene.reserve(1, step=1))
    assert scene.buffer.lease() is LeaseWait.STRAGGLER


def test_a_lease_takes_the_earliest_deadline_and_ties_in_prompt_order_retries_included() -> None:
    scene = Scene(eta=3, per_step=2)
    g0, g1, g2, g3 = scene.reserve(4, step=0)
    scene.commit(g1, g3)
    assert scene.groups(scene.train()) == [1, 3]
    (g4,) = scene.reserve(1, step=1)
    scene.buffer.fail(g0.key, incarnation=1, failure=Failure(failure_class=FailureClass.INFRA, reason="engine"))
    (g0_again,) = scene.reserve(1, step=1)
    scene.commit(g4, g0_again, g2)
    assert scene.groups(scene.train()) == [2, 0]


def test_a_lease_is_handed_out_once_until_it_ends_however_long_that_takes() -> None:
    scene = Scene(eta=1, per_step=1)
    scene.commit(*scene.reserve(2))
    lease = scene.lease()
    scene.clock.now_s += 1e6
    scene.buffer.expire()
    assert scene.lease() == lease
    assert scene.buffer.counts().leased == 1


def test_a_leased_group_holds_its_slot_and_its_bytes_until_the_ack() -> None:
    scene = Scene(eta=0, per_step=2)
    scene.commit(*scene.reserve(2))
    scene.lease()
    assert scene.reserve(1) == ()
    assert scene.buffer.counts().booked_bytes == 20
    assert scene.buffer.ack(1, 0) == ("0.0", "1.0")
    assert scene.buffer.version == Version(1, 1)
    assert len(scene.reserve(9)) == 2


def test_calls_that_match_no_lease_are_counted_and_change_nothing() -> None:
    scene = Scene(eta=1, per_step=1)
    scene.commit(*scene.reserve(2))
    assert scene.buffer.ack(1, 0) == ()
    scene.lease()
    for incarnation, step in [(0, 0), (2, 0), (1, 1)]:
        assert scene.buffer.ack(incarnation, step) == ()
        assert scene.buffer.skip(incarnation, step) == ()
        assert not scene.buffer.give_back(incarnation, step)
    assert scene.buffer.account.events[Event.LEASE_CALL_REFUSED] == 10
    assert scene.buffer.counts().leased == 1
    assert scene.buffer.version == Version(1, 0)


def test_a_repeated_ack_moves_nothing_but_says_again_what_may_be_cleared() -> None:
    scene = Scene(eta=1, per_step=1)
    scene.commit(*scene.reserve(2))
    scene.lease()
    keys = scene.buffer.ack(1, 0)
    assert scene.buffer.ack(1, 0) == keys == ("0.0",)
    assert scene.buffer.skip(1, 0) == ()
    assert scene.buffer.ack(0, 0) == ()
    assert scene.buffer.version == Version(1, 1)
    assert scene.buffer.account.fates[Fate.TRAINED].groups == 1


def test_a_lease_that_is_given_back_can_be_leased_again() -> None:
    scene = Scene(eta=1, per_step=2)
    scene.commit(*scene.reserve(4))
    lease = scene.lease()
    assert scene.buffer.give_back(1, 0)
    assert scene.buffer.counts().ready == 4
    assert scene.lease() == lease
    assert scene.buffer.account.events[Event.LEASE_GIVEN_BACK] == 1


def test_a_skipped_step_leaves_the_version_and_other_prompts_replace_its_groups() -> None:
    scene = Scene(eta=0, per_step=2)
    scene.commit(*scene.reserve(2))
    scene.lease()
    assert scene.buffer.skip(1, 0) == ("0.0", "1.0")
    assert scene.buffer.version == Version(1, 0)
    replacements = scene.reserve(9)
    assert [ticket.group for ticket in replacements] == [2, 3]
    scene.commit(*replacements)
    assert scene.train().step == 0
    account = scene.buffer.account
    assert account.fates[Fate.SKIPPED] == account.fates[Fate.TRAINED] == Amount(2, 4, 6)
    assert account.closed


@pytest.mark.fault("F37")
def test_lost_rows_of_ready_groups_are_generated_anew_and_the_rest_stays() -> None:
    scene = Scene(eta=2, per_step=1)
    g0, g1, g2 = scene.reserve(3)
    scene.commit(g0, g1)
    scene.lease()
    assert scene.buffer.rows_lost([g0.key, g1.key, g2.key, "nonsense"]) == (g1.key,)
    assert scene.buffer.account.events[Event.ROWS_LOST_REFUSED] == 3
    assert scene.buffer.rows_lost([g1.key]) == ()
    account = scene.buffer.account
    assert account.fates[Fate.ROWS_LOST] == Amount(1, 2, 3)
    assert account.closed
    assert scene.buffer.commit(finished(g1)) is CommitOutcome.LATE
    scene.buffer.ack(1, 0)
    (again,) = scene.reserve(1, step=1)
    assert (again.group, again.attempt, again.seed) == (g1.group, 1, g1.seed)
    scene.commit(g2, again)
    assert [scene.groups(scene.train()) for _ in range(2)] == [[2], [1]]
    account = scene.buffer.account
    assert (account.issued.groups, account.fates[Fate.TRAINED].groups) == (4, 3)
    assert account.closed


# The end.


def test_when_prompts_run_out_the_last_step_is_short() -> None:
    scene = Scene(eta=1, per_step=2, prompts=3)
    g0, g1, g2 = scene.reserve(4)
    scene.commit(g1, g2)
    scene.train()
    assert scene.buffer.lease() is LeaseWait.NOT_ENOUGH_READY  # g0 is still reserved
    scene.commit(g0)
    assert scene.groups(scene.train()) == [0]
    assert scene.buffer.lease() is LeaseWait.FINISHED
    assert scene.buffer.account.fates[Fate.TRAINED].groups == 3


def test_a_short_last_step_that_is_given_back_and_loses_its_rows_is_generated_anew() -> None:
    scene = Scene(eta=0, per_step=2, prompts=3)
    scene.commit(*scene.reserve(2))
    scene.train()
    (last,) = scene.reserve(2)
    scene.commit(last)
    assert scene.groups(scene.lease()) == [2]
    assert scene.buffer.give_back(1, 1)
    assert scene.buffer.rows_lost([last.key]) == (last.key,)
    assert scene.buffer.lease() is LeaseWait.NOT_ENOUGH_READY
    (again,) = scene.reserve(2)
    scene.commit(again)
    assert scene.groups(scene.train()) == [2]
    assert scene.buffer.lease() is LeaseWait.FINISHED


def test_an_exhausted_source_is_the_reason_given_even_where_the_bound_refuses_as_well() -> None:
    scene = Scene(eta=0, per_step=2, prompts=2)
    tickets = scene.reserve(2)
    assert len(tickets) == 2
    assert (
        scene.buffer.reserve("a", version=Version(1, 0), count=1).refusal is Refusal.STALENESS
    )  # the end of the prompts is not known yet
    scene.commit(*tickets)
    scene.train()
    assert scene.buffer.reserve("a", version=Version(1, 1), count=1).refusal is Refusal.NO_PROMPTS
    assert scene.buffer.reserve("a", version=Version(1, 0), count=1).refusal is Refusal.NO_PROMPTS


def test_drop_last_drops_what_fills_no_step_and_counts_it() -> None:
    scene = Scene(eta=1, per_step=2, prompts=3, drop_last=True)
    scene.commit(*scene.reserve(4))
    scene.train()
    assert scene.buffer.lease() is LeaseWait.FINISHED
    account = scene.buffer.account
    assert account.fates[Fate.DROPPED] == Amount(1, 2, 3)
    assert account.closed
    counts = scene.buffer.counts()
    assert (counts.ready, counts.booked_bytes) == (0, 0)


def test_a_prompt_that_waits_for_its_next_attempt_is_neither_the_end_nor_a_short_step() -> None:
    scene = Scene(eta=1, per_step=2, prompts=2)
    first, _ = scene.reserve(3)
    scene.commit(first)
    scene.buffer.leave("a")
    assert scene.buffer.lease() is LeaseWait.NOT_ENOUGH_READY
    assert scene.buffer.counts().waiting == 1
    scene.commit(*scene.reserve(1, replica="b"))
    assert scene.groups(scene.train()) == [0, 1]


def test_a_learner_that_takes_over_finds_the_leased_groups_ready_and_repeats_no_call_of_the_first() -> None:
    scene = Scene()
    scene.commit(*scene.reserve(4))
    skipped = scene.lease()
    assert len(scene.buffer.skip(1, skipped.step)) == 2
    lease = scene.lease()
    assert scene.buffer.succeed() == 2
    assert scene.buffer.counts().leased == 0
    assert scene.buffer.skip(2, skipped.step) == ()
    assert scene.lease() == msgspec.structs.replace(lease, incarnation=2)
    assert scene.buffer.account.closed
