"""The scores of a request's groups, which become known one by one: rewards, and errors of single completions."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from asyncrl.environments.scoring_messages import Components, Failure, Group, Outcome
from asyncrl.errors import DataError

Score = float | Components | DataError
"""The reward of a completion, or why it has none. The `reason` of the error is a RewardFailure, its message says what
happened, and its `completion` is the text of the completion. The text is empty if a call for several completions
failed, or if the completion was not scored because the reward had failed too often."""


class Scores:
    """The scores of `groups`. Completions without a score are requested, again if their request was interrupted."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._found: list[list[Score | None]] = [[None] * len(group.completions) for group in groups]
        self._requested: list[tuple[int, int]] = []
        self.open = sum(len(group.completions) for group in groups)
        """Number of completions that have no score."""
        self._last: Failure | None = None
        self.rewards = 0
        """Number of completions that have a reward."""

    def request(self) -> tuple[Group, ...]:
        """Returns the groups with those completions that have no score yet. The numbers of completions below count
        over this request."""
        self._requested = [
            (group, place)
            for group, found in enumerate(self._found)
            for place, score in enumerate(found)
            if score is None
        ]
        if len(self._requested) == sum(map(len, self._found)):
            return tuple(self._groups)  # the first request
        return tuple(
            Group(
                task=self._groups[group].task,
                completions=tuple(self._groups[group].completions[place] for _, place in places),
            )
            for group, places in groupby(self._requested, key=lambda each: each[0])
        )

    @property
    def left(self) -> list[int]:
        """The numbers of the requested completions that have no score yet."""
        return [number for number, (group, place) in enumerate(self._requested) if self._found[group][place] is None]

    def of_group(self, number: int) -> list[int]:
        """Returns the numbers of the requested completions in the group of completion `number`."""
        return [each for each, (group, _) in enumerate(self._requested) if group == self._requested[number][0]]

    def take(self, outcomes: Iterable[tuple[int, Outcome]]) -> bool:
        """Keeps the outcomes of completions. Returns False if one of them was not requested, or is known."""
        for number, outcome in outcomes:
            if number not in range(len(self._requested)):
                return False
            group, place = self._requested[number]
            if self._found[group][place] is not None:
                return False
            self._found[group][place] = self._score(outcome, group, place)
            self.open -= 1
        return True

    def fail(self, numbers: Iterable[int], failure: Failure) -> None:
        """Gives each of the requested completions the failure."""
        self.take((number, failure) for number in numbers)

    def give_up(self) -> None:
        """Gives each completion without a score the last failure."""
        assert self._last is not None, "no completion has failed"
        self.fail(self.left, Failure(reason=self._last.reason, message=self._last.message, of_call=True))

    def results(self) -> list[list[Score]]:
        """Returns the scores of each group in the order of its completions. All scores must be known."""
        return [[score for score in found if score is not None] for found in self._found]

    def _score(self, outcome: Outcome, group: int, place: int) -> Score:
        if not isinstance(outcome, Failure):
            self.rewards += 1
            return outcome
        self._last = outcome
        completion = "" if outcome.of_call else self._groups[group].completions[place]
        return DataError(outcome.message, reason=outcome.reason, completion=completion)
