"""The scores of a request's groups, which become known one by one: rewards, and errors of single completions."""

from collections.abc import Iterable, Sequence
from itertools import groupby, islice

import msgspec

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
        # The completions of all groups one after the other; for each, the index of its group and its score.
        self._completions = [text for group in groups for text in group.completions]
        self._group_of = [number for number, group in enumerate(groups) for _ in group.completions]
        self._found: list[Score | None] = [None] * len(self._completions)
        self._requested: list[int] = []
        self._last: Failure | None = None
        self.rewards = 0
        """Number of completions that have a reward."""

    @property
    def open(self) -> int:
        """Number of completions that have no score."""
        return self._found.count(None)

    def request(self) -> tuple[Group, ...]:
        """Returns the groups with those completions that have no score yet. The other methods name a completion by its
        index in this request, which counts over all of its groups."""
        self._requested = [place for place, score in enumerate(self._found) if score is None]
        return tuple(
            Group(task=self._groups[group].task, completions=tuple(self._completions[place] for place in places))
            for group, places in groupby(self._requested, key=self._group_of.__getitem__)
        )

    @property
    def left(self) -> list[int]:
        """The indices of the requested completions that have no score yet."""
        return [number for number, place in enumerate(self._requested) if self._found[place] is None]

    def left_of_group(self, number: int) -> list[int]:
        """Returns the indices of the requested completions in the group of completion `number` that have no score
        yet."""
        group = self._group_of[self._requested[number]]
        return [each for each in self.left if self._group_of[self._requested[each]] == group]

    def take(self, outcomes: Iterable[tuple[int, Outcome]]) -> bool:
        """Keeps the outcomes of completions, and returns True. Keeps none and returns False if one of the completions
        was not requested, has a score already, or occurs twice."""
        found = list(outcomes)
        numbers = {number for number, _ in found}
        if len(numbers) != len(found) or not numbers <= set(self.left):
            return False
        for number, outcome in found:
            place = self._requested[number]
            self._found[place] = self._score(outcome, place)
        return True

    def fail(self, numbers: Iterable[int], failure: Failure) -> None:
        """Makes `failure` the score of the requested completions with these indices."""
        self.take((number, failure) for number in numbers)

    def give_up(self, numbers: Iterable[int]) -> None:
        """Makes the last failure the score of these requested completions, because they are not scored any more."""
        assert self._last is not None, "no completion has failed"
        self.fail(numbers, msgspec.structs.replace(self._last, of_call=True))

    def results(self) -> list[list[Score]]:
        """Returns a list of scores for each group, in the order of the group's completions. Call it only when `open` is
        0: scores that are not known are left out."""
        found = iter(self._found)
        return [[score for score in islice(found, len(each.completions)) if score is not None] for each in self._groups]

    def _score(self, outcome: Outcome, place: int) -> Score:
        if not isinstance(outcome, Failure):
            self.rewards += 1
            return outcome
        self._last = outcome
        completion = "" if outcome.of_call else self._completions[place]
        return DataError(outcome.message, reason=outcome.reason, completion=completion, error=outcome.error)
