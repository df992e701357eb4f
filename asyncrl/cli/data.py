"""`asyncrl data`: shows the prompts of a configuration token by token, before anything trains."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncrl.cli.options import ConfigFiles, Overrides, checked_config, print_warnings
from asyncrl.cli.terminal import command_app, say
from asyncrl.config.parts import part_configs
from asyncrl.config.schema import Config
from asyncrl.data.conversation import asked
from asyncrl.data.prompts import Task
from asyncrl.demo.directory import is_tiny

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
) -> None:
    """Print prompts as the model gets them, token by token, with the model's chat template and special tokens.

    A line of tokens says what it is for: the model reads the prompt, and nothing of it is trained. Tokens that the
    model samples are trained, with the end of its turn. The reference answer shows where they would stand. Tokens that
    the chat template puts behind a turn are not sampled, and not trained.
    """
    config, warnings = checked_config(files, overrides, roles=())
    print_warnings(warnings)

    from asyncrl.data.tokenizer import load_tokenizer
    from asyncrl.environments.interfaces import build_tasks

    train, kept_back = build_tasks(config)
    chosen = kept_back if heldout else train
    shown = [task for name in part_configs(config) for task in [t for t in chosen if t.part == name][:prompts]]
    with tempfile.TemporaryDirectory() as folder:
        model = _model(config, Path(folder))
        tokenizer = load_tokenizer(model, chat=config.data.chat, chat_options=config.data.chat_options)
    source = "mixture" if config.data.mixture else config.data.path or config.data.dataset
    say(f"{source}: {len(train)} prompts for training, {len(kept_back)} held out for evaluation")
    for task in shown:
        say()
        for line in described(task, tokenizer):
            say(line)


def described(task: Task, tokenizer: Any) -> Iterator[str]:
    """Yields lines that show a prompt and its reference answer token by token."""
    from asyncrl.data.tokenizer import encode_prompt, template_tokens

    ids = encode_prompt(tokenizer, task.input)
    added = template_tokens(tokenizer, task.input)
    where = f"{task.part}, row {task.row}" if task.part else f"row {task.row}"
    yield f"{where}: {len(ids)} tokens" + (f", {added} of them from the chat template" if added else "")
    yield f"  read, not trained:  {_tokens(tokenizer, ids)}"
    if task.answer:
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
    end = tokenizer.eos_token_id
    plain = [*tokenizer(task.answer, add_special_tokens=False)["input_ids"], end]
    if not getattr(tokenizer, "chat_template", None):
        return plain, []
    whole = tokenizer.apply_chat_template(
        [*asked(task.input), {"role": "assistant", "content": task.answer}], tokenize=True, return_dict=False
    )
    rest = list(whole[len(prompt_ids) :])
    if list(whole[: len(prompt_ids)]) != list(prompt_ids) or end not in rest:
        return plain, []  # the template writes an old turn in another way than it begins a new one
    cut = rest.index(end) + 1
    return rest[:cut], rest[cut:]


def _tokens(tokenizer: Any, ids: Sequence[int]) -> str:
    """Returns the text of each token, with `|` between them. Special tokens are in brackets."""
    special = set(tokenizer.all_special_ids)
    texts = [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
    shown = [repr(text)[1:-1] for text in texts]
    return "|".join(f"[{text}]" if each in special else text for each, text in zip(ids, shown, strict=True))


def _model(config: Config, folder: Path) -> str:
    """Returns the path of the model's tokenizer. That of a tiny model is made in `folder`: a model that is built
    already must keep its weights, even if it would be built again for this configuration."""
    path = Path(config.model.path)
    if config.model.tiny is None or (path.exists() and not is_tiny(path)):
        return config.model.path
    from asyncrl.demo.tiny_model import ensure_description

    elsewhere = config.model.model_copy(update={"path": str(folder / "model")})
    return ensure_description(config.model_copy(update={"model": elsewhere}))
