"""Whether what a configuration names is on this machine: files, modules, reasoning-gym's tasks, GPUs, cores.

Looked for is what the roles of a command need, and nothing is imported for it: a module's inside, a dataset's rows and
the hub's models show when the run starts.
"""

import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from asyncrl.algorithms.presets import baseline_of
from asyncrl.buffer.membership import Role
from asyncrl.config.import_path import is_import_path, missing_module, suggest
from asyncrl.config.schema import Config
from asyncrl.environments.reasoning_gym_tasks import task_names
from asyncrl.errors import ConfigError

_TASK = "environment.options.task"


def check_presence(config: Config, *, roles: Collection[Role]) -> list[str]:
    """Warnings about a configuration whose parts are there for `roles`; ConfigError with every part that is missing."""
    missing = [*_file(config), *_model(config), *_modules(config, roles), *_trackers(config, roles)]
    if config.environment.name == "reasoning_gym" and _builds_environment(config, roles):
        missing += _reasoning_gym_task(config)
    if missing:
        raise ConfigError("\n".join(missing))
    # only a Ray that `asyncrl up` starts is on this machine for certain
    here = len(roles) == len(Role) and config.ray.address is None
    return [*_gpus(config), *_cores(config)] if here else []


def _builds_environment(config: Config, roles: Collection[Role]) -> bool:
    """Prompts may come from it, in every process; and rewards, in the generators."""
    scores = Role.GENERATOR in roles and config.environment.reward is None
    return scores or config.data.dataset == "environment"


def _file(config: Config) -> Iterator[str]:
    path = config.data.path
    if path is not None and not path.is_file():
        yield f"data.path = {path}: there is no such file; name one with a JSON object a line"


def _model(config: Config) -> Iterator[str]:
    """Only what can be no name of the hub's: whether that has it shows when the run starts."""
    path = config.model.path
    if config.model.tiny is None and path.startswith(("/", "./", "../", "~")) and not Path(path).is_dir():
        yield f"model.path = {path}: there is no such directory; name one, or a model of the hub"
    run = config.run.dir / config.run.name
    if config.model.tiny is None and Path(path).resolve().is_relative_to(run.resolve()):
        yield (
            f"model.path = {path}: it is in {run}, which is moved aside for the next run of that name; choose another "
            "run.name"
        )


def _modules(config: Config, roles: Collection[Role]) -> Iterator[str]:
    named: dict[str, object] = {"data.dataset": config.data.dataset}
    if _builds_environment(config, roles):
        named["environment.name"] = config.environment.name
    if Role.GENERATOR in roles:
        named["environment.reward"] = config.environment.reward
    if Role.LEARNER in roles:
        named["algorithm.loss"] = config.algorithm.loss
        named["algorithm.advantage"] = baseline_of(config.algorithm)
    for key, value in named.items():
        if isinstance(value, str) and is_import_path(value) and (problem := missing_module(value, key=key)):
            yield problem


def _trackers(config: Config, roles: Collection[Role]) -> Iterator[str]:
    for name in config.metrics.trackers if Role.LEARNER in roles else ():
        if importlib.util.find_spec(name) is None:
            yield f"metrics.trackers = {name}: is not installed; run pip install 'asyncrl[{name}]', or leave it out"


def _reasoning_gym_task(config: Config) -> Iterator[str]:
    names = sorted(task_names())
    task = config.environment.options.get("task")
    if not names:
        return  # another library than the one that we can read: importing it tells
    if task is None:
        yield f"{_TASK}: is missing; name one of reasoning-gym's {len(names)} tasks, e.g. spell_backward"
    elif task not in names:
        yield f"{_TASK}: reasoning-gym has no {task!r}{suggest(str(task), names)}"


def _gpus(config: Config) -> Iterator[str]:
    if shutil.which("nvidia-smi") is not None:
        return
    for key, gpus in (("generator.gpus", config.generator.gpus), ("learner.gpus", config.learner.gpus)):
        if gpus > 0:
            yield (
                f"{key} = {gpus:g}, and this machine shows no GPU (it has no nvidia-smi): `asyncrl up` would wait for "
                "one until ray.placement_timeout_s is over; set it to 0, or ray.address to a cluster that has some"
            )


def _cores(config: Config) -> Iterator[str]:
    """Of engines in parts alone: what waits by spinning leaves no time to the others."""
    generator, cores = config.generator, len(os.sched_getaffinity(0))
    spinning = generator.replicas * generator.tensor_parallel_size
    if generator.gpus == 0 and generator.tensor_parallel_size > 1 and spinning > cores:
        yield (
            f"generator.tensor_parallel_size × generator.replicas = {generator.tensor_parallel_size} × "
            f"{generator.replicas} on CPUs needs {spinning} cores, and this machine has {cores}: the parts of an "
            "engine wait for each other by spinning, and all is slow; lower them"
        )
