"""A wait for calls returns results in order, raises typed errors, the first one at once, and ends at a deadline."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from asyncrl.config.schema import Config
from asyncrl.data_plane import calls
from asyncrl.errors import ActorGone, CallTimeout, RunError


class Ray:
    """Replaces the module `ray`. Calls finish in the order of `done`. Calls that are not in `done` never finish."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.cancelled: list[str] = []
        self.no_actor: Exception | None = None
        self.known_nodes: list[dict[str, Any]] = []

    def nodes(self) -> list[dict[str, Any]]:
        return self.known_nodes

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "own")

    def get_actor(self, name: str, *, namespace: str) -> None:
        if self.no_actor is not None:
            raise self.no_actor

    def wait(self, refs: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        done = [self.done.pop(0)] if self.done else []
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str, *, timeout: float) -> str:
        if ref == "bad":
            raise ValueError("bad")
        return ref.upper()

    def cancel(self, ref: str) -> None:
        self.cancelled.append(ref)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    replaced = Ray()
    monkeypatch.setattr(calls, "ray", replaced)
    return replaced


def answers(*refs: str) -> list[Any]:
    return calls.answers(refs, timeout_s=7.0, what="asking")


def test_answers_come_in_the_order_of_the_calls(ray: Ray) -> None:
    ray.done = ["b", "a"]
    assert answers("a", "b") == ["A", "B"]
    assert answers() == []


def test_a_failure_does_not_wait_for_the_others(ray: Ray) -> None:
    ray.done = ["bad"]
    with pytest.raises(ValueError, match="bad"):
        answers("never", "bad")


def test_what_is_late_is_cancelled_and_the_limit_is_named(ray: Ray) -> None:
    ray.done = ["a"]
    with pytest.raises(TimeoutError, match="asking took longer than 7 s"):
        answers("a", "never")
    assert ray.cancelled == ["never"]


async def raising(error: Exception) -> None:
    raise error


def test_an_error_of_the_actor_is_raised_unchanged_also_if_it_is_a_timeout() -> None:
    error = RayTaskError("load", "", CallTimeout("the engine is late")).as_instanceof_cause()
    with pytest.raises(CallTimeout, match=r"^the engine is late$"):
        asyncio.run(calls.finished(raising(error), timeout_s=7.0, what="asking"))


def test_an_actor_that_has_ended_is_gone() -> None:
    with pytest.raises(ActorGone, match="asking: the actor's process has ended"):
        asyncio.run(calls.finished(raising(RayActorError()), timeout_s=7.0, what="asking"))


def test_a_wait_that_is_late_or_cancelled_cancels_the_call(ray: Ray) -> None:
    async def cancelled() -> None:
        waiting = asyncio.create_task(calls.finished(asyncio.Event().wait(), timeout_s=7.0, what="asking"))
        await asyncio.sleep(0)
        waiting.cancel()
        await waiting

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert len(ray.cancelled) == 1
    with pytest.raises(CallTimeout, match="asking took longer than 0 s"):
        asyncio.run(calls.finished(asyncio.Event().wait(), timeout_s=0.0, what="asking"))
    assert len(ray.cancelled) == 2


def test_an_actor_whose_constructor_failed_says_with_which_error() -> None:
    try:
        raise ModuleNotFoundError("no module named 'torchvision'")
    except ModuleNotFoundError as error:
        failed = RayTaskError(
            "RankActor.__init__", "Traceback …\nModuleNotFoundError: no module named 'torchvision'", error
        )
    assert calls.reason_of_death(ActorDiedError(failed)) == "ModuleNotFoundError: no module named 'torchvision'"
    killed = RayActorError(error_msg="The actor died unexpectedly.\n\tclass_name: RankActor")
    assert calls.reason_of_death(killed) == "The actor died unexpectedly"


class Late:
    """A call that is late `times` times, and then answers."""

    def __init__(self, times: int, error: Exception | None = None) -> None:
        self.left = times
        self.calls = 0
        self._error = error or CallTimeout("the buffer's commit took longer than 30 s")

    async def __call__(self) -> str:
        self.calls += 1
        self.left -= 1
        if self.left >= 0:
            raise self._error
        return "answer"


@pytest.mark.asyncio
async def test_a_late_call_is_repeated_with_growing_pauses_until_it_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = Late(5)
    assert await calls.patiently(late, patience_s=60.0, first_pause_s=0.001) == "answer"
    assert late.calls == 6
    assert "the buffer's commit took longer than 30 s; the call is repeated" in caplog.text


def test_a_late_call_is_repeated_in_a_thread_too() -> None:
    late = Late(3)
    assert calls.patiently_in_thread(lambda: asyncio.run(late()), patience_s=60.0, first_pause_s=0.001) == "answer"
    assert late.calls == 4


@pytest.mark.asyncio
async def test_a_call_that_stays_late_is_raised_when_the_patience_is_over() -> None:
    late = Late(5)
    with pytest.raises(CallTimeout, match="longer than 30 s"):
        await calls.patiently(late, patience_s=0.0)
    assert late.calls == 1


@pytest.mark.asyncio
async def test_a_call_of_an_actor_that_has_ended_is_not_repeated() -> None:
    gone = Late(1, ActorGone("the buffer's actor has ended"))
    with pytest.raises(ActorGone):
        await calls.patiently(gone, patience_s=60.0)
    assert gone.calls == 1


def test_an_actor_that_cannot_be_reached_for_a_while_is_late_and_not_gone() -> None:
    away = ActorUnavailableError("the network is down", actor_id=b"0" * 16)
    with pytest.raises(CallTimeout, match="cannot be reached at the moment"):
        asyncio.run(calls.finished(raising(away), timeout_s=9.0, what="asking"))


@pytest.mark.parametrize("error", [ValueError("no actor with this name"), AssertionError("Expected str or bytes")])
def test_an_actor_that_has_ended_has_no_handle_also_if_ray_still_lists_it(error: Exception, ray: Ray) -> None:
    ray.no_actor = error
    assert calls.named_actor("buffer", namespace="run") is None


LABELS = {"pool": "in(a,b)"}
OWN, HEAD = {calls.NODE_ID_LABEL: "own"}, {calls.NODE_ID_LABEL: "head"}


@pytest.mark.fault("F42")
@pytest.mark.parametrize(
    ("labels", "here", "places"),
    [
        ({}, False, [HEAD]),
        ({}, True, [OWN, HEAD]),
        (LABELS, False, [LABELS, HEAD]),
        (LABELS, True, [OWN | LABELS, LABELS, HEAD]),
        ({calls.NODE_ID_LABEL: "a"}, True, [{calls.NODE_ID_LABEL: "a"}, {calls.NODE_ID_LABEL: "a"}, HEAD]),
    ],
)
def test_shared_actors_belong_to_a_node_of_the_learner_or_to_the_head(
    labels: dict[str, str], here: bool, places: list[dict[str, str]], ray: Ray
) -> None:
    """A node of `generator.node_labels` is never named."""
    ray.known_nodes = [
        {"NodeID": "another", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "dead head", "Alive": False, "Resources": {HEAD_NODE_RESOURCE_NAME: 1.0}},
        {"NodeID": "head", "Alive": True, "Resources": {HEAD_NODE_RESOURCE_NAME: 1.0}},
    ]
    sections = {"learner": {"node_labels": labels}, "generator": {"node_labels": {"pool": "generator"}}}
    placement = calls.control_placement(Config.model_validate(sections), here=here)
    fallbacks = placement["fallback_strategy"] or []
    assert [placement["label_selector"], *(each["label_selector"] for each in fallbacks)] == places


def test_without_a_head_and_labels_no_node_is_chosen(ray: Ray) -> None:
    """Ray might otherwise choose a generator's node."""
    ray.known_nodes = [{"NodeID": "another", "Alive": True, "Resources": {"CPU": 1.0}}]
    with pytest.raises(RunError, match="Ray lists no head"):
        calls.control_placement(Config())
