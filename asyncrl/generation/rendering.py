"""Turns the messages and texts of an agent's calls into tokens, with the model's chat template and tokenizer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from asyncrl.data.tokenizer import with_one_start
from asyncrl.data.turn_ends import CONTENTS, REFUSALS, common_prefix, common_suffix, engine_ends, template_end
from asyncrl.errors import ConfigError
from asyncrl.generation.messages import Message, for_template, text_of

CONTEXT = 8
"""Number of tokens before others with which these are decoded."""


class Renderer:
    """Turns messages into tokens, with any chat template. The tokens of new messages are those behind the model's turn
    in a short conversation: a template may write the last turn of a conversation in another form than an earlier one.

    `end` is the token with which the template ends a turn. The model samples it, or another one of `ends`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError if the tokenizer has no chat template, or if the template does not end the turns of the
        model with a token of its own."""
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "environment.agent: an agent needs a model whose tokenizer has a chat template, and data.chat: auto; "
                "use a chat model"
            )
        end = template_end(tokenizer)
        if end is None:
            raise ConfigError(
                "environment.agent: the model's chat template does not end a turn with a control token, such as "
                f"{tokenizer.eos_token!r}, so an agent's turns cannot be put together; use a tokenizer whose template "
                "does"
            )
        self.end: int = end
        self.ends: frozenset[int] = engine_ends(tokenizer) | {end}
        self._line = self.encoded("\n", first_token=False)

    def check_tools(self) -> None:
        """Raises ConfigError if the chat template refuses a conversation with the result of a tool."""
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "1"}
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        called, _ = _turns([result], called=True)
        try:
            self.first([*called, result], [tool])
        except REFUSALS as error:
            raise ConfigError(
                f"environment.tools: the model's chat template refuses the result of a tool ({error}); use a model "
                "whose template has tools"
            ) from error

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to the place where the model answers."""
        [messages] = with_one_start(self._tokenizer, [messages])
        return self._render(messages, tools=tools)

    def rest(self, messages: Sequence[Message]) -> list[int] | None:
        """Returns the tokens that follow the end of the model's turn: what the template puts behind it, the `messages`,
        and the beginning of the next answer. None if they depend on the turns before, or if the template refuses the
        messages after any turn."""
        for called in (False, True):  # some templates refuse the result of a tool that was not called
            try:
                behind = common_suffix(*(self._render([*turn, *messages]) for turn in _turns(messages, called=called)))
            except REFUSALS:
                continue
            closing = self._closings[called]
            if closing and behind[: len(closing)] == closing:
                return behind[len(closing) :]
        return None

    @cached_property
    def _closings(self) -> tuple[list[int], list[int]]:
        """What the template writes behind the text of a turn that a message follows, up to `end`: of a turn with a
        text, and of one that calls a tool. Empty if it writes no `end` before the message."""
        return self._closing(called=False), self._closing(called=True)

    def _closing(self, *, called: bool) -> list[int]:
        try:
            one, other = (
                common_suffix(*(self._render([*turn, message]) for turn in _turns([message], called=called)))
                for message in ({"role": "tool" if called else "user", "content": text} for text in CONTENTS)
            )
        except REFUSALS:
            return []
        shared = common_prefix(one, other)
        return shared[: shared.index(self.end) + 1] if self.end in shared else []

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
        def rendered(shown: Sequence[Message]) -> list[int]:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(shown), tools=list(tools) or None, add_generation_prompt=prompted, tokenize=True, return_dict=False
            )
            return ids

        try:
            return rendered(list(map(for_template, messages)))
        except TypeError:  # some templates join the arguments of calls as texts
            return rendered([{**message, "content": text_of(message)} for message in messages])


def _turns(messages: Sequence[Message], *, called: bool) -> Iterator[list[Message]]:
    """Yields two conversations that end with a turn of the model and differ in its text only. With `called`, the turn
    calls the tools whose results are in `messages`, and the text is an argument."""
    for text in CONTENTS:
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if called:
            results = [message for message in messages if message["role"] == "tool"]
            function = {"name": "f", "arguments": json.dumps({"x": text})}
            calls = [
                {"id": each.get("tool_call_id", "call00000"), "type": "function", "function": function}
                for each in results
            ]
            turn |= {"content": "", "tool_calls": calls}
        yield [{"role": "user", "content": "a"}, turn]
