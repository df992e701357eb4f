"""The error of a late call names the node that did not answer, and waits for Ray's head only once."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from asyncrl.data_plane import calls, late_calls
from asyncrl.data_plane.late_calls import FRESH_S, LOOKUP_S, Lookups, Place
from asyncrl.errors import ActorUnreachable, CallTimeout

ELSEWHERE = Place(host="gpu-2", address="10.0.0.2", here=False, alive=True)
BUSY = "this machine may be too busy: end other programs"


def ref(actor: str = "a") -> Any:
    """Returns a reference like one of Ray to the result of a call of `actor`."""
    return SimpleNamespace(task_id=lambda: SimpleNamespace(actor_id=lambda: SimpleNamespace(hex=lambda: actor)))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (ELSEWHERE, "the actor's process is on the node gpu-2 (10.0.0.2), which did not answer: see whether"),
        (ELSEWHERE._replace(alive=False), "on the node gpu-2 (10.0.0.2), which Ray counts as dead"),
        (ELSEWHERE._replace(here=True), BUSY),
    ],
)
def test_the_node_that_did_not_answer_is_named_and_this_machine_only_for_its_own_processes(
    place: Place, said: str
) -> None:
    why = Lookups(lambda _: place, lookup_s=60.0).why(ref())
    assert said in why
    assert (BUSY in why) == place.here


def test_a_head_that_does_not_answer_is_named_and_asked_only_once_for_an_actor() -> None:
    answered, asked = threading.Event(), list[str]()

    def silent(call: Any) -> Place:
        asked.append(call.task_id().actor_id().hex())
        assert answered.wait(60.0)
        return ELSEWHERE

    lookups = Lookups(silent, lookup_s=0.0)
    for actor in ("a", "a", "b", "a"):
        assert "Ray's head also did not say" in lookups.why(ref(actor))
    answered.set()
    assert sorted(asked) == ["a", "b"]


def test_threads_that_are_late_together_get_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    second_waits, first_asks = threading.Event(), threading.Event()

    class Answer(Future[Place]):
        """The answer of the lookup, which comes when a caller waits for it that has not asked."""

        def result(self, timeout: float | None = None) -> Place:
            if threading.current_thread() is threading.main_thread():
                second_waits.set()
            return super().result(timeout)

    def answering(_: Any) -> Place:
        first_asks.set()
        assert second_waits.wait(60.0)
        return ELSEWHERE

    monkeypatch.setattr(late_calls, "Future", Answer)
    now_s = [0.0]
    lookups = Lookups(answering, lookup_s=60.0, clock=lambda: now_s[0])
    with ThreadPoolExecutor(1) as other:
        first = other.submit(lookups.why, ref())
        assert first_asks.wait(60.0)
        now_s[0] = 30.0
        assert "the node gpu-2" in lookups.why(ref())
        assert "the node gpu-2" in first.result(60.0)


def test_an_answer_is_used_again_while_it_is_fresh() -> None:
    now_s, places = [0.0], [ELSEWHERE, ELSEWHERE._replace(alive=False)]
    lookups = Lookups(lambda _: places.pop(0), lookup_s=60.0, clock=lambda: now_s[0])
    first = lookups.why(ref())
    now_s[0] = FRESH_S
    assert lookups.why(ref()) == first
    now_s[0] = FRESH_S + 0.1
    assert "counts as dead" in lookups.why(ref())
    assert LOOKUP_S < FRESH_S


def test_an_error_of_the_lookup_does_not_hide_that_the_call_is_late() -> None:
    def failing(_: Any) -> Place:
        raise KeyError("Address")

    assert "Ray's head also did not say" in Lookups(failing, lookup_s=60.0).why(ref())
    assert "Ray's head also did not say" in Lookups(failing, lookup_s=60.0).why("no reference")


@pytest.mark.parametrize("here", [True, False])
def test_the_place_is_that_of_ray(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeID": id, "NodeManagerHostname": host, "NodeManagerAddress": address, "Alive": True}
        for id, host, address in (("1", "gpu-1", "10.0.0.1"), ("2", "gpu-2", "10.0.0.2"))
    ]
    replaced = SimpleNamespace(
        _private=SimpleNamespace(state=SimpleNamespace(actors=lambda id: {"Address": {"NodeID": id}})),
        nodes=lambda: nodes,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "2" if here else "1"),
    )
    monkeypatch.setattr(late_calls, "ray", replaced)
    assert late_calls.place_of(ref("2")) == ELSEWHERE._replace(here=here)
    with pytest.raises(LookupError):
        late_calls.place_of(ref("3"))


@pytest.mark.asyncio
async def test_a_late_call_and_one_that_cannot_reach_its_actor_say_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_calls, "_lookups", Lookups(lambda _: ELSEWHERE, lookup_s=60.0))

    class Call:
        task_id = staticmethod(ref().task_id)

        def __init__(self, error: Exception) -> None:
            self.error = error

        def __await__(self) -> Any:
            raise self.error
            yield

    monkeypatch.setattr(calls.ray, "cancel", lambda _: None)
    with pytest.raises(CallTimeout, match=r"^asking took longer than 7 s; the actor's process is on the node gpu-2"):
        await calls.finished(Call(TimeoutError()), timeout_s=7.0, what="asking")
    with pytest.raises(ActorUnreachable, match=r"cannot be reached at the moment .* the node gpu-2 \(10\.0\.0\.2\)"):
        await calls.finished(Call(ActorUnavailableError("lost", None)), timeout_s=7.0, what="asking")
