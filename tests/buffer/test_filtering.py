"""`algorithm.zero_variance: resample`: groups whose rewards are all equal are not trained, and no step is short."""

import random

import pytest
from buffer_scenes import Clock, NumberedPrompts, finished, limits

from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.records import CommitOutcome, FilteredGroup, Lease, LeaseWait, Ticket
from asyncrl.buffer.replay_buffer import ReplayBuffer
from asyncrl.common.version import Version

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def buffer_of(most_filtered: int = 4, **changes: float) -> ReplayBuffer:
    prompts = NumberedPrompts()
    return ReplayBuffer(
        limits=limits(**changes),  # type: ignore[arg-type]
        prompts=prompts,
        clock=Clock(),
        most_filtered=most_filtered,
    )


def reserved(buffer: ReplayBuffer, count: int, step: int = 0) -> tuple[Ticket, ...]:
    return buffer.reserve("a", version=Version(1, step), count=count).tickets


def leased(buffer: ReplayBuffer) -> Lease:
    lease = buffer.lease()
    assert isinstance(lease, Lease)
    return lease


def test_a_filtered_group_frees_its_slot_and_another_prompt_takes_it() -> None:
    buffer = buffer_of(eta=0)
    first, second = reserved(buffer, 2)
    assert not reserved(buffer, 1), "the staleness limit admits no more"
    assert buffer.commit(finished(first, rewards=EQUAL)) is CommitOutcome.FILTERED
    (third,) = reserved(buffer, 2)
    assert (third.group, buffer.counts().ready) == (2, 0)
    for ticket in (second, third):
        assert buffer.commit(finished(ticket, rewards=DIFFERENT)) is CommitOutcome.ACCEPTED
    lease = leased(buffer)
    assert [group.meta.group for group in lease.groups] == [1, 2]
    assert lease.filtered == (FilteredGroup(1.0, 2),)
    account = buffer.account
    assert (account.fates[Fate.FILTERED].groups, account.fates[Fate.FILTERED].tokens) == (1, 3)
    assert account.closed
    assert account == buffer.recount()


def test_its_rows_are_cleared_and_a_repeated_commit_is_late() -> None:
    buffer = buffer_of()
    (ticket, _) = reserved(buffer, 2)
    buffer.commit(finished(ticket, rewards=EQUAL))
    assert buffer.never_committed([ticket.key]) == (ticket.key,)
    assert buffer.commit(finished(ticket, rewards=EQUAL)) is CommitOutcome.LATE


def test_a_reward_that_failed_does_not_make_a_group_different() -> None:
    buffer = buffer_of()
    (ticket, _) = reserved(buffer, 2)
    meta = finished(ticket, rewards=(1.0, None))  # type: ignore[arg-type]
    assert buffer.commit(meta) is CommitOutcome.FILTERED
    assert buffer.commit(finished(reserved(buffer, 1)[0], rewards=DIFFERENT)) is CommitOutcome.ACCEPTED


def test_beyond_the_limit_of_a_step_groups_are_kept_and_counted_and_the_next_step_has_a_new_limit() -> None:
    buffer = buffer_of(most_filtered=1, eta=1)
    tickets = reserved(buffer, 4)
    outcomes = [buffer.commit(finished(ticket, rewards=EQUAL)) for ticket in tickets]
    assert outcomes == [CommitOutcome.FILTERED, *[CommitOutcome.ACCEPTED] * 3]
    assert buffer.account.events[Event.FILTER_LIMIT] == 3
    leased(buffer)
    buffer.ack(1, 0)
    (ticket, *_) = reserved(buffer, 3, step=1)
    assert buffer.commit(finished(ticket, rewards=EQUAL)) is CommitOutcome.FILTERED


def test_a_lease_that_is_given_back_keeps_its_filtered_groups() -> None:
    buffer = buffer_of(eta=1)
    tickets = reserved(buffer, 4)
    for number, ticket in enumerate(tickets):
        buffer.commit(finished(ticket, rewards=EQUAL if number == 0 else DIFFERENT))
    before = leased(buffer)
    assert len(before.filtered) == 1
    buffer.give_back(1, 0)
    assert leased(buffer).filtered == before.filtered


def test_without_it_nothing_is_filtered() -> None:
    buffer = buffer_of(most_filtered=0)
    assert buffer.commit(finished(reserved(buffer, 1)[0], rewards=EQUAL)) is CommitOutcome.ACCEPTED


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_with_60_percent_equal_groups_no_step_is_short_or_too_old_and_the_ledger_closes(eta: int, seed: int) -> None:
    rng, per_step, steps = random.Random(seed), 4, 40
    buffer = buffer_of(most_filtered=4 * per_step, eta=eta, per_step=per_step, total_steps=steps)
    held: list[Ticket] = []
    step = 0
    while step < steps:
        held += reserved(buffer, rng.randint(1, 4), step=max(0, step - rng.randint(0, min(eta, 1))))
        rng.shuffle(held)
        for _ in range(rng.randint(0, len(held))):
            ticket = held.pop()
            buffer.commit(finished(ticket, rewards=EQUAL if rng.random() < 0.6 else DIFFERENT))
        lease = buffer.lease()
        if isinstance(lease, Lease):
            assert len(lease.groups) == per_step
            assert all(step - group.meta.oldest <= eta for group in lease.groups)
            buffer.ack(1, step)
            step += 1
        assert buffer.account.closed
        assert buffer.account == buffer.recount()
    assert buffer.lease() is LeaseWait.FINISHED
    fates = buffer.account.fates
    assert fates[Fate.TRAINED].groups == steps * per_step
    assert fates[Fate.FILTERED].groups > steps * per_step
