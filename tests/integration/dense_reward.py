"""A reward that usually differs between the samples of a group, so that every step of a short run has a gradient."""

from asyncrl.data.prompts import Task


def by_length(task: Task, completion: str) -> float:
    """Gives longer completions a higher reward."""
    return len(completion) / 10
