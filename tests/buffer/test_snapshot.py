"""A buffer that was restored from a snapshot. tests/buffer/test_buffer_histories.py does this in random histories."""

import msgspec
import pytest
from buffer_scenes import Scene, finished

from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.records import CommitOutcome, Failure
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.version import Version
from asyncrl.errors import FailureClass


def restored(scene: Scene, **changes: int) -> Scene:
    """Returns a new buffer that continues from the snapshot of `scene`, with other limits."""
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(scene.buffer.snapshot()), type=BufferSnapshot)
    after = Scene(**changes)
    after.prompts.taken = snapshot.next_group
    after.buffer.restore(snapshot, lineage=scene.buffer.lineage.child(snapshot.version))
    return after


@pytest.mark.fault("F9")
def test_with_a_smaller_limit_groups_that_cannot_meet_their_deadlines_go_to_the_front_and_are_counted() -> None:
    scene = Scene(eta=3, per_step=2)
    scene.commit(*scene.reserve(8))
    after = restored(scene, eta=1, per_step=1, capacity_groups=3)
    # Three groups fit into the buffer. All eight are due at step 3, before which there is room for four.
    assert (after.buffer.counts().ready, after.buffer.counts().waiting) == (3, 5)
    account = after.buffer.account
    assert account.fates[Fate.RETURNED_ON_RESUME].groups == 5
    assert account.closed
    for _ in range(3):
        after.train()
    tickets = after.reserve(2)
    assert [(ticket.group, ticket.attempt) for ticket in tickets] == [(3, 1), (4, 1)]


def test_groups_that_are_due_too_soon_for_a_smaller_step_go_to_the_front() -> None:
    scene = Scene(eta=1, per_step=3)
    scene.commit(*scene.reserve(6))
    after = restored(scene, eta=3, per_step=1)
    # All six are due at step 1, and steps 0 and 1 train one group each.
    assert (after.buffer.counts().ready, after.buffer.counts().waiting) == (2, 4)


def test_a_group_that_was_in_flight_gets_another_attempt_with_its_seed_and_what_was_leased_is_ready() -> None:
    scene = Scene(eta=1, per_step=2)
    scene.commit(*scene.reserve(2))
    in_flight = scene.reserve(2)
    scene.lease()
    after = restored(scene)
    assert after.buffer.version == Version(2, 0)
    again = after.reserve(2)
    assert [(t.group, t.attempt, t.seed, t.task) for t in again] == [
        (t.group, t.attempt + 1, t.seed, t.task) for t in in_flight
    ]
    assert after.groups(after.lease()) == [0, 1]
    # A replica of the time before cannot commit under the key of a new ticket.
    assert after.buffer.commit(finished(in_flight[0])) is CommitOutcome.LATE
    after.commit(*again)


def test_attempts_that_a_restart_ended_do_not_count_against_the_limit() -> None:
    scene = Scene(max_attempts=2)
    for attempt in range(5):
        [ticket] = scene.reserve(1)
        assert (ticket.group, ticket.attempt, ticket.failed_on) == (0, attempt, ())
        scene = restored(scene, max_attempts=2)
    [ticket] = scene.reserve(1)
    failure = Failure(failure_class=FailureClass.INFRA, reason="x")
    scene.buffer.fail(ticket.key, incarnation=6, failure=failure)
    [last] = scene.reserve(1)
    scene.buffer.fail(last.key, incarnation=6, failure=failure)
    assert (last.attempt, scene.buffer.account.fates[Fate.FAILED].groups) == (6, 1)


def test_a_prompt_that_waits_and_the_attempts_of_ended_groups_are_remembered() -> None:
    scene = Scene(eta=1, per_step=1)
    failure = Failure(failure_class=FailureClass.INFRA, reason="x")
    first, waits = scene.reserve(2)
    for ticket in (first, waits):
        scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    [again] = scene.reserve(1)
    scene.commit(again)
    scene.train()
    after = restored(scene, eta=1, per_step=1)
    assert [(ticket.group, ticket.attempt, ticket.task) for ticket in after.reserve(1)] == [(1, 1, waits.task)]
    assert after.buffer.commit(finished(again)) is CommitOutcome.DUPLICATE
    assert after.buffer.commit(finished(first)) is CommitOutcome.LATE


def test_failures_go_on_but_a_streak_that_ended_the_run_begins_anew() -> None:
    scene = Scene(max_data_failures=2)
    failure = Failure(failure_class=FailureClass.DATA, reason="x")
    for _ in range(2):
        [ticket] = scene.reserve(1)
        scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    assert scene.buffer.failures.too_many
    after = restored(scene, max_data_failures=2)
    assert not after.buffer.failures.too_many
    assert [count.groups for count in after.buffer.failures.counts()] == [2]
    assert len(after.reserve(1)) == 1


@pytest.mark.fault("F19")
def test_samples_without_a_reward_and_their_count_go_on() -> None:
    scene = Scene(eta=1, per_step=1)
    [ticket] = scene.reserve(1)
    meta = msgspec.structs.replace(finished(ticket), rewards=(None, 0.5))
    assert scene.buffer.commit(meta) is CommitOutcome.ACCEPTED
    scene.buffer.failures.count(Failure(failure_class=FailureClass.DATA, reason="reward_raised"), samples=1)
    after = restored(scene, eta=1, per_step=1)
    assert [count.samples for count in after.buffer.failures.counts()] == [1]
    assert after.lease().groups[0].meta.rewards == (None, 0.5)


def test_the_audit_gets_every_ended_group_once_also_over_a_restart() -> None:
    scene = Scene(eta=2, per_step=1)
    scene.commit(*scene.reserve(1))
    scene.train()
    trained = scene.buffer.ledger_entry(of_ack=True)
    assert [(ended.group, ended.fate, ended.tokens) for ended in trained.ended] == [(0, Fate.TRAINED, 3)]
    assert (trained.prompts, trained.open) == (1, ())
    one, other, _ = scene.reserve(3)
    failure = Failure(failure_class=FailureClass.DATA, reason="x")
    scene.buffer.fail(one.key, incarnation=1, failure=failure)
    after = restored(scene)
    after.buffer.fail(after.reserve(1)[0].key, incarnation=2, failure=failure)
    for of_ack in (False, True):
        entry = after.buffer.ledger_entry(of_ack=of_ack)
        assert [(ended.group, ended.fate) for ended in entry.ended] == [(1, Fate.FAILED), (other.group, Fate.FAILED)]
        assert (entry.prompts, entry.open) == (4, (3,)), "a prompt that waits for another attempt is open"
    assert after.buffer.ledger_entry(of_ack=True).ended == ()
