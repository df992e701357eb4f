"""`asyncrl data`: shows the prompts of a configuration token by token, before anything trains."""

import json
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from asyncrl.cli.options import ConfigFiles, Overrides
from asyncrl.cli.preflight import checked_config
from asyncrl.cli.terminal import command_app, print_warnings, say
from asyncrl.config.parts import key_of, part_configs, section_of
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.left_out import REASONS, LeftOut, counts
from asyncrl.data.prompts import Task
from asyncrl.data.rows import BadRow
from asyncrl.data.tokenizer import asked
from asyncrl.data.turn_ends import template_end
from asyncrl.demo.directory import is_tiny
from asyncrl.environments.reward_function import subject
from asyncrl.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from asyncrl.data.tokenizer import Tools
    from asyncrl.deployment.inputs import Prompts

app = command_app(help="Look at the prompts of a configuration, without starting anything.")


@app.callback()
def _data() -> None:
    """Makes `show` a subcommand: Typer turns an app with a single command into that command."""


@app.command()
def show(
    files: ConfigFiles,
    overrides: Overrides,
    prompts: Annotated[
        int, typer.Option("-n", metavar="N", min=1, help="Number of prompts, of each part of a mixture.")
    ] = 3,
    heldout: Annotated[
        bool, typer.Option("--heldout", help="Show prompts that are held out for evaluation, not those for training.")
    ] = False,
    row: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Show row N of the dataset in full: as it is in the file, its use or why it is left out, its prompt "
            "token by token with ids, and what the reward gets.",
        ),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show each token of a prompt in a line, with its id.")
    ] = False,
) -> None:
    """Print prompts as the model gets them, token by token, with the model's chat template and special tokens.

    Each line of tokens begins with its use. "read, not trained": the prompt, with the descriptions of
    `environment.tools`. "sampled, trained": the reference answer and the end of the model's turn, in the place of what
    the model will sample; not shown if episodes have several turns. "added, not trained": tokens that the chat template
    puts behind a turn. The first lines count the rows that are left out, by reason. A dataset or an environment that is
    your own code is imported and called, and your own tools are imported.
    """
    config, warnings = checked_config(files, overrides, roles=())
    print_warnings(warnings)

    from asyncrl.data.tokenizer import load_tokenizer
    from asyncrl.deployment.inputs import read_prompts

    if row is not None:  # before the prompts are read: they may be refused because of this row
        for name, part in part_configs(config).items():
            for line in row_lines(part, row, named=section_of(name)):
                say(line)
    read = read_prompts(config)
    with tempfile.TemporaryDirectory() as folder:
        model = _model(config, Path(folder))
        found = _fitting(read, config=config, model=model)
        tokenizer = load_tokenizer(model, chat=config.data.chat, chat_options=config.data.chat_options)
        source = "mixture" if config.data.mixture else config.data.path or config.data.dataset
        if row is not None:
            for line in use_lines(found, row, tokenizer, config=config):
                say(line)
            return
        say(f"{source}: {len(found.train)} prompts for training, {len(found.heldout)} held out for evaluation")
        for line in left_out_lines(found.left_out):
            say(line)
        chosen = found.heldout if heldout else found.train
        for name, part in part_configs(config).items():
            for note in episode_notes(part.environment):
                say(f"{key_of(name)}{note}", label="note:")
            for task in [task for task in chosen if task.part == name][:prompts]:
                say()
                for line in _described_in(part, task, tokenizer, found=found, tokens=tokens):
                    say(line)


def episode_notes(section: EnvironmentSection) -> Iterator[str]:
    """Yields notes about text that the model reads in an episode and that the shown prompt does not contain."""
    if section.mcp_servers:
        yield (
            "environment.mcp_servers: the servers are not started here, so the prompts below lack the descriptions of "
            "their tools, which the model reads in addition"
        )
    if section.plays_agents and not section.has_tools:
        yield (
            f"{subject(section)}: makes its own calls to the model, so the model may read other messages than the "
            "prompts below"
        )


def _described_in(config: Config, task: Task, tokenizer: Any, *, found: "Prompts", tokens: bool) -> Iterator[str]:
    tools = found.tools.get(task.part, ())
    return described(task, tokenizer, tokens=tokens, tools=tools, turns=config.environment.plays_agents)


def _fitting(read: "Prompts", *, config: Config, model: str) -> "Prompts":
    """Returns the prompts that a run would use. If a run would refuse them, prints why, and returns all."""
    from asyncrl.deployment.inputs import fitting_prompts

    try:
        return fitting_prompts(read, config=config, model=model)
    except DatasetError as error:
        say(f"a run would refuse these prompts: {error}", label="note:")
        return read


def left_out_lines(left_out: LeftOut) -> Iterator[str]:
    """Yields lines that count the rows that are left out by part and reason, with the first row of each."""
    for part, rows in left_out.items():
        yield f"{section_of(part)}: {len(rows)} row{'' if len(rows) == 1 else 's'} left out"
        for reason, count in counts({part: rows})[part].items():
            first = next(each.row for each in rows if each.reason == reason)
            yield f"  {count} {reason}: {REASONS[reason]} (first: row {first})"


def row_lines(config: Config, number: int, *, named: str) -> Iterator[str]:
    """Yields lines that show a row of a dataset as it was read, with the types of its values. Raises ConfigError if
    there is no such row."""
    from asyncrl.environments.interfaces import dataset_rows

    source, rows = dataset_rows(config)
    last = deque(enumerate(islice(rows, number), start=1), maxlen=1)
    count, row = last[0] if last else (0, None)
    if count < number:
        raise ConfigError(f"--row {number}: {source} ({named}) has {count} rows")
    yield f"{source}, row {number}, as it was read:"
    yield from value_lines(row)


def value_lines(value: object) -> Iterator[str]:
    """Yields a line for each field of a row or a task: its name, its value, and its type."""
    if isinstance(value, BadRow):
        yield f"  {value}"
        return
    fields = msgspec.structs.asdict(value) if isinstance(value, Task) else value
    if not isinstance(fields, Mapping):
        yield f"  {fields!r} ({_type(fields)})"
        return
    for name, each in fields.items():
        yield f"  {name}: {each!r} ({_type(each)})"


_TYPES = {str: "text", bool: "truth value", int: "integer", float: "number", type(None): "null"}


def _type(value: object) -> str:
    return _TYPES.get(type(value), type(value).__name__)


def use_lines(found: "Prompts", number: int, tokenizer: Any, *, config: Config) -> Iterator[str]:
    """Yields lines about row `number` of the dataset of each part: what a run uses it for, or why it is left out, its
    prompt token by token, and what the reward gets."""
    uses = {"used for training": found.train, "held out for evaluation": found.heldout}
    for use, tasks in uses.items():
        for task in [task for task in tasks if task.row == number]:
            yield f"{section_of(task.part)}, row {number}: {use}"
            of_part = part_configs(config)[task.part]
            yield from list(_described_in(of_part, task, tokenizer, found=found, tokens=True))[1:]
            yield "  the reward gets:"
            for name in ("question", "answer"):
                yield from (f"  {line}" for line in value_lines({name: getattr(task, name)}))
            yield from (f"    metadata.{line.strip()}" for line in value_lines(task.metadata))
    for part, rows in found.left_out.items():
        for each in rows:
            if each.row == number:
                yield f"{section_of(part)}, row {number}: left out, {each.reason}: it {each.details}"


def described(
    task: Task, tokenizer: Any, *, tokens: bool = False, tools: "Tools" = (), turns: bool = False
) -> Iterator[str]:
    """Yields lines that show a prompt and its reference answer token by token; with `tokens`, each token of the prompt
    in a line with its id. The prompt contains the descriptions of the `tools`. A note names a control token in the
    task's own text. With `turns`, an episode has several turns: the reference answer is not what the model samples
    after the prompt, so its tokens are not shown."""
    from asyncrl.data.control_tokens import ControlTokens
    from asyncrl.data.tokenizer import encode_prompt, template_tokens

    ids = encode_prompt(tokenizer, task.input, tools=tools)
    added = template_tokens(tokenizer, task.input)
    where = f"{task.part}, row {task.row}" if task.part else f"row {task.row}"
    describing = len(ids) - len(encode_prompt(tokenizer, task.input)) if tools else 0
    shares = {"from the chat template": added, "describe tools": describing}
    yield ", ".join([f"{where}: {len(ids)} tokens", *(f"{n} of them {share}" for share, n in shares.items() if n)])
    tokens_found = ControlTokens(tokenizer)
    if (control := tokens_found.first_in(task)) is not None:
        yield f"  note: its own text contains {control!r}, {tokens_found.description(control)}"
    if tokens:
        yield "  read, not trained (id, token):"
        yield from (f"    {each:>7}  {_tokens(tokenizer, [each])}" for each in ids)
    else:
        yield f"  read, not trained:  {_tokens(tokenizer, ids)}"
    if task.answer and not turns:
        sampled, closing = answered(task, ids, tokenizer)
        yield f"  sampled, trained:   {_tokens(tokenizer, sampled)}"
        if closing:
            yield f"  added, not trained: {_tokens(tokenizer, closing)}"
    yield f"  answer: {task.answer!r}" if task.answer else "  no reference answer"
    if task.metadata:
        yield f"  metadata: {json.dumps(task.metadata, ensure_ascii=False)}"


def answered(task: Task, prompt_ids: Sequence[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens of the reference answer as the model would sample them, with the end of its turn, and those
    that the chat template adds after a turn."""
    end = template_end(tokenizer) or tokenizer.eos_token_id
    plain = [*tokenizer(task.answer, add_special_tokens=False)["input_ids"], end]
    if not getattr(tokenizer, "chat_template", None):
        return plain, []
    whole = tokenizer.apply_chat_template(
        [*asked(task.input), {"role": "assistant", "content": task.answer}], tokenize=True, return_dict=False
    )
    rest = list(whole[len(prompt_ids) :])
    if list(whole[: len(prompt_ids)]) != list(prompt_ids) or end not in rest:
        return plain, []  # the template writes past turns differently, so the answer cannot be cut out of its text
    cut = rest.index(end) + 1
    return rest[:cut], rest[cut:]


def _tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of each token, with `|` between them. Special tokens are in brackets."""
    special = set(tokenizer.all_special_ids)
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
    shown = [repr(text)[1:-1] for text in texts]
    return "|".join(f"[{text}]" if each in special else text for each, text in zip(ids, shown, strict=True))


def _model(config: Config, folder: Path) -> str:
    """Returns the path or the name of the model whose tokenizer is loaded. For a tiny model, makes the tokenizer in
    `folder` and not at `model.path`: a tiny model there must keep its weights, also if a run with this configuration
    would build it again."""
    path = Path(config.model.path)
    if config.model.tiny is None or (path.exists() and not is_tiny(path)):
        return config.model.path
    from asyncrl.demo.tiny_model import ensure_description

    elsewhere = config.model.model_copy(update={"path": str(folder / "model")})
    return ensure_description(config.model_copy(update={"model": elsewhere}))
