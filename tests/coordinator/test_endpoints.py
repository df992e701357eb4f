"""The metrics endpoints: a caller that polls gets what has changed, and always ends up with all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.coordinator import registry as endpoints_module
from asyncrl.coordinator.registry import Endpoints


def test_a_caller_gets_what_has_changed_since_its_last_call() -> None:
    endpoints = Endpoints()
    endpoints.set("a", "h:1")
    endpoints.set("b", "h:2")
    first = endpoints.since(0)
    assert (first.whole, first.addresses) == (True, {"a": "h:1", "b": "h:2"})
    assert endpoints.since(first.serial).addresses == {}
    endpoints.set("a", "h:1")
    assert endpoints.since(first.serial).addresses == {}, "nothing has changed"
    endpoints.set("a", "")
    endpoints.set("c", "h:3")
    second = endpoints.since(first.serial)
    assert (second.whole, second.addresses) == (False, {"a": "", "c": "h:3"})
    assert second.applied_to({"a": "h:1", "b": "h:2"}) == {"b": "h:2", "c": "h:3"}


@pytest.mark.parametrize("kept", [1, 3, 1000])
@given(changes=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "h:1", "h:2"]), st.booleans())))
def test_what_a_caller_knows_is_all_there_is_whenever_it_calls(kept: int, changes: list[tuple[str, str, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints_module, "KEPT_CHANGES", kept)
        endpoints = Endpoints()
    known: dict[str, str] = {}
    serial = 0
    for name, address, calls in changes:
        endpoints.set(name, address)
        if calls:
            answer = endpoints.since(serial)
            serial, known = answer.serial, answer.applied_to(known)
            assert known == endpoints.addresses


def test_a_caller_of_an_earlier_life_of_the_coordinator_gets_everything() -> None:
    endpoints = Endpoints()
    endpoints.set("a", "h:1")
    assert endpoints.since(99).whole
