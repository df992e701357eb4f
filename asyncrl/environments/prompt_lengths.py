"""Checks prompt lengths: the model can take prompts of 1 to `longest_prompt_tokens` tokens.

Every deployment measures every prompt once, before it gives the prompts to the buffer. So all deployments of a run have
the same prompts. A rollout checks its own prompt again and fails as DATA if the prompt does not fit.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompts, template_tokens
from asyncrl.errors import DatasetError

logger = logging.getLogger(__name__)

ENCODED_AT_ONCE = 1024
"""Prompts that are encoded at a time. The token ids of a whole dataset need not fit into memory."""


def longest_prompt_tokens(config: Config) -> int:
    """Returns the longest allowed prompt: `data.max_prompt_tokens`, or less if no completion token would fit."""
    return min(config.data.max_prompt_tokens, config.model.max_length - 1)


def counted(tokenizer: Any, task: Task, ids: Sequence[int]) -> str:
    """Says in words how many tokens a prompt has, and how many of them the chat template adds."""
    added = template_tokens(tokenizer, task.input)
    of_template = f" ({added} of them from the model's chat template, which data.chat: off leaves out)"
    return f"{len(ids)} tokens{of_template if added else ''}"


def fitting(
    tasks: Sequence[Task], *, config: Config, tokenizer: Any, exact: Callable[[], Any] | None = None
) -> list[Task]:
    """Returns the tasks whose prompts fit, and logs the count of skipped ones.

    If `tokenizer` is a LightTokenizer, `exact` returns the model's real tokenizer. It is called for prompts that fit
    only if the real one adds no special tokens.

    Raises DatasetError, which names the first row that does not fit, if `data.on_bad_row` is `refuse` or if there are
    tasks but none of them fits.
    """
    longest = longest_prompt_tokens(config)
    fit: list[Task] = []
    first_misfit = ""
    for start in range(0, len(tasks), ENCODED_AT_ONCE):
        chunk = tasks[start : start + ENCODED_AT_ONCE]
        encoded = encode_prompts(tokenizer, [task.input for task in chunk])
        if exact is not None:
            added = tokenizer.added_at_most
            doubtful = [place for place, ids in enumerate(encoded) if not ids or len(ids) <= longest < len(ids) + added]
            again = encode_prompts(exact(), [chunk[place].input for place in doubtful]) if doubtful else []
            for place, ids in zip(doubtful, again, strict=True):
                encoded[place] = ids
        for task, ids in zip(chunk, encoded, strict=True):
            if 0 < len(ids) <= longest:
                fit.append(task)
            elif not first_misfit:
                where = f"{task.part} row {task.row}" if task.part else f"row {task.row}"
                first_misfit = f"{where}: the prompt {task.prompt[:40]!r} has {counted(tokenizer, task, ids)}"
    misfits = len(tasks) - len(fit)
    if not misfits:
        return fit
    source = "data.mixture" if config.data.mixture else config.data.path or config.data.dataset
    finding = (
        f"{source}, {first_misfit}, but must have 1 to {longest} (data.max_prompt_tokens = "
        f"{config.data.max_prompt_tokens}, model.max_length = {config.model.max_length}); it is the first of {misfits} "
        f"that do not fit, among {len(tasks)} prompts"
    )
    if not fit:
        raise DatasetError(f"{finding}. No prompt fits: raise the limit, or shorten the rows")
    if config.data.on_bad_row == "refuse":
        raise DatasetError(f"{finding}. Raise the limit, shorten the rows, or set data.on_bad_row: skip")
    logger.warning("%s. These prompts are skipped (data.on_bad_row: skip)", finding)
    return fit
