"""What the heartbeats of a replica send. tests/buffer/test_buffer_histories.py loses and delays them at random."""

from buffer_scenes import Scene, stored_by

from asyncrl.generation.generator import HeldTickets


def test_only_what_has_changed_since_an_answered_heartbeat_is_sent() -> None:
    first, second = Scene().reserve(2)
    held = HeldTickets(first_number=7)
    held.add([first, second])
    report = held.report()
    assert (report.number, report.complete, report.tokens) == (7, True, {first.key: 0, second.key: 0})
    held.answered(report)
    assert (held.report().complete, held.report().tokens) == (False, {})
    held.progressed(second.key, 5)
    held.stored(first.key, prefix := stored_by(first))
    report = held.report()
    assert (report.complete, report.tokens, report.prefixes) == (False, {second.key: 5}, {first.key: prefix})
    assert held.report().tokens == report.tokens, "the first of the two heartbeats may be lost"
    held.progressed(second.key, 6)
    held.progressed(first.key, 0)
    held.answered(report)
    assert (held.report().tokens, held.report().prefixes) == ({second.key: 6}, {})


def test_a_ticket_that_the_buffer_does_not_know_to_be_given_up_is_left_out_of_a_complete_heartbeat() -> None:
    kept, lost, also_lost = Scene().reserve(3)
    held = HeldTickets(first_number=1)
    held.add([kept, lost, also_lost])
    first = held.report()
    held.answered(first)
    held.give_up(lost.key)
    before = held.report()
    held.give_up(also_lost.key)
    held.answered(before)
    for _ in range(2):  # until one of them is answered
        report = held.report()
        assert (report.complete, set(report.tokens)) == (True, {kept.key})
    held.answered(report)
    assert not held.report().complete


def test_a_settled_ticket_is_not_named_any_longer() -> None:
    (ticket,) = Scene().reserve(1)
    held = HeldTickets(first_number=1)
    held.add([ticket])
    held.stored(ticket.key, stored_by(ticket))
    held.forget(ticket.key)
    held.progressed(ticket.key, 3)
    assert (len(held), held.prefix_of(ticket.key), held.report().tokens, held.report().prefixes) == (0, None, {}, {})
