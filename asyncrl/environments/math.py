"""Mathematics with reference answers: the tasks come from a dataset, and math-verify scores the completions."""

from typing import NoReturn

from asyncrl.data.prompts import Task
from asyncrl.environments.verifiers import math_verify
from asyncrl.errors import ConfigError


class Math:
    """Scores answers to prompts from a JSONL file or from a dataset given by import path. It has no tasks of its
    own."""

    def tasks(self, seed: int) -> NoReturn:
        raise ConfigError(
            "data.dataset: the math environment has no tasks of its own; set data.dataset: jsonl and data.path"
        )

    def score(self, task: Task, completion: str) -> float:
        """Calls `verifiers.math_verify`."""
        return math_verify(task, completion)
