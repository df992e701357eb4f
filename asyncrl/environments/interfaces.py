"""Environments: sources of tasks, and rewards for completions.

The rest of the system uses an environment only through `Environment` or `AgentEnvironment`, and finds it by its name in
the config.
`build_tasks` makes the prompts of a run from its config. The same config gives the same (training, held-out) tasks in
every process. Reward code is the user's code: it runs in the processes of `scoring.py`, not in the generator.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import msgspec

from asyncrl.config.import_path import BUILT_IN_NAMES, call_with_options, resolve
from asyncrl.config.parts import EVAL, eval_configs, part_configs
from asyncrl.config.schema import Config, EnvironmentSection, RewardTerm
from asyncrl.data.hugging_face import hugging_face_rows
from asyncrl.data.left_out import LeftOutRow, counts, in_words
from asyncrl.data.prompts import (
    PromptSource,
    Task,
    apply_template,
    asked_in,
    compared,
    in_conversation,
    interleaved,
    split,
    without_fields,
    without_repeated,
)
from asyncrl.data.rows import Row, jsonl_rows, read_rows
from asyncrl.environments.agents import Demonstration, Session, as_reward
from asyncrl.environments.reward_function import RewardFunction, reward_function, subject
from asyncrl.environments.reward_terms import combined
from asyncrl.errors import AsyncRLError, ConfigError, DatasetError
from asyncrl.user_code import describe_error

_log = logging.getLogger(__name__)


@runtime_checkable
class Environment(Protocol):
    """A single-turn environment."""

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns the environment's own tasks, determined by `seed`. A task need not set its `prompt`, because
        `data.prompt_template` makes it later."""

    def score(self, task: Task, completion: Any, /) -> Any:
        """Returns the reward of one completion (a text, without special tokens by default), or a list with the rewards
        of a group. `reward_function.py` describes the four forms that this method may have.

        It is called in a scoring process, with a task that has been converted to JSON and back.
        """


@runtime_checkable
class AgentEnvironment(Protocol):
    """An environment of several turns, which makes its own calls to the model.

    It may have a method `demonstrations(seed)`, which returns `Demonstration`s: with `model.tiny`, the warm-up learns
    these instead of the answers of the tasks.
    """

    def tasks(self, seed: int) -> Sequence[Task]:
        """Returns the environment's own tasks, determined by `seed`. A task need not set its `prompt`."""

    def run(self, session: Session, task: Task, /) -> Any:
        """Runs one episode of the agent, which calls the model through `session`, and returns its reward. It may be
        async."""


_BUILT_IN = {
    "reasoning_gym": "asyncrl.environments.reasoning_gym:ReasoningGym",
    "math": "asyncrl.environments.verifiers:Math",
    "guess_the_number": "asyncrl.environments.games:GuessTheNumber",
    "calculator": "asyncrl.environments.games:Calculator",
    "key_value_store": "asyncrl.environments.games:KeyValueStore",
    "verifiers": "asyncrl.environments.verifiers_taskset:VerifiersTaskset",
    "openenv": "asyncrl.environments.openenv_environment:OpenEnvEnvironment",
}
"""The import paths of the built-in environments."""


def build_environment(section: EnvironmentSection) -> "Environment | AgentEnvironment":
    """Builds the environment `environment.name` with `environment.options`. Raises ConfigError if either is wrong.
    Errors that the environment itself raises pass through."""
    factory = resolve(_BUILT_IN.get(section.name, section.name), key="environment.name")
    needs = (
        "an environment needs the methods tasks(seed) and score(task, completion), or tasks(seed) and "
        "run(session, task)"
    )
    if isinstance(factory, type) and not any(hasattr(factory, name) for name in ("tasks", "score", "run")):
        raise ConfigError(f"environment.name: the class {section.name!r} has none of the methods, but {needs}")
    environment = call_with_options(factory, section.options, key="environment.options")
    if not isinstance(environment, Environment | AgentEnvironment):
        raise ConfigError(f"environment.name: {section.name!r} returned a {type(environment).__name__}, but {needs}")
    return environment


def build_demonstrations(config: Config) -> list[Demonstration]:
    """Returns the demonstrations of the environment; an empty list if it has no method `demonstrations`, and in a
    mixture. The list is also empty, and the environment is not built, if the tasks are not from the environment and the
    config sets an agent, tools or rewards."""
    section = config.environment
    replaced = section.agent is not None or section.has_tools or section.reward is not None or section.rewards
    if config.data.mixture or (replaced and config.data.dataset != "environment"):
        return []
    environment = build_environment(config.environment)
    return list(getattr(environment, "demonstrations", lambda seed: [])(config.run.seed))


def build_reward(section: EnvironmentSection) -> RewardFunction:
    """Returns the code that gives completions their rewards: the agent `environment.agent`, the agent that calls
    `environment.tools`, the functions of `environment.rewards`, the function `environment.reward`, or the environment's
    own `score` or `run`.

    The environment is built only for its own `score` or `run`. Raises ConfigError when a function does not exist or
    cannot be called as a reward, or when an agent or a tool cannot be called as such. Raises the errors of
    `build_environment`.
    """
    named = subject(section)
    if section.agent is not None:
        return as_reward(resolve(section.agent, key="environment.agent"), named=named)
    if section.has_tools:
        return _with_tools(section)
    if section.rewards:
        weights = {term.name: term.weight for term in section.rewards}
        return combined({term.name: _term(term, section) for term in section.rewards}, weights=weights)
    if section.reward is None:
        environment = build_environment(section)
        if isinstance(environment, AgentEnvironment):
            return as_reward(environment.run, named=named)
        return reward_function(environment.score, named=named)
    function = _named_reward(section.reward, key="environment.reward")
    return reward_function(function, named=named)


def _with_tools(section: EnvironmentSection) -> RewardFunction:
    """Returns an agent that calls the tools of `section`. The rewards of `section` score the agent's last answer."""
    scoring = build_reward(section.model_copy(update={"tools": [], "mcp_servers": []}))
    if scoring.form.agent:
        raise ConfigError(
            f"{section.tools_key}: has no effect with environment.name = {section.name}, which makes its own calls to "
            "the model; remove it, or set environment.reward, which then scores instead of that environment"
        )
    from asyncrl.environments.tools import ToolAgent

    agent = ToolAgent(section, scoring=scoring)
    made = as_reward(agent.run, named=section.tools_key, tools=agent.described)
    return replace(made, weights=scoring.weights)


def _term(term: RewardTerm, section: EnvironmentSection) -> RewardFunction:
    key = f"environment.rewards.{term.name}"
    function = _named_reward(term.fn, key=f"{key}.fn")
    if not term.options and term.fn not in BUILT_IN_NAMES["environment.rewards"]:
        return reward_function(function, named=f"{key}.fn = {term.fn}")
    # below the time limit of the scoring process, so that the judge's own error is shown
    limit = {"time_limit_s": 0.9 * section.score_timeout_s} if term.fn == "judge" else {}
    made = partial(function, **limit | term.options)
    signature = inspect.signature(function)
    try:
        signature.bind_partial(None, None, **term.options)  # names an unknown option before a missing one
        signature.bind(None, None, **term.options)
    except TypeError as error:
        names = list(signature.parameters)[2:]
        raise ConfigError(
            f"{key}.options: the reward {term.fn} cannot take them ({error}); its options are {', '.join(names)}"
        ) from None
    return reward_function(made, named=f"{key}.fn = {term.fn}")


def _named_reward(name: str, *, key: str) -> Callable[..., Any]:
    """Returns the built-in reward `name`, or the function at the import path `name`."""
    if name in BUILT_IN_NAMES["environment.rewards"]:
        from asyncrl.environments import verifiers

        function: Callable[..., Any] = getattr(verifiers, name)
        return function
    return resolve(name, key=key)


def build_tasks(
    config: Config, *, left_out: dict[str, list[LeftOutRow]] | None = None
) -> tuple[list[Task], list[Task]]:
    """Returns (training, held-out) tasks of all parts of the mixture, or of the only dataset. Their prompts are made
    with `prompt_template`. A prompt that one part holds out is not trained in another part.

    Rows that are left out are added to `left_out`, by part, and logged with their counts. Raises ConfigError or
    DatasetError.
    """
    out: dict[str, list[LeftOutRow]] = {name: [] for name in part_configs(config)}
    parts = {
        name: split_tasks(part, read_tasks(part, left_out=out[name]), left_out=out[name])
        for name, part in part_configs(config).items()
    }
    train, heldout = [], []
    for name, (trained, kept_back) in parts.items():
        train += [msgspec.structs.replace(task, part=name) for task in trained] if name else trained
        heldout.append([msgspec.structs.replace(task, part=name) for task in kept_back] if name else kept_back)
    mixed = interleaved(heldout, [part.weight for part in config.data.mixture] or [1])
    if len(parts) > 1:
        unseen = {compared(task) for task in mixed}
        for task in train:
            if compared(task) in unseen:
                out[task.part].append(_held_out(task))
        kept = [task for task in train if compared(task) not in unseen]
        _log_held_out(len(train) - len(kept), source="data.mixture")
        train = kept
    check_enough(config, train)
    if left_out is not None:
        left_out.update({name: rows for name, rows in out.items() if rows})
    return train, mixed


def build_sets(
    config: Config, *, train: Sequence[Task], left_out: dict[str, list[LeftOutRow]] | None = None
) -> dict[str, list[Task]]:
    """Returns the tasks of the named held-out sets (`eval.sets`), by name, without questions and prompts of the
    training tasks `train`.

    Rows that are left out are added to `left_out`, by part. Raises ConfigError or DatasetError, also for a set of which
    nothing is left.
    """
    templates = {name: part.data.prompt_template for name, part in part_configs(config).items()}
    seen = {asked_in(task, templates[task.part]) for task in train} | {(compared(task),) for task in train}
    sets = {}
    for part, of_set in eval_configs(config).items():
        out: list[LeftOutRow] = []
        name, template = part.removeprefix(EVAL), of_set.data.prompt_template
        read = read_tasks(of_set, left_out=out)
        unseen = [task for task in read if not {asked_in(task, template), (compared(task),)} & seen]
        kept = [msgspec.structs.replace(task, part=part) for task in unseen]
        if not kept:
            raise DatasetError(
                f"eval.sets.{name}: none of its {len(read)} questions can be evaluated, because the run trains them; "
                "give it other data, or hold out some with data.heldout_fraction"
            )
        if len(kept) < len(read):
            _log.info("eval.sets.%s: left out %d questions that the run trains", name, len(read) - len(kept))
            same = {id(task) for task in unseen}
            out += [LeftOutRow(task.row, "trained", "the run trains it") for task in read if id(task) not in same]
        if out and left_out is not None:
            left_out[part] = out
        sets[name] = kept
    return sets


def _log_held_out(left_out: int, *, source: str) -> None:
    if left_out:
        _log.warning("%s: left out %d training rows whose prompt is held out", source, left_out)


def _held_out(task: Task) -> LeftOutRow:
    return LeftOutRow(task.row, "held_out", f"its prompt {task.prompt[:40]!r} is held out")


def split_tasks(
    config: Config, tasks: Sequence[Task], *, left_out: list[LeftOutRow] | None = None
) -> tuple[list[Task], list[Task]]:
    """Returns (training, held-out) tasks of one dataset. Adds to `left_out` the rows that are in neither list, because
    a held-out task has the same prompt. Raises DatasetError if no task remains for training."""
    data = config.data
    train, heldout = split(tasks, data.heldout_fraction, template=data.prompt_template)
    used = {id(task) for task in (*train, *heldout)}
    out = [_held_out(task) for task in tasks if id(task) not in used]
    _log_held_out(len(out), source=str(data.path or data.dataset))
    if left_out is not None:
        left_out += out
    if not train:
        raise DatasetError(
            f"data.dataset = {data.dataset}: none of its {len(tasks)} tasks remains for training, because "
            f"data.heldout_fraction = {data.heldout_fraction} holds out {len(heldout)} of them, and tasks with the "
            "prompt of a held-out task are left out; lower data.heldout_fraction, or add tasks"
        )
    return train, heldout


def check_enough(config: Config, train: Sequence[Task]) -> None:
    """Raises DatasetError if all epochs together have too few training tasks for one step, and `data.drop_last` drops
    the rest."""
    data, groups = config.data, config.learner.groups_per_step
    weights = {part.name: part.weight for part in data.mixture}
    issued = PromptSource(train, seed=0, epochs=data.epochs, weights=weights).total
    if data.drop_last and issued is not None and issued < groups:
        raise DatasetError(
            f"data.dataset = {data.dataset}: {len(train)} tasks remain for training, and with data.epochs = "
            f"{data.epochs} the run ends after {issued} prompts. A step needs learner.groups_per_step = {groups} "
            "groups, and data.drop_last drops a smaller rest, so no step would be trained; lower "
            "learner.groups_per_step, raise data.epochs, or set data.drop_last to false"
        )


def read_tasks(config: Config, *, first: int | None = None, left_out: list[LeftOutRow] | None = None) -> list[Task]:
    """Returns the dataset's tasks with their prompts, before `split` divides them into training and held-out tasks.
    `first` limits how many rows are read. A task is left out if its finished prompt, answer and metadata are equal to
    those of an earlier task.

    Rows that are left out are added to `left_out`, and logged with their counts. Raises ConfigError or DatasetError; an
    error that the user's code raises becomes a DatasetError.
    """
    data = config.data
    source, rows = dataset_rows(config)
    tasks, out = read_rows(
        islice(rows, first),
        source=source,
        columns={str(name): key for name, key in data.columns.items()},
        on_bad_row=data.on_bad_row,
    )
    if lacking := without_fields(data.prompt_template, tasks):
        row = lacking[0][1]
        if data.on_bad_row == "refuse":
            raise DatasetError(
                f"{source}, row {row.row}: {row.details}; correct the row, or set data.on_bad_row: skip ({row.reason})"
            )
        out += [left for _, left in lacking]
        unusable = {id(task) for task, _ in lacking}
        tasks = [task for task in tasks if id(task) not in unusable]
    examples = [{"prompt": example.prompt, "answer": example.answer} for example in data.few_shot]
    tasks = apply_template(data.prompt_template, tasks)
    finished = in_conversation(tasks, system_prompt=data.system_prompt, examples=examples)
    kept, repeated = without_repeated(finished)
    out += repeated
    if out:
        _log.warning("%s: skipped %d rows (%s)", data.path or data.dataset, len(out), in_words(counts({"": out})[""]))
    if left_out is not None:
        left_out += out
    return kept


def dataset_rows(config: Config) -> tuple[str, Iterable[Row]]:
    """Returns the name of the dataset for errors, and its rows. Raises ConfigError or DatasetError, also while the rows
    are read; an error that the user's code raises becomes a DatasetError."""
    data = config.data
    if data.dataset == "jsonl":
        if data.path is None:
            raise ConfigError("data.path: must be set for data.dataset = jsonl; give the path of the file")
        return str(data.path), jsonl_rows(data.path)
    if data.dataset == "hf":
        rows = hugging_face_rows(str(data.path), subset=data.subset, split=data.split, options=data.options)
        return f"{data.path} ({data.split})", rows
    own = data.dataset == "environment"
    key, source = ("environment.name", config.environment.name) if own else ("data.dataset", data.dataset)
    return source, _rows_of_code(config, key=key, source=source)


def _rows_of_code(config: Config, *, key: str, source: str) -> Iterator[Row]:
    """Yields the rows of the environment, or of the function `source`.

    When the user's code raises an error, raises DatasetError with this error and its place.
    """
    try:
        if key == "environment.name":
            made: object = build_environment(config.environment).tasks(config.run.seed)
        else:
            function = resolve(source, key=key)
            if isinstance(function, type) and not issubclass(function, Iterable):
                raise ConfigError(f"{key}: the class {source!r} has no rows: it needs the method __iter__")
            made = call_with_options(function, config.data.options, key="data.options")
        if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
            raise DatasetError(
                f"{key} = {source} returned a {type(made).__name__}; return or yield asyncrl Tasks, or dicts with the "
                "texts 'prompt' and 'answer'"
            )
        yield from made
    except AsyncRLError:
        raise
    except Exception as error:
        raise DatasetError(f"{key} = {source} raised {describe_error(error)}") from error
