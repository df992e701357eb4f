"""The messages of agents: their canonical form, by which equal messages are recognised, and the difference of two
histories of messages."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

Message = Mapping[str, Any]


class Fork(StrEnum):
    """Why a call of an agent does not continue the newest branch of its session, but begins a branch or continues an
    older one.

    RESAMPLED: the call repeats an earlier one and is not a retry. TOOLS_CHANGED: the tools differ. THINKING_STRIPPED:
    the model's thinking was removed from a reply. JSON_REORDERED: the arguments of a tool call, or a reply that is
    JSON, are written in another way. COMPACTED: messages were left out. EDITED: a message differs in another way.
    PARALLEL: another call has continued the same history already, or no call has an answer yet. TEMPLATE: the chat
    template writes the earlier turns in another way when messages follow.
    """

    RESAMPLED = "resampled"
    TOOLS_CHANGED = "tools_changed"
    THINKING_STRIPPED = "thinking_stripped"
    JSON_REORDERED = "json_reordered"
    COMPACTED = "compacted"
    EDITED = "edited"
    PARALLEL = "parallel"
    TEMPLATE = "template"


def difference(old: Sequence[str], new: Sequence[str]) -> Fork:
    """Returns how the history `new` differs from the history `old`. Both are lists of messages in canonical form."""
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
    kept: dict[str, Any] = {"role": message["role"], "content": text_of(message)}
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
    return compact(kept)


def for_template(message: Message) -> dict[str, Any]:
    """Returns a message as chat templates expect it: its content is a text, and the arguments of its calls are a
    dict."""
    shown = {**message, "content": text_of(message)}
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _value(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def text_of(message: Message) -> str:
    """Returns the text of a message. Raises ValueError if it has a part that is not a text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if others := sorted({str(part.get("type")) for part in content if "text" not in part}):
        raise ValueError(f"a message has a part of the type {', '.join(others)}, but only texts are supported")
    return "".join(str(part["text"]) for part in content)


def _value(text: Any) -> Any:
    """Returns the value of a JSON text. Returns `text` unchanged if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _spelled(arguments: Any) -> str:
    """Returns the arguments of a tool call as JSON without spaces. Equal arguments give equal texts; keys keep their
    order. Python's json is used because msgspec refuses values that a model may write, such as NaN and halves of
    surrogate pairs."""
    return json.dumps(_value(arguments), separators=(",", ":"))


def compact(value: Any) -> str:
    # msgspec, because it is fast: each call encodes each message of its history
    return msgspec.json.encode(value, order="sorted").decode()


def _without_thinking(message: Mapping[str, Any]) -> str:
    text = str(message["content"])
    return compact({**message, "content": text.rpartition("</think>")[2].strip()})


def _parsed(message: Mapping[str, Any]) -> Any:
    calls = [{**call, "arguments": _value(call["arguments"])} for call in message.get("tool_calls", [])]
    return {**message, "content": _value(message["content"]), "tool_calls": calls}
