"""An example of your own task: which of two numbers is larger? own_task.yaml names the functions of this file."""

from asyncrl.data.prompts import Task


def questions() -> list[Task]:
    """Returns all questions. A run holds out a tenth of them for evaluation (`data.heldout_fraction`)."""
    return [
        Task(question=f"{first},{second}", answer=str(max(first, second)))
        for first in range(100)
        for second in range(100)
    ]


def reward(task: Task, completion: str) -> float:
    """Returns 1 if the completion is exactly the right number, 0.1 if it is another number, else 0."""
    if completion == task.answer:
        return 1.0
    return 0.1 if completion.isdigit() else 0.0
