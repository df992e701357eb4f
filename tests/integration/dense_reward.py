"""A reward that differs between the samples of a group, also after many steps."""

import time
import zlib

from asyncrl.data.prompts import Task

LATE_S = 2.0
"""Time that a slow score takes, seconds. It is several times as long as a step of the tiny model."""


def by_checksum(task: Task, completion: str) -> float:
    """Gives each pair of prompt and completion a fixed number in [0, 1) that a policy cannot learn.

    A policy can learn the length of a completion within 20 steps. All rewards would then be equal.
    """
    return zlib.crc32(f"{task.prompt}\n{completion}".encode()) / 2**32


def late_for_some_prompts(task: Task, completion: str) -> float:
    """Like `by_checksum`, but takes seconds for every fifth prompt, so that its group is a straggler."""
    if zlib.crc32(task.prompt.encode()) % 5 == 0:
        time.sleep(LATE_S)
    return by_checksum(task, completion)
