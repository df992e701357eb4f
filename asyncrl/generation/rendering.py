"""Turns the messages and texts of an agent's calls into tokens, with the model's chat template and tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.data.tokenizer import with_one_start
from asyncrl.errors import ConfigError
from asyncrl.generation.messages import Message, for_template

CONTEXT = 8
"""Number of tokens before others with which these are decoded."""


class Renderer:
    """Turns messages into tokens, with any chat template. The tokens of new messages are the difference between a short
    conversation and the same one with the new messages. `end` is the token that ends a turn; the model samples it."""

    _BEFORE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError if the tokenizer has no chat template, or if the template does not end the turns of the
        model with the token that ends its answers."""
        self._tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "environment.agent: an agent needs a model whose tokenizer has a chat template, and data.chat: auto; "
                "use a chat model"
            )
        before = self._render(self._BEFORE, prompted=False)
        if self.end not in before:
            raise ConfigError(
                f"environment.agent: the model's chat template does not end a turn with {tokenizer.eos_token!r}, the "
                "end of its answers, so an agent's turns cannot be put together; use a tokenizer whose template does"
            )
        self._closed = before[: len(before) - before[::-1].index(self.end)]
        self._line = self.encoded("\n", first_token=False)

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to the place where the model answers."""
        [messages] = with_one_start(self._tokenizer, [messages])
        return self._render(messages, tools=tools)

    def rest(self, messages: Sequence[Message]) -> list[int] | None:
        """Returns the tokens that follow the end of the model's turn: what the template puts behind it, the `messages`,
        and the beginning of the next answer. None if they depend on the turns before."""
        whole = self._render([*self._BEFORE, *messages])
        same = whole[: len(self._closed)] == self._closed
        return whole[len(self._closed) :] if same else None

    def encoded(self, text: str, *, first_token: bool) -> list[int]:
        """Returns the tokens of a text. With `first_token`, the tokenizer may put a token before it."""
        return list(self._tokenizer(text, add_special_tokens=first_token, verbose=False)["input_ids"])

    def continued(self, text: str) -> list[int]:
        """Returns the tokens of a text that continues another one."""
        # Some tokenizers put a space before the first word of a text. It is not there behind a line.
        whole = self.encoded(f"\n{text}", first_token=False)
        if whole[: len(self._line)] == self._line:
            return whole[len(self._line) :]
        return self.encoded(text, first_token=False)

    def decoded(self, token_ids: Sequence[int], *, after: Sequence[int]) -> str:
        """Returns the text of tokens that follow `after`, without special tokens."""
        before = list(after[-CONTEXT:])  # some tokenizers leave out the space before the first word of a text
        start, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (before, [*before, *token_ids])
        )
        return str(whole[len(start) :])

    def _render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), prompted: bool = True
    ) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(map(for_template, messages)),
            tools=list(tools) or None,
            add_generation_prompt=prompted,
            tokenize=True,
            return_dict=False,
        )
        return ids
