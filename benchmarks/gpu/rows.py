"""Rows of the table, and how times are measured.

A part is a function from a `Size` to rows. It yields each row as soon as it is measured, so that a later failure loses
none. It raises CheckFailed if a result is wrong.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

GIB = 2**30
GB = 10**9


class Row(NamedTuple):
    """What was measured, and the result in words and numbers."""

    what: str
    figure: str


class CheckFailed(RuntimeError):
    """A result is not what it must be."""


def check(value: float, *, at_most: float, what: str) -> None:
    """Raises CheckFailed unless `value` is at most `at_most`. A NaN fails."""
    if not value <= at_most:
        raise CheckFailed(f"{what} is {value:.3g}, but must be at most {at_most:.3g}")


def best_s(work: Callable[[], object], *, device: torch.device, rounds: int) -> float:
    """Returns the seconds of the fastest of `rounds` calls, after one call that is not measured."""
    best = float("inf")
    for index in range(rounds + 1):
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        best = min(best, time.perf_counter() - started_s) if index else best
    return best


def synchronize(device: torch.device) -> None:
    """Waits until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(work: Callable[[], object], *, device: torch.device) -> str:
    """Runs `work`. Returns in words how much more memory was allocated on the GPU at the peak than before."""
    if device.type != "cuda":
        work()
        return "memory is measured on GPUs only"
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return f"{(torch.cuda.max_memory_allocated(device) - before) / GIB:.2f} GiB"
