"""The checks before a run starts: what the configuration names is on this machine, and works.

`checked_config` reads the configuration, applies its rules (`asyncrl.config.rules`), and checks that the files, models,
modules, tasks, GPUs and cores are there. It imports none of them. `look` (of `asyncrl config check`) and `prepared`
(of the commands that start a run) then try the user's code, the rows of datasets, and a model of the Hugging Face Hub,
before Ray starts.

The user's reward or environment is created in a real scoring process, with the same environment variables as in a run.
The command's own process imports datasets, losses, advantages and optimizers. Built-in parts are not tried, so they
take no time here. Only the parts that the command's roles need are checked.
"""

import contextlib
import difflib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.algorithms.baselines import OwnEstimator, resolve_advantage
from asyncrl.algorithms.checks import check_algorithm
from asyncrl.algorithms.presets import advantage_of, baseline_of, own_loss
from asyncrl.cli.restarts import restarts
from asyncrl.cli.terminal import outlive_terminal, print_warnings, say
from asyncrl.common.roles import Role
from asyncrl.config.import_path import is_import_path, missing_module, search_folders, suggest
from asyncrl.config.load import Layer, config_origins, load_config
from asyncrl.config.parts import EVAL, all_configs, eval_configs, key_of, part_configs
from asyncrl.config.recipes import unread_copies
from asyncrl.config.rules import check_config, check_metrics_host
from asyncrl.config.schema import Config, EnvironmentSection, KeyPath
from asyncrl.config.timeouts import derived_timeouts, with_timeouts
from asyncrl.data.prompts import Task
from asyncrl.data.rows import FIRST_ROWS
from asyncrl.demo.directory import is_tiny, why_not_built
from asyncrl.deployment.known_runs import has_checkpoint
from asyncrl.deployment.local_clusters import use_ray_token
from asyncrl.deployment.mirror import Store, check_no_run, url_problem
from asyncrl.deployment.temporary_folders import temporary_folder_problems
from asyncrl.environments.reasoning_gym_tasks import task_names
from asyncrl.environments.secrets import hide_secrets
from asyncrl.errors import ConfigError, DatasetError, InfraError, RunError
from asyncrl.learner.records import known_info
from asyncrl.policy.families import family_problems, is_tied
from asyncrl.policy.model_directory import (
    counts_problem,
    missing_parts,
    model_problems,
    number_of_parameters,
    read_json,
    read_model,
    second_head,
)

if TYPE_CHECKING:
    from asyncrl.data.tokenizer import Tools
    from asyncrl.deployment.inputs import Prompts

FIRST_PROMPTS = 1000
"""Number of first prompts of each part whose lengths and control tokens are checked before the start. All prompts are
checked while Ray starts."""
HUB_TIMEOUT_S = 5.0
"""Maximum time for the request to the Hugging Face Hub, seconds."""
_TASK = "environment.options.task"
_NVIDIA = "nvidia[0-9]*"
_GPU_FILES = (_NVIDIA, "dxg", "kfd")
"""Patterns of the device files of GPUs: NVIDIA, WSL, AMD."""


def checked_config(
    files: Sequence[Layer],
    overrides: Sequence[str],
    *,
    roles: Collection[Role] = tuple(Role),
    allow_public: bool = False,
    starts: bool = True,
) -> tuple[Config, list[str]]:
    """Returns the merged configuration and warnings about it. Without `starts`, GPUs that this machine lacks are
    warnings.

    Time limits that the user has not set follow the size of the model. Raises ConfigError with one line for each
    problem. If keys or values are wrong, the error lists only those. Otherwise it lists the violated rules over several
    keys, and the parts that deployments of `roles` need and this machine lacks. From now on this process shows no value
    of `environment.secrets`.
    """
    config = load_config(files, overrides)
    search_user_modules(config, files)
    config = with_timeouts(config, timeouts_of_model(config))
    hide_secrets(config.environment, os.environ)
    metrics_host = partial(check_metrics_host, allow_public=allow_public)
    presence = partial(check_presence, roles=roles, origins=config_origins(files, overrides), starts=starts)
    return config, unread_copies(files) + run_checks(config, [metrics_host, check_config, check_algorithm, presence])


def timeouts_of_model(config: Config) -> dict[str, float]:
    """Returns the time limits that must be longer because of the size of the model, seconds by dotted key
    (`derived_timeouts`). Returns none if the model's files are not on this machine."""
    path, parameters = model_files(config), None
    if path is not None:
        with contextlib.suppress(OSError, ValueError):  # `check_presence` refuses a file that cannot be read
            parameters = number_of_parameters(path)
    return derived_timeouts(config, parameters=parameters)


def run_checks(config: Config, checks: Iterable[Callable[[Config], list[str] | None]]) -> list[str]:
    """Runs all checks and returns their warnings. Raises ConfigError with one line for each problem that they found."""
    problems: list[str] = []
    warnings: list[str] = []
    for check in checks:
        try:
            warnings += check(config) or []
        except (ConfigError, DatasetError) as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))  # two checks may find the same problem
    return warnings


def look(config: Config) -> list[str]:
    """Reads the first rows of the user's dataset, creates the user's code as a run does, and calls it. For `asyncrl
    config check`.

    Returns notes about the rows that were read, about where answers end, and about a model of the Hugging Face Hub.
    Raises ConfigError with one line for each problem. Sends no request to the Hub.
    """
    notes = run_checks(config, [*_trials(config, tuple(Role)), _first_rows])
    run_checks(config, _calls(config))
    notes += _ends(config)
    if model_directory(config) is None:
        notes.append(
            f"model.path = {config.model.path}: a model of the Hugging Face Hub; this check sends no request to the "
            "Hub, but a run does before it starts"
        )
    return notes


def prepared(
    files: Sequence[Layer], overrides: list[str], *, roles: Collection[Role] = tuple(Role), allow_public: bool
) -> "tuple[Config, Prompts | None]":
    """Returns the checked configuration of the layers `files` and the result of `prepare`, for a command that starts
    deployments of `roles`. Raises the errors of both, and RunError if the command must not restart its run
    (`check_restart`)."""
    outlive_terminal()
    config, warnings = checked_config(files, overrides, roles=roles, allow_public=allow_public)
    check_restart(config, restarts())
    print_warnings(warnings)
    # Only commands with all roles (`up`, `resume` and `fork`) may start a Ray of their own.
    use_ray_token(own=len(roles) == len(Role) and config.ray.address is None)
    return config, prepare(config, roles=roles)


def check_restart(config: Config, number: int) -> None:
    """Raises RunError if this process must not restart the run. `number` is the number of restarts of this command
    within an hour, including this one. It is 0 in the first process of a command, which may always start.

    A restart is refused if `number` is larger than `run.max_restarts`. It is also refused if the run has no checkpoint,
    unless the earlier process stopped in order because it was asked to start again (`RunDir.end`): that process had
    trained no step.
    """
    if not number:
        return
    if number > config.run.max_restarts:
        raise RunError(
            f"the run is not restarted: run.max_restarts = {config.run.max_restarts} within an hour. Mend the cause of "
            "the failure; then the same command resumes the run from its newest checkpoint"
        )
    info = known_info(config.run.dir / config.run.name)
    if not has_checkpoint(config) and (info is None or info.state != "stopped"):
        raise RunError("the run is not restarted, because it ended before its first checkpoint")


def prepare(config: Config, *, roles: Collection[Role] = tuple(Role)) -> "Prompts | None":
    """Tries the parts of a run that `roles` use, before Ray starts: sends a request to the Hugging Face Hub for the
    model, creates the user's code as a run does, and reads the prompts. For the commands that start a run.

    Returns the prompts if they come from a file or from the user's code; else None, because built-in prompts are made
    while Ray starts. Raises ConfigError or DatasetError for a problem that would end the run later.
    """
    from asyncrl.deployment.inputs import read_prompts

    run_checks(config, [try_hub, *_trials(config, roles)])
    if not _has_own_rows(config):
        return None
    prompts = read_prompts(config)
    for name, part in part_configs(config).items():
        tools = prompts.tools.get(name, ())
        _try_prompts(part, [task for task in (*prompts.train, *prompts.heldout) if task.part == name], tools=tools)
    for part_name, of_set in eval_configs(config).items():
        tasks = prompts.sets[part_name.removeprefix(EVAL)]
        _try_prompts(of_set, tasks, tools=prompts.tools.get(part_name, ()))
    return prompts


# Checks whether this machine has what the configuration names. They import none of it.


def check_presence(
    config: Config, *, roles: Collection[Role], origins: Mapping[KeyPath, str], starts: bool = True
) -> list[str]:
    """Returns warnings about a configuration, if all parts that `roles` need are there.

    Raises ConfigError with one line for each missing part. `origins` says where each key was set (`config_origins`).
    Without `starts`, the command starts no run, and GPUs that this machine lacks are warnings.
    """
    model, warnings = (inside, []) if (inside := _inside_run(config)) else _model(config, roles, origins)
    missing = [*model, *_modules(config, roles), *_trackers(config, roles)]
    for name, part in all_configs(config).items():
        missing += _of_part(part, roles, prefix=key_of(name))
    if Role.LEARNER in roles:
        missing += [*_run_directory(config), *_mirror(config)]
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
    sizes or the family of the model do not fit the configuration."""
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

    None if a local folder has no `config.json`, for example because a tiny model is not built yet, or if a model of the
    Hugging Face Hub is not in the cache.
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


def _mirror(config: Config) -> Iterator[str]:
    if (url := config.run.mirror) is None:
        return
    if problem := url_problem(url):
        yield f"run.mirror = {problem}"
    elif url.startswith("memory://"):
        yield f"run.mirror = {url}: a mirror in the memory of the run's process ends with it; use e.g. s3:// or file://"
    elif (store := Store(url)).in_place:
        try:
            check_no_run(store)
        except (ConfigError, OSError) as error:
            yield str(error) if isinstance(error, ConfigError) else f"run.mirror = {url}: cannot be read ({error})"


def _inside_run(config: Config) -> list[str]:
    """Returns a problem if the model is in the directory of the run itself."""
    path, run = model_directory(config), config.run.dir / config.run.name
    if path is None or not path.resolve().is_relative_to(run.resolve()):
        return []
    return [
        f"model.path = {config.model.path}: is in the run's own directory {run}, which the start of the run would move "
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
    """Returns the warnings about the family of the model, if the model's config.json is on this machine. Raises
    ConfigError if models of this family cannot be trained or served. The other files of the model may be absent."""
    files = model_files(config)
    if files is None:
        return []
    try:
        problems, warnings = family_problems(read_json(files / "config.json"), config)
    except (OSError, ValueError):
        return []  # `show_plan` also reads config.json, and its error says why the file is unreadable
    if problems:
        raise ConfigError("\n".join(problems))
    return warnings


def _incomplete(path: Path, config: Config, roles: Collection[Role]) -> str | None:
    """Returns why `path` is not the directory of a complete model; None if it is one. Weights are not needed in a
    process with generators only, unless there is an adapter."""
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
        named["algorithm.loss"] = config.algorithm.loss_name
        named["algorithm.advantage"] = baseline_of(config.algorithm)
        named |= {f"{name}.optimizer.name": pool.optimizer.name for name, pool in config.rank_pools().items()}
    return {key: value for key, value in named.items() if isinstance(value, str) and is_import_path(value)}


def search_user_modules(config: Config, files: Iterable[Layer]) -> None:
    """Lets this process, and those that it starts, find the user's modules in the folders of the configuration files
    and in the working directory, if no other place has them. The directory of a run does not count, because another
    person may have made it."""
    folders = [Path(file).parent for file in files if not isinstance(file, Mapping)]
    folders = [folder for folder in folders if not (folder / "run.json").exists()]
    search_folders([*folders, Path()], user_modules(config, tuple(Role)).values())


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


# Trials: the user's code is created and called, rows of datasets are read, and the Hub is asked for the model.


def _trials(config: Config, roles: Collection[Role]) -> list[Callable[[Config], None]]:
    """Returns functions that create the user's own code as a run does, and raise ConfigError if this fails:
    environments with their rewards, the loss, the advantages and the optimizers. With agents, one of them tries the
    model's chat template."""
    trials: list[Callable[[Config], None]] = []
    for part in all_configs(config).values() if Role.GENERATOR in roles else ():
        environment = part.environment
        named = environment.agent or environment.reward or environment.name
        own_reward = bool(environment.rewards or environment.tools) or is_import_path(named)
        if own_reward or environment.secrets:
            trials.append(partial(_try_scoring, environment))
    if Role.GENERATOR in roles and any(part.environment.plays_agents for part in all_configs(config).values()):
        trials.append(_try_template)
    if Role.LEARNER in roles and own_loss(config.algorithm) is not None:
        trials.append(_try_loss)
    if Role.LEARNER in roles and isinstance(resolve_advantage(advantage_of(config.algorithm)), OwnEstimator):
        trials.append(_try_advantage)
    if Role.LEARNER in roles and any(pool.optimizer.own is not None for pool in config.rank_pools().values()):
        trials.append(_try_optimizers)
    return trials


def _calls(config: Config) -> list[Callable[[Config], None]]:
    """Returns functions that call the user's rewards on a row, and the user's loss and advantages on a small batch.
    Each raises ConfigError if its call fails."""
    calls: list[Callable[[Config], None]] = [partial(_call_reward, *each) for each in all_configs(config).items()]
    if own_loss(config.algorithm) is not None:
        calls.append(_call_loss)
    if isinstance(resolve_advantage(advantage_of(config.algorithm)), OwnEstimator):
        calls.append(_call_advantage)
    return calls


def _call_reward(name: str, part: Config, _: Config) -> None:
    environment = part.environment
    named = [environment.reward, environment.name, *(term.fn for term in environment.rewards)]
    if not any(is_import_path(each) for each in named if each) or (
        part.data.dataset == "hf" and not _reads_own_rows(part)  # reading its rows may send requests to the Hub
    ):
        return
    from asyncrl.cli.code_trials import call_reward, own_rewards  # imports torch
    from asyncrl.environments.interfaces import read_tasks

    if (own := own_rewards(environment)) is not None and (tasks := read_tasks(part, first=1)):
        try:
            call_reward(own, tasks[0])
        except ConfigError as error:
            raise ConfigError(f"{key_of(name)}{error}") from error


def _call_loss(config: Config) -> None:
    from asyncrl.cli.code_trials import call_loss

    call_loss(config)


def _call_advantage(config: Config) -> None:
    from asyncrl.cli.code_trials import call_advantage

    call_advantage(config)


def _try_scoring(section: EnvironmentSection, _: Config) -> None:
    from asyncrl.environments.reward_function import subject
    from asyncrl.environments.scoring_process import started
    from asyncrl.environments.secrets import read_secrets

    try:
        with started(section, secrets=read_secrets(section, os.environ), output=partial(say, err=True)):
            pass  # the start of the process has created the environment and its rewards
    except InfraError as error:
        raise ConfigError(f"{subject(section)}: {error}") from error


def _try_template(config: Config) -> None:
    """Checks that an agent's turns can be put together with the model's chat template, and, if a part has tools, that
    the template writes tools and their results. Does nothing if the model's files are not on this machine."""
    from asyncrl.data.tokenizer import load_tokenizer  # imports transformers
    from asyncrl.gateway.rendering import Renderer

    files = model_files(config)
    if files is None:
        return
    renderer = Renderer(load_tokenizer(str(files), chat=config.data.chat, chat_options=config.data.chat_options))
    for name, part in all_configs(config).items():
        if part.environment.has_tools:
            system = [{"role": "system", "content": part.data.system_prompt}] if part.data.system_prompt else []
            prompt = [*system, {"role": "user", "content": "a"}]
            renderer.check_tools(prompt, model=config.model.path, key=key_of(name) + part.environment.tools_key)
            return


def _ends(config: Config) -> list[str]:
    """Returns a note if the chat template ends an answer with another token than the model's own end tokens; a run
    prints the same note when it starts. Returns nothing if the model's files are not on this machine."""
    path, chat, options = model_files(config), config.data.chat, config.data.chat_options
    if path is None or chat == "off":
        return []
    from asyncrl.data.light_tokenizer import light_tokenizer
    from asyncrl.data.tokenizer import load_tokenizer
    from asyncrl.data.turn_ends import note_on_ends

    tokenizer = light_tokenizer(path, chat=chat, chat_options=options)
    if tokenizer is None or tokenizer.eos_token_id is None:  # transformers may know the end token from the class
        tokenizer = load_tokenizer(str(path), chat=chat, chat_options=options)
    note = note_on_ends(tokenizer)
    return [] if note is None else [note]


def _try_loss(config: Config) -> None:
    from asyncrl.algorithms.loss import build_loss  # imports torch, as the user's loss does too

    build_loss(config)


def _try_advantage(config: Config) -> None:
    from asyncrl.algorithms.advantages import resolve_estimator  # imports torch

    resolve_estimator(advantage_of(config.algorithm))


def _try_optimizers(config: Config) -> None:
    from asyncrl.ranks.optimizer import try_optimizer  # imports torch

    for name, pool in config.rank_pools().items():
        if pool.optimizer.own is not None:
            try_optimizer(pool.optimizer, key=f"{name}.optimizer")


def _has_own_rows(config: Config) -> bool:
    """Returns whether prompts come from files or from the user's code. A dataset on the Hub counts as neither."""
    return any(map(_reads_own_rows, all_configs(config).values()))


def _reads_own_rows(config: Config) -> bool:
    dataset = config.data.dataset
    if dataset == "hf":
        return config.data.path is not None and config.data.path.exists()
    source = config.environment.name if dataset == "environment" else dataset
    return source == "jsonl" or is_import_path(source)


def _first_rows(config: Config) -> list[str]:
    """Reads the first rows of the user's datasets and returns notes about them; none for built-in environments."""
    notes = []
    for name, part in all_configs(config).items():
        if not _reads_own_rows(part):
            continue
        from asyncrl.environments.interfaces import check_enough, read_tasks, split_tasks
        from asyncrl.environments.prompt_tools import described_tools

        tasks = read_tasks(part, first=FIRST_ROWS)
        tools = described_tools(part.environment)
        notes += [f"{key_of(name)}{note}" for note in _try_prompts(part, tasks, tools=tools)]
        if len(tasks) < FIRST_ROWS and not name.startswith(EVAL):
            train, _ = split_tasks(part, tasks)
            if not name:
                check_enough(config, train)
        notes += _long_answers(part, tasks, prefix=key_of(name))
        notes += _unknown_fields(part, tasks, prefix=key_of(name))
        rows = f"the first {FIRST_ROWS} rows were" if len(tasks) >= FIRST_ROWS else "all rows were"
        notes.append(
            f"{key_of(name)}data.dataset = {part.data.dataset}: {rows} read; a run reads all of them before it starts"
        )
    return notes


def _unknown_fields(config: Config, tasks: Sequence[Task], *, prefix: str) -> list[str]:
    """Returns a note for each judge whose prompt has names in braces that are not keys of the first rows. Such a name
    is not replaced: the judge reads it with its braces."""
    from asyncrl.environments.verifiers import JUDGE_FIELD, JUDGE_FIELDS

    keys = {key for task in tasks for key in task.metadata}
    notes = []
    for term in config.environment.rewards:
        names = dict.fromkeys(JUDGE_FIELD.findall(str(term.options.get("prompt", "")))) if term.fn == "judge" else ()
        if unknown := [name for name in names if name not in keys and name not in JUDGE_FIELDS]:
            fields = ", ".join(f"{{{name}}}" for name in unknown)
            notes.append(
                f"{prefix}environment.rewards.{term.name}.options.prompt: {fields} "
                f"stays as it is, because no row has such a key; known are {', '.join([*JUDGE_FIELDS, *sorted(keys)])}"
            )
    return notes


def _long_answers(config: Config, tasks: Sequence[Task], *, prefix: str) -> list[str]:
    """Returns a note if most answers of the tasks are longer than a completion may be."""
    path, limit = model_files(config), config.generator.max_completion_tokens
    answers = [task.answer for task in tasks if task.answer]
    if path is None or not answers:
        return []
    from asyncrl.data.light_tokenizer import light_tokenizer

    tokenizer = light_tokenizer(path, chat="off")
    if tokenizer is None:
        return []
    sizes = [len(ids) for ids in tokenizer(answers, add_special_tokens=False)["input_ids"]]
    longer = sum(size > limit for size in sizes)
    if 2 * longer <= len(sizes):
        return []
    return [
        f"{prefix}generator.max_completion_tokens = {limit}: {longer} of {len(sizes)} answers of the dataset have more "
        f"tokens (up to {max(sizes)}), so a completion cannot contain them; raise it if completions must contain the "
        "whole answer"
    ]


def _try_prompts(config: Config, tasks: Sequence[Task], *, tools: "Tools") -> list[str]:
    """Checks the control tokens of the first prompts, their lengths with the descriptions of the `tools`, and that the
    model's vocabulary has the tokens of the first prompt. Returns a note about control tokens that are kept, if there
    are any.

    Does nothing if the model's files are not on this machine, or if their tokenizer needs transformers, which takes
    seconds to import. Raises DatasetError (see `prompt_lengths.fitting`) unless `data.on_bad_row` is `skip`, and
    ConfigError for a token outside the vocabulary.
    """
    path = model_files(config)
    if path is None or not tasks:
        return []
    from asyncrl.data.control_tokens import with_control_tokens
    from asyncrl.data.light_tokenizer import light_tokenizer
    from asyncrl.data.tokenizer import encode_prompt
    from asyncrl.environments.prompt_lengths import control_token_finding, fitting, without_control_tokens
    from asyncrl.policy.model_directory import read_model

    tokenizer = light_tokenizer(path, chat=config.data.chat, chat_options=config.data.chat_options, tools=tools)
    if tokenizer is None:
        return []
    first = tasks[:FIRST_PROMPTS]
    if config.data.on_bad_row == "refuse":
        fitting(first, config=config, tokenizer=tokenizer, tools=tools)
    found = with_control_tokens(first, tokenizer)
    if found and (config.data.control_tokens, config.data.on_bad_row) == ("refuse", "refuse"):
        without_control_tokens(first, config=config, tokenizer=tokenizer)
    vocabulary = read_model(path).vocabulary
    largest = max(encode_prompt(tokenizer, tasks[0].input), default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise ConfigError(
            f"model.path = {config.model.path}: the first prompt contains the token {tokenizer.text_of(largest)!r} "
            f"with the id {largest}, but the model's vocabulary has {vocabulary} tokens; resize the model's "
            "embeddings, or set data.chat: off if the token belongs to the chat template"
        )
    return [control_token_finding(found, config=config, tokenizer=tokenizer, among=len(first))] if found else []


def try_hub(config: Config) -> None:
    """Sends one request to the Hugging Face Hub for a model that is not in a directory.

    Raises ConfigError if the model is not available. If the Hub does not answer and the local cache has the model, this
    process and its child processes send no further requests: each would repeat them for two minutes.
    """
    name = config.model.path
    if model_directory(config) is not None:
        return
    cached = model_files(config) is not None
    from huggingface_hub import constants, get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import RepositoryNotFoundError

    if constants.is_offline_mode():
        if cached:
            return
        reason = "HF_HUB_OFFLINE is set and the local cache of the Hugging Face Hub does not have the model"
    else:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), token=get_token(), timeout=HUB_TIMEOUT_S)
            return
        except Exception as error:
            if cached and not isinstance(error, RepositoryNotFoundError):  # nor a GatedRepoError, its subclass
                _leave_hub_alone(name)
            if cached:
                return
            reason = _refusal(error)
    near = similar_folder(Path(name))
    meant = f"did you mean the folder {near}? If not, " if near is not None else ""
    raise ConfigError(
        f"model.path = {name}: there is no folder {name} here, and {reason}; {meant}set model.path to the directory "
        "of a model, or to another model of the Hub"
    )


def _refusal(error: Exception) -> str:
    """Returns the reason why the Hugging Face Hub did not provide a model."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return "the Hugging Face Hub requires an account with access to it; log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hugging Face Hub has no such model, or the model is private"
    return f"the Hugging Face Hub does not answer ({type(error).__name__})"


def _leave_hub_alone(name: str) -> None:
    """Prevents further requests to the Hugging Face Hub by this process and its child processes."""
    from huggingface_hub import constants

    say(f"note: the Hugging Face Hub does not answer; model.path = {name} is read from its local cache", err=True)
    constants.HF_HUB_OFFLINE = True  # the library reads the variable only when it is imported
    os.environ["HF_HUB_OFFLINE"] = "1"
