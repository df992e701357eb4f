"""`staleness.on_deadline`: each value acts on exactly the reserved groups that are in the way, and the run goes on."""

import msgspec
import pytest
from buffer_scenes import Scene, finished, progress_of, stored_by

from asyncrl.buffer.ledger import Amount, Event, Fate
from asyncrl.buffer.records import CommitOutcome, Failure, LeaseWait, Renewal, Ticket, VersionSpan
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.version import Lineage, Version
from asyncrl.config.schema import OnDeadline
from asyncrl.errors import FailureClass

ACTED = {
    "requeue": Event.STRAGGLER_REQUEUED,
    "drop": Event.STRAGGLER_DROPPED,
    "mask": Event.STRAGGLER_MASKED,
}


def with_stragglers(
    policy: OnDeadline, count: int, *, first_by: str = "a", **changes: int
) -> tuple[Scene, list[Ticket]]:
    """Returns a buffer at step 1 with two ready groups that are due at step 2, and `count` that are still generated,
    reserved at step 0 and also due at step 2. Replica `first_by` has the first of them, and replica a the others.

    η = 2 and B = 2. Step 2 has room for two of the groups that are due by then, so if a step 1 trains two fresh groups,
    `count` − 2 are too many.
    """
    scene = Scene(eta=2, per_step=2, on_deadline=policy, **changes)
    first = [*scene.reserve(3, step=0, replica=first_by), *scene.reserve(count - 1, step=0)]
    scene.commit(*first[:2])
    scene.train()
    scene.commit(*scene.reserve(2, step=1))
    return scene, first[2:]


def heartbeat(scene: Scene, *tickets: Ticket, tokens: int, step: int = 1, replica: str = "a") -> None:
    held = progress_of(*tickets, tokens=tokens, complete=False)
    scene.buffer.renew(replica, held=held, version=Version(1, step))


@pytest.mark.parametrize("policy", ACTED)
@pytest.mark.parametrize(("count", "excess"), [(2, 0), (3, 1), (4, 2)])
def test_a_policy_acts_on_as_many_stragglers_as_are_in_the_way(policy: OnDeadline, count: int, excess: int) -> None:
    scene, stragglers = with_stragglers(policy, count)
    heartbeat(scene, *stragglers, tokens=1)
    assert len(scene.lease().groups) == 2
    events = scene.buffer.account.events
    assert [events[event] for name, event in ACTED.items() if name != policy] == [0, 0]
    assert events[ACTED[policy]] == excess
    left = {"mask": count}.get(policy, count - excess)
    assert scene.buffer.counts().reserved == left
    assert scene.buffer.account.closed


@pytest.mark.parametrize("policy", ACTED)
def test_the_stragglers_with_the_fewest_tokens_are_chosen(policy: OnDeadline) -> None:
    scene, (slow, slowest, far, also_far) = with_stragglers(policy, 4)
    for ticket, tokens in ((slow, 7), (slowest, 2), (far, 30), (also_far, 30)):
        heartbeat(scene, ticket, tokens=tokens)
    scene.lease()
    slots = {group.ticket.key: group for group in scene.buffer.snapshot().open if group.meta is None}
    acted = {key for key, slot in slots.items() if slot.deadline != 2} if policy == "mask" else {
        ticket.key for ticket in (slow, slowest, far, also_far) if ticket.key not in slots
    }  # fmt: skip
    assert acted == {slow.key, slowest.key}


def test_wait_acts_on_none() -> None:
    scene, _ = with_stragglers("wait", 3)
    assert scene.buffer.lease() is LeaseWait.STRAGGLER
    assert (scene.buffer.counts().reserved, scene.buffer.cancelled) == (3, [])


def test_a_requeued_group_is_no_failure_and_starts_again_at_the_front_with_the_weights_of_its_replica() -> None:
    scene, stragglers = with_stragglers("requeue", 3)
    heartbeat(scene, *stragglers, tokens=5)
    assert scene.buffer.renew("a", held=progress_of(*stragglers, tokens=5)) == Renewal()
    scene.lease()
    (requeued, *others) = stragglers
    assert scene.buffer.renew("a", held=progress_of(complete=False)) == Renewal(report_all=True)
    assert scene.buffer.cancelled == [requeued.key]
    assert scene.buffer.renew("a", held=progress_of(*stragglers)) == Renewal(ended=(requeued.key,))
    assert scene.buffer.commit(finished(requeued)) is CommitOutcome.LATE
    assert scene.buffer.failures.counts() == ()
    assert scene.buffer.account.fates[Fate.FAILED] == Amount()
    scene.buffer.ack(1, 1)
    (again, fresh) = scene.reserve(2, step=2)
    assert (again.group, again.attempt, again.seed, again.deadline) == (requeued.group, 1, requeued.seed, 4)
    assert fresh.group > again.group
    scene.commit(*others, again, fresh)
    assert [scene.groups(scene.train()) for _ in range(2)] == [[3, 4], [2, fresh.group]]


@pytest.mark.parametrize(("policy", "counted"), [("requeue", 9), ("drop", 0), ("mask", 0)])
def test_the_tokens_of_a_requeued_attempt_are_counted_as_thrown_away(policy: OnDeadline, counted: int) -> None:
    """Those of a dropped group are counted with its fate, and those of a masked one with the group."""
    scene, stragglers = with_stragglers(policy, 4)
    for ticket, tokens in zip(stragglers, (7, 2, 30, 31), strict=True):
        heartbeat(scene, ticket, tokens=tokens)
    before = scene.buffer.account
    scene.lease()
    account = scene.buffer.account
    assert account.events[Event.TOKENS_THROWN_AWAY] - before.events[Event.TOKENS_THROWN_AWAY] == counted
    assert account.fates[Fate.DROPPED].tokens == (9 if policy == "drop" else 0)


@pytest.mark.parametrize(("stored", "sampled", "thrown_away"), [(0, 11, 11), (4, 11, 7), (11, 11, 0), (12, 11, 0)])
def test_stored_tokens_of_a_requeued_attempt_are_counted_once(stored: int, sampled: int, thrown_away: int) -> None:
    scene, (straggler, *others) = with_stragglers("requeue", 3)
    if stored:
        scene.store(straggler, stored_by(straggler, tokens=stored))
    heartbeat(scene, straggler, tokens=sampled)
    heartbeat(scene, *others, tokens=50)
    scene.lease()
    events = scene.buffer.account.events
    assert (events[Event.TOKENS_THROWN_AWAY], events[Event.TOKENS_DROPPED]) == (thrown_away, stored)


@pytest.mark.parametrize("ending", ["infra", "data", "silence"])
def test_the_tokens_of_failed_and_lost_attempts_are_counted_too(ending: str) -> None:
    scene = Scene()
    [ticket] = scene.reserve(1)
    heartbeat(scene, ticket, tokens=6, step=0)
    if ending == "silence":
        scene.clock.now_s += 100.0
        scene.buffer.expire()
    else:
        failure = Failure(failure_class=FailureClass(ending), reason="engine")
        scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    assert scene.buffer.account.events[Event.TOKENS_THROWN_AWAY] == 6
    assert scene.buffer.account.closed


def test_a_group_at_its_last_attempt_is_waited_for_and_the_others_lose_no_work_for_nothing() -> None:
    scene = Scene(eta=2, per_step=2, on_deadline="requeue", max_attempts=2)
    tickets = scene.reserve(6, step=0)
    for ticket in tickets[2:5]:
        failure = Failure(failure_class=FailureClass.INFRA, reason="engine")
        scene.buffer.fail(ticket.key, incarnation=1, failure=failure)
    last_attempts = scene.reserve(3, step=0)
    assert [(ticket.group, ticket.attempt) for ticket in last_attempts] == [(2, 1), (3, 1), (4, 1)]
    scene.commit(*tickets[:2])
    scene.train()
    scene.commit(*scene.reserve(2, step=1))
    assert scene.buffer.lease() is LeaseWait.STRAGGLER, "two are in the way, and only one could start again"
    assert scene.buffer.counts().reserved == 4
    scene.commit(last_attempts[0])
    assert scene.groups(scene.lease()) == [2, 6]
    assert scene.buffer.cancelled == [tickets[5].key]


def test_an_attempt_that_a_restart_ended_does_not_count_against_requeueing() -> None:
    scene, _ = with_stragglers("requeue", 3, max_attempts=2)
    restored = Scene(eta=2, per_step=2, on_deadline="requeue", max_attempts=2)
    restored.prompts.taken = 7
    restored.buffer.restore(scene.buffer.snapshot(), lineage=Lineage().child(scene.buffer.version))
    again = restored.buffer.reserve("a", version=Version(2, 1), count=4).tickets
    assert [(t.group, t.attempt, t.failed_on) for t in again] == [(2, 1, ()), (3, 1, ()), (4, 1, ()), (7, 0, ())]
    restored.train()
    restored.commit(*restored.buffer.reserve("a", version=Version(2, 2), count=2).tickets)
    restored.lease()
    assert restored.buffer.cancelled == ["2.1", "3.1"]


def test_a_dropped_group_counts_with_the_tokens_that_it_had_and_another_prompt_replaces_it() -> None:
    scene, stragglers = with_stragglers("drop", 3)
    heartbeat(scene, stragglers[1], tokens=11)
    heartbeat(scene, stragglers[0], stragglers[2], tokens=12)
    scene.lease()
    assert scene.buffer.cancelled == [stragglers[1].key]
    account = scene.buffer.account
    assert account.fates[Fate.DROPPED] == Amount(1, 2, 11)
    assert account.closed
    (ended,) = [each for each in scene.buffer.ledger_entry(of_ack=False).ended if each.fate is Fate.DROPPED]
    assert (ended.group, ended.attempt, ended.tokens) == (stragglers[1].group, 0, 11)
    assert scene.buffer.commit(finished(stragglers[1])) is CommitOutcome.LATE
    (replacement,) = scene.reserve(1, step=1)
    assert (replacement.group, replacement.attempt) == (7, 0)


def test_a_masked_group_stays_with_the_deadline_of_its_newest_token() -> None:
    scene, stragglers = with_stragglers("mask", 3)
    heartbeat(scene, stragglers[0], tokens=5)
    heartbeat(scene, *stragglers[1:], tokens=9)
    scene.lease()
    scene.buffer.ack(1, 1)
    scene.commit(*stragglers[1:])
    assert scene.groups(scene.train()) == [3, 4]
    meta = msgspec.structs.replace(
        finished(stragglers[0], newest=1),
        version_spans=((VersionSpan(1, 0, 1),), (VersionSpan(1, 0, 1), VersionSpan(1, 1, 1))),
    )
    assert scene.buffer.commit(meta) is CommitOutcome.ACCEPTED
    scene.commit(*scene.reserve(1, step=3))
    (masked, fresh) = scene.lease().groups
    assert (masked.meta.group, masked.deadline, masked.extended) == (2, 3, True)
    assert masked.stale_tokens(3) == (1, 1), "the tokens of step 0 are three versions old"
    assert masked.stale_tokens(2) == (0, 0)
    assert (fresh.extended, fresh.stale_tokens(9)) == (False, (0, 0))


def test_a_group_whose_replica_has_no_newer_weights_cannot_be_masked() -> None:
    scene, stragglers = with_stragglers("mask", 3)
    for version in (None, Version(1, 0), Version(0, 9)):
        scene.buffer.renew("a", held=progress_of(*stragglers), version=version)
        assert scene.buffer.lease() is LeaseWait.STRAGGLER
    assert scene.buffer.account.events[Event.STRAGGLER_MASKED] == 0
    heartbeat(scene, *stragglers, tokens=0)
    scene.lease()
    assert scene.buffer.account.events[Event.STRAGGLER_MASKED] == 1


def test_a_group_with_more_tokens_is_masked_if_only_its_replica_has_newer_weights() -> None:
    scene, (fewest, *others) = with_stragglers("mask", 3, first_by="b")
    heartbeat(scene, fewest, tokens=1, step=0, replica="b")
    heartbeat(scene, *others, tokens=8)
    scene.lease()
    assert scene.buffer.account.events[Event.STRAGGLER_MASKED] == 1
    slots = {group.ticket.key: group for group in scene.buffer.snapshot().open}
    assert [slots[ticket.key].deadline for ticket in (fewest, *others)] == [2, 3, 2]


def test_an_extended_deadline_survives_a_checkpoint() -> None:
    scene, stragglers = with_stragglers("mask", 3)
    heartbeat(scene, *stragglers, tokens=0)
    scene.lease()
    scene.buffer.ack(1, 1)
    scene.commit(*stragglers)
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(scene.buffer.snapshot()), type=BufferSnapshot)
    restored = Scene(eta=2, per_step=2, on_deadline="mask")
    restored.buffer.restore(snapshot, lineage=Lineage().child(snapshot.version))
    assert restored.buffer.lease().groups == scene.buffer.lease().groups  # type: ignore[union-attr]
    for each in (scene, restored):
        leased = {group.meta.group for group in each.buffer.lease().groups}  # type: ignore[union-attr]
        groups = [(group.ticket.group, group.deadline) for group in each.buffer.snapshot().open]
        assert [(group, deadline) for group, deadline in groups if group not in leased] == [(2, 3)]


@pytest.mark.parametrize("policy", ACTED)
def test_groups_in_the_way_at_a_later_deadline_are_treated_in_the_same_call(policy: OnDeadline) -> None:
    """At step 2, group 3 is due, and groups 5 to 7 are due at step 3. Step 2 would train two fresh groups: at deadline
    2 one group is too many, and without it another one at deadline 3."""
    scene = Scene(eta=2, per_step=2, on_deadline=policy)
    g0, g1, g2, g3 = scene.reserve(4, step=0)
    scene.commit(g0, g1)
    scene.train()
    g4, *due_at_3 = scene.reserve(4, step=1)
    scene.commit(g2, g4)
    scene.train()
    scene.commit(*scene.reserve(2, step=2))
    heartbeat(scene, g3, *due_at_3, tokens=4, step=2)
    heartbeat(scene, due_at_3[1], tokens=3, step=2)
    assert scene.groups(scene.lease()) == [8, 9]
    assert scene.buffer.account.events[ACTED[policy]] == 2
    if policy == "mask":
        groups = [group for group in scene.buffer.snapshot().open if group.meta is None]
        assert sorted(group.ticket.group for group in groups if group.deadline == 4) == [g3.group, due_at_3[1].group]
    else:
        assert scene.buffer.cancelled == [g3.key, due_at_3[1].key]


@pytest.mark.parametrize("policy", ACTED)
def test_nothing_is_done_before_enough_groups_are_ready(policy: OnDeadline) -> None:
    scene = Scene(eta=2, per_step=2, on_deadline=policy)
    tickets = scene.reserve(6, step=0)
    scene.commit(tickets[0])
    assert scene.buffer.lease() is LeaseWait.NOT_ENOUGH_READY
    assert not any(scene.buffer.account.events[event] for event in ACTED.values())
