"""Control tokens of a tokenizer in the texts of users.

A tokenizer turns the text of a control token, such as `<|im_start|>` or `</s>`, into this token wherever it stands. So
a row of a dataset may end a turn or begin another one. If the dataset's author has applied a chat template to a prompt,
the prompt also contains such tokens, or the template's own words, such as `[INST]`.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt

_MESSAGE = "question"
_MOST_WORDS = 3
"""If the line before a message has at most this number of words, all of them are taken as the template's own. Of a
longer line, such as a system prompt, only the last word is taken."""


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

    @cached_property
    def _words(self) -> tuple[str, str]:
        """The words that the chat template writes directly before and after the message of a user, such as `[INST]` and
        `[/INST]`. Both are empty if a control token stands there, or if one of them has letters and digits only, as
        any text may have."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "", ""
        before, _, after = self._tokenizer.decode(encode_prompt(self._tokenizer, _MESSAGE)).rpartition(_MESSAGE)
        if self._ids:
            before, after = self._pattern.split(before)[-1], self._pattern.split(after)[0]
        sides = [*before.strip().splitlines()[-1:], *after.strip().splitlines()[:1]]
        if len(sides) < 2 or not all(re.search(r"[^\w\s]", side) for side in sides):
            return "", ""
        words = sides[0].split()
        return (sides[0] if len(words) <= _MOST_WORDS else words[-1]), sides[1]

    def of_template(self, token: str) -> bool:
        """Returns whether the chat template writes `token` around a message. `token` is a control token, or the words
        that `first_in` returns."""
        return token == self._words[0] or self._ids[token] in self._of_template

    def description(self, token: str) -> str:
        """Returns the second half of a message about a text that contains `token`, which is a control token or the
        template's words before a message: why this is a problem."""
        if token in self._ids:
            return "which the model reads as a control token, and not as text"
        return f"and then {self._words[1]!r}, as the chat template writes them around a message"

    def first_in_text(self, text: str) -> str | None:
        """Returns the first control token in a text; None if there is none."""
        return next(self._found(text), None)

    def first_in(self, task: Task) -> str | None:
        """Returns the first control token in the text or the messages of a task. Without a control token, returns the
        words that the template writes before a message, if a text contains them and then the words after a message;
        otherwise None."""
        texts = [message["content"] for message in task.messages] or [task.prompt]
        begin, end = self._words
        found = (token for text in texts for token in self._found(text))
        in_words = (begin for text in texts if begin and end in text.partition(begin)[2])
        return next(found, None) or next(in_words, None)

    def _found(self, text: str) -> Iterator[str]:
        if not self._ids or not self._pattern.search(text):
            return
        # A tokenizer may take some tokens only as whole words, or with a space beside them. So a text of a control
        # token counts only if the tokenizer makes this token of it.
        [ids] = self._tokenizer([text], add_special_tokens=False)["input_ids"]
        there = set(ids)
        yield from (found for found in self._pattern.findall(text) if self._ids[found] in there)


def with_control_tokens(tasks: Sequence[Task], tokenizer: Any) -> list[tuple[Task, str]]:
    """Returns the tasks whose text has a control token, or the words that the chat template writes around a message.
    Each task comes with its first control token. A task without one comes with the words before a message."""
    tokens = ControlTokens(tokenizer)
    found = ((task, tokens.first_in(task)) for task in tasks)
    return [(task, token) for task, token in found if token is not None]
