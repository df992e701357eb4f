"""The ledger: its account is closed if and only if every issued group has exactly one fate."""

import msgspec
from buffer_scenes import Scene

from asyncrl.buffer.ledger import Account, Amount, EndedGroup, Event, Fate, Ledger


def test_the_account_is_open_by_whatever_no_fate_explains() -> None:
    ledger = Ledger()
    ledger.issue(samples=4)
    ledger.generated(30)
    nothing, group = Amount(), Amount(1, 4, 30)
    assert ledger.account(reserved=nothing, ready=group, leased=nothing).closed
    for wrong in (nothing, Amount(1, 4, 29), Amount(1, 3, 30), Amount(2, 4, 30)):
        assert not ledger.account(reserved=nothing, ready=wrong, leased=nothing).closed
    ledger.settle(EndedGroup(0, 0, Fate.TRAINED, samples=4, tokens=30))
    assert ledger.account(reserved=nothing, ready=nothing, leased=nothing).closed
    assert not ledger.account(reserved=nothing, ready=group, leased=nothing).closed


def test_every_fate_of_the_design_has_its_line_and_every_event_starts_at_zero() -> None:
    account = Ledger().account(reserved=Amount(), ready=Amount(), leased=Amount())
    assert {fate.value for fate in account.fates} == {
        "trained", "leased", "ready", "reserved", "filtered", "skipped", "dropped", "failed", "rows_lost",
        "returned_on_resume",
    }  # fmt: skip
    assert account.events == dict.fromkeys(Event, 0)


def test_a_group_has_no_tokens_until_its_commit() -> None:
    scene = Scene(eta=1, per_step=1, group_size=3)
    first, _ = scene.reserve(2)
    assert scene.buffer.account.issued == scene.buffer.account.fates[Fate.RESERVED] == Amount(2, 6, 0)
    scene.commit(first)
    account = scene.buffer.account
    assert account.issued == Amount(2, 6, 6)
    assert (account.fates[Fate.RESERVED], account.fates[Fate.READY]) == (Amount(1, 3, 0), Amount(1, 3, 6))
    scene.lease()
    assert scene.buffer.account.fates[Fate.LEASED] == Amount(1, 3, 6)
    assert scene.buffer.account.fates[Fate.READY] == Amount()


def test_a_group_whose_prompt_waits_for_its_next_attempt_stays_reserved_and_is_issued_once() -> None:
    scene = Scene()
    scene.reserve(2)
    scene.buffer.leave("a")
    account = scene.buffer.account
    assert account.issued == account.fates[Fate.RESERVED] == Amount(2, 4, 0)
    scene.reserve(1)
    account = scene.buffer.account
    assert account.issued == account.fates[Fate.RESERVED] == Amount(2, 4, 0)
    assert (account.events[Event.ATTEMPT], account.events[Event.RETRY]) == (3, 2)


def test_an_account_survives_json() -> None:
    scene = Scene()
    scene.commit(*scene.reserve(2))
    account = scene.buffer.account
    assert msgspec.json.decode(msgspec.json.encode(account), type=Account) == account
