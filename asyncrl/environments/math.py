"""Mathematics with a reference answer: tasks come from a dataset, scoring from math-verify."""

from typing import NoReturn

from asyncrl.data.prompts import Task
from asyncrl.environments.verifiers import math_verify
from asyncrl.errors import ConfigError


class Math:
    """Scores answers to the prompts of a JSONL file or of a dataset given by import path; has no tasks of its own."""

    def tasks(self, seed: int) -> NoReturn:
        raise ConfigError("data.dataset: the math environment has no tasks of its own; set jsonl", key="data.dataset")

    def score(self, task: Task, completion: str) -> float:
        """See `verifiers.math_verify`."""
        return math_verify(task, completion)
