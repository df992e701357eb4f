"""An environment of reasoning-gym's procedural tasks: https://github.com/open-thought/reasoning-gym

Questions, answers and scoring come from the library. A task carries its entry's metadata as plain JSON, so that scoring
needs only the task, and prompt templates can use the metadata's scalar keys (`{word}` in spell_backward).
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

with warnings.catch_warnings():
    # When Python compiles cellpylib, which reasoning-gym imports, it warns about the source of cellpylib.
    warnings.simplefilter("ignore", SyntaxWarning)
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

from asyncrl.config.import_path import suggest
from asyncrl.data.prompts import Task
from asyncrl.errors import ConfigError

_CHECKED_ENTRIES = 3
_OPTIONS_KEY = "environment.options.task_options"
_RESERVED = ("seed", "size")


class ReasoningGym:
    """One reasoning-gym dataset.

    `task` is the dataset's name, `size` the number of entries (some may repeat, if the library's generator repeats
    itself), and `task_options` the dataset's own options. With `exact` a reward is 1.0 for full credit, and else 0.0.
    Without it the reward is the library's partial credit; for example, spell_backward gives credit for single letters
    in the right place.
    """

    def __init__(
        self, task: str, *, size: int = 1000, task_options: Mapping[str, Any] | None = None, exact: bool = True
    ) -> None:
        if task not in DATASETS:
            hint = suggest(task, list(DATASETS))
            raise ConfigError(f"environment.options.task: reasoning-gym has no task {task!r}{hint}")
        if size < 1:
            raise ConfigError(f"environment.options.size: must be at least 1, got {size}")
        self._name = task
        self._size = size
        self._options = dict(task_options or {})
        self._exact = exact
        self._scorer = self._dataset(seed=0)

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns `size` tasks. With the seed s, the library makes entry i from the number s + i. This method gives it
        the seed s = `seed` · `size`, so that two different seeds never use the same number. Raises ConfigError if
        scoring needs metadata that JSON cannot represent."""
        dataset = self._dataset(seed=seed * self._size)
        entries = [dataset[index] for index in range(self._size)]
        for entry in entries[:_CHECKED_ENTRIES]:
            self._check_json(entry)
        return [_task(entry) for entry in entries]

    def score(self, task: Task, completion: str) -> float:
        """Returns the library's score of the completion; with `exact`, 1.0 if this is at least 1, and else 0.0. White
        space at the completion's ends is removed first."""
        entry = {"question": task.question, "answer": task.answer or None, "metadata": task.metadata}
        score = float(self._scorer.score_answer(completion.strip(), entry))
        return float(score >= 1.0) if self._exact else score

    def _dataset(self, *, seed: int) -> Any:
        for reserved in _RESERVED:
            if reserved in self._options:
                raise ConfigError(
                    f"{_OPTIONS_KEY}: {reserved!r} is set by run.seed and environment.options.size; remove it"
                )
        known = [field.name for field in fields(DATASETS[self._name][1]) if field.name not in _RESERVED]
        for option in self._options:
            if option not in known:
                raise ConfigError(
                    f"{_OPTIONS_KEY}: {self._name} has no option {option!r}; it has {', '.join(known) or 'none'}"
                    f"{suggest(option, known)}"
                )
        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=self._size, **self._options)
        except (TypeError, ValueError, AssertionError) as error:  # the library validates its options with asserts
            raise ConfigError(f"{_OPTIONS_KEY}: {self._name} refuses {self._options} ({error})") from error

    def _check_json(self, entry: dict[str, Any]) -> None:
        """Refuses datasets whose scoring needs metadata that JSON changes or cannot hold, such as tuples, which become
        lists: rewards would be wrong. It scores the answers of the first entries before and after JSON."""
        try:
            carried = self._scorer.score_answer(entry["answer"], json.loads(json.dumps(entry)))
        except (TypeError, ValueError) as error:
            carried = error
        if carried != self._scorer.score_answer(entry["answer"], entry):
            raise ConfigError(
                f"environment.options.task: {self._name} is not supported, because its scoring needs metadata that "
                "JSON cannot represent; choose another task"
            )


def _task(entry: dict[str, Any]) -> Task:
    question = str(entry["question"])
    metadata = json.loads(json.dumps(entry["metadata"]))
    return Task(question=question, prompt=question, answer=entry["answer"] or "", metadata=metadata)
