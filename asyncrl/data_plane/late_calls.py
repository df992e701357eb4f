"""Says where the actor of a call without an answer runs, and so what may be wrong: this machine, the machine of that
process, the network between them, or Ray's head.

Ray's head knows the node of an actor. If the head does not answer either, each question would block for a minute. So a
question is asked in a thread, and callers wait for its answer until `LOOKUP_S` after it was asked. Later callers that
ask about the same actor do not wait.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray

LOOKUP_S = 1.0
"""Longest wait for the answer of Ray's head, seconds. It takes some milliseconds."""
FRESH_S = 5.0
"""Time for which an answer is used again, seconds. Calls to one actor are often late together."""


class Place(NamedTuple):
    """The node of an actor. `here` says whether it is the node of this process, and `alive` whether Ray's head still
    counts it as alive."""

    host: str
    address: str
    here: bool
    alive: bool


def place_of(ref: Any) -> Place:
    """Asks Ray's head for the node of the actor whose call has the reference `ref`. Blocks as long as the head does not
    answer. Raises LookupError for an actor that Ray has not placed."""
    actor = ray._private.state.actors(ref.task_id().actor_id().hex())
    place = actor["Address"]["NodeID"]
    node = next((node for node in ray.nodes() if node["NodeID"] == place), None)  # type: ignore[no-untyped-call]
    if node is None:
        raise LookupError(f"Ray lists no node {place}")
    return Place(
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        here=place == ray.get_runtime_context().get_node_id(),
        alive=node["Alive"],
    )


class Lookups:
    """Asks `place_of` in a thread for each actor, and remembers its answers for `FRESH_S`."""

    def __init__(
        self,
        place_of: Callable[[Any], Place] = place_of,
        *,
        lookup_s: float = LOOKUP_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place_of = place_of
        self._lookup_s = lookup_s
        self._clock = clock
        self._asked: dict[str, tuple[Future[Place], float]] = {}
        self._lock = threading.Lock()

    def why(self, ref: Any) -> str:
        """Returns what may be wrong with the actor whose call has the reference `ref`, and what to do."""
        try:
            place = self._place(ref)
        except Exception:  # a failed question must not hide that the call is late
            place = None
        if place is None:
            return (
                "Ray's head also did not say on which node the actor's process is: see whether the head and that node "
                "run, and whether this machine reaches them"
            )
        if place.here:
            return "this machine may be too busy: end other programs, and try again"
        node = f"the actor's process is on the node {place.host} ({place.address})"
        if not place.alive:
            return f"{node}, which Ray counts as dead: see whether that node runs, and start Ray there again"
        return (
            f"{node}, which did not answer: see whether that node runs and is not too busy, and whether this machine "
            "reaches it"
        )

    def _place(self, ref: Any) -> Place:
        """Returns the node of the actor. Raises an error if Ray's head does not know it or does not answer."""
        with self._lock:
            key, now_s = str(ref.task_id().actor_id().hex()), self._clock()
            asked, asked_s = self._asked.get(key, (None, now_s))
            if asked is None or (asked.done() and now_s - asked_s > FRESH_S):
                asked, asked_s = Future(), now_s
                self._asked[key] = asked, asked_s
                threading.Thread(target=self._ask, args=(ref, asked), name="place of an actor", daemon=True).start()
        return asked.result(timeout=max(0.0, asked_s + self._lookup_s - now_s))

    def _ask(self, ref: Any, answer: "Future[Place]") -> None:
        try:
            answer.set_result(self._place_of(ref))
        except Exception as error:
            answer.set_exception(error)


_lookups = Lookups()


def why_late(ref: Any) -> str:
    """Returns what may be wrong with the actor whose call has the reference `ref`, and what to do."""
    return _lookups.why(ref)
