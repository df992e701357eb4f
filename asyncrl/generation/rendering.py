"""Turns the messages and texts of an agent's calls into tokens, with the model's chat template and tokenizer."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from asyncrl.data.control_tokens import ControlTokens
from asyncrl.data.conversation import asked
from asyncrl.data.tokenizer import EXAMPLE_TOOL, Input, check_tools_written, renamed, with_one_start
from asyncrl.data.turn_ends import CONTENTS, REFUSALS, common_prefix, common_suffix, engine_ends, template_end
from asyncrl.errors import ConfigError, DataError
from asyncrl.generation.messages import Message, for_template, text_of

_log = logging.getLogger(__name__)

REFUSED_RESULT = "error: the result contains a control token of the model, so it cannot be shown"
"""What the model reads in place of the result of a tool with control tokens, with `data.control_tokens: refuse`."""
CONTEXT = 8
"""Number of tokens before others with which these are decoded."""


class Renderer:
    """Turns messages into tokens, with any chat template. The tokens of new messages are those behind the model's turn
    in a short conversation: a template may write the last turn of a conversation in another form than an earlier one.

    `end` is the token with which the template ends a turn. The model samples it, or another one of `ends`.
    """

    def __init__(self, tokenizer: Any, *, control_tokens: Literal["keep", "refuse"] = "keep") -> None:
        """`control_tokens` is `data.control_tokens`, which holds for the results of tools too.

        Raises ConfigError if the tokenizer has no chat template, or if the template does not end the turns of the model
        with a token of its own.
        """
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
        self._control_tokens, self._keeps, self._noted = ControlTokens(tokenizer), control_tokens == "keep", False
        self._line = self.encoded("\n", first_token=False)

    def check_tools(self, prompt: Input, *, model: str, key: str) -> None:
        """Raises ConfigError if the chat template ignores tools, or refuses a conversation with the result of a tool.
        `prompt` is an example, `model` the path of the model, `key` the setting that names the tools."""
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "1"}
        called, _ = _turns([result], called=True)
        try:
            check_tools_written(self._tokenizer, prompt, tools=[EXAMPLE_TOOL], model=model, key=key)
            self.first([*asked(prompt), *called[1:], result], [EXAMPLE_TOOL])
        except (*REFUSALS, DataError) as error:
            raise ConfigError(
                f"{key}: the chat template of model.path = {model} refuses the result of a tool ({error}); use a model "
                "whose template has tools"
            ) from error

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to the place where the model answers. Raises DataError if the chat
        template does not write the tools into it."""
        [messages] = with_one_start(self._tokenizer, [messages])
        texts = (self._render(messages, tools=shown, tokenize=False) for shown in (tools, renamed(tools)) if shown)
        if tools and next(texts) == next(texts):
            raise DataError(
                "the model's chat template does not write the tools of the call into the prompt, so the model would "
                "never see them; use a model whose chat template has tools, or describe them in a message",
                reason="tools_ignored",
            )
        ids: list[int] = self._render(messages, tools=tools)
        return ids

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
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), tokenize: bool = True
    ) -> Any:
        """Returns the tokens of a conversation, or its text."""

        def rendered(shown: Sequence[Message]) -> Any:
            return self._tokenizer.apply_chat_template(
                list(shown), tools=list(tools) or None, add_generation_prompt=True, tokenize=tokenize, return_dict=False
            )

        try:
            return rendered([{**for_template(message), "content": self._content(message)} for message in messages])
        except TypeError:  # some templates join the arguments of calls as texts
            return rendered([{**message, "content": self._content(message)} for message in messages])

    def _content(self, message: Message) -> str:
        """Returns the text of a message for the model. A result of a tool with control tokens is kept, with one note in
        the log, or becomes an error."""
        text = text_of(message)
        token = self._control_tokens.first_in_text(text) if message["role"] == "tool" else None
        if token is None:
            return text
        if not self._noted:
            self._noted = True
            done = "kept (data.control_tokens: keep)" if self._keeps else "an error for the model"
            what = self._control_tokens.description(token)
            _log.warning("the result of a tool contains %r, %s; such results are %s", token, what, done)
        return text if self._keeps else REFUSED_RESULT


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
