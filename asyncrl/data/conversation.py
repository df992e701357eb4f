"""Conversations: prompts of several messages, for models with a chat template."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, str]
"""One message of a conversation, with the keys `role` (`system`, `user` or `assistant`) and `content`, a text."""

ROLES = ("system", "user", "assistant")
_MORE_CONTENT = ("tool_calls", "function_call", "tool_call_id", "tools", "images", "image", "videos", "audio")
"""Keys of a message that chat templates write into the prompt, and asyncrl does not pass to them. Templates leave the
reasoning of earlier turns out themselves."""


def checked_messages(value: Iterable[object]) -> tuple[Message, ...]:
    """Returns a conversation that ends with a message of the assistant or of the user.

    Raises ValueError, which says what is wrong: no message, another role, content that is not a text, or
    content under further keys.
    """
    messages = tuple(_checked(message, number) for number, message in enumerate(value, start=1))
    if not messages:
        raise ValueError("is empty")
    if messages[-1]["role"] == "system":
        raise ValueError("ends with the system's message; a prompt ends with a message of the user")
    return messages


def _checked(message: object, number: int) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"has a {type(message).__name__} as message {number}, not an object with `role` and `content`")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ValueError(f"has the role {role!r} in message {number}; known roles are {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f"has content of type {type(content).__name__} in message {number}; only texts can be used")
    if more := [key for key in _MORE_CONTENT if message.get(key)]:
        raise ValueError(
            f"has {', '.join(more)} in message {number}, which would be left out: only `role` and `content` are used; "
            "write it into the content as the model's chat template does, or remove the key"
        )
    return {"role": str(role), "content": content}


def asked(prompt: str | Sequence[Message]) -> list[Message]:
    """Returns the messages of a prompt. A text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a conversation for people to read: the user's text alone, or all messages with their roles.

    >>> as_text([{"role": "user", "content": "2+2="}])
    '2+2='
    >>> as_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}])
    'system: Be brief.\\nuser: 2+2='
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
