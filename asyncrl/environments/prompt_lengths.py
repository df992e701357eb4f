"""Checks the control tokens of prompts, and their lengths: a prompt may have 1 to `longest_prompt_tokens` tokens.

Every deployment measures every prompt once, before it gives the prompts to the buffer. So all deployments of a run have
the same prompts. A rollout checks the length of its own prompt again, and fails with a DataError if it does not fit.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.control_tokens import ControlTokens, with_control_tokens
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import Tools, encode_prompt, encode_prompts, template_tokens
from asyncrl.errors import DatasetError

logger = logging.getLogger(__name__)

ENCODED_AT_ONCE = 1024
"""Prompts that are encoded at a time. The token ids of a whole dataset need not fit into memory."""


def longest_prompt_tokens(config: Config) -> int:
    """Returns the largest number of tokens that a prompt may have: `data.max_prompt_tokens`, or `model.max_length` − 1
    if that is less, so that a completion token fits."""
    return min(config.data.max_prompt_tokens, config.model.max_length - 1)


def counted(tokenizer: Any, task: Task, ids: Sequence[int], *, tools: Tools = ()) -> str:
    """Returns in words how many tokens a prompt has, and how many of them the chat template and the tools add. `ids`
    are the tokens of the prompt."""
    added = template_tokens(tokenizer, task.input)
    if tools:
        of_tools = len(ids) - len(encode_prompt(tokenizer, task.input))
        return (
            f"{len(ids)} tokens ({of_tools} of them describe the tools of environment.tools, and {added} are from the "
            "model's chat template)"
        )
    of_template = f" ({added} of them from the model's chat template, which data.chat: off leaves out)"
    return f"{len(ids)} tokens{of_template if added else ''}"


def control_token_finding(found: Sequence[tuple[Task, str]], *, config: Config, tokenizer: Any, among: int) -> str:
    """Returns a message about the prompts `found`, which have control tokens in their own text. `among` is the number
    of all prompts."""
    task, token = found[0]
    tokens = ControlTokens(tokenizer)
    of_template = (
        f". The chat template writes {token!r} too: a prompt that is in the template already becomes the text of one "
        "turn of the user; set data.chat: off, or give the conversation as `messages`"
        if tokens.of_template(token)
        else ""
    )
    return (
        f"{_source(config)}, {_where(task)}: the prompt {task.question[:40]!r} contains {token!r}, "
        f"{tokens.description(token)}; it is the first of {len(found)} such prompts, among {among}{of_template}"
    )


def without_control_tokens(
    tasks: Sequence[Task], *, config: Config, tokenizer: Any, left_out: list[LeftOutRow] | None = None
) -> Sequence[Task]:
    """Applies `data.control_tokens`: returns the tasks, and logs a note about those with control tokens in their own
    text. With `data.control_tokens: refuse` it leaves these tasks out and adds them to `left_out`; it raises
    DatasetError instead if `data.on_bad_row` is `refuse`, or if all tasks have such tokens."""
    if not (found := with_control_tokens(tasks, tokenizer)):
        return tasks
    finding = control_token_finding(found, config=config, tokenizer=tokenizer, among=len(tasks))
    if config.data.control_tokens == "keep":
        logger.warning("%s (data.control_tokens: keep)", finding)
        return tasks
    if config.data.on_bad_row == "refuse" or len(found) == len(tasks):
        raise DatasetError(f"{finding}. Correct the rows, or set data.control_tokens: keep, or data.on_bad_row: skip")
    logger.warning("%s. These prompts are skipped (data.control_tokens: refuse, data.on_bad_row: skip)", finding)
    if left_out is not None:
        left_out += [LeftOutRow(task.row, "control_token", f"contains {token!r}") for task, token in found]
    skipped = {id(task) for task, _ in found}
    return [task for task in tasks if id(task) not in skipped]


def _source(config: Config) -> str:
    return "data.mixture" if config.data.mixture else str(config.data.path or config.data.dataset)


def _where(task: Task) -> str:
    return f"{task.part} row {task.row}" if task.part else f"row {task.row}"


def fitting(
    tasks: Sequence[Task],
    *,
    config: Config,
    tokenizer: Any,
    exact: Callable[[], Any] | None = None,
    left_out: list[LeftOutRow] | None = None,
    tools: Tools = (),
    at_once: int = ENCODED_AT_ONCE,
) -> list[Task]:
    """Returns the tasks whose prompts are neither empty nor too long. The descriptions of the `tools`
    count as a part of each prompt. Adds the other tasks to `left_out`, and logs their number.

    If `tokenizer` is a LightTokenizer, `exact` returns the model's real tokenizer. It measures again the prompts that
    would fit or not depending on the special tokens that it adds, and those without a token. `at_once` prompts are
    encoded at a time.

    Raises DatasetError, which names the first row that does not fit, if `data.on_bad_row` is `refuse` or if there are
    tasks but none of them fits.
    """
    longest = longest_prompt_tokens(config)
    fit: list[Task] = []
    misfits: list[LeftOutRow] = []
    first_misfit = ""
    for start in range(0, len(tasks), at_once):
        chunk = tasks[start : start + at_once]
        encoded = encode_prompts(tokenizer, [task.input for task in chunk], tools=tools)
        if exact is not None:
            added = tokenizer.added_at_most
            doubtful = [place for place, ids in enumerate(encoded) if not ids or len(ids) <= longest < len(ids) + added]
            prompts = [chunk[place].input for place in doubtful]
            again = encode_prompts(exact(), prompts, tools=tools) if doubtful else []
            for place, ids in zip(doubtful, again, strict=True):
                encoded[place] = ids
        for task, ids in zip(chunk, encoded, strict=True):
            if 0 < len(ids) <= longest:
                fit.append(task)
                continue
            misfits.append(
                LeftOutRow(task.row, "prompt_length", f"has {len(ids)} tokens, but must have 1 to {longest}")
            )
            if not first_misfit:
                size = counted(tokenizer, task, ids, tools=tools)
                first_misfit = f"{_where(task)}: the prompt {task.prompt[:40]!r} has {size}"
    if not misfits:
        return fit
    finding = (
        f"{_source(config)}, {first_misfit}, but must have 1 to {longest} (data.max_prompt_tokens = "
        f"{config.data.max_prompt_tokens}, model.max_length = {config.model.max_length}); it is the first of "
        f"{len(misfits)} that do not fit, among {len(tasks)} prompts"
    )
    if not fit:
        raise DatasetError(f"{finding}. No prompt fits: raise the limit, or shorten the rows")
    if config.data.on_bad_row == "refuse":
        raise DatasetError(f"{finding}. Raise the limit, shorten the rows, or set data.on_bad_row: skip")
    logger.warning("%s. These prompts are skipped (data.on_bad_row: skip)", finding)
    if left_out is not None:
        left_out += misfits
    return fit
