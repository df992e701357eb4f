"""Measures the time of stages: in the driver for the caller, and on a rank for the report of a step."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class Timer:
    """Measures the wall-clock time of stages: `with timer.time("policy_training/ranks"): …`. `seconds` has the sum of
    each label.

    A call of the policy or the critic measures its stages under `<call>/…`, but not its whole time. The caller measures
    that: `with timer.time("policy_training"): policy.train(data, loss_fn, timer=timer)`. Such a call takes any object
    that has the same method `time`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        """Adds the seconds of the body to those of `label`, also if the body fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start


def timed(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    """Returns `timer.time(label)`, or a context that does nothing if there is no timer."""
    return nullcontext() if timer is None else timer.time(label)
