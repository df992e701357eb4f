"""The facts about a run that do not change, from its configuration, its data and its machine.

The live view in the learner's process makes them from its configuration (`setting_of`), all other views from the run's
directory (`setting_at`).
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.algorithms.baselines import GROUP_BASELINES, Outcome, resolve_advantage
from asyncrl.algorithms.checks import uncorrected_in_words
from asyncrl.algorithms.presets import advantage_of
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config, ScoringSection
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import known_data, read_config, read_info

WITH_TOOLS = "calculator"
"""The built-in environment whose model calls a tool."""
OF_OTHERS = ("verifiers", "openenv")
"""Built-in environments that play an environment of another library, which may have one turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Facts about a run that do not change.

    - `run` is its directory, as a command names it.
    - `total_steps` is `learner.total_steps`, `learning_rate` is `learner.optimizer.learning_rate`.
    - `equal_rewards_teach` is whether the algorithm has a gradient when all rewards of a group are equal.
    - `room` is whether a core is free for another process; None if it is not known, or if the run uses GPUs.
    - `hidden_tags` are tags that the text for the reward never has, because the tokenizer removes them.
    - `chat_off` is whether prompts are not put into the model's chat template (`data.chat=off`).
    - `tools` is whether all episodes may call tools that asyncrl runs, `several_turns` whether they are made for
      several turns. An agent of the user's own may need one turn only.
    - `reward_weights` are the weights of `environment.rewards` by name, in a mixture those of all parts.
    - `dtype` is `model.dtype`; None if unknown.
    - `uncorrected` says in words that the run trains on stale data without a correction, as a baseline
      (`algorithm.uncorrected`); None for other runs.

    The defaults are for a run whose configuration is not known: a group baseline, on an unknown machine.
    """

    run: str = "RUN"
    total_steps: int | None = None
    learning_rate: float | None = None
    equal_rewards_teach: bool = False
    room: bool | None = None
    hidden_tags: tuple[str, ...] = ()
    chat_off: bool = False
    tools: bool = False
    several_turns: bool = False
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    dtype: str | None = None
    uncorrected: str | None = None


def setting_of(config: Config, *, cores: int | None, hidden_tags: tuple[str, ...] = ()) -> Setting:
    """Returns the setting for a configuration. `cores` is the number of cores of the run's machine; None if unknown."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    compares = config.critic is None and isinstance(axes, Outcome) and axes.baseline in GROUP_BASELINES
    parts = part_configs(config).values()
    played = [part.environment for part in parts]
    return Setting(
        run=str(config.run.dir / config.run.name),
        total_steps=config.learner.total_steps,
        learning_rate=config.learner.optimizer.learning_rate,
        equal_rewards_teach=not compares,
        room=_room(config, cores=cores),
        hidden_tags=hidden_tags,
        chat_off=all(part.data.chat == "off" for part in parts),
        tools=all(part.has_tools or (part.plays_agents and part.name == WITH_TOOLS) for part in played),
        several_turns=all(_has_several_turns(part) for part in played),
        reward_weights={term.name: term.weight for section in played for term in section.rewards},
        dtype=config.model.dtype,
        uncorrected=uncorrected_in_words(config),
    )


def setting_at(run_dir: Path) -> Setting:
    """Returns the setting of the run that wrote `run_dir`, or the default when the directory cannot be read.

    Its `run` is `run_dir`, because the directory of an earlier run is renamed when a new run takes its name. The
    number of cores is known only when the run started its own Ray on this host.
    """
    try:
        config = read_config(run_dir)
        info = read_info(run_dir)
    except (ConfigError, RunError):
        return Setting()
    here = config.ray.address is None and info.host == socket.gethostname()
    data = known_data(run_dir)
    known = setting_of(
        config, cores=usable_cores() if here else None, hidden_tags=() if data is None else data.hidden_tags
    )
    return replace(known, run=str(run_dir))


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _has_several_turns(part: ScoringSection) -> bool:
    """Returns whether episodes are made for several turns, as far as the configuration shows it."""
    if part.max_turns == 1 or part.agent is not None:
        return False
    return part.has_tools or (part.plays_agents and part.name not in OF_OTHERS)


def _room(config: Config, *, cores: int | None) -> bool | None:
    """Returns whether a core is free for another rank or replica; None when `cores` is unknown or the run uses GPUs."""
    if cores is None or config.learner.gpus or config.generator.gpus:
        return None
    processes = config.learner.ranks + config.generator.replicas * config.generator.tensor_parallel_size
    processes += config.critic.ranks if config.critic is not None else 0
    return cores > processes
