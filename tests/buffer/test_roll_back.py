"""A learner restores a checkpoint while the buffer and the replicas go on: what stays, and what is generated again."""

import msgspec
import pytest
from buffer_scenes import Scene, finished, progress_of, stored_by

from asyncrl.buffer.ledger import Event
from asyncrl.buffer.records import CommitOutcome, Lease, Prefix, Refusal, Renewal
from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.version import Lineage, Version

pytestmark = pytest.mark.fault("F6")


def checkpoint(scene: Scene) -> BufferSnapshot:
    """Takes a snapshot that is complete at once."""
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(scene.buffer.snapshot()), type=BufferSnapshot)
    scene.buffer.release(complete=snapshot.version.step)
    return snapshot


def go_back(scene: Scene, snapshot: BufferSnapshot, *, loaded: Version) -> int:
    """Another learner restores `snapshot`. Replica a has loaded `loaded`. Returns the tokens that may be continued."""
    lineage = scene.buffer.lineage.child(snapshot.version)
    scene.prompts.taken = snapshot.next_group
    again = scene.buffer.restore(snapshot, lineage=lineage, loaded={"a": loaded})
    assert scene.buffer.account.closed
    return again


def test_groups_of_surviving_weights_that_a_lost_step_trained_are_trained_again_without_generation() -> None:
    scene = Scene(eta=2, per_step=1)
    snapshot = checkpoint(scene)
    scene.commit(*scene.reserve(2))
    first = scene.lease()
    assert scene.buffer.ack(1, 0) == (), "the rows stay"
    second = scene.lease()
    go_back(scene, snapshot, loaded=Version(1, 0))
    again = [scene.train().groups[0].meta.key for _ in range(2)]
    assert again == [first.groups[0].meta.key, second.groups[0].meta.key]
    assert scene.buffer.version == Version(2, 2)
    assert scene.prompts.taken == 2, "no other prompt was issued"


def test_rows_are_kept_only_while_a_checkpoint_needs_them() -> None:
    scene = Scene(eta=1, per_step=1)
    scene.commit(*scene.reserve(2))
    assert scene.buffer.ack(1, scene.lease().step) == ("0.0",), "there is no checkpoint yet"
    snapshot = checkpoint(scene)
    assert scene.buffer.ack(1, scene.lease().step) == (), "ready at the checkpoint"
    scene.commit(*scene.reserve(1, step=2))
    assert scene.buffer.ack(1, scene.lease().step) == ("2.0",), "a newer token than the checkpoint"
    assert scene.buffer.release(complete=snapshot.version.step) == ()
    assert scene.buffer.without_slot(["0.0", "1.0", "2.0"]) == ("0.0", "2.0"), "1.0 is retained"
    assert checkpoint_releases(scene) == ("1.0",)


def checkpoint_releases(scene: Scene) -> tuple[str, ...]:
    scene.buffer.snapshot()
    return scene.buffer.release(complete=scene.buffer.version.step)


def test_a_group_with_a_token_of_lost_weights_is_generated_again_and_the_attempt_does_not_count() -> None:
    scene = Scene(eta=2, per_step=1, max_attempts=1)
    snapshot = checkpoint(scene)
    ready, reserved, trained = scene.reserve(3)
    scene.commit(trained)
    scene.train()
    assert scene.buffer.commit(finished(ready, versions=[Version(1, 1)])) is CommitOutcome.ACCEPTED
    go_back(scene, snapshot, loaded=Version(1, 0))
    assert scene.buffer.commit(finished(reserved, versions=[Version(1, 1)])) is CommitOutcome.OLD_INCARNATION
    assert scene.lease().groups[0].meta.key == trained.key
    attempts = {ticket.group: ticket.attempt for ticket in scene.reserve(2)}
    assert attempts == {ready.group: 1, reserved.group: 1}
    for ticket in (ready, reserved):
        assert scene.buffer.commit(finished(ticket)) is CommitOutcome.LATE


@pytest.mark.parametrize("trained", [False, True])
def test_a_group_that_lost_weights_finished_continues_its_stored_tokens_of_surviving_ones(trained: bool) -> None:
    scene = Scene(eta=2, per_step=1)
    snapshot = checkpoint(scene)
    split, whole = scene.reserve(2)
    scene.commit(whole)
    scene.train()
    stored = stored_by(split, tokens=5, also=(Version(1, 1),))
    meta = msgspec.structs.replace(finished(split, versions=[Version(1, 1)]), stored=stored)
    assert scene.buffer.commit(meta) is CommitOutcome.ACCEPTED
    if trained:
        scene.train()
    assert scene.buffer.unneeded_prefixes([split.key]) == ()
    assert go_back(scene, snapshot, loaded=Version(1, 1)) == 2, "the first token of each of the two samples"
    assert scene.train().groups[0].meta.key == whole.key
    (again,) = scene.reserve(1)
    assert (again.group, again.prefix) == (split.group, Prefix(attempt=0, tokens=5, versions=(Version(1, 0),)))
    assert scene.buffer.commit(finished(again)) is CommitOutcome.ACCEPTED
    assert scene.buffer.account.events[Event.TOKENS_CONTINUED] == 5
    checkpoint_releases(scene)
    assert scene.buffer.unneeded_prefixes([split.key, again.key]) == (split.key, again.key)


def test_what_is_stored_of_a_committed_group_stays_only_while_a_checkpoint_splits_the_group() -> None:
    scene = Scene(eta=2, per_step=1)
    first, second, split = scene.reserve(3)
    scene.commit(first, second)
    scene.train()
    checkpoint(scene)
    scene.train()
    meta = finished(split, versions=[Version(1, 2)], newest=2)
    prefix = stored_by(split)
    assert scene.buffer.commit(msgspec.structs.replace(meta, stored=prefix)) is CommitOutcome.ACCEPTED
    assert scene.buffer.unneeded_prefixes([split.key]) == ()
    scene.train()
    assert scene.buffer.release(complete=1) == ()
    assert scene.buffer.unneeded_prefixes([split.key]) == ()
    checkpoint_releases(scene)
    assert scene.buffer.take_unneeded_prefixes()[-1] == split.key
    assert scene.buffer.unneeded_prefixes([split.key]) == (split.key,)


def test_the_age_is_that_of_the_oldest_group_also_if_groups_of_the_checkpoint_come_before_it() -> None:
    scene = Scene(eta=1, per_step=1)
    ready, reserved = scene.reserve(2)
    scene.commit(ready)
    snapshot = checkpoint(scene)
    scene.clock.now_s += 7.0
    go_back(scene, snapshot, loaded=Version(1, 0))
    assert scene.buffer.counts().oldest_group_age_s == 7.0, "the replica still generates the reserved group"
    scene.commit(reserved)
    assert scene.buffer.counts().oldest_group_age_s == 7.0


@pytest.mark.parametrize("clock_of_the_new_process_s", [2.0, 10_000.0])
def test_the_age_in_another_process_counts_from_the_restore(clock_of_the_new_process_s: float) -> None:
    before, after = Scene(eta=1, per_step=1), Scene(eta=1, per_step=1)
    before.clock.now_s, after.clock.now_s = 500.0, clock_of_the_new_process_s
    before.commit(*before.reserve(2))
    before.clock.now_s += 7.0
    go_back(after, checkpoint(before), loaded=Version(1, 0))
    assert after.buffer.counts().oldest_group_age_s == 0.0
    after.clock.now_s += 3.0
    assert after.buffer.counts().oldest_group_age_s == 3.0


@pytest.mark.parametrize("loaded_rows", [False, True])
def test_groups_whose_rows_no_learner_has_loaded_are_generated_again_by_one_that_goes_back_further(
    loaded_rows: bool,
) -> None:
    """The buffer has died, so the rows of the newer checkpoint are not in the data plane until a learner loads them."""
    scene = Scene(eta=2, per_step=1, max_attempts=1)
    older = checkpoint(scene)
    scene.commit(*scene.reserve(2))
    scene.train()
    newer = checkpoint(scene)
    assert [group.ticket.key for group in newer.open if group.meta is not None] == ["1.0"]
    again = Scene(eta=2, per_step=1, max_attempts=1)
    go_back(again, newer, loaded=Version(1, 0))
    if loaded_rows:
        again.lease()
    go_back(again, older, loaded=Version(1, 0))
    assert again.buffer.counts().ready == int(loaded_rows)
    tickets = again.reserve(2)
    assert [ticket.key for ticket in tickets] == (["0.1", "2.0"] if loaded_rows else ["0.1", "1.1"])
    again.commit(*tickets)
    for _ in range(2):
        again.train()
    assert again.buffer.account.closed


def test_groups_that_were_ready_all_the_time_stay_although_no_learner_has_loaded_their_rows() -> None:
    scene = Scene(eta=2, per_step=1)
    older = checkpoint(scene)
    scene.commit(*scene.reserve(2))
    scene.train()
    newer = checkpoint(scene)
    go_back(scene, newer, loaded=Version(1, 0))
    go_back(scene, older, loaded=Version(1, 0))
    assert scene.lease().groups[0].meta.key == "1.0"


@pytest.mark.parametrize("loaded", [0, 1])
def test_a_ticket_stays_unless_its_replica_has_loaded_lost_weights(loaded: int) -> None:
    scene = Scene(eta=2, per_step=1)
    snapshot = checkpoint(scene)
    trained, held = scene.reserve(2)
    scene.commit(trained)
    scene.train()
    go_back(scene, snapshot, loaded=Version(1, loaded))
    lost = loaded == 1
    outcome = scene.buffer.commit(finished(held))
    assert outcome is (CommitOutcome.LATE if lost else CommitOutcome.ACCEPTED)
    reservation = scene.buffer.reserve("a", version=Version(1, loaded), count=1)
    assert reservation.refusal is (Refusal.OLD_INCARNATION if lost else None)


def test_all_groups_stay_within_the_limit_at_every_step_back() -> None:
    """The buffer is as full as the limit allows, and nothing is generated again that surviving weights have made."""
    scene = Scene(eta=2, per_step=2)
    snapshot = checkpoint(scene)
    scene.commit(*scene.reserve(6))
    scene.train()
    scene.train()
    go_back(scene, snapshot, loaded=Version(1, 0))
    counts = scene.buffer.counts()
    assert (counts.ready, counts.waiting) == (6, 0)
    assert scene.buffer.reserve("a", version=Version(2, 0), count=1).refusal is Refusal.STALENESS
    for _ in range(3):
        assert isinstance(scene.train(), Lease)


def test_the_lineage_of_another_run_does_not_continue_this_one() -> None:
    lineage = Lineage((Version(1, 2),))
    assert lineage.child(Version(2, 3)).continues(lineage)
    assert not lineage.continues(lineage)
    assert not Lineage((Version(1, 1), Version(2, 3))).continues(lineage)


def test_a_living_group_without_room_goes_on_from_what_it_has_stored() -> None:
    scene = Scene(eta=2, per_step=1, capacity_groups=2)
    snapshot = checkpoint(scene)
    scene.commit(*scene.reserve(2))
    scene.train()
    (reserved,) = scene.reserve(1, step=0)
    stored = stored_by(reserved)
    scene.store(reserved, stored)
    go_back(scene, snapshot, loaded=Version(1, 0))
    assert scene.buffer.account.events[Event.TOKENS_DROPPED] == 0
    assert scene.reserve(1) == (), "the two finished groups are ready again"
    scene.train()
    (again,) = scene.reserve(1)
    assert (again.group, again.attempt, again.prefix) == (reserved.group, 1, stored)


def test_tickets_without_a_heartbeat_expire_in_time_also_after_a_step_back() -> None:
    """The tickets are placed by deadline, and the one that was reserved first is due last."""
    scene = Scene(eta=2, per_step=1)
    scene.commit(*scene.reserve(1))
    scene.train()
    snapshot = checkpoint(scene)
    (first,) = scene.reserve(1, step=1)
    scene.clock.now_s += 8.0
    (second,) = scene.reserve(1, step=0)
    assert second.deadline < first.deadline
    go_back(scene, snapshot, loaded=Version(1, 0))
    scene.clock.now_s += 3.0
    assert scene.buffer.expire() == (first.key,)


def test_after_a_step_back_replicas_name_their_tickets_and_hear_which_have_ended() -> None:
    scene = Scene(eta=2, per_step=1)
    snapshot = checkpoint(scene)
    trained, held = scene.reserve(2)
    scene.commit(trained)
    scene.train()
    for _ in range(2):
        scene.buffer.renew("a", held=progress_of(held), version=Version(1, 1))
    go_back(scene, snapshot, loaded=Version(1, 1))
    assert scene.buffer.renew("a", held=progress_of(complete=False)) == Renewal(report_all=True)
    assert scene.buffer.renew("a", held=progress_of(held)) == Renewal(ended=(held.key,))


def test_the_lost_weights_of_a_replica_do_not_count_as_those_of_its_next_rollouts() -> None:
    scene = Scene(eta=2, per_step=1)
    snapshot = checkpoint(scene)
    scene.commit(*scene.reserve(1))
    scene.train()
    scene.buffer.renew("a", held=progress_of(), version=Version(1, 1))
    go_back(scene, snapshot, loaded=Version(1, 1))
    ticket = scene.reserve(2)[-1]
    scene.buffer.renew("a", held=progress_of(ticket), version=Version(2, 0))
    assert scene.buffer.groups.reserved[ticket.key].newest_step == 0
