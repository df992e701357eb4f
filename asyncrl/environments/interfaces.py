"""Environments: where tasks may come from, and what turns a completion into a reward.

The rest of the system sees an environment through `Environment` alone and finds it by its name in the config.
`build_tasks` is the one way from a config to prompts: the same config gives the same (training, held-out) tasks in
every process. Reward code is foreign code: it runs in `scoring.py`'s processes, not in the generator.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from asyncrl.config.import_path import call_with_options, is_import_path, resolve, suggest
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task, apply_template, numbered, read_jsonl, split
from asyncrl.environments.reward_function import RewardFunction, reward_function
from asyncrl.errors import ConfigError, DatasetError

_log = logging.getLogger(__name__)


@runtime_checkable
class Environment(Protocol):
    """A single-turn environment."""

    def tasks(self, seed: int) -> Sequence[Task]:
        """Its own tasks, decided by `seed`. A task's `prompt` is its question: the config's template comes later."""

    def score(self, task: Task, completion: Any, /) -> Any:
        """Reward of one completion, a text without special tokens; or of a group, in any form of `reward_function.py`.

        Called in a scoring process, with a task that went through JSON.
        """


def build_environment(section: EnvironmentSection) -> Environment:
    """The environment that `environment.name` names, made with `environment.options`. ConfigError on either."""
    factory: Callable[..., Any]
    match section.name:
        case "reasoning_gym":
            from asyncrl.environments.reasoning_gym import ReasoningGym as factory
        case "math":
            from asyncrl.environments.math import Math as factory
        case path if is_import_path(path):
            factory = resolve(path, key="environment.name")
        case name:
            hint = suggest(name, ["reasoning_gym", "math"])
            raise ConfigError(
                f"environment.name: {name!r} is neither reasoning_gym, math nor an import path{hint}",
                key="environment.name",
            )
    environment = call_with_options(factory, section.options, key="environment.options")
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"environment.name: {section.name!r} made a {type(environment).__name__} without tasks(seed) and "
            "score(task, completion)",
            key="environment.name",
        )
    return environment


def build_reward(section: EnvironmentSection) -> RewardFunction:
    """The function of `environment.reward`, or the environment's own `score` if that is not set.

    With `environment.reward` the environment is not built. ConfigError when there is no such function, or when it
    cannot be called as a reward is.
    """
    function: Callable[..., Any]
    match section.reward:
        case None:
            function = build_environment(section).score
        case "exact_match":
            from asyncrl.environments.verifiers import exact_match as function
        case "math_verify":
            from asyncrl.environments.verifiers import math_verify as function
        case path if is_import_path(path):
            function = resolve(path, key="environment.reward")
        case name:
            hint = suggest(name, ["exact_match", "math_verify"])
            raise ConfigError(
                f"environment.reward: {name!r} is neither exact_match, math_verify nor an import path{hint}",
                key="environment.reward",
            )
    return reward_function(function, section)


def build_tasks(config: Config) -> tuple[list[Task], list[Task]]:
    """(training, held-out) tasks with their prompts made by `data.prompt_template`.

    Skipped rows are logged with their counts. ConfigError or DatasetError.
    """
    data = config.data
    match data.dataset:
        case "environment":
            tasks = list(build_environment(config.environment).tasks(config.run.seed))
        case "jsonl":
            if data.path is None:
                raise ConfigError("data.path: must be set for data.dataset = jsonl", key="data.path")
            tasks, skipped = read_jsonl(data.path, on_bad_row=data.on_bad_row)
            _report_skipped(skipped, source=str(data.path))
        case path if is_import_path(path):
            made = call_with_options(resolve(path, key="data.dataset"), data.options, key="data.options")
            tasks = list(made)
            for number, task in enumerate(tasks, start=1):
                if not isinstance(task, Task):
                    raise DatasetError(f"{path}: item {number} is a {type(task).__name__}, not an asyncrl Task")
        case name:
            hint = suggest(name, ["environment", "jsonl"])
            raise ConfigError(
                f"data.dataset: {name!r} is neither environment, jsonl nor an import path{hint}", key="data.dataset"
            )
    tasks = apply_template(data.prompt_template, numbered(tasks))
    train, heldout = split(tasks, data.heldout_fraction)
    if not train:
        raise DatasetError(
            f"data.dataset = {data.dataset}: no training tasks remain of {len(tasks)} "
            f"({len(heldout)} held out by data.heldout_fraction = {data.heldout_fraction})"
        )
    return train, heldout


def _report_skipped(skipped: "dict[str, int]", *, source: str) -> None:
    if skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        _log.warning("%s: skipped %d rows (%s)", source, sum(skipped.values()), counts)
