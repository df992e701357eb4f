"""Rewards of each form, as users write them. Tests name them by import path; they run in scoring processes only."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence

from asyncrl.data.prompts import Task

_never = threading.Event()


def each(task: Task, completion: str) -> float:
    """Takes the seconds that the completion states."""
    _never.wait(float(completion))
    return float(os.getpid())


def printed(task: Task, completion: str) -> float:
    print(completion)
    return each(task, completion)


def batch(task: Task, completions: Sequence[str]) -> list[float]:
    """Takes the sum of the seconds that its completions state."""
    for completion in completions:
        _never.wait(float(completion))
    return [float(len(completions))] * len(completions)


async def batch_async(task: Task, completions: Sequence[str]) -> list[float]:
    return [float(len(completions))] * len(completions)


async def together(task: Task, completion: str) -> float:
    """Ends when as many completions as `task.answer` states are being scored at the same time."""
    barrier = _barriers.setdefault(task.question, asyncio.Barrier(int(task.answer)))
    await barrier.wait()
    return float(completion)


_barriers: dict[str, asyncio.Barrier] = {}


async def waits(task: Task, completion: str) -> float:
    """Takes the seconds that the completion states, without blocking other completions."""
    await asyncio.sleep(float(completion))
    return 1.0


async def blocking(task: Task, completion: str) -> float:
    """Makes a slow call without awaiting it."""
    if completion == "pause":
        print("paused")
        await asyncio.sleep(1)
    if completion == "hang":
        _never.wait()
    return 1.0


async def stubborn(task: Task, completion: str) -> float:
    while completion == "hang":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    return 1.0


def noted(task: Task, completion: str) -> float:
    """Writes the completion into a file, and takes longer than outcomes are kept back. May hang or crash."""
    with open(task.metadata["file"], "a") as file:
        file.write(f"{completion}\n")
    if completion == "crash":
        os._exit(1)
    _never.wait(None if completion == "hang" else 0.02)
    return float(len(completion))


async def noted_async(task: Task, completion: str) -> float:
    """Like `noted`, with code that blocks the event loop."""
    await asyncio.sleep(0.05 if completion in ("hang", "crash") else 0)
    return noted(task, completion)


def late_once(task: Task, completion: str) -> float:
    """Hangs for the completion "late", but only the first time. Takes longer than outcomes are kept back."""
    with open(task.metadata["file"], "a+") as file:
        file.write(f"{completion}\n")
        file.seek(0)
        if completion == "late" and file.read().split().count("late") == 1:
            file.flush()
            _never.wait()
    _never.wait(0.02)
    return float(len(completion))


def late_once_batched(task: Task, completions: Sequence[str]) -> list[float]:
    return [late_once(task, completion) for completion in completions]


class Riddles:
    """An environment with an async `score`."""

    def tasks(self, seed: int) -> list[Task]:
        return []

    async def score(self, task: Task, completion: str) -> float:
        if completion == "raise":
            raise ValueError("no riddle")
        return float(len(completion))


def keyed(task: Task, completion: str) -> float:
    """Prints and raises texts that contain its key."""
    key = os.environ["JUDGE_API_KEY"]
    print("asking with", key)
    print("again with", repr(key), file=sys.stderr)
    if completion == "raise":
        raise RuntimeError(f"401 for {key}")
    return float(len(key))


def flood(task: Task, completion: str) -> float:
    if completion == "flood":
        while True:
            os.write(1, b"x" * 63 + b"\n")
    return float(len(completion))


def prints_surrogates(task: Task, completion: str) -> float:
    print("lone \udc80 surrogate")
    return 1.0
