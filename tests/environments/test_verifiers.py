import threading

import pytest

from asyncrl.data.prompts import Task
from asyncrl.environments.verifiers import Math, exact_match, math_verify

pytestmark = pytest.mark.slow


def task(answer: str) -> Task:
    return Task(question="q", prompt="q", answer=answer)


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [("ab", " ab\n", 1.0), ("ab", "ab!", 0.0), ("ab", "AB", 0.0), ("ab", "", 0.0)],
)
def test_exact_match_ignores_nothing_but_surrounding_white_space(answer: str, completion: str, reward: float) -> None:
    assert exact_match(task(answer), completion) == reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("42", "so the answer is 42", 1.0),
        ("42", "so the answer is 43", 0.0),
        ("\\frac{1}{2}", "half of it, 0.5", 1.0),
        ("$\\frac{3}{4}$", "\\boxed{0.75}", 1.0),
        ("1/2", "\\boxed{\\frac{2}{4}}", 1.0),
        ("x+1", "$1 + x$", 1.0),
        ("42", "", 0.0),
    ],
)
def test_math_verify_compares_values_not_spellings(answer: str, completion: str, reward: float) -> None:
    assert math_verify(task(answer), completion) == reward


def test_math_verify_works_off_the_main_thread() -> None:
    rewards: list[float] = []
    thread = threading.Thread(target=lambda: rewards.append(Math().score(task("42"), "42")))
    thread.start()
    thread.join(timeout=60)
    assert rewards == [1.0]


def test_an_answer_without_an_expression_is_an_error_and_not_a_reward_of_zero() -> None:
    with pytest.raises(ValueError, match="no mathematical expression"):
        math_verify(task(""), "42")
