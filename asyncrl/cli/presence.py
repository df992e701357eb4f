"""Checks that the parts a configuration names are on this machine: files, models, modules, tasks, GPUs and cores.

Only the parts that the command's roles need are checked, and nothing is imported. `before_start.py` tries the user's
own code, the rows of datasets, and whether the Hugging Face Hub has a model.
"""

import difflib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from asyncrl.algorithms.presets import baseline_of
from asyncrl.common.roles import Role
from asyncrl.config.import_path import is_import_path, missing_module, suggest
from asyncrl.config.parts import all_configs, key_of
from asyncrl.config.schema import Config, KeyPath
from asyncrl.demo.directory import is_tiny, why_not_built
from asyncrl.deployment.temporary_folders import temporary_folder_problems
from asyncrl.environments.reasoning_gym_tasks import task_names
from asyncrl.errors import ConfigError
from asyncrl.policy.families import family_problems, is_tied
from asyncrl.policy.model_directory import (
    counts_problem,
    missing_parts,
    model_problems,
    read_json,
    read_model,
    second_head,
)

_TASK = "environment.options.task"
_NVIDIA = "nvidia[0-9]*"
_GPU_FILES = (_NVIDIA, "dxg", "kfd")
"""Patterns of the device files of GPUs: NVIDIA, WSL, AMD."""


def check_presence(
    config: Config, *, roles: Collection[Role], origins: Mapping[KeyPath, str], starts: bool = True
) -> list[str]:
    """Returns warnings about a configuration, if all parts that `roles` need are there.

    Raises ConfigError with one line for each missing part. `origins` says where each key was set (`config_origins`).
    Without `starts` no run is started on this machine, and GPUs that it lacks are warnings.
    """
    model, warnings = (inside, []) if (inside := _inside_run(config)) else _model(config, roles, origins)
    missing = [*model, *_modules(config, roles), *_trackers(config, roles)]
    for name, part in all_configs(config).items():
        missing += _of_part(part, roles, prefix=key_of(name))
    missing += _run_directory(config) if Role.LEARNER in roles else []
    # GPUs and cores of this machine matter only for a Ray that `asyncrl up` starts. Other clusters may have other
    # nodes.
    here = len(roles) == len(Role) and config.ray.address is None
    without_gpus = list(_gpus(config)) if here else []
    if starts:
        missing += without_gpus
    missing += map(str, temporary_folder_problems(ray=here, vllm=Role.GENERATOR in roles))
    if missing:
        raise ConfigError("\n".join(missing))
    elsewhere = [f"on this machine `asyncrl up` is refused: {problem}" for problem in without_gpus]
    return [*warnings, *elsewhere, *(_cores(config) if here else [])]


def _of_part(config: Config, roles: Collection[Role], *, prefix: str) -> Iterator[str]:
    """Yields what the dataset and the rewards of `config` need and this machine lacks."""
    path = config.data.path
    if config.data.dataset == "jsonl" and path is not None and not path.is_file():
        yield f"{prefix}data.path = {path}: there is no such file; name a file with one JSON object in each line"
    if config.environment.name == "reasoning_gym" and builds_environment(config, roles):
        yield from (f"{prefix}{problem}" for problem in _reasoning_gym_task(config))


def check_model(config: Config) -> None:
    """Raises ConfigError if `model.path` is a directory that does not exist or that lacks a part of a model, or if the
    sizes of the model do not fit."""
    problems, _ = _model(config, tuple(Role), {})
    if problems:
        raise ConfigError("\n".join(problems))


def builds_environment(config: Config, roles: Collection[Role]) -> bool:
    """Returns whether deployments of `roles` build the environment: for its tasks, or in generators for its rewards."""
    environment = config.environment
    replaced = environment.agent or environment.reward or environment.rewards
    scores = Role.GENERATOR in roles and not replaced
    return scores or config.data.dataset == "environment"


def model_directory(config: Config) -> Path | None:
    """Returns the directory that `model.path` names, whether it exists or not; None for a Hugging Face Hub id.

    A path is a directory if the directory exists, if the path begins with `/`, `./`, `../`, `~` or `models/`, if its
    first part is a folder in the working directory, or if it has more than the two parts of a Hub id (`owner/name`).
    With `model.tiny` it is always a directory.
    """
    text = config.model.path
    path = Path(text)
    first, *rest = text.split("/")
    local = (
        text.startswith(("/", "./", "../", "~", "models/")) or len(rest) > 1 or (bool(rest) and Path(first).is_dir())
    )
    return path if local or path.exists() or config.model.tiny is not None else None


def model_files(config: Config) -> Path | None:
    """Returns the folder of the model's files on this machine.

    None if a tiny model is not built yet, or if a model of the Hugging Face Hub is not in the cache.
    """
    path = model_directory(config)
    if path is not None:
        return path if (path / "config.json").is_file() else None
    from asyncrl.data.light_tokenizer import cached_files

    return cached_files(config.model.path)


def _run_directory(config: Config) -> Iterator[str]:
    """Yields a problem if the run's directory cannot be written.

    Tries to write a file without a name: the file permissions do not show a read-only or a full file system.
    """
    path = config.run.dir / config.run.name
    existing = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as error:
        yield (
            f"run.dir = {config.run.dir}: the run's directory {path} cannot be written ({existing}: {error.strerror}); "
            "set run.dir to a folder in which you can create files"
        )


def _inside_run(config: Config) -> list[str]:
    """Returns a problem if the model is in the directory of the run itself."""
    path, run = model_directory(config), config.run.dir / config.run.name
    if path is None or not path.resolve().is_relative_to(run.resolve()):
        return []
    return [
        f"model.path = {config.model.path}: is in {run}, and the start of a run with that name moves this directory "
        "away; choose another run.name"
    ]


def _model(config: Config, roles: Collection[Role], origins: Mapping[KeyPath, str]) -> tuple[list[str], list[str]]:
    """Returns (problems, warnings) of `model.path`: a directory, or a model in the cache of the Hugging Face Hub."""
    path, named = model_directory(config), f"model.path = {config.model.path}"
    if path is None:
        from asyncrl.data.light_tokenizer import cached_files

        files = cached_files(config.model.path)
    elif config.model.tiny is not None and is_tiny(path):
        return [], []
    elif not path.exists():
        return [f"{named}: {reason}" for reason in _no_directory(path, config, origins)], []
    elif problem := _incomplete(path, config, roles):
        return [f"{named}: {problem}"], []
    else:
        files = path
    if files is None:
        return [], []
    try:
        found, described = read_model(files), read_json(files / "config.json")
        if (problem := counts_problem(files)) is not None:
            return [f"{named}: {problem}"], []
    except (OSError, ValueError) as error:  # the errors of msgspec and json are ValueErrors
        return [f"{named}: its config.json or tokenizer.json cannot be read ({error}); name another directory"], []
    warnings = []
    if config.model.tiny is not None:
        warnings.append(f"{named} is a model that asyncrl did not build and is used as it is: model.tiny has no effect")
    if found.added:
        warnings.append(
            f"{named}: the tokenizer has added tokens beyond the model's vocabulary of {found.vocabulary}, such as "
            f"{found.added[0]!r}; a prompt must not contain them"
        )
    problems, unknown = family_problems(described, config)
    if is_tied(described) and (names := second_head(files)) is not None:
        problems.append(
            f"{named}: config.json says that head and embeddings are one matrix (tie_word_embeddings), but the files "
            f"have {names[0]} and {names[1]} with different numbers; learner and engines would choose differently. Set "
            f"tie_word_embeddings to false in config.json, or remove {names[0]} from the files"
        )
    return [*model_problems(found, config), *problems], [*warnings, *unknown]


def check_planned_family(config: Config) -> list[str]:
    """Returns the warnings about the family of the model, if its config.json is on this machine. Raises ConfigError if
    it cannot be trained or served; the other files may be absent."""
    files = model_files(config)
    if files is None:
        return []
    try:
        problems, warnings = family_problems(read_json(files / "config.json"), config)
    except (OSError, ValueError):
        return []  # the plan reads the file too, and its error says why it cannot
    if problems:
        raise ConfigError("\n".join(problems))
    return warnings


def _incomplete(path: Path, config: Config, roles: Collection[Role]) -> str | None:
    """Returns why `path` is not the directory of a whole model; None if it is one."""
    if not path.is_dir():
        return "is a file; name the model's directory"
    if missing := missing_parts(path, weights=Role.LEARNER in roles or config.model.lora is not None):
        return (
            f"the directory is not a complete Hugging Face model, it lacks {' and '.join(missing)}; name the directory "
            "of a complete model"
        )
    return None


def _no_directory(path: Path, config: Config, origins: Mapping[KeyPath, str]) -> list[str]:
    """Returns why `path`, which does not exist, is a problem; nothing if a tiny model is built there."""
    near = similar_folder(path)
    hint = f"did you mean {near}? If not, " if near is not None else ""
    if config.model.tiny is None:
        return [
            f"there is no such folder; {hint}name a model's directory, or a model of the Hugging Face Hub, or set "
            "model.tiny, which builds a tiny one (`asyncrl recipes copy tiny_chat` writes an example)"
        ]
    why = why_not_built(config, origins)
    return [] if why is None else [f"there is no such folder; {hint}{why}"]


def similar_folder(path: Path) -> Path | None:
    """Returns an existing folder whose path differs from `path` only by misspelt names; None if there is none.

    A part of `path` that does not exist is replaced by the most similar name in its folder.

    >>> similar_folder(Path("/urs/nosuch-folder"))
    """
    found = Path(path.anchor)
    for part in path.relative_to(path.anchor).parts:
        if not (found / part).is_dir():
            try:
                names = [each.name for each in found.iterdir() if each.is_dir()]
            except OSError:  # the user may not read this folder
                return None
            close = difflib.get_close_matches(part, names, n=1)
            if not close:
                return None
            part = close[0]
        found /= part
    return found


def user_modules(config: Config, roles: Collection[Role]) -> dict[str, str]:
    """Returns the import paths of the user's code that deployments of `roles` use, by key."""
    named: dict[str, object] = {}
    for name, part in all_configs(config).items():
        named |= {f"{key_of(name)}{key}": value for key, value in _named_by_tasks(part, roles).items()}
    if Role.LEARNER in roles:
        named["algorithm.loss"] = config.algorithm.loss
        named["algorithm.advantage"] = baseline_of(config.algorithm)
    return {key: value for key, value in named.items() if isinstance(value, str) and is_import_path(value)}


def _named_by_tasks(config: Config, roles: Collection[Role]) -> dict[str, object]:
    named: dict[str, object] = {"data.dataset": config.data.dataset}
    if builds_environment(config, roles):
        named["environment.name"] = config.environment.name
    if Role.GENERATOR in roles:
        named["environment.agent"] = config.environment.agent
        named["environment.reward"] = config.environment.reward
        named |= {f"environment.tools.{number}": path for number, path in enumerate(config.environment.tools)}
        named |= {f"environment.rewards.{term.name}.fn": term.fn for term in config.environment.rewards}
    return named


def _modules(config: Config, roles: Collection[Role]) -> Iterator[str]:
    for key, value in user_modules(config, roles).items():
        if problem := missing_module(value, key=key):
            yield problem


def _trackers(config: Config, roles: Collection[Role]) -> Iterator[str]:
    for name in config.metrics.trackers if Role.LEARNER in roles else ():
        if importlib.util.find_spec(name) is None:
            yield f"metrics.trackers = {name}: is not installed; run pip install 'asyncrl[{name}]', or remove it"


def _reasoning_gym_task(config: Config) -> Iterator[str]:
    names = sorted(task_names())
    task = config.environment.options.get("task")
    if not names:
        return  # the names of this version of reasoning-gym are unknown; its import reports a wrong task
    if task is None:
        yield f"{_TASK}: is missing; name one of reasoning-gym's {len(names)} tasks, e.g. spell_backward"
    elif task not in names:
        yield f"{_TASK}: reasoning-gym has no task {task!r}{suggest(str(task), names)}"


def _gpus(config: Config) -> Iterator[str]:
    has_gpu = shutil.which("nvidia-smi") is not None or any(any(Path("/dev").glob(name)) for name in _GPU_FILES)
    nvidia = len(list(Path("/dev").glob(_NVIDIA)))
    wanted, terms = 0.0, []
    for name, counted in (("generator", "replicas"), ("learner", "ranks"), ("critic", "ranks")):
        section = getattr(config, name)
        if section is None or section.gpus == 0:
            continue
        if not has_gpu:
            yield (
                f"{name}.gpus = {section.gpus:g}: this machine has no GPU, and no other machine can join the Ray "
                f"cluster that `asyncrl up` starts; set {name}.gpus to 0, or set ray.address to a cluster with GPUs"
            )
        processes = getattr(section, counted)
        wanted += section.gpus * processes
        terms.append(f"{name}.{counted} × {name}.gpus = {processes} × {section.gpus:g}")
    if nvidia and wanted > nvidia:
        yield (
            f"{' and '.join(terms)}: needs {wanted:g} GPUs, this machine has {nvidia}, and no other machine can join "
            "the Ray that `asyncrl up` starts; lower them, or set ray.address to a cluster with more GPUs"
        )


def _cores(config: Config) -> Iterator[str]:
    """Yields a warning if tensor-parallel engines on CPUs have more processes than this machine has cores.

    Only tensor-parallel engines matter: their processes busy-wait for each other, which takes the CPU time of others.
    """
    generator, cores = config.generator, len(os.sched_getaffinity(0))
    spinning = generator.replicas * generator.tensor_parallel_size
    if generator.gpus == 0 and generator.tensor_parallel_size > 1 and spinning > cores:
        yield (
            f"generator.tensor_parallel_size × generator.replicas = {generator.tensor_parallel_size} × "
            f"{generator.replicas} on CPUs needs {spinning} cores, but this machine has {cores}: the processes of an "
            "engine busy-wait for each other, and the whole run becomes slow; lower one of the two"
        )
