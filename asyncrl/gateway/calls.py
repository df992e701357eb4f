"""The bodies of calls to a gateway, and of its answers: OpenAI's chat completions, OpenAI's completions of a text, and
vLLM's completions of tokens (`/inference/v1/generate`)."""

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from asyncrl.gateway.conversations import Conversation, Turn
from asyncrl.generation.episodes import Node, version_spans

MAX_BODY_BYTES = 4 * 2**20
"""Largest body of a call. A conversation of a million characters fits."""


class Refused(Exception):
    """A call that is not answered: an HTTP status, a code for programs and a sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Stop = _Text | Annotated[list[_Text], msgspec.Meta(max_length=16)]
"""Stop strings. The engine looks for each of them after every token, and fails for an empty one."""


def _asked_for(body: msgspec.Struct, honoured: Mapping[str, bool]) -> str:
    """Returns the arguments of a body that the gateway cannot honour, with their values. `honoured` says for each
    argument whether it can."""
    return ", ".join(f"{name} = {getattr(body, name)!r}" for name, is_so in honoured.items() if not is_so)


class _OpenAICall(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the bodies of OpenAI's calls `chat/completions` and `completions` share. The gateway ignores
    other fields, such as the temperature."""

    max_tokens: _Count | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of the answer; None without a limit."""
        return self.max_tokens

    @property
    def _honoured(self) -> dict[str, bool]:
        return {
            "n": self.n in (None, 1),
            "logit_bias": not self.logit_bias,
            "return_token_ids": not (self.return_token_ids and self.stream),
        }


class _Function(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a function that templates and vLLM's tool parsers read."""

    name: _Text
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    function: _Function
    type: Literal["function"] = "function"
    defer_loading: bool | None = None


class ChatCall(_OpenAICall, frozen=True, kw_only=True):
    """The body of a call of `chat/completions`."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | None = None
    response_format: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        # Checks the tools. They stay dicts, because templates get all fields of a tool. msgspec reports an error of
        # this check like any other error in the body of a call.
        msgspec.convert(self.tools, list[_Tool] | None)

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of the answer, under either of its two names; None without a limit."""
        return self.max_completion_tokens or self.max_tokens

    def not_supported(self) -> str:
        """Returns the arguments that ask for what the gateway cannot do, e.g. `n = 2`; empty if there are none."""
        honoured = self._honoured | {
            "logprobs": not self.logprobs,
            "response_format": (self.response_format or {}).get("type", "text") == "text",
            "tool_choice": self.tool_choice in (None, "auto"),
        }
        return _asked_for(self, honoured)

    def turn(self, conversation: Conversation, *, retry: bool) -> Turn:
        """Returns the turn of the call in a conversation. Raises the errors of `Conversation`."""
        return conversation.call(self.messages, tools=self.tools or (), retry=retry)

    def answer(self, turn: Turn, *, model: str, number: int) -> dict[str, Any]:
        """Returns the body of the HTTP response to a call. `turn` has the model's answer. `number` is the index of the
        turn in the session."""
        assert turn.answer is not None, "the turn is answered"
        reason = "tool_calls" if turn.answer.get("tool_calls") else _reason(turn)
        choice = {"message": turn.answer, "finish_reason": reason}
        answer = _answer(turn, choice, id=f"chatcmpl-{number}", object="chat.completion", model=model)
        if self.return_token_ids:
            answer["prompt_token_ids"] = turn.token_ids
            answer["choices"][0]["token_ids"] = list(_reply(turn).token_ids)
        return answer


class TextCall(_OpenAICall, frozen=True, kw_only=True):
    """The body of a call of `completions`: a prompt, as a text or as tokens, alone or as the only entry of a list."""

    prompt: str | list[str | _Token | list[_Token]]
    add_special_tokens: bool = True
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None

    def not_supported(self) -> str:
        """Returns the arguments that ask for what the gateway cannot do, e.g. `echo = True`; empty without any."""
        honoured = self._honoured | {
            "best_of": self.best_of in (None, 1),
            "echo": not self.echo,
            "suffix": not self.suffix,
            "logprobs": self.logprobs is None,
        }
        return _asked_for(self, honoured)

    def turn(self, conversation: Conversation, *, retry: bool) -> Turn:
        """Returns the turn of the call in a conversation. Raises Refused if there are several prompts, or if the prompt
        is empty, and the errors of `Conversation`."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            [prompt] = prompt
        tokens = [token for token in prompt if isinstance(token, int)]
        if not prompt or (not isinstance(prompt, str) and len(tokens) < len(prompt)):
            raise Refused(400, "bad_call", "the prompt must be one text, or the tokens of one prompt")
        if not isinstance(prompt, str):
            return conversation.call_with_tokens(tokens, retry=retry)
        stop, first_token = strings(self.stop), self.add_special_tokens
        return conversation.call_with_text(prompt, stop=stop, first_token=first_token, retry=retry)

    def answer(self, turn: Turn, *, model: str, number: int) -> dict[str, Any]:
        """Returns the body of the HTTP response to a call. `turn` has the model's answer. `number` is the index of the
        turn in the session."""
        choice: dict[str, Any] = {
            "text": str((turn.answer or {}).get("content") or ""),
            "finish_reason": _reason(turn),
        }
        if self.return_token_ids:
            choice |= {"prompt_token_ids": turn.token_ids, "token_ids": list(_reply(turn).token_ids)}
        return _answer(turn, choice, id=f"cmpl-{number}", object="text_completion", model=model)


class TokenSampling(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a `TokenCall` that are read. Others, such as the temperature, are ignored."""

    max_tokens: _Count | None = None
    stop: _Stop | None = None
    n: int | None = None


class TokenCall(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a call of `/inference/v1/generate`, as vLLM has it: the tokens of the prompt."""

    token_ids: Annotated[list[_Token], msgspec.Meta(min_length=1)]
    sampling_params: TokenSampling = TokenSampling()
    stream: bool | None = None
    features: dict[str, Any] | None = None
    content_parts: list[dict[str, Any]] | None = None

    @property
    def answer_tokens(self) -> int | None:
        """The most tokens of the answer; None without a limit."""
        return self.sampling_params.max_tokens

    @property
    def stop(self) -> str | list[str] | None:
        """The stop strings."""
        return self.sampling_params.stop

    def not_supported(self) -> str:
        """Returns the arguments that ask for what the gateway cannot do, e.g. `n = 2`; empty if there are none."""
        honoured = {
            "stream": not self.stream,
            "features": self.features is None,
            "content_parts": self.content_parts is None,
        }
        of_sampling = {"n": self.sampling_params.n in (None, 1)}
        return _asked_for(self.sampling_params, of_sampling) or _asked_for(self, honoured)

    def turn(self, conversation: Conversation, *, retry: bool) -> Turn:
        """Returns the turn of the call in a conversation. Raises the errors of `Conversation`."""
        return conversation.call_with_tokens(self.token_ids, retry=retry)

    def answer(self, turn: Turn, *, model: str, number: int) -> dict[str, Any]:
        """Returns the body of the HTTP response to a call. `turn` has the model's answer. `number` is the index of the
        turn in the session.

        Each log-prob is written in both forms that clients read: `token_id` as vLLM 0.32 has it, and `token` with the
        text `token_id:N`, which the package renderers demands. `weight_versions` are spans over the sampled tokens.
        """
        reply = _reply(turn)
        token_ids = [int(token) for token in reply.token_ids]
        content: list[dict[str, Any]] = [
            {"token_id": token, "token": f"token_id:{token}", "logprob": logprob, "rank": None, "top_logprobs": []}
            for token, logprob in zip(token_ids, reply.logprobs, strict=True)
        ]
        spans, start = [], 0
        for span in version_spans(reply.versions):
            spans.append({"version": f"{span.incarnation}.{span.step}", "start": start, "end": start + span.tokens})
            start += span.tokens
        choice = {
            "index": 0,
            "finish_reason": _reason(turn),
            "token_ids": token_ids,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return {
            "request_id": f"{number}",
            "choices": [choice],
            "usage": _usage(turn),
            "prompt_token_ids": turn.token_ids,
        }


Call = ChatCall | TextCall | TokenCall


_Body = TypeVar("_Body", bound=msgspec.Struct)


async def read_call(request: Request, kind: type[_Body]) -> _Body:
    """Reads the body of a call. Raises Refused if it is too large, not complete, or not of this kind. The server ends
    the connection of a body that arrives too slowly (`server.py`)."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise Refused(413, "too_large", f"the body of a call may have at most {MAX_BODY_BYTES} bytes")
            parts.append(part)
    except ClientDisconnect:
        raise Refused(400, "incomplete", "the body of the call is not complete") from None
    try:
        return msgspec.json.decode(b"".join(parts), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "bad_call", f"the body of the call is not valid: {error}") from None


def strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a call as a tuple. `stop` is one string, a list of strings, or None."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _reply(turn: Turn) -> Node:
    assert turn.reply is not None, "the turn is answered"
    return turn.reply


def _reason(turn: Turn) -> str:
    return "length" if turn.truncated else "stop"


def _answer(turn: Turn, choice: Mapping[str, Any], **head: str) -> dict[str, Any]:
    return {
        **head,
        "created": int(time.time()),
        "choices": [{"index": 0, "logprobs": None, **choice}],
        "usage": _usage(turn),
    }


def _usage(turn: Turn) -> dict[str, int]:
    sampled = len(_reply(turn).token_ids)
    return {"prompt_tokens": turn.length, "completion_tokens": sampled, "total_tokens": turn.length + sampled}


def json_response(body: Mapping[str, Any], *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


def response_with(answer: Mapping[str, Any], call: Call) -> Response:
    """Returns the response with an answer, as a stream if the call asks for one."""
    if isinstance(call, TokenCall) or not call.stream:
        return json_response(answer)
    with_usage = bool((call.stream_options or {}).get("include_usage"))
    return Response(_events(answer, with_usage=with_usage), media_type="text/event-stream")


def _events(answer: Mapping[str, Any], *, with_usage: bool) -> bytes:
    """Returns a complete answer as the server-sent events of a stream. With `with_usage`, the last chunk has the
    numbers of tokens."""
    [choice] = answer["choices"]
    head = {key: answer[key] for key in ("id", "object", "created", "model")}
    if "message" in choice:
        head["object"] += ".chunk"
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        parts: list[dict[str, Any]] = [{"delta": delta}, {"delta": {}}]
    else:
        parts = [{"text": choice["text"]}, {"text": ""}]
    reasons = [None, choice["finish_reason"]]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, **part, "finish_reason": reason}]}
        for part, reason in zip(parts, reasons, strict=True)
    ]
    if with_usage:
        chunks.append({"choices": [], "usage": answer["usage"]})
    texts = [*(msgspec.json.encode(head | chunk) for chunk in chunks), b"[DONE]"]
    return b"".join(b"data: " + text + b"\n\n" for text in texts)
