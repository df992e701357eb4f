"""Scores become known in any order and over several requests, and end up in the order of groups and completions."""

from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Scores
from asyncrl.environments.scoring_messages import Failure, Group, RewardFailure
from asyncrl.errors import DataError

FIRST, SECOND = (Task(question=name, prompt=name, answer="") for name in ("first", "second"))
LATE = Failure(reason=RewardFailure.TIMEOUT, message="took too long")


def two_groups() -> Scores:
    groups = [Group(task=FIRST, completions=("a", "b", "c")), Group(task=SECOND, completions=("d", "e"))]
    scores = Scores(groups)
    assert scores.request() == tuple(groups)
    return scores


def test_only_completions_without_a_score_are_requested_again() -> None:
    scores = two_groups()
    assert scores.take([(4, 0.5), (1, 1.0), (0, LATE)])
    assert (scores.left, scores.rewards) == ([2, 3], 2)
    assert scores.request() == (Group(task=FIRST, completions=("c",)), Group(task=SECOND, completions=("d",)))
    assert scores.take([(0, 0.25), (1, 0.75)])
    assert scores.open == 0
    (error, *rewards), second = scores.results()
    assert (rewards, second) == ([1.0, 0.25], [0.75, 0.5])
    assert isinstance(error, DataError)
    assert (str(error), error.reason, error.completion) == ("took too long", "reward_timeout", "a")


def test_outcomes_that_were_not_requested_or_are_known_are_refused() -> None:
    scores = two_groups()
    assert not scores.take([(5, 1.0)])
    assert not scores.take([(-1, 1.0)])
    assert scores.take([(3, 1.0)])
    assert not scores.take([(3, 1.0)])


def test_what_is_left_of_a_group_is_found_by_any_of_its_completions_that_were_requested() -> None:
    scores = two_groups()
    assert scores.left_of_group(4) == [3, 4]
    scores.take([(0, 1.0), (3, 1.0)])
    assert scores.left_of_group(3) == [4]
    scores.request()
    assert (scores.left_of_group(0), scores.left_of_group(2)) == ([0, 1], [2])


def test_what_is_given_up_has_the_last_failure_and_no_completion_of_its_own() -> None:
    scores = two_groups()
    scores.take([(1, 1.0), (0, LATE)])
    scores.give_up(scores.left)
    errors = [score for scored in scores.results() for score in scored if isinstance(score, DataError)]
    assert [(error.reason, error.completion) for error in errors] == [
        ("reward_timeout", text) for text in ("a", *[""] * 3)
    ]
