"""Whether what a configuration names is on this machine: files, models, modules, reasoning-gym's tasks, GPUs, cores.

Checks what the roles of a command need, without importing it. `before_start.py` tries the user's own code, the rows of
datasets and models of the hub.
"""

import difflib
import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from asyncrl.algorithms.presets import baseline_of
from asyncrl.buffer.membership import Role
from asyncrl.config.import_path import is_import_path, missing_module, suggest
from asyncrl.config.load import KeyPath
from asyncrl.config.schema import Config
from asyncrl.environments.reasoning_gym_tasks import task_names
from asyncrl.errors import ConfigError
from asyncrl.policy.model_directory import is_tiny, missing_parts, model_problems, read_model

_TASK = "environment.options.task"
_NVIDIA = "nvidia[0-9]*"
_GPU_FILES = (_NVIDIA, "dxg", "kfd")
"""Device files of NVIDIA, of WSL and of AMD."""


def check_presence(config: Config, *, roles: Collection[Role], origins: Mapping[KeyPath, str]) -> list[str]:
    """Warnings about a configuration whose parts are there for `roles`; ConfigError with every part that is missing.

    `origins` are the configuration's, by `config_origins`.
    """
    model, warnings = _model(config, roles, origins)
    missing = [*_file(config), *model, *_modules(config, roles), *_trackers(config, roles)]
    if config.environment.name == "reasoning_gym" and builds_environment(config, roles):
        missing += _reasoning_gym_task(config)
    # only a Ray that `asyncrl up` starts is on this machine for certain
    here = len(roles) == len(Role) and config.ray.address is None
    missing += _gpus(config) if here else []
    if missing:
        raise ConfigError("\n".join(missing))
    return [*warnings, *(_cores(config) if here else [])]


def check_model(config: Config) -> None:
    """ConfigError when `model.path` names a directory that is not there, or one that does not hold a whole model."""
    problems, _ = _model(config, tuple(Role), {})
    if problems:
        raise ConfigError("\n".join(problems), key="model.path")


def builds_environment(config: Config, roles: Collection[Role]) -> bool:
    """Prompts may come from it, in every process; and rewards, in the generators."""
    scores = Role.GENERATOR in roles and config.environment.reward is None
    return scores or config.data.dataset == "environment"


def model_directory(config: Config) -> Path | None:
    """The directory that `model.path` names, whether it is there or not; None for a model of the hub.

    A path is a directory if it is one, if it begins with `/`, `./`, `../`, `~` or `models/`, if its first part is a
    folder here, or if it has more parts than the owner and the name of a model of the hub.
    """
    text = config.model.path
    path = Path(text)
    first, *rest = text.split("/")
    local = (
        text.startswith(("/", "./", "../", "~", "models/")) or len(rest) > 1 or (bool(rest) and Path(first).is_dir())
    )
    return path if local or path.exists() or config.model.tiny is not None else None


def _file(config: Config) -> Iterator[str]:
    path = config.data.path
    if path is not None and not path.is_file():
        yield f"data.path = {path}: there is no such file; name one with a JSON object a line"


def _model(config: Config, roles: Collection[Role], origins: Mapping[KeyPath, str]) -> tuple[list[str], list[str]]:
    """Problems and warnings."""
    path, run = model_directory(config), config.run.dir / config.run.name
    named = f"model.path = {config.model.path}"
    if path is None:
        return [], []
    if path.resolve().is_relative_to(run.resolve()):
        return [
            f"{named}: it is in {run}, which is moved aside for the next run of that name; choose another run.name"
        ], []
    if config.model.tiny is not None and is_tiny(path):
        return [], []
    if not path.exists():
        return [f"{named}: {reason}" for reason in _no_directory(path, config, origins)], []
    if not path.is_dir():
        return [f"{named}: is a file; name the model's directory"], []
    if missing := missing_parts(path, weights=Role.LEARNER in roles):
        return [
            f"{named}: the directory is no whole Hugging Face model, it lacks {' and '.join(missing)}; name another one"
        ], []
    try:
        found = read_model(path)
    except (OSError, ValueError) as error:  # msgspec's and json's errors are ValueErrors
        return [f"{named}: its config.json or tokenizer.json cannot be read ({error}); name another directory"], []
    warnings = []
    if config.model.tiny is not None:
        warnings.append(f"{named} is there and is used as it is: model.tiny is not applied")
    if found.added:
        warnings.append(
            f"{named}: its tokenizer has added tokens beyond the model's vocabulary of {found.vocabulary}, such as "
            f"{found.added[0]!r}; a prompt cannot contain them"
        )
    return model_problems(found, config), warnings


def _no_directory(path: Path, config: Config, origins: Mapping[KeyPath, str]) -> Iterator[str]:
    """Why nothing may be built at a path where there is nothing."""
    siblings = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    hint = f" (did you mean {path.parent / close[0]}?)" if close else ""
    if config.model.tiny is None:
        yield f"there is no such folder here{hint}; name a model's directory, or a model of the hub"
    elif path.resolve().is_relative_to(config.run.dir.resolve()):
        yield (
            f"there is no such folder here{hint}, and no tiny model is built in run.dir = {config.run.dir}; name a "
            "directory that is there, or one elsewhere"
        )
    elif not _names_tiny_too(origins):
        yield (
            f"there is no such folder here{hint}, and no tiny model is built there: model.path is set "
            f"{origins['model', 'path']}, and model.tiny is not; name a directory that is there, or set "
            "model.tiny={} beside model.path to build one"
        )


def _names_tiny_too(origins: Mapping[KeyPath, str]) -> bool:
    """Whether the file or command line that sets `model.path` sets something of `model.tiny` as well. The default path
    belongs to tiny models."""
    where = origins.get(("model", "path"))
    return where is None or any(key[:2] == ("model", "tiny") and origin == where for key, origin in origins.items())


def _modules(config: Config, roles: Collection[Role]) -> Iterator[str]:
    named: dict[str, object] = {"data.dataset": config.data.dataset}
    if builds_environment(config, roles):
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
    pools = {"generator": config.generator.gpus, "learner": config.learner.gpus}
    processes = {"generator": config.generator.replicas, "learner": config.learner.ranks}
    if config.critic is not None:
        pools["critic"], processes["critic"] = config.critic.gpus, config.critic.ranks
    if shutil.which("nvidia-smi") is not None or any(next(Path("/dev").glob(name), None) for name in _GPU_FILES):
        there, wanted = len(list(Path("/dev").glob(_NVIDIA))), sum(pools[pool] * processes[pool] for pool in pools)
        if there and wanted > there:
            terms = [
                f"{pool}.{'replicas' if pool == 'generator' else 'ranks'} × {pool}.gpus = {processes[pool]} × {gpus:g}"
                for pool, gpus in pools.items()
                if gpus > 0
            ]
            yield (
                f"{' and '.join(terms)}: needs {wanted:g} GPUs, this machine has {there}, and no other machine can "
                "join the Ray that `asyncrl up` starts; lower them, or set ray.address to a cluster with more GPUs"
            )
        return
    for pool, gpus in pools.items():
        key = f"{pool}.gpus"
        if gpus > 0:
            yield (
                f"{key} = {gpus:g}: this machine has no GPU, and no other machine can join the Ray that `asyncrl up` "
                f"starts; set {key} to 0, or ray.address to a cluster with GPUs"
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
