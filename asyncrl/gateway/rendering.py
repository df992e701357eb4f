"""Turns the messages and texts of an agent's calls into tokens, with the model's chat template and tokenizer."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from asyncrl.data.control_tokens import ControlTokens
from asyncrl.data.tokenizer import EXAMPLE_TOOL, Input, asked, check_tools_written, renamed, with_one_start
from asyncrl.data.turn_ends import (
    CONTENTS,
    REFUSALS,
    behind_turn,
    common_prefix,
    common_suffix,
    control_ids,
    engine_ends,
    template_end,
)
from asyncrl.errors import ConfigError, DataError
from asyncrl.gateway.messages import Message, compact, for_template, text_of

_log = logging.getLogger(__name__)

REFUSED_RESULT = "error: the result contains a control token of the model, so it cannot be shown"
"""The text that the model reads in place of a tool's result that contains control tokens, with
`data.control_tokens: refuse`."""
CONTEXT = 8
"""Number of earlier tokens with which an answer is decoded, because its first word may depend on what is before it."""
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "a"},)


class Renderer:
    """Turns messages into tokens, with any chat template. New messages are rendered behind a turn of the model in a
    short example conversation, and the tokens behind this turn are taken. The whole conversation is not rendered again,
    because a template may write a turn in another form when messages follow it.

    `end` is the token with which the template ends a turn. The model samples it, or another one of `ends`.
    """

    def __init__(self, tokenizer: Any, *, control_tokens: Literal["keep", "refuse"] = "keep") -> None:
        """`control_tokens` is `data.control_tokens`, which applies to the results of tools too.

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
                "ends turns with one"
            )
        self.end: int = end
        self.ends: frozenset[int] = engine_ends(tokenizer) | {end}
        self._control_tokens, self._keeps, self._noted = ControlTokens(tokenizer), control_tokens == "keep", False
        self._line = self.encoded("\n", first_token=False)
        self._written: set[str] = set()
        self._moved: dict[str, bool] = {}
        self._closings: dict[tuple[str, bool], list[int] | str] = {}

    def end_of(self, *, called: bool) -> int:
        """Returns the token with which the template ends a turn of the model. With `called`, the turn calls a tool."""
        try:
            closing = self._closing("tool" if called else "user", called=called)
        except REFUSALS:
            return self.end
        return self.end if isinstance(closing, str) else closing[-1]

    def check_tools(self, prompt: Input, *, model: str, key: str) -> None:
        """Raises ConfigError if the chat template ignores tools, refuses a conversation with the result of a tool, or
        leaves the result out. `prompt` is an example, `model` the path of the model, `key` the setting that names the
        tools."""
        results = [_message("tool", text) for text in CONTENTS]
        called, _ = _turns(results[:1], called=True)
        try:
            check_tools_written(self._tokenizer, prompt, tools=[EXAMPLE_TOOL], model=model, key=key)
            one, other = (self.first([*asked(prompt), *called[1:], result], [EXAMPLE_TOOL]) for result in results)
        except (*REFUSALS, DataError) as error:
            raise ConfigError(
                f"{key}: the chat template of model.path = {model} refuses the result of a tool ({error}); use a model "
                "whose template has tools"
            ) from error
        if one == other:
            raise ConfigError(
                f"{key}: the chat template of model.path = {model} leaves out the results of tools; use a model whose "
                "template has tools"
            )

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to the place where the model answers. Raises DataError if the chat
        template does not write the tools into it, and the errors of the template."""
        [messages] = with_one_start(self._tokenizer, [messages])
        if tools and (shown := compact(list(tools))) not in self._written:
            one, other = (self._render(messages, tools=each, tokenize=False) for each in (tools, renamed(tools)))
            if one == other:
                raise DataError(
                    "the model's chat template does not write the tools of the call into the prompt, so the model "
                    "would never see them; use a model whose chat template has tools, or describe them in a message",
                    reason="tools_ignored",
                )
            self._written.add(shown)
        ids: list[int] = self._render(messages, tools=tools)
        return ids

    def rest(
        self, messages: Sequence[Message], *, last: int | None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int] | str:
        """Returns the tokens that follow the model's turn, whose last token is `last`. These are the token that ends a
        turn, if the turn was cut before it, the tokens that the template puts behind this token, the `messages`, and
        the beginning of the next answer.

        Returns the reason as a text instead if these tokens depend on the turns before, if the template refuses the
        messages after a turn of the model, or if it writes the turns before in another way when messages follow.
        `tools` are the tools that the call names.
        """
        if self._moves(tools):
            return "the chat template writes earlier messages or the tools in another place when messages follow"
        reason, role = "", str(messages[0]["role"]) if messages else "user"
        # Some templates refuse the result of a tool that was not called, and others leave it out.
        for called in (True, False) if role == "tool" else (False,):
            try:
                behind = common_suffix(*(self._render([*turn, *messages]) for turn in _turns(messages, called=called)))
                closing = self._closing(role, called=called)
            except REFUSALS as error:
                reason = reason or f"the chat template refuses the messages ({error})"
                continue
            if not isinstance(closing, str) and behind[: len(closing)] == closing:
                ended = last == closing[-1] or (last in self.ends and not self._end_begins_message)
                return behind[len(closing) - (not ended) :]
            changes = "the chat template writes the end of an answer in another way before these messages"
            reason = reason or (closing if isinstance(closing, str) else changes)
        return reason

    @cached_property
    def _end_begins_message(self) -> bool:
        """Whether the token that ends a turn is the beginning of the next message, such as `<|user|>`: the template
        does not write it behind the last turn of a conversation. Then no other token of `ends` can replace it."""
        return self.ends.isdisjoint(behind_turn(partial(self._render, prompted=False), []))

    def _moves(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether the template writes what is before the model's turn in another way when messages follow the
        turn. A difference at the beginning of the turn does not count, such as an empty thought in the last turn."""
        shown = compact(list(tools))
        if shown not in self._moved:
            try:
                asked = self._render(_ASKED, tools=tools)
                before = common_prefix(
                    *(self._render([*turn, *_ASKED], tools=tools) for turn in _turns([], called=False))
                )
            except REFUSALS:
                self._moved[shown] = False  # the call is refused with the template's error when it is rendered
            else:
                shared = len(common_prefix(asked, before))
                self._moved[shown] = bool(
                    control_ids(self._tokenizer).intersection(asked[shared:]).intersection(before[shared:])
                )
        return self._moved[shown]

    def _closing(self, role: str, *, called: bool) -> list[int] | str:
        """Returns what the template writes behind the text of a model's turn that a message of this role follows, up to
        the first token of `ends`. With `called`, the turn calls a tool. Returns a reason as a text instead if the
        template writes no token of `ends` before the text of the message, or leaves this text out. Raises the errors of
        the template."""
        if (role, called) not in self._closings:
            one, other = (
                common_suffix(*(self._render([*turn, message]) for turn in _turns([message], called=called)))
                for message in (_message(role, text) for text in CONTENTS)
            )
            shared = common_prefix(one, other)
            place = next((place for place, token in enumerate(shared) if token in self.ends), None)
            ends = ", ".join(sorted(repr(self._tokenizer.decode([end])) for end in self.ends))
            if one == other:
                found: list[int] | str = f"the chat template leaves out messages of the role {role}"
            elif place is None:
                found = (
                    f"the chat template ends an answer {'that calls a tool ' if called else ''}before a message of the "
                    f"role {role} with none of the tokens at which engines stop, {ends}"
                )
            else:
                found = shared[: place + 1]
            self._closings[role, called] = found
        return self._closings[role, called]

    def encoded(self, text: str, *, first_token: bool) -> list[int]:
        """Returns the tokens of a text. With `first_token`, the tokenizer may put its beginning-of-sequence token
        first."""
        return list(self._tokenizer(text, add_special_tokens=first_token, verbose=False)["input_ids"])

    def continued(self, text: str) -> list[int]:
        """Returns the tokens of a text that continues another one."""
        # Some tokenizers put a space before the first word of a text, but not behind a newline. So the text is encoded
        # behind a newline, whose tokens are cut off.
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
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompted: bool = True,
        tokenize: bool = True,
    ) -> Any:
        """Returns the tokens of a conversation, or its text. With `prompted`, the next answer begins at its end."""

        def rendered(shown: Sequence[Message]) -> Any:
            return self._tokenizer.apply_chat_template(
                list(shown),
                tools=list(tools) or None,
                add_generation_prompt=prompted,
                tokenize=tokenize,
                return_dict=False,
            )

        try:
            return rendered([{**for_template(message), "content": self._content(message)} for message in messages])
        except TypeError:  # some templates need the arguments of calls as a text
            return rendered([{**message, "content": self._content(message)} for message in messages])

    def _content(self, message: Message) -> str:
        """Returns the text of a message for the model. If the result of a tool contains control tokens, the result is
        kept (`data.control_tokens: keep`), or an error for the model replaces it. The log gets one note on the first
        such result."""
        text = text_of(message)
        token = self._control_tokens.first_in_text(text) if message["role"] == "tool" else None
        if token is None:
            return text
        if not self._noted:
            self._noted = True
            done = "kept (data.control_tokens: keep)" if self._keeps else "replaced by an error for the model"
            what = self._control_tokens.description(token)
            _log.warning("the result of a tool contains %r, %s; such results are %s", token, what, done)
        return text if self._keeps else REFUSED_RESULT


def _message(role: str, text: str) -> dict[str, Any]:
    """Returns a message. With the role `tool`, it is the result of the tool call in a turn of `_turns`."""
    of_tool = {"name": "f", "tool_call_id": "call00000"} if role == "tool" else {}
    return {"role": role, "content": text, **of_tool}


def _turns(messages: Sequence[Message], *, called: bool) -> Iterator[list[Message]]:
    """Yields two conversations that end with a turn of the model and differ in its text only. With `called`, the turn
    calls the tools whose results are in `messages`, and the text is an argument of the call."""
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
