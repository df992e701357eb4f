"""Turns the messages of an agent's calls into the exact tokens that the engine saw.

An agent sends the whole history with each call. Its messages are not rendered again: the tokens of a turn are those of
the turn before, with what the model sampled, and the rendered messages that are new. A history that does not continue
an earlier one begins a branch, from the longest part that is the same. Branches form a tree, and each sampled token is
trained in one row only: that of the first branch that contains it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.generation.episodes import Episode, Node, Origin
from asyncrl.generation.interfaces import Completion

Message = Mapping[str, Any]


class Fork(StrEnum):
    """Why a call began a branch.

    RESAMPLED: it repeats an earlier call and is no retry. TOOLS_CHANGED: the tools differ. THINKING_STRIPPED: the
    model's thinking was removed from a reply. JSON_REORDERED: the arguments of a tool call are written in another way.
    COMPACTED: messages were left out. EDITED: a message differs in another way. PARALLEL: another call has continued
    the same history already. TEMPLATE: the chat template writes the earlier turns in another way when messages follow.
    """

    RESAMPLED = "resampled"
    TOOLS_CHANGED = "tools_changed"
    THINKING_STRIPPED = "thinking_stripped"
    JSON_REORDERED = "json_reordered"
    COMPACTED = "compacted"
    EDITED = "edited"
    PARALLEL = "parallel"
    TEMPLATE = "template"


class Renderer(Protocol):
    """Turns messages into tokens."""

    end: int
    """The token that ends a turn. The model samples it."""

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the tokens of a conversation up to the place where the model answers."""
        ...

    def rest(self, messages: Sequence[Message]) -> list[int] | None:
        """Returns the tokens that follow the end of the model's turn: what the template puts behind it, the `messages`,
        and the beginning of the next answer. None if they depend on the turns before."""
        ...


class TemplateRenderer:
    """A renderer for any chat template. The tokens of new messages are the difference between a short conversation and
    the same one with the new messages."""

    _BEFORE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError if the tokenizer has no chat template, or if the template does not end the turns of the
        model with the token that ends its answers."""
        self._tokenizer = tokenizer
        self.end: int = tokenizer.eos_token_id
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "an agent needs a model whose tokenizer has a chat template, and data.chat: auto; use a chat model",
                key="environment.agent",
            )
        if self.end not in self._render(self._BEFORE, prompted=False):
            raise ConfigError(
                f"the model's chat template does not end a turn with {tokenizer.eos_token!r}, the end of its answers, "
                "so an agent's turns cannot be put together; use a tokenizer whose template does",
                key="environment.agent",
            )
        before = self._render(self._BEFORE, prompted=False)
        self._closed = before[: len(before) - before[::-1].index(self.end)]

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._render(messages, tools=tools)

    def rest(self, messages: Sequence[Message]) -> list[int] | None:
        whole = self._render([*self._BEFORE, *messages])
        same = whole[: len(self._closed)] == self._closed
        return whole[len(self._closed) :] if same else None

    def _render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), prompted: bool = True
    ) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(map(_for_template, messages)),
            tools=list(tools) or None,
            add_generation_prompt=prompted,
            tokenize=True,
            return_dict=False,
        )
        return ids


@dataclass(eq=False, kw_only=True)
class Turn:
    """A call of an agent: a place in the tree where the model answers, or has answered.

    `history` are the call's messages in canonical form, and `node` the tokens that the call added. `reply` is set when
    the model has answered; `answer` is the message for the agent, which has got it if it is `delivered`, and `then` are
    the turns that continue it.
    """

    history: tuple[str, ...]
    tools: str
    parent: "Turn | None"
    node: Node
    fork: Fork | None
    reply: Node | None = None
    answer: dict[str, Any] | None = None
    closing: str = ""
    delivered: bool = False
    truncated: bool = False
    then: list["Turn"] = field(default_factory=list)

    @property
    def path(self) -> list["Turn"]:
        """The turns from the first one to this one."""
        return [*(self.parent.path if self.parent else ()), self]

    @property
    def token_ids(self) -> list[int]:
        """The prompt of the call, exactly as the engine gets it."""
        tokens: list[int] = []
        for turn in self.path:
            tokens += turn.node.token_ids
            if turn is not self and turn.reply is not None:
                tokens += turn.reply.token_ids
        return tokens

    @property
    def whole(self) -> list[int]:
        """The prompt of the call and what the model has sampled."""
        return [*self.token_ids, *(self.reply.token_ids if self.reply is not None else ())]

    @property
    def replied(self) -> tuple[str, ...]:
        """The history with the model's answer."""
        return (*self.history, self.closing)


class TooManyBranches(Exception):
    """A call would begin one branch more than the conversation may have. `fork` is its reason."""

    def __init__(self, fork: Fork | None) -> None:
        super().__init__(fork)
        self.fork = fork


class Conversation:
    """The calls of one session, which are one sample of a group. A call that would begin a branch beyond `max_branches`
    raises TooManyBranches."""

    def __init__(self, renderer: Renderer, *, max_branches: int) -> None:
        self._renderer = renderer
        self._max_branches = max_branches
        self._branches = 0
        self.turns: list[Turn] = []
        """All calls, in the order in which they came."""

    def call(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), retry: bool = False
    ) -> Turn:
        """Returns the turn of a call. If the call is a `retry` of an earlier one, or if the answer of an equal one
        never reached the agent, this is that one's turn."""
        history, shown = tuple(map(canonical, messages)), _compact(list(tools))
        same = [turn for turn in self.turns if turn.history == history and turn.tools == shown]
        if same and (retry or (same[-1].reply is not None and not same[-1].delivered)):
            return same[-1]
        if same:
            return self._added(same[0].parent, same[0].node, history, shown, Fork.RESAMPLED)
        before = [
            turn
            for turn in self.turns
            if turn.reply is not None and turn.tools == shown and history[: len(turn.replied)] == turn.replied
        ]
        parent = max(before, key=lambda turn: len(turn.replied), default=None)
        fork = self._why(history, shown, parent)
        if parent is not None:
            added = self._after(parent, messages[len(parent.replied) :])
            if added is not None:
                return self._added(parent, added, history, shown, fork)
            fork = Fork.TEMPLATE
        node = Node(origin=Origin.ENVIRONMENT, token_ids=self._renderer.first(messages, tools))
        return self._added(None, node, history, shown, fork)

    def call_with_tokens(self, token_ids: Sequence[int], *, retry: bool = False) -> Turn:
        """Returns the turn of a call whose agent renders the messages itself. It continues the longest earlier sequence
        with which it begins. Retries are as in `call`."""
        asked = list(token_ids)
        same = [turn for turn in self.turns if turn.token_ids == asked]
        if same and (retry or (same[-1].reply is not None and not same[-1].delivered)):
            return same[-1]
        if same:
            return self._added(same[0].parent, same[0].node, (), "", Fork.RESAMPLED)
        wholes = [(turn, turn.whole) for turn in self.turns if turn.reply is not None]
        before = [(turn, whole) for turn, whole in wholes if asked[: len(whole)] == whole]
        parent, begun = max(before, key=lambda each: len(each[1]), default=(None, []))
        fork = None
        if self.turns and (parent is None or parent.then or parent is not self._newest()):
            newest = self._newest()
            if newest is None or parent is newest:
                fork = Fork.PARALLEL
            else:
                fork = Fork.COMPACTED if newest.whole[: len(asked)] == asked else Fork.EDITED
        node = Node(origin=Origin.ENVIRONMENT, token_ids=asked[len(begun) :])
        return self._added(parent, node, (), "", fork)

    def answered(self, turn: Turn, completion: Completion, message: dict[str, Any]) -> None:
        """Records what the model sampled in a turn, and the message that the agent gets."""
        turn.reply = Node(
            origin=Origin.SAMPLED,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            supports=completion.supports,
        )
        turn.answer, turn.closing, turn.truncated = message, canonical(message), completion.truncated

    def episodes(self) -> Iterator[Episode]:
        """Yields an episode for each branch, in the order in which the branches ended. A sampled token is sampled in
        the first one that has it. In later ones it is read."""
        trained: set[int] = set()
        for leaf in self.turns:
            if leaf.reply is None or any(turn.reply is not None for turn in leaf.then):
                continue
            nodes: list[Node] = []
            for turn in leaf.path:
                assert turn.reply is not None, "only an answered turn is continued"
                first_time = id(turn) not in trained
                trained.add(id(turn))
                seen = Node(origin=Origin.ENVIRONMENT, token_ids=turn.reply.token_ids)
                nodes += [turn.node, turn.reply if first_time else seen]
            yield Episode(
                nodes=tuple(nodes), text=str((leaf.answer or {}).get("content") or ""), truncated=leaf.truncated
            )

    def _after(self, parent: Turn, messages: Sequence[Message]) -> Node | None:
        """Returns the tokens that `messages` add after the answer of `parent`."""
        rest = self._renderer.rest(messages)
        if rest is None:
            return None
        assert parent.reply is not None, "only an answered turn is continued"
        ended = list(parent.reply.token_ids[-1:]) == [self._renderer.end]
        return Node(origin=Origin.TEMPLATE, token_ids=rest if ended else [self._renderer.end, *rest])

    def _added(self, parent: Turn | None, node: Node, history: tuple[str, ...], tools: str, fork: Fork | None) -> Turn:
        begins = parent is None or bool(parent.then)
        if begins and self._branches == self._max_branches:
            raise TooManyBranches(fork)
        self._branches += begins
        turn = Turn(history=history, tools=tools, parent=parent, node=node, fork=fork)
        self.turns.append(turn)
        if parent is not None:
            parent.then.append(turn)
        return turn

    def _why(self, history: tuple[str, ...], tools: str, parent: Turn | None) -> Fork | None:
        """Returns why a call does not continue the newest branch; None if it does, or if it is the first one."""
        if not self.turns:
            return None
        if parent is not None and not parent.then and parent is self._newest():
            return None
        newest = self._newest()
        if newest is None or parent is newest:
            return Fork.PARALLEL
        if tools != newest.tools and history[: len(newest.history)] == newest.history:
            return Fork.TOOLS_CHANGED
        return difference(newest.replied, history)

    def _newest(self) -> Turn | None:
        return next((turn for turn in reversed(self.turns) if turn.reply is not None), None)


def difference(old: Sequence[str], new: Sequence[str]) -> Fork:
    """Returns how the history `new` differs from the history `old`."""
    place = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if place is None:
        return Fork.COMPACTED if len(new) < len(old) else Fork.PARALLEL
    was, now = json.loads(old[place]), json.loads(new[place])
    if was["role"] == now["role"] == "assistant":
        if _without_thinking(was) == _without_thinking(now):
            return Fork.THINKING_STRIPPED
        if _parsed(was) == _parsed(now):
            return Fork.JSON_REORDERED
    return Fork.COMPACTED if len(new) < len(old) else Fork.EDITED


def canonical(message: Message) -> str:
    """Returns a message in one form: its role, text, tool calls and the call that it answers. Clients add and leave out
    other keys at will, send a text as a list of parts, and write the arguments of a call with other spaces and escapes
    (LangChain parses them and writes them again)."""
    kept: dict[str, Any] = {"role": message["role"], "content": _text(message)}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            {
                "id": call.get("id"),
                "name": call["function"]["name"],
                "arguments": _spelled(call["function"]["arguments"]),
            }
            for call in calls
        ]
    for key in ("tool_call_id", "name"):
        if message.get(key):
            kept[key] = message[key]
    return _compact(kept)


def _for_template(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates expect it: its content is a text, and the arguments of its calls are a
    dict."""
    shown = {**message, "content": _text(message)}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _value(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if others := sorted({str(part.get("type")) for part in content if "text" not in part}):
        raise ValueError(f"a message has a part of the type {', '.join(others)}, but only texts are supported")
    return "".join(str(part["text"]) for part in content)


def _value(text: Any) -> Any:
    """Returns the value of a JSON text, or what is no JSON text as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _spelled(arguments: Any) -> str:
    """Returns the arguments of a call in one spelling, with their keys in the order that they have."""
    return json.dumps(_value(arguments), ensure_ascii=False, separators=(",", ":"))


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _without_thinking(message: Mapping[str, Any]) -> str:
    text = str(message["content"])
    return _compact({**message, "content": text.rpartition("</think>")[2].strip()})


def _parsed(message: Mapping[str, Any]) -> Any:
    calls = [{**call, "arguments": _value(call["arguments"])} for call in message.get("tool_calls", [])]
    return {**message, "content": _value(message["content"]), "tool_calls": calls}
