"""Trials that a command makes before it starts Ray: models of the Hugging Face Hub, the user's code, dataset rows.

The user's reward or environment is created in a real scoring process, with the same environment variables as in a run.
The command's own process imports datasets, losses and advantages, because it uses them later. Built-in parts are not
tried, so they take no time here.
"""

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.algorithms.baselines import OwnEstimator, resolve_advantage
from asyncrl.algorithms.presets import advantage_of, is_own_loss
from asyncrl.cli.options import checked_config, print_warnings, run_checks
from asyncrl.cli.presence import model_directory, model_files, similar_folder
from asyncrl.cli.restarts import restarts
from asyncrl.cli.terminal import outlive_terminal, say
from asyncrl.common.roles import Role
from asyncrl.config.import_path import is_import_path
from asyncrl.config.load import Layer
from asyncrl.config.parts import EVAL, all_configs, eval_configs, key_of, part_configs
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.data.rows import FIRST_ROWS
from asyncrl.deployment.known_runs import has_checkpoint
from asyncrl.deployment.local_clusters import use_ray_token
from asyncrl.errors import ConfigError, InfraError, RunError

if TYPE_CHECKING:
    from asyncrl.data.tokenizer import Tools
    from asyncrl.deployment.inputs import Prompts

FIRST_PROMPTS = 1000
"""Number of prompts whose length is checked before the start. All prompts are checked while Ray starts."""
HUB_TIMEOUT_S = 5.0
"""Maximum time for the request to the Hugging Face Hub, seconds."""


def look(config: Config) -> list[str]:
    """Makes the trials of `asyncrl config check`: reads the first rows of the user's dataset, and tries and calls the
    user's code.

    Returns notes about the rows that were read, and about where answers end. Raises ConfigError with one line for each
    problem. Sends no request to the Hugging Face Hub.
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
    """Returns the checked configuration of the layers `files` and the result of `prepare`. The first action of a
    command that starts deployments of `roles`."""
    outlive_terminal()
    config, warnings = checked_config(files, overrides, roles=roles, allow_public=allow_public)
    check_restart(config, restarts())
    print_warnings(warnings)
    use_ray_token(own=len(roles) == len(Role) and config.ray.address is None)  # only `asyncrl up` has all roles
    return config, prepare(config, roles=roles)


def check_restart(config: Config, number: int) -> None:
    """Raises RunError if this process is restart number `number`, but one too many or without a checkpoint. The first
    process of a command has the number 0."""
    if not number:
        return
    if number > config.run.max_restarts:
        raise RunError(
            f"the run is not restarted: run.max_restarts = {config.run.max_restarts} within an hour. Mend the cause of "
            "the failure; then the same command resumes the run from its newest checkpoint"
        )
    if not has_checkpoint(config):
        raise RunError("the run is not restarted, because it ended before its first checkpoint")


def prepare(config: Config, *, roles: Collection[Role] = tuple(Role)) -> "Prompts | None":
    """Makes the trials of the commands that start a run, for the parts that `roles` use.

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


def _trials(config: Config, roles: Collection[Role]) -> list[Callable[[Config], None]]:
    """Returns the trials that create the user's own callables in the same way as a run does."""
    trials: list[Callable[[Config], None]] = []
    for part in all_configs(config).values() if Role.GENERATOR in roles else ():
        environment = part.environment
        named = environment.agent or environment.reward or environment.name
        own_reward = bool(environment.rewards or environment.tools) or is_import_path(named)
        if own_reward or environment.secrets:
            trials.append(partial(_try_scoring, environment))
    if Role.GENERATOR in roles and any(part.environment.plays_agents for part in all_configs(config).values()):
        trials.append(_try_template)
    if Role.LEARNER in roles and is_own_loss(config.algorithm):
        trials.append(_try_loss)
    if Role.LEARNER in roles and isinstance(resolve_advantage(advantage_of(config.algorithm)), OwnEstimator):
        trials.append(_try_advantage)
    return trials


def _calls(config: Config) -> list[Callable[[Config], None]]:
    """Returns the calls of the user's rewards on a row, and of the user's loss and advantages on a small batch."""
    calls: list[Callable[[Config], None]] = [partial(_call_reward, *each) for each in all_configs(config).items()]
    if is_own_loss(config.algorithm):
        calls.append(_call_loss)
    if isinstance(resolve_advantage(advantage_of(config.algorithm)), OwnEstimator):
        calls.append(_call_advantage)
    return calls


def _call_reward(name: str, part: Config, _: Config) -> None:
    environment = part.environment
    named = [environment.reward, environment.name, *(term.fn for term in environment.rewards)]
    if not any(is_import_path(each) for each in named if each) or (
        part.data.dataset == "hf" and not _reads_own_rows(part)  # it may ask the Hub
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
            pass  # it is ready
    except InfraError as error:
        raise ConfigError(f"{subject(section)}: {error}") from error


def _try_template(config: Config) -> None:
    """Checks that an agent's turns can be put together with the model's chat template, if its files are here."""
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
    """Returns the note of the start about an end of the chat template that is not the model's own, if there is one and
    the model's files are here."""
    path, chat, options = model_files(config), config.data.chat, config.data.chat_options
    if path is None or chat == "off":
        return []
    from asyncrl.data.light_tokenizer import light_tokenizer
    from asyncrl.data.tokenizer import load_tokenizer
    from asyncrl.data.turn_ends import note_on_ends

    tokenizer = light_tokenizer(path, chat=chat, chat_options=options)
    if tokenizer is None or tokenizer.eos_token_id is None:  # transformers may know it from the model's type
        tokenizer = load_tokenizer(str(path), chat=chat, chat_options=options)
    note = note_on_ends(tokenizer)
    return [] if note is None else [note]


def _try_loss(config: Config) -> None:
    from asyncrl.algorithms.loss import build_loss  # imports torch, as the user's loss does too

    build_loss(config)


def _try_advantage(config: Config) -> None:
    from asyncrl.algorithms.advantages import resolve_estimator  # imports torch

    resolve_estimator(advantage_of(config.algorithm))


def _has_own_rows(config: Config) -> bool:
    """Returns whether prompts come from files or from the user's code. No request is sent to the Hub."""
    return any(map(_reads_own_rows, all_configs(config).values()))


def _reads_own_rows(config: Config) -> bool:
    dataset = config.data.dataset
    if dataset == "hf":
        return config.data.path is not None and config.data.path.exists()
    source = config.environment.name if dataset == "environment" else dataset
    return source == "jsonl" or is_import_path(source)


def _first_rows(config: Config) -> list[str]:
    """Reads the first rows of the user's dataset and returns a note about it; none for a built-in environment."""
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
    """Returns a note for each name in braces in a judge's prompt that the first rows do not have."""
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
            if cached and not isinstance(error, RepositoryNotFoundError):  # GatedRepoError is a subclass
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
