"""Control tokens of a tokenizer in the texts of users.

A tokenizer turns the text of a control token, such as `<|im_start|>` or `</s>`, into this token wherever it stands. So
a row of a dataset may end a turn or begin another one. A prompt that is in the chat template already has such tokens
too.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt


class ControlTokens:
    """The control tokens of a tokenizer: the special ones, and those that its chat template writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._ids = {
            token.content: number
            for number, token in added.items()
            if token.content and (token.special or number in self._of_template)
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    @cached_property
    def _of_template(self) -> frozenset[int]:
        has_template = getattr(self._tokenizer, "chat_template", None)
        return frozenset(encode_prompt(self._tokenizer, "a")) if has_template else frozenset()

    def of_template(self, token: str) -> bool:
        """Returns whether the chat template writes this token around a message."""
        return self._ids[token] in self._of_template

    def first_in(self, task: Task) -> str | None:
        """Returns the first control token in the text or the messages of a task; None if there is none."""
        texts = [message["content"] for message in task.messages] or [task.prompt]
        return next((token for text in texts for token in self._found(text)), None)

    def _found(self, text: str) -> Iterator[str]:
        if not self._ids or not self._pattern.search(text):
            return
        # A tokenizer may take some tokens only as whole words, or with a space beside them.
        [ids] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        there = set(ids)
        yield from (found for found in self._pattern.findall(text) if self._ids[found] in there)


def with_control_tokens(tasks: Sequence[Task], tokenizer: Any) -> list[tuple[Task, str]]:
    """Returns the tasks whose text has a control token, each with the first one."""
    tokens = ControlTokens(tokenizer)
    found = ((task, tokens.first_in(task)) for task in tasks)
    return [(task, token) for task, token in found if token is not None]
