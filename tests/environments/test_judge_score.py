"""A judge's answer gives the number that it states in the form that was asked for, or no score."""

import pytest

from asyncrl.environments.verifiers import JUDGE_FORM, judge_score

SCORES = [
    ("Score: 0.7", 0.7),
    ("Score: 0", 0.0),
    ("Score: 1", 1.0),
    ("Score: 0.0", 0.0),
    ("Score: 1.0", 1.0),
    ("Score: 1.000", 1.0),
    ("Score: 0.125", 0.125),
    ("Score:0.5", 0.5),
    ("score: 0.5", 0.5),
    ("SCORE:   0.5", 0.5),
    ("  Score: 0.5  ", 0.5),
    ("Score: 0.5.", 0.5),
    ("Score: 1.", 1.0),
    ("**Score: 0.3**", 0.3),
    ("**Score:** 0.3", 0.3),
    ("__Score__: 0.3", 0.3),
    ("*Score*: **0.3**", 0.3),
    ("`Score: 0.3`", 0.3),
    ("**Score: 0.3.**", 0.3),
    ("It is right.\nScore: 0.9\n\n", 0.9),
    ("It is right.\r\nScore: 0.9\r\n", 0.9),
    ("Score: 1\nNo, I was wrong.\nScore: 0.1", 0.1),
    ("Steps 1 and 0 of 3 hold.\nScore: 0.4", 0.4),
    ("<think>Score: 1</think>\nScore: 0.2", 0.2),
]

NO_SCORES = [
    *("", " \n\n", "0.7", "1", "0", "It is right.\n1", "The score is 0.7", "Score 0.7", "Score = 0.7", "Rating: 0.7"),
    *("Score:", "Score: ", "Score: 0,7", "Score: 1,0", "Score: 0,25", "Score: 1e-3", "Score: 1E0", "Score: 1e-1."),
    *("Score: 7/10", "Score: 1/10", "Score: 0/1", "Score: 1/1", "Score: 0.5/1", "Score: ½", "Score: \\frac{1}{2}"),
    *("Score: 0.5 out of 1", "Score: 7 out of 10", "Score: 1 out of 10", "Score: 1 of 10", "Score: 1 (of 5)"),
    *("Score: 70%", "Score: 1%", "Score: 0.7 %", "Score: 100", "Score: 7", "Score: 1.5", "Score: 1.01", "Score: 2"),
    *("Score: -1", "Score: -0.5", "Score: +1", "Score: −0.5", "Score: - 1", "Score: 0.5-0.7", "Score: 0 to 1"),
    *("Score: 0.2, 0.9", "Score: 0.2 0.9", "Score: 0.2 or 0.9", "Score: 0.5*1", "Score: 0.*5", "Score: 0 .5"),
    *("Score: one", "Score: half", "Score: high", "Score: true", "Score: nan", "Score: inf", "Score: N/A", "Score: ?"),
    *("Score: 0.7 because it is short", "Score: 0.7\nI hope this helps!", "Score: 0.7\n```", "Score: 0.7 (good)"),
    *("The final Score: 0.7", "Score: Score: 0.7", "Style score: 0.7", "Score: 1:0", "Score: 1.0.0", "Score: 01"),
    *(
        "Score: 00.5",
        "Score: .5",
        "Score: ~0.7",
        "Score: <0.7>",
        "Score: [0.7]",
        "Score: $0.7$",
        "Score: ٠.٧",
        "Score: １",
    ),
    *("Score:\n0.7", "Score: 0.\n7", '{"score": 0.7}', "Score: 0.7; style: 0.2", "Score: 0.7 ⭐", "Score: 0'7"),
]


@pytest.mark.parametrize(("answer", "score"), SCORES)
def test_the_last_line_in_the_form_that_was_asked_for_is_the_score(answer: str, score: float) -> None:
    assert judge_score(answer) == score


@pytest.mark.parametrize("answer", NO_SCORES)
def test_any_other_answer_has_no_score_and_the_error_shows_its_end(answer: str) -> None:
    with pytest.raises(ValueError, match=r"has no score: its last line must be `Score: `") as caught:
        judge_score(answer)
    assert repr(answer[-200:]) in str(caught.value)


def test_the_prompt_asks_for_a_line_that_is_read() -> None:
    assert judge_score(JUDGE_FORM) == 0.7
    assert len(SCORES) + len(NO_SCORES) >= 60
