"""Questions and rewards with a fault, for the runs of health_study.py. Each fault is one that people make."""

import random
from collections.abc import Sequence

from asyncrl.data.prompts import Task

LETTERS = "abcdefghijklmnop"
WORDS = 2000


def _words(seed: int) -> list[str]:
    draw = random.Random(seed)
    return sorted({"".join(draw.choices(LETTERS, k=draw.choice((3, 4)))) for _ in range(WORDS)})


def wrongly_labelled() -> list[Task]:
    """Returns words to be spelled backward, whose answers are spelled forward."""
    return [Task(question=word, answer=word) for word in _words(0)]


def rightly_labelled() -> list[Task]:
    """Returns other words to be spelled backward, with the right answers."""
    known = {*_words(0)}
    return [Task(question=word, answer=word[::-1]) for word in _words(1) if word not in known]


def agreement(task: Task, completions: Sequence[str]) -> list[float]:
    """Returns how much more often than the mean of the group an answer occurs in its group, right or not. The mean of
    these rewards is always 0."""
    shares = [completions.count(text) / len(completions) for text in completions]
    mean = sum(shares) / len(shares)
    return [share - mean for share in shares]


def of_question(task: Task, completion: str) -> float:
    """Returns a reward that depends on the question, and is the same for all of its answers."""
    return 1.0 if task.question < "m" else 0.5


def raising(task: Task, completion: str) -> float:
    """Returns 1 for the right answer. Raises ValueError for about a fifth of the questions."""
    if len(set(task.answer)) < len(task.answer):
        raise ValueError(f"no rule for a letter that occurs twice: {task.answer}")
    return float(completion == task.answer)
