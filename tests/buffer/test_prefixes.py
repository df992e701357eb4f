"""Stored tokens of an attempt that ended: the next attempt continues them, or drops them if they are too old.

tests/buffer/test_buffer_histories.py does this in random histories.
"""

import msgspec
import pytest
from buffer_scenes import Scene, finished, progress_of, stored_by
from test_snapshot import restored

from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import CommitOutcome, Failure, Prefix, Ticket
from asyncrl.common.version import Version
from asyncrl.config.schema import OnDeadline
from asyncrl.errors import FailureClass, StalenessViolation

INFRA = Failure(failure_class=FailureClass.INFRA, reason="x")


def tokens(scene: Scene) -> tuple[int, int]:
    """Returns the numbers of continued and of dropped tokens."""
    events = scene.buffer.account.events
    return events[Event.TOKENS_CONTINUED], events[Event.TOKENS_DROPPED]


def left_behind(scene: Scene, *, tokens: int = 5) -> Ticket:
    """A replica stores tokens of a group and ends. Returns its ticket."""
    (ticket,) = scene.reserve(1, replica="a")
    scene.store(ticket, stored_by(ticket, tokens=tokens))
    assert scene.buffer.leave("a") == (ticket.key,)
    return ticket


@pytest.mark.fault("F2")
@pytest.mark.parametrize("end", ["leave", "expire", "fail"])
def test_the_next_attempt_gets_what_was_stored_and_keeps_its_deadline(end: str) -> None:
    scene = Scene(eta=2, per_step=1)
    first, ticket = scene.reserve(2, replica="a")
    scene.commit(first)
    scene.store(ticket, stored_by(ticket, tokens=5))
    match end:
        case "leave":
            scene.buffer.leave("a")
        case "expire":
            scene.clock.now_s += 11.0
            scene.buffer.expire()
        case "fail":
            scene.buffer.fail(ticket.key, incarnation=1, failure=INFRA)
    scene.train()
    (again,) = scene.reserve(1, replica="b")
    assert (again.key, again.seed) == ("1.1", ticket.seed)
    assert again.prefix == Prefix(attempt=0, tokens=5, versions=(Version(1, 0),))
    assert (again.version.step, again.oldest, again.deadline) == (1, 0, 2)
    assert scene.buffer.commit(finished(again)) is CommitOutcome.ACCEPTED
    (leased,) = scene.lease().groups
    assert (leased.meta.oldest, leased.deadline) == (0, 2)
    assert tokens(scene) == (5, 0)
    assert scene.buffer.account.events[Event.PREFIX_CONTINUED] == 1


def test_a_replica_with_older_weights_than_the_stored_tokens_sets_the_deadline() -> None:
    scene = Scene(eta=2, per_step=1)
    for _ in range(2):
        scene.commit(*scene.reserve(1))
        scene.train()
    left_behind(scene)
    (again,) = scene.reserve(1, step=1)
    assert again.prefix is not None
    assert (again.oldest, again.deadline) == (1, 3)


@pytest.mark.parametrize(("steps", "kept"), [(1, True), (2, False), (3, False)])
def test_stored_tokens_that_can_no_longer_be_trained_in_time_are_dropped(steps: int, kept: bool) -> None:
    """Group 1 is due at step 2. While no replica takes its prompt, the learner goes on with other groups."""
    scene = Scene(eta=2, per_step=1)
    first, ticket = scene.reserve(2, replica="a")
    scene.commit(first)
    scene.train()
    scene.store(ticket, stored_by(ticket, tokens=5))
    others = scene.reserve(2, replica="b")
    scene.buffer.leave("a")
    scene.commit(*others)
    scene.train()
    if steps == 2:
        scene.lease()  # the learner has begun step 2, which is the last one that could train group 1
    if steps == 3:
        scene.train()
    (again,) = scene.reserve(1, replica="b")
    assert (again.group, again.seed) == (ticket.group, ticket.seed)
    assert (again.prefix is not None) == kept
    assert again.deadline == (2 if kept else again.version.step + 2)
    assert tokens(scene) == (0, 0 if kept else 5)


def test_tokens_of_lost_weights_are_dropped() -> None:
    scene = Scene(eta=2, per_step=1)
    (ticket,) = scene.reserve(1)
    scene.store(ticket, stored_by(ticket, tokens=5, also=(Version(7, 0),)))
    scene.buffer.leave("a")
    (again,) = scene.reserve(1)
    assert again.prefix is None
    assert again.deadline == 2
    assert tokens(scene) == (0, 5)
    assert scene.buffer.account.events[Event.PREFIX_DROPPED] == 1


def test_an_attempt_that_stores_nothing_of_its_own_hands_on_what_it_was_given() -> None:
    scene = Scene(eta=2, per_step=1)
    left_behind(scene)
    (second,) = scene.reserve(1)
    scene.buffer.fail(second.key, incarnation=1, failure=INFRA)
    (third,) = scene.reserve(1)
    assert third.key == "0.2"
    assert third.prefix is not None
    assert (third.prefix.attempt, third.prefix.tokens) == (0, 5)


@pytest.mark.parametrize(("unreadable", "dropped"), [(False, 0), (True, 5)])
def test_an_attempt_that_could_not_read_its_prefix_drops_it(unreadable: bool, dropped: int) -> None:
    scene = Scene(eta=2, per_step=1)
    left_behind(scene)
    (second,) = scene.reserve(1)
    scene.store(second, stored_by(second, tokens=3, unreadable=unreadable))
    assert tokens(scene) == (0, dropped)
    assert "0.0" in scene.buffer.take_unneeded_prefixes()
    scene.buffer.leave("a")
    (third,) = scene.reserve(1)
    assert third.prefix is not None
    assert (third.prefix.attempt, third.prefix.tokens) == (1, 8 - dropped)


@pytest.mark.parametrize("continued", [0, 2, 5])
@pytest.mark.parametrize("stores", [False, True])
def test_a_commit_counts_the_tokens_that_it_did_not_continue(continued: int, stores: bool) -> None:
    """Agents may not ask for all stored answers. What their attempt stores has the answers that were not asked for."""
    scene = Scene(eta=2, per_step=1)
    left_behind(scene)
    (again,) = scene.reserve(1)
    if stores:
        scene.store(again, stored_by(again, tokens=3))
    meta = msgspec.structs.replace(finished(again), continued_tokens=continued)
    assert scene.buffer.commit(meta) is CommitOutcome.ACCEPTED
    assert tokens(scene) == (continued, 5 - continued)


def test_a_commit_with_a_token_older_than_the_prefix_is_refused() -> None:
    scene = Scene(eta=3, per_step=1)
    for _ in range(2):
        scene.commit(*scene.reserve(1))
        scene.train()
    left_behind(scene)
    (again,) = scene.reserve(1)
    with pytest.raises(StalenessViolation, match="older than step 2"):
        scene.buffer.commit(msgspec.structs.replace(finished(again), oldest=1))


@pytest.mark.parametrize("end", ["commit", "fail"])
def test_what_is_stored_of_a_group_is_cleared_when_it_ends(end: str) -> None:
    scene = Scene(eta=2, per_step=1)
    first = left_behind(scene)
    (second,) = scene.reserve(1)
    assert scene.buffer.unneeded_prefixes([first.key, second.key, "0.2", "9.0", "x"]) == ("0.2", "9.0")
    assert scene.buffer.take_unneeded_prefixes() == ()
    if end == "commit":
        scene.commit(second)
    else:
        data = msgspec.structs.replace(INFRA, failure_class=FailureClass.DATA)
        scene.buffer.fail(second.key, incarnation=1, failure=data)
    assert set(scene.buffer.take_unneeded_prefixes()) == {first.key, second.key}
    assert scene.buffer.take_unneeded_prefixes() == ()
    assert scene.buffer.unneeded_prefixes([first.key, second.key]) == (first.key, second.key)


def test_a_restart_of_the_run_drops_what_was_stored_and_counts_it() -> None:
    scene = Scene(eta=2, per_step=1)
    waits, runs = scene.reserve(2)
    scene.store(waits, stored_by(waits, tokens=5))
    scene.buffer.fail(waits.key, incarnation=1, failure=INFRA)
    scene.store(runs, stored_by(runs, tokens=4))
    after = restored(scene, eta=2, per_step=1)
    assert [ticket.prefix for ticket in after.reserve(2)] == [None, None]
    assert tokens(after) == (0, 9)


@pytest.mark.parametrize("policy", ["requeue", "drop", "mask"])
def test_a_straggler_that_is_requeued_or_dropped_loses_what_it_has_stored(policy: OnDeadline) -> None:
    """η = 2 and B = 1. Groups 1 and 2 are due at step 2, and group 3 is ready. Step 1 leaves one step for both."""
    scene = Scene(eta=2, per_step=1, on_deadline=policy)
    first, one, two = scene.reserve(3)
    scene.commit(first)
    scene.train()
    scene.commit(*scene.reserve(1, step=1))
    scene.store(one, stored_by(one, tokens=4))
    scene.buffer.renew("a", held=progress_of(two, tokens=9), version=Version(1, 1))
    if policy == "mask":
        scene.buffer.renew("a", held=progress_of(one), version=Version(1, 1))
    scene.lease()
    if policy == "mask":
        assert tokens(scene) == (0, 0)
        assert scene.buffer.unneeded_prefixes([one.key]) == ()
        scene.buffer.leave("a")
        (again, *_) = scene.reserve(1, step=1)
        assert again.prefix is not None
        return
    assert scene.buffer.cancelled == [one.key]
    assert one.key in scene.buffer.take_unneeded_prefixes()
    assert scene.buffer.unneeded_prefixes([one.key]) == (one.key,)
    assert tokens(scene) == (0, 4 if policy == "requeue" else 0)
    (again,) = scene.reserve(1, step=1)
    assert (again.key, again.prefix) == ("1.1" if policy == "requeue" else "4.0", None)
