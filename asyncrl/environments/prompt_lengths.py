"""Which prompts the model can take: each has at least one token and at most `longest_prompt_tokens`.

The learner looks at every prompt once, before it publishes the first weights: until then nothing is generated. A
rollout looks at its own prompt again and fails as DATA when it does not fit.
"""

import logging
from collections.abc import Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompts, template_tokens
from asyncrl.errors import DatasetError

logger = logging.getLogger(__name__)

ENCODED_AT_ONCE = 1024
"""A dataset's ids need not fit into memory."""


def longest_prompt_tokens(config: Config) -> int:
    """`data.max_prompt_tokens`, or less, so that a completion of one token still fits."""
    return min(config.data.max_prompt_tokens, config.model.max_length - 1)


def counted(tokenizer: Any, task: Task, ids: Sequence[int]) -> str:
    """How many tokens a prompt has, and how many of them are the chat template's, in words."""
    added = template_tokens(tokenizer, task.prompt)
    of_template = f" ({added} of them from the model's chat template, which data.chat: off leaves out)"
    return f"{len(ids)} tokens{of_template if added else ''}"


def fitting(tasks: Sequence[Task], *, config: Config, tokenizer: Any) -> list[Task]:
    """The tasks whose prompts fit. DatasetError names the first row that does not, unless `data.on_bad_row` skips.

    Skipped rows are logged with their count. DatasetError also when there are tasks, and none that fits.
    """
    longest = longest_prompt_tokens(config)
    fit: list[Task] = []
    first_misfit = ""
    for start in range(0, len(tasks), ENCODED_AT_ONCE):
        chunk = tasks[start : start + ENCODED_AT_ONCE]
        for task, ids in zip(chunk, encode_prompts(tokenizer, [task.prompt for task in chunk]), strict=True):
            if 0 < len(ids) <= longest:
                fit.append(task)
            elif not first_misfit:
                first_misfit = f"row {task.row}: the prompt {task.prompt[:40]!r} has {counted(tokenizer, task, ids)}"
    misfits = len(tasks) - len(fit)
    if not misfits:
        return fit
    source = config.data.path if config.data.dataset == "jsonl" else config.data.dataset
    finding = (
        f"{source}, {first_misfit}, and 1 to {longest} fit (data.max_prompt_tokens = {config.data.max_prompt_tokens}, "
        f"model.max_length = {config.model.max_length}); it is the first of {misfits} among {len(tasks)} prompts"
    )
    if not fit:
        raise DatasetError(f"{finding}: none fits; raise the limit, or shorten the rows")
    if config.data.on_bad_row == "refuse":
        raise DatasetError(f"{finding}; raise the limit, shorten the rows, or set data.on_bad_row: skip")
    logger.warning("%s: they are skipped (data.on_bad_row: skip)", finding)
    return fit
