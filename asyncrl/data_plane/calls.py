"""Starts Ray actors and calls, and waits for calls, always with a deadline. Cancelling a wait cancels the call.

A late call is repeated by `patiently`, or by `patiently_in_thread` in a thread that may block. Also chooses the nodes
for the run's shared actors, and describes the resources of a cluster in which Ray cannot place an actor.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from asyncrl.data_plane.late_calls import why_late
from asyncrl.errors import ActorGone, ActorUnreachable, AsyncRLError, CallTimeout, RunError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config  # the processes that store rows need no pydantic

logger = logging.getLogger(__name__)

P = ParamSpec("P")
Answer = TypeVar("Answer")

PAUSE_S = 0.2
"""Longest pause before the first repetition of a late call, seconds. It doubles with each further repetition."""
LONGEST_PAUSE_S = 5.0
NODE_ID_LABEL = "ray.io/node-id"
"""Label that Ray gives to each node. Its value is the id of the node."""


def require_ray(doing: str) -> None:
    """Raises RunError, which says that `doing` is not possible, if Ray is not initialized: Ray would then start a
    cluster of its own, which listens on all networks."""
    if not ray.is_initialized():
        raise RunError(f"cannot {doing} because Ray is not initialized; call ray.init() first (docs/own-loop.md)")


def start(actor: Any, method: Callable[Concatenate[Any, P], Any], *arguments: P.args, **options: P.kwargs) -> Any:
    """Calls a method of an actor, given as a method of the actor's class, e.g. `start(actor, RowStore.clear, keys)`.

    Ray's handles have no types; with this function, mypy checks the method's name and arguments. Returns the reference
    of the result.
    """
    return getattr(actor, method.__name__).remote(*arguments, **options)


def named_actor(name: str, *, namespace: str) -> Any:
    """Returns the handle of the actor of this name; None if there is none.

    Ray removes the classes of a job with the job's last actor. If this happens while `ray.get_actor` runs, the function
    fails with an AssertionError (Ray 2.60, `_load_actor_class_from_gcs`): the actor has just ended.
    """
    try:
        return ray.get_actor(name, namespace=namespace)
    except (ValueError, AssertionError):
        return None


def detached(body: type, *arguments: Any, name: str, namespace: str, **options: Any) -> Any:
    """Returns the handle of the only actor of this name in the namespace, and starts it if needed. The actor outlives
    the process that started it."""
    settings = {"name": name, "namespace": namespace, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
    return ray.remote(body).options(**settings, **options).remote(*arguments)


def control_placement(config: "Config", *, here: bool = False) -> dict[str, Any]:
    """Returns Ray's options for the placement of a shared actor: the coordinator, the weight store, the row index.

    The run ends with these actors. So they must not be on a generator's node, which may leave while the learner trains.
    Ray takes the first of these nodes that lives when the actor is created:

    1. with `here`, the node of this process, if it has `learner.node_labels`. A learner sets `here`: it ends with its
       node in any case;
    2. a node with `learner.node_labels`, if there are any labels;
    3. the head. Without it, no process of the run can go on.

    Raises RunError if there is no such node, because Ray's head was started again and has not registered yet.
    """
    labels, places = config.learner.node_labels, list[dict[str, str]]()
    if here:
        places.append({NODE_ID_LABEL: ray.get_runtime_context().get_node_id(), **labels})
    if labels:
        places.append(labels)
    if (head := head_node()) is not None:
        places.append({NODE_ID_LABEL: head})
    if not places:
        raise RunError(
            "Ray lists no head among its nodes, so there is no node for the run's buffer; start again when `ray "
            "status` lists the head, or set learner.node_labels"
        )
    return {
        "label_selector": places[0],
        "fallback_strategy": [{"label_selector": place} for place in places[1:]] or None,
    }


def head_node() -> str | None:
    """Returns the id of the head of the joined cluster; None while a head that was started again has not registered."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(
        (node["NodeID"] for node in nodes if node["Alive"] and HEAD_NODE_RESOURCE_NAME in node["Resources"]), None
    )


def reason_of_death(error: RayActorError) -> str:
    """Returns in one line why an actor is dead. If its constructor failed, this is the error, the last line of Ray's
    text. Otherwise it is the first line: the other lines have ids and guesses at the cause."""
    lines = str(error).strip().splitlines()
    return lines[-1 if error.actor_init_failed else 0].rstrip(".")


def _late(what: str, timeout_s: float, ref: Any) -> CallTimeout:
    return CallTimeout(f"{what} took longer than {timeout_s:g} s; {why_late(ref)}")


@contextlib.contextmanager
def _own_errors(ref: Any, *, timeout_s: float, what: str, unchanged: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raises the actor's errors of the types `unchanged` as they are, and typed errors for Ray's own errors. After a
    timeout or a cancellation it asks the actor to cancel the call."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, unchanged):
            raise error.cause from error
        raise
    except ActorUnavailableError as error:
        raise ActorUnreachable(
            f"{what}: the actor cannot be reached at the moment ({reason_of_death(error)}); {why_late(ref)}"
        ) from error
    except RayActorError as error:
        raise ActorGone(f"{what}: the actor's process has ended ({reason_of_death(error)})") from error
    except TimeoutError:
        ray.cancel(ref)
        raise _late(what, timeout_s, ref) from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise


async def patiently(
    call: Callable[[], Awaitable[Answer]], *, patience_s: float, first_pause_s: float = PAUSE_S
) -> Answer:
    """Returns the answer of `call`, which is repeated after each CallTimeout until `patience_s` seconds have passed.
    Then it raises the last CallTimeout. `patience_s` may be infinite.

    The call must be idempotent: an earlier one may have been performed, and only its answer was late. The pauses
    between the calls grow, and are drawn at random, so that many callers do not come back at the same moment. The first
    one has at most `first_pause_s` seconds.
    """
    patience = _Patience(patience_s, first_pause_s)
    while True:
        try:
            return await call()
        except CallTimeout as error:
            pause_s = patience.pause_s(error)
        await asyncio.sleep(pause_s)


def patiently_in_thread(call: Callable[[], Answer], *, patience_s: float, first_pause_s: float = PAUSE_S) -> Answer:
    """Returns the answer of the blocking `call`, which is repeated after each CallTimeout as by `patiently`. Blocks the
    thread meanwhile."""
    patience = _Patience(patience_s, first_pause_s)
    while True:
        try:
            return call()
        except CallTimeout as error:
            pause_s = patience.pause_s(error)
        time.sleep(pause_s)


class _Patience:
    """Decides how long to wait before a late call is repeated."""

    def __init__(self, patience_s: float, first_pause_s: float) -> None:
        self._deadline_s = time.monotonic() + patience_s
        self._longest_s = first_pause_s

    def pause_s(self, error: CallTimeout) -> float:
        """Returns the pause after a call that was late. Raises `error` when the time for repetitions is over."""
        if time.monotonic() >= self._deadline_s:
            raise error
        logger.warning("%s; the call is repeated", error)
        longest_s, self._longest_s = self._longest_s, min(LONGEST_PAUSE_S, 2 * self._longest_s)
        return random.uniform(0.0, longest_s)


async def finished(ref: Any, *, timeout_s: float, what: str) -> Any:
    """Waits for the result of an actor call.

    Raises asyncrl's own errors unchanged, ActorGone when the actor is dead, and CallTimeout after the deadline. After
    a timeout or a cancellation it asks the actor to cancel the call.
    """
    with _own_errors(ref, timeout_s=timeout_s, what=what, unchanged=(AsyncRLError,)):
        async with asyncio.timeout(timeout_s):
            return await ref


def answer(ref: Any, *, timeout_s: float, what: str) -> Any:
    """Waits for the result of an actor call and blocks the thread.

    Works like `finished`. It also raises KeyError, ValueError and TypeError of a data-plane call unchanged.
    """
    unchanged = (AsyncRLError, KeyError, ValueError, TypeError)
    with _own_errors(ref, timeout_s=timeout_s, what=what, unchanged=unchanged):
        return ray.get(ref, timeout=timeout_s)


def answers(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """Waits for the results of several calls and blocks the thread. Returns them in the order of `refs`.

    The first failure is raised as soon as it is known, as by `answer`, and the other calls continue. `timeout_s` is the
    limit of all calls together. After it, the calls that have not ended are cancelled, and CallTimeout is raised.
    """
    deadline_s, waiting, results = time.monotonic() + timeout_s, list(refs), {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            for ref in waiting:
                ray.cancel(ref)
            raise _late(what, timeout_s, waiting[0])
        for ref in done:
            results[ref] = answer(ref, timeout_s=timeout_s, what=what)
    return [results[ref] for ref in refs]


def has_process(handle: Any) -> bool:
    """Returns whether Ray has placed an actor: a process runs its constructor, or has run it.

    Ray answers no call of an actor before its constructor has returned. So a late call does not show whether Ray has
    placed the actor. The table of actors has the address of the process as soon as Ray has room for it (seen with Ray
    2.60). Ray's public form of the table, `ray.util.state`, needs its dashboard, which a run does not start.
    """
    return bool(_table_entry(handle).get("Pid"))


def node_of(handle: Any) -> str:
    """Returns the id of the node on which Ray has placed an actor, as `has_process` describes."""
    return str(_table_entry(handle)["Address"]["NodeID"])


def _table_entry(handle: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray._private.state.actors(handle._actor_id.hex())
    return found


def room(resources: Iterable[str], *, node_labels: Mapping[str, str], section: str) -> str:
    """Returns the end of an error about actors that Ray could not place: the node labels that `section` of the config
    requires, and the total and free resources of the cluster."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    labels = ", ".join(f"{name}={value}" for name, value in node_labels.items())
    has = " and ".join(f"{total.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)" for name in resources)
    return f"{f', on nodes with {labels} ({section}.node_labels)' if labels else ''}; the cluster has {has}"
