"""A task of one's own: which of two numbers is larger? Used by own_task.yaml as `own_task:questions` and so on."""

from asyncrl.data.prompts import Task


def questions() -> list[Task]:
    """All of them; a tenth is held out and never issued."""
    return [
        Task(question=f"{first},{second}", answer=str(max(first, second)))
        for first in range(100)
        for second in range(100)
    ]


def reward(task: Task, completion: str) -> float:
    """1 for the right number and nothing else, 0.1 for some number."""
    if completion == task.answer:
        return 1.0
    return 0.1 if completion.isdigit() else 0.0
