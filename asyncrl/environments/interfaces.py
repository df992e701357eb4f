"""Environments: sources of tasks, and rewards for completions.

The rest of the system uses an environment only through `Environment`, and finds it by its name in the config.
`build_tasks` is the only way from a config to prompts. The same config gives the same (training, held-out) tasks in
every process. Reward code is the user's code: it runs in the processes of `scoring.py`, not in the generator.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from asyncrl.config.import_path import call_with_options, resolve
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Row, Task, apply_template, read_jsonl, read_rows, split
from asyncrl.environments.reward_function import RewardFunction, reward_function
from asyncrl.errors import AsyncRLError, ConfigError, DatasetError
from asyncrl.user_code import describe_error

_log = logging.getLogger(__name__)


@runtime_checkable
class Environment(Protocol):
    """A single-turn environment."""

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns the environment's own tasks, determined by `seed`. A task's `prompt` equals its question, because the
        config's template is applied later."""

    def score(self, task: Task, completion: Any, /) -> Any:
        """Returns the reward of one completion (a text without special tokens), or the rewards of a group, in any form
        of `reward_function.py`.

        It is called in a scoring process, with a task that has been converted to JSON and back.
        """


def build_environment(section: EnvironmentSection) -> Environment:
    """Builds the environment `environment.name` with `environment.options`. Raises ConfigError if either is wrong."""
    factory: Callable[..., Any]
    match section.name:
        case "reasoning_gym":
            from asyncrl.environments.reasoning_gym import ReasoningGym as factory
        case "math":
            from asyncrl.environments.math import Math as factory
        case path:
            factory = resolve(path, key="environment.name")
    environment = call_with_options(factory, section.options, key="environment.options")
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment.name: {section.name!r} returned a {type(environment).__name__}, but an environment needs "
            "the methods tasks(seed) and score(task, completion)",
            key="environment.name",
        )
    return environment


def build_reward(section: EnvironmentSection) -> RewardFunction:
    """Returns the function of `environment.reward`, or the environment's own `score` if that is not set.

    With `environment.reward` the environment is not built. Raises ConfigError when the function does not exist or
    cannot be called as a reward.
    """
    function: Callable[..., Any]
    match section.reward:
        case None:
            function = build_environment(section).score
        case "exact_match":
            from asyncrl.environments.verifiers import exact_match as function
        case "math_verify":
            from asyncrl.environments.verifiers import math_verify as function
        case path:
            function = resolve(path, key="environment.reward")
    return reward_function(function, section)


def build_tasks(config: Config) -> tuple[list[Task], list[Task]]:
    """Returns (training, held-out) tasks. Their prompts are made with `data.prompt_template`.

    Skipped rows are logged with their counts. Raises ConfigError or DatasetError.
    """
    return split_tasks(config, read_tasks(config))


def split_tasks(config: Config, tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """Returns (training, held-out) tasks. Raises DatasetError if the training tasks are too few for one step."""
    data, groups = config.data, config.learner.groups_per_step
    train, heldout = split(tasks, data.heldout_fraction)
    if not train:
        raise DatasetError(
            f"data.dataset = {data.dataset}: none of its {len(tasks)} tasks remains for training, because "
            f"data.heldout_fraction = {data.heldout_fraction} holds out {len(heldout)} of them; lower it or add tasks"
        )
    if data.drop_last and data.epochs is not None and len(train) * data.epochs < groups:
        raise DatasetError(
            f"data.dataset = {data.dataset}: {len(train)} tasks remain for training, and data.epochs = {data.epochs} "
            f"uses each {data.epochs} times. A step needs learner.groups_per_step = {groups} groups, and "
            "data.drop_last drops a smaller rest, so no step would be trained; lower learner.groups_per_step, raise "
            "data.epochs, or set data.drop_last to false"
        )
    return train, heldout


def read_tasks(config: Config, *, first: int | None = None) -> list[Task]:
    """Returns the dataset's tasks with their prompts, before the split. `first` limits how many rows are read.

    Skipped rows are logged with their counts. Raises ConfigError or DatasetError; an error that the user's code raises
    becomes a DatasetError.
    """
    data = config.data
    if data.dataset == "jsonl":
        if data.path is None:
            raise ConfigError(
                "data.path: must be set for data.dataset = jsonl; give the path of the file", key="data.path"
            )
        tasks, skipped = read_jsonl(data.path, on_bad_row=data.on_bad_row, first=first)
    else:
        own = data.dataset == "environment"
        key, source = ("environment.name", config.environment.name) if own else ("data.dataset", data.dataset)
        rows = _rows_of_code(config, key=key, source=source, first=first)
        tasks, skipped = read_rows(rows, source=source, on_bad_row=data.on_bad_row)
    if skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        _log.warning("%s: skipped %d rows (%s)", data.path or data.dataset, sum(skipped.values()), counts)
    return apply_template(data.prompt_template, tasks)


def _rows_of_code(config: Config, *, key: str, source: str, first: int | None) -> Iterator[Row]:
    """Yields the rows of the environment, or of the function `source`; at most `first`.

    Raises DatasetError when the user's code raises, which says what was raised, and where.
    """
    try:
        if key == "environment.name":
            made: object = build_environment(config.environment).tasks(config.run.seed)
        else:
            made = call_with_options(resolve(source, key=key), config.data.options, key="data.options")
        if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise DatasetError(
                f"{key} = {source} returned a {type(made).__name__}; return or yield asyncrl Tasks, or dicts with the "
                "texts 'prompt' and 'answer'"
            )
        yield from islice(made, first)
    except AsyncRLError:
        raise
    except Exception as error:
        raise DatasetError(f"{key} = {source} raised {describe_error(error)}") from error
