"""Measures the stages of a call: with the caller's timer in the driver, with a stopwatch on a rank."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol


class Timer(Protocol):
    """Measures the time of stages: `with timer.time("policy_training/ranks"): …`.

    A call measures its stages under `<call>/…`, but not the call itself, so that the caller can do that:
    `with timer.time("policy_training"): policy.train(data, loss_fn, timer=timer)`.
    """

    def time(self, label: str) -> AbstractContextManager[Any]: ...


def timed(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    """Returns `timer.time(label)`, or a context that does nothing if there is no timer."""
    return nullcontext() if timer is None else timer.time(label)


@contextmanager
def stopwatch(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Adds the wall-clock seconds of the body to `seconds[stage]`, also if the body fails."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - start
