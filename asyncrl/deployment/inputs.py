"""The prompts and the model files of a run. Threads load them while Ray and the engines start."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.common.imports import uncollected
from asyncrl.common.tasks import cancelled
from asyncrl.config.import_path import is_import_path
from asyncrl.config.parts import EVAL, all_configs, eval_configs, key_of, part_configs, section_of
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.data.answer_text import hidden_tags, note_on_begin, note_on_tags
from asyncrl.data.left_out import LeftOutRow, counts, in_words, joined
from asyncrl.data.light_tokenizer import cached_files, light_tokenizer
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import EXAMPLE_TOOL, check_tools_written, load_tokenizer, shown_prompt
from asyncrl.data.turn_ends import note_on_ends
from asyncrl.environments.interfaces import build_sets, build_tasks
from asyncrl.environments.prompt_lengths import fitting, without_control_tokens
from asyncrl.environments.prompt_tools import PromptTools, prompt_tools
from asyncrl.errors import DatasetError
from asyncrl.learner.records import DataRecord


class Prompts(NamedTuple):
    """The tasks of a run: for training, held out for evaluation, and those of the named held-out sets (`eval.sets`).
    `left_out` has the rows of the datasets that the run does not use. `tools` has the descriptions of tools in the
    prompts. The keys of both are the names of the parts of the mixture (`data.mixture`) and of the held-out sets."""

    train: Sequence[Task]
    heldout: Sequence[Task]
    sets: Mapping[str, Sequence[Task]] = {}
    left_out: Mapping[str, Sequence[LeftOutRow]] = {}
    tools: Mapping[str, PromptTools] = {}


def data_record(prompts: Prompts, *, hidden_tags: Sequence[str] = ()) -> DataRecord:
    """Returns the record of the run's data: the numbers of prompts, the numbers of dataset rows that are left out, and
    `hidden_tags` (`tags_of_rewards`)."""
    return DataRecord(
        training=len(prompts.train),
        heldout=len(prompts.heldout),
        sets={name: len(tasks) for name, tasks in prompts.sets.items()},
        left_out={section_of(part): by_reason for part, by_reason in counts(prompts.left_out).items()},
        hidden_tags=tuple(hidden_tags),
    )


def tags_of_rewards(config: Config, tokenizer: Any) -> tuple[str, ...]:
    """Returns the tags, such as `<think>`, that the text of an answer never has (`hidden_tags`), although a reward of
    the run may look for them; none if no reward looks for tags."""
    kinds = [part.environment.special_tokens for part in part_configs(config).values() if _may_read_tags(part)]
    return tuple(dict.fromkeys(tag for kind in kinds for tag in hidden_tags(tokenizer, special_tokens=kind)))


def lines_on_data(record: DataRecord, prompts: Prompts, *, config: Config, tokenizer: Any) -> Iterator[str]:
    """Yields the lines about its data that a run prints at its start: rows that are left out, the first prompt, where
    answers end, special tokens that rewards do not get, and tags that the chat template writes before an answer."""
    for section, by_reason in record.left_out.items():
        yield f"{section}: left out {in_words(by_reason)}"
    for task in prompts.train[:1]:
        yield shown_prompt(tokenizer, task.input, tools=prompts.tools.get(task.part, ()))
    if (note := note_on_ends(tokenizer)) is not None:
        yield note
    read = [part.environment for part in part_configs(config).values() if _may_read_tags(part)]
    drops = any(environment.special_tokens == "drop" for environment in read)
    for note in (note_on_tags(tokenizer) if drops else None, note_on_begin(tokenizer) if read else None):
        if note is not None:
            yield note


def _may_read_tags(config: Config) -> bool:
    """Returns whether a reward may look for tags in answers: it is the user's own code or a regular expression, and the
    prompts have no agents."""
    environment = config.environment
    if environment.plays_agents:
        return False
    named = [term.fn for term in environment.rewards] or [environment.reward or environment.name]
    return any(name == "regex" or is_import_path(name) for name in named)


class Inputs:
    """Loads the prompts and the model of a config, as tasks that several deployments of a process can await.

    `loaded` are the prompts if the command has read them already. `report` prints lines about the building of a tiny
    model (`model.tiny`). The end of the block of `async with` cancels the tasks.
    """

    def __init__(
        self, config: Config, *, loaded: Prompts | None = None, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self._config = config
        self._report = report
        self._read = asyncio.create_task(self._load_prompts(loaded), name="reading prompts")
        self.engine_model = asyncio.create_task(self._describe_model(), name="engine model")
        """Path of the model for engines. They need config and tokenizer only: the learner sends them the weights."""
        self.prompts = asyncio.create_task(self._fitting_prompts(), name="prompts")
        """The tasks of the config whose prompts fit, which are the same in every deployment of a run. Raises the errors
        of `read_prompts` and of `fitting_prompts`, and DatasetError if `run.stop_when` needs held-out tasks but there
        are none."""

    @property
    def generator_model(self) -> "asyncio.Task[str]":
        """Path of the model for the engines of this config. If an adapter is trained, engines load the weights of the
        model from this path, so a tiny model is then built with its weights."""
        return self.engine_model if self._config.model.lora is None else self.learner_model

    @cached_property
    def learner_model(self) -> "asyncio.Task[str]":
        """Path of the model with its weights, for ranks. A tiny model is built when this property is first read."""
        return asyncio.create_task(self._build_model(), name="learner model")

    async def __aenter__(self) -> "Inputs":
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancelled(*[task for task in vars(self).values() if isinstance(task, asyncio.Task)])

    async def _load_prompts(self, loaded: Prompts | None) -> Prompts:
        return await asyncio.to_thread(read_prompts, self._config) if loaded is None else loaded

    async def _fitting_prompts(self) -> Prompts:
        prompts, model = await self._read, await self.engine_model
        found = await asyncio.to_thread(fitting_prompts, prompts, config=self._config, model=model)
        _check_heldout(self._config, found.heldout)
        return found

    async def _describe_model(self) -> str:
        if self._config.model.tiny is None:
            return _for_workers(self._config.model.path)
        # Wait for the thread that reads the prompts: two threads that import at the same time may see half-initialised
        # modules.
        await self._read

        def describe() -> str:
            from asyncrl.demo.tiny_model import ensure_description

            return _for_workers(ensure_description(self._config))

        return await asyncio.to_thread(describe)

    async def _build_model(self) -> str:
        path, prompts = await self.engine_model, await self._read
        if self._config.model.tiny is None:
            return path

        def build() -> str:
            from asyncrl.demo.tiny_model import ensure_model

            return _for_workers(ensure_model(self._config, tasks=(prompts.train, prompts.heldout), report=self._report))

        return await asyncio.to_thread(build)


@uncollected()
def read_prompts(config: Config) -> Prompts:
    """Reads the tasks of a configuration. Raises ConfigError or DatasetError."""
    left_out: dict[str, list[LeftOutRow]] = {}
    train, heldout = build_tasks(config, left_out=left_out)
    sets = build_sets(config, train=train, left_out=left_out)
    return Prompts(train=train, heldout=heldout, sets=sets, left_out=left_out, tools=prompt_tools(config))


@uncollected()
def fitting_prompts(prompts: Prompts, *, config: Config, model: str) -> Prompts:
    """Returns the prompts that have at least one token, fit `data.max_prompt_tokens` and `model.max_length`, and have
    no refused control tokens. `model` is the path of a folder, or a name of the Hub.

    Raises DatasetError if a prompt does not fit or has such a token, unless `data.on_bad_row` is `skip`, or if no
    prompt is left. Raises ConfigError if the chat template ignores the tools.
    """
    if not any([prompts.train, prompts.heldout, *prompts.sets.values()]):
        return prompts
    chat, options = config.data.chat, config.data.chat_options
    exact = cache(partial(load_tokenizer, model, chat=chat, chat_options=options))
    files = Path(model) if os.path.isdir(model) else cached_files(model)
    # The real tokenizer needs transformers, whose import takes seconds. It is used only if the light one is not enough.
    tools = _shown_tools(prompts, config=config)
    any_tools = list(chain.from_iterable(tools.values()))
    light = None if files is None else light_tokenizer(files, chat=chat, chat_options=options, tools=any_tools)
    if any_tools:
        _check_tools(prompts, tools, config=config, tokenizer=light or exact())
    fit = partial(_usable, tokenizer=exact()) if light is None else partial(_usable, tokenizer=light, exact=exact)
    out: dict[str, list[LeftOutRow]] = {part: [] for part in all_configs(config)}
    configs = eval_configs(config)
    return Prompts(
        train=fitting_of_parts(prompts.train, config=config, fit=fit, left_out=out, tools=prompts.tools),
        heldout=fitting_of_parts(prompts.heldout, config=config, fit=fit, left_out=out, tools=prompts.tools),
        sets={
            name: fit(
                tasks,
                config=configs[f"{EVAL}{name}"],
                left_out=out[f"{EVAL}{name}"],
                tools=prompts.tools.get(f"{EVAL}{name}", ()),
            )
            for name, tasks in prompts.sets.items()
        },
        left_out=joined(*prompts.left_out.items(), *out.items()),
        tools=prompts.tools,
    )


def _shown_tools(prompts: Prompts, *, config: Config) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Returns the tools of each part that has tools. For a part with MCP servers, whose tools are not known yet,
    returns an example."""
    parts = {name: part for name, part in all_configs(config).items() if part.environment.has_tools}
    return {name: prompts.tools.get(name, (EXAMPLE_TOOL,)) for name in parts}


def _check_tools(
    prompts: Prompts, tools: Mapping[str, Sequence[Mapping[str, Any]]], *, config: Config, tokenizer: Any
) -> None:
    """Raises ConfigError if the chat template does not write the tools of a part into its first prompt."""
    parts = all_configs(config)
    everything = [*prompts.train, *prompts.heldout, *chain.from_iterable(prompts.sets.values())]
    for name, of_part in tools.items():
        key = f"{key_of(name)}{parts[name].environment.tools_key}"
        for task in [task for task in everything if task.part == name][:1]:
            check_tools_written(tokenizer, task.input, tools=of_part, model=config.model.path, key=key)


def _usable(
    tasks: Sequence[Task],
    *,
    config: Config,
    tokenizer: Any,
    left_out: list[LeftOutRow],
    exact: Callable[[], Any] | None = None,
    tools: PromptTools = (),
) -> Sequence[Task]:
    plain = without_control_tokens(tasks, config=config, tokenizer=tokenizer, left_out=left_out)
    return fitting(plain, config=config, tokenizer=tokenizer, exact=exact, left_out=left_out, tools=tools)


def fitting_of_parts(
    tasks: Sequence[Task],
    *,
    config: Config,
    fit: Callable[..., Sequence[Task]],
    left_out: Mapping[str, list[LeftOutRow]],
    tools: Mapping[str, PromptTools],
) -> Sequence[Task]:
    """Returns the tasks that fit, in their order. They are checked part by part, because each part of a mixture has its
    own `on_bad_row`."""
    parts = part_configs(config)
    if len(parts) == 1:
        [name] = parts
        return fit(tasks, config=config, left_out=left_out[name], tools=tools.get(name, ()))
    kept = {
        id(task)
        for name, part in parts.items()
        for task in fit(
            [t for t in tasks if t.part == name],
            config=part,
            left_out=left_out[name],
            tools=tools.get(name, ()),
        )
    }
    return [task for task in tasks if id(task) in kept]


def _check_heldout(config: Config, tasks: Sequence[Task]) -> None:
    """Raises DatasetError if the run ends at a held-out reward (`run.stop_when`), but no question is held out."""
    if config.run.stop_when is not None and config.run.stop_when.eval == HELDOUT and not tasks:
        raise DatasetError(
            f"run.stop_when: the hash of the questions holds out none of data.dataset = {config.data.dataset} with "
            f"data.heldout_fraction = {config.data.heldout_fraction}, so no evaluation would run; raise "
            "data.heldout_fraction, add questions, or remove run.stop_when"
        )


def _for_workers(model: str) -> str:
    """Returns the absolute path if `model` is a folder, else `model`.

    The processes of a Ray cluster run in the folder in which the cluster was started, so a relative path is wrong
    there.
    """
    return os.path.abspath(model) if os.path.isdir(model) else model
