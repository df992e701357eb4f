"""Built-in rewards. They compare a completion with the task's reference answer and return 1.0 or 0.0."""

from functools import lru_cache
from typing import Any

from asyncrl.data.prompts import Task


def exact_match(task: Task, completion: str) -> float:
    """Returns 1.0 if the completion equals the answer. White space at either end of both texts is ignored."""
    return float(completion.strip() == task.answer.strip())


def math_verify(task: Task, completion: str) -> float:
    """Returns 1.0 if the completion's last mathematical expression equals the answer, as the library math-verify finds.

    The library's own time limits are off, because they use SIGALRM, which fails outside the main thread and does not
    stop C code. The scoring process has a wall-clock limit instead (`environment.score_timeout_s`). Raises ValueError
    for an answer without an expression, because no completion could ever earn a reward.
    """
    from math_verify import parse, verify  # imported here because it imports sympy, which takes a second

    gold = _parsed_answer(task.answer)
    if not gold:
        raise ValueError(
            f"the answer {task.answer[:80]!r} has no mathematical expression; correct it or use another reward"
        )
    return float(verify(list(gold), parse(completion, parsing_timeout=None), timeout_seconds=None))


@lru_cache(maxsize=256)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    """Returns the answer's expressions. Bare LaTeX (`\\frac{1}{2}`) gets delimiters, because the library needs them."""
    from math_verify import parse

    delimited = any(mark in answer for mark in ("$", "\\(", "\\[", "\\boxed"))
    return tuple(parse(answer if delimited else f"${answer}$", parsing_timeout=None))
