"""A reward that differs from sample to sample, so that every step of a short run has something to learn."""

from asyncrl.data.prompts import Task


def by_length(task: Task, completion: str) -> float:
    """Longer is better."""
    return len(completion) / 10
