"""The metrics endpoints: a caller that polls gets what has changed, and always ends up with all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.coordinator import registry as registry_module
from asyncrl.coordinator.registry import Endpoint, Registry


def no_run() -> Registry:
    return Registry(shared={}, timeout_s=10.0, clock=lambda: 0.0)


def test_a_caller_gets_what_has_changed_since_its_last_call() -> None:
    registry = no_run()
    a, b, c, moved = Endpoint("h:1", "n1"), Endpoint("h:2", "n1"), Endpoint("h:3", "n2"), Endpoint("h:2", "n2")
    registry.set_endpoint("a", "h:1", node="n1")
    registry.set_endpoint("b", "h:2", node="n1")
    first = registry.endpoints_since(0)
    assert (first.whole, first.endpoints) == (True, {"a": a, "b": b})
    assert registry.endpoints_since(first.serial).endpoints == {}
    registry.set_endpoint("a", "h:1", node="n1")
    assert registry.endpoints_since(first.serial).endpoints == {}, "nothing has changed"
    registry.set_endpoint("a", "")
    registry.set_endpoint("c", "h:3", node="n2")
    registry.set_endpoint("b", "h:2", node="n2")  # the same address on another node, such as 127.0.0.1
    second = registry.endpoints_since(first.serial)
    assert (second.whole, second.endpoints) == (False, {"a": None, "b": moved, "c": c})
    assert second.applied_to({"a": a, "b": b}) == {"b": moved, "c": c}


@pytest.mark.parametrize("kept", [1, 3, 1000])
@given(changes=st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "h:1", "h:2"]), st.booleans())))
def test_what_a_caller_knows_is_all_there_is_whenever_it_calls(kept: int, changes: list[tuple[str, str, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_module, "KEPT_CHANGES", kept)
        registry = no_run()
    known: dict[str, Endpoint] = {}
    serial = 0
    for name, address, calls in changes:
        registry.set_endpoint(name, address)
        if calls:
            answer = registry.endpoints_since(serial)
            serial, known = answer.serial, answer.applied_to(known)
            assert known == registry.endpoints


def test_a_caller_of_an_earlier_life_of_the_coordinator_gets_everything() -> None:
    registry = no_run()
    registry.set_endpoint("a", "h:1")
    assert registry.endpoints_since(99).whole
