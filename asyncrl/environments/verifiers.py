"""Built-in rewards: (task, completion) → 1.0 or 0.0, against the task's reference answer."""

from functools import lru_cache
from typing import Any

from asyncrl.data.prompts import Task


def exact_match(task: Task, completion: str) -> float:
    """1.0 for the answer to the letter; white space around either does not count."""
    return float(completion.strip() == task.answer.strip())


def math_verify(task: Task, completion: str) -> float:
    """1.0 when the completion's last mathematical expression equals the answer, by the library of the same name.

    Its own time limits are off: they use SIGALRM, which fails off the main thread and leaves C code hanging. The wall
    clock of the scoring process is the limit (`environment.score_timeout_s`). ValueError for an answer in which there
    is no expression: no completion could ever earn a reward.
    """
    from math_verify import parse, verify  # imports sympy: a second that exact_match does not need

    gold = _parsed_answer(task.answer)
    if not gold:
        raise ValueError(f"the answer {task.answer[:80]!r} has no mathematical expression")
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    """The answer's expressions. Bare LaTeX (`\\frac{1}{2}`) gets the delimiters without which it is not recognised."""
    from math_verify import parse

    delimited = any(mark in answer for mark in ("$", "\\(", "\\[", "\\boxed"))
    return tuple(parse(answer if delimited else f"${answer}$", parsing_timeout=None))
