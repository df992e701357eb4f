"""Waiting for a Ray call: always with a deadline, and a cancelled wait cancels the call; and what to say when Ray has
no room for an actor."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from asyncrl.errors import ActorGone, AsyncRLError, CallTimeout


async def finished(ref: Any, *, timeout_s: float, what: str) -> Any:
    """Result of an actor call.

    Raises asyncrl's own errors as themselves, ActorGone when the actor is dead, CallTimeout past the deadline;
    after a timeout or a cancellation the actor is asked to cancel the call.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError:
        ray.cancel(ref)
        raise CallTimeout(f"{what} took longer than {timeout_s:g} s") from None
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, AsyncRLError):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise ActorGone(f"{what}: the process behind it is gone ({error})") from error


def answer(ref: Any, *, timeout_s: float, what: str) -> Any:
    """Result of an actor call for a caller that blocks.

    Like `finished`; also the KeyError, ValueError and TypeError of a data-plane call come as themselves.
    """
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        ray.cancel(ref)
        raise CallTimeout(f"{what} took longer than {timeout_s:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, AsyncRLError | KeyError | ValueError | TypeError):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise ActorGone(f"{what}: the process behind it is gone ({error})") from error


def answers(refs: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
    """Results of several calls, in their order, for a caller that blocks.

    The first failure is raised as `answer` does, as soon as it is known; the other calls go on.
    """
    deadline_s, waiting, results = time.monotonic() + timeout_s, list(refs), {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            for ref in waiting:
                ray.cancel(ref)
            raise CallTimeout(f"{what} took longer than {timeout_s:g} s")
        for ref in done:
            results[ref] = answer(ref, timeout_s=timeout_s, what=what)
    return [results[ref] for ref in refs]


def room(resources: Iterable[str], *, node_labels: Mapping[str, str], section: str) -> str:
    """The end of a sentence about what Ray could not place: the labels that `section` of the config asks for, and what
    the cluster has."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    labels = ", ".join(f"{name}={value}" for name, value in node_labels.items())
    has = " and ".join(f"{total.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)" for name in resources)
    return f"{f', on nodes with {labels} ({section}.node_labels)' if labels else ''}; the cluster has {has}"
