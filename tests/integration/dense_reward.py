"""A reward that differs between the samples of a group, also after many steps."""

import zlib

from asyncrl.data.prompts import Task


def by_checksum(task: Task, completion: str) -> float:
    """Gives each pair of prompt and completion a fixed number in [0, 1) that a policy cannot learn.

    A policy can learn the length of a completion within 20 steps. All rewards would then be equal.
    """
    return zlib.crc32(f"{task.prompt}\n{completion}".encode()) / 2**32
