"""The gateway: an OpenAI-style server that turns an agent's calls into episodes of exact tokens.

An agent knows only a URL and a key. Each sample of a group has a session of its own, which ends with the sample. The
gateway renders messages to tokens (`conversations.py`), lets an engine continue them, and records what was sampled. The
run's sampling settings apply. Of a call's, only the stop strings and a lower limit of tokens count.
"""

import asyncio
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.buffer.records import cut_text
from asyncrl.common.tasks import cancelled
from asyncrl.environments.agents import Session, ToolFailure
from asyncrl.errors import DataError
from asyncrl.gateway.calls import (
    Call,
    ChatCall,
    Refused,
    TextCall,
    TokenCall,
    json_response,
    read_call,
    response_with,
    strings,
)
from asyncrl.gateway.conversations import Conversation, LimitExceeded, SessionSettings, Turn
from asyncrl.gateway.rendering import Renderer
from asyncrl.generation.episodes import Episode
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.prefixes import seed_of
from asyncrl.user_code import describe_error

TOO_MANY = 429
"""The HTTP status of a call beyond `SessionSettings.calls_at_once`."""
MAX_TOOL_FAILURES = 200
"""The most failed calls of tools that a session records. Further ones are ignored."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine: the tokens to continue for one call of a session. `begun` counts how often the agent of
    the session has begun. `tools` are the tools that the call names, for the tool parser."""

    session: str
    token_ids: list[int]
    max_tokens: int
    temperature: float
    seed: int | None
    begun: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


Answered = tuple[Completion, dict[str, Any]]
"""The completion for a call, and the message that the agent gets."""
Sample = Callable[[Asked], Awaitable[Answered]]
"""Lets an engine continue the tokens of a request."""


@dataclass(frozen=True, kw_only=True)
class EndedSession:
    """The result of a session: its episodes, the number of its calls and of the model's tool calls, the forks by
    reason, the message of the last call that exceeded a limit, and the error of an engine if one ended a call.
    `tool_seconds` has the time from each answer with tool calls to the call that continues it. `tool_failures` are the
    calls of tools that the agent reported as failed."""

    episodes: tuple[Episode, ...]
    calls: int
    tool_calls: int
    tool_seconds: tuple[float, ...]
    tool_failures: tuple[ToolFailure, ...]
    forks: Counter[str]
    limit: str
    error: Exception | None


@dataclass(eq=False, kw_only=True)
class _Session:
    id: str
    key: str
    settings: SessionSettings
    conversation: Conversation
    calls: dict[Turn, "asyncio.Task[None]"] = field(default_factory=dict)
    keys: dict[str, Turn] = field(default_factory=dict)
    answered_s: dict[Turn, float] = field(default_factory=dict)
    tool_seconds: list[float] = field(default_factory=list)
    tool_failures: list[ToolFailure] = field(default_factory=list)
    limit: str = ""
    begun: int = 0
    errors: dict[Turn, Exception] = field(default_factory=dict)
    at_once: int = 0

    def refuse(self, code: str, message: str, *, status: int = 400) -> "Refused":
        """Returns the refusal of a call that exceeds a limit, and remembers its message as the session's `limit`."""
        self.limit = message
        return Refused(status, code, message)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Counts a call as running during the block. Raises Refused if too many calls of the session run already."""
        if self.at_once >= self.settings.calls_at_once:
            message = f"the agent has {self.at_once} calls at once, the limit; wait until one of them is answered"
            raise self.refuse("too_many_calls", message, status=TOO_MANY)
        self.at_once += 1
        try:
            yield
        finally:
            self.at_once -= 1


class Gateway:
    """The sessions of one node, and the application that serves them."""

    def __init__(self, *, renderer: Renderer, sample: Sample, model: str) -> None:
        self._renderer = renderer
        self._sample = sample
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self.app = Starlette(
            routes=[
                self._route("v1/models", self._models, method="GET"),
                self._route("v1/chat/completions", partial(self._answered, ChatCall)),
                self._route("v1/completions", partial(self._answered, TextCall)),
                self._route("inference/v1/generate", partial(self._answered, TokenCall)),
                self._route("begin", self._begin),
                self._route("tool_failed", self._tool_failed),
            ]
        )

    # --- sessions -----------------------------------------------------------------------------------------------

    def open(self, settings: SessionSettings, *, url: str) -> tuple[str, Session]:
        """Opens a session. Returns its id, and the URL, key and model name for its agent."""
        session = _Session(
            id=secrets.token_hex(8),
            key=secrets.token_urlsafe(24),
            settings=settings,
            conversation=Conversation(self._renderer, settings),
        )
        self._sessions[session.id] = session
        seen = Session(base_url=f"{url}/sessions/{session.id}/v1", api_key=session.key, model=self._model)
        return session.id, seen

    async def close(self, id: str) -> EndedSession:
        """Ends a session, cancels its running calls, and returns its result."""
        session = self._sessions.pop(id)
        await cancelled(*session.calls.values())
        turns = session.conversation.turns
        return EndedSession(
            episodes=tuple(session.conversation.episodes()),
            calls=session.conversation.calls,
            tool_calls=sum(len((turn.answer or {}).get("tool_calls", ())) for turn in turns),
            tool_seconds=tuple(session.tool_seconds),
            tool_failures=tuple(session.tool_failures),
            forks=Counter(turn.fork.value for turn in turns if turn.fork is not None),
            limit=session.limit,
            error=next((error for error in session.errors.values() if not isinstance(error, DataError)), None),
        )

    # --- calls --------------------------------------------------------------------------------------------------

    def _route(
        self, path: str, handle: Callable[[_Session, Request], Awaitable[Response]], *, method: str = "POST"
    ) -> Route:
        async def answer(request: Request) -> Response:
            try:
                return await handle(self._session(request), request)
            except Refused as refused:
                error = {"message": str(refused), "type": "invalid_request_error", "code": refused.code}
                response = json_response({"error": error}, status=refused.status)
                if refused.status == TOO_MANY:
                    # Without this header, OpenAI's client sends the call again as a retry, and a retry may get the
                    # answer of an equal call.
                    response.headers["x-should-retry"] = "false"
                return response

        return Route(f"/sessions/{{id}}/{path}", answer, methods=[method])

    def _session(self, request: Request) -> _Session:
        session = self._sessions.get(request.path_params["id"])
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # An unknown session and a wrong key get the same answer, so that ids cannot be searched for.
        known = session is not None and hmac.compare_digest(key.encode(), session.key.encode())
        if session is None or not known or scheme.lower() != "bearer":
            raise _no_session()
        return session

    async def _models(self, session: _Session, _: Request) -> Response:
        length = session.settings.max_length
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "asyncrl", "max_model_len": length}
        return json_response({"object": "list", "data": [model]})

    async def _begin(self, session: _Session, _: Request) -> Response:
        """Forgets the calls of an agent that was started again after its process had died."""
        await cancelled(*session.calls.values())
        session.conversation, session.limit = Conversation(self._renderer, session.settings), ""
        session.begun += 1
        for kept in (session.keys, session.errors, session.answered_s, session.tool_seconds, session.tool_failures):
            kept.clear()
        return json_response({})

    async def _tool_failed(self, session: _Session, request: Request) -> Response:
        """Records a failed call of a tool that the agent reports."""
        with session.calling():
            failure = await read_call(request, ToolFailure)
            if len(session.tool_failures) < MAX_TOOL_FAILURES:
                session.tool_failures.append(msgspec.structs.replace(failure, message=cut_text(failure.message)))
            return json_response({})

    async def _answered(self, kind: type[Call], session: _Session, request: Request) -> Response:
        """Answers a call whose body is of the type `kind`. The engine samples only if the call's turn has no answer
        yet."""
        with session.calling():
            call = await read_call(request, kind)
            if self._sessions.get(session.id) is not session:  # the session ended while the call's body arrived
                raise _no_session()
            if what := call.not_supported():
                raise Refused(400, "not_supported", f"{what} is not supported; leave it out")
            turn = self._turn(session, call, request.headers)
            turns = session.conversation.turns
            number = turns.index(turn)
            if turn.reply is None:
                task = session.calls.get(turn)
                if task is None:
                    asked = self._asked(session, turn, call, number=number)
                    task = session.calls[turn] = asyncio.create_task(self._sampled(session, turn, asked))
                # The call goes on if the client gives up: a retry then gets what was sampled.
                await asyncio.shield(asyncio.gather(task, return_exceptions=True))
            if turns is not session.conversation.turns:
                raise Refused(503, "begun_again", "the agent of this session has begun again since this call")
            if turn.reply is None:
                error = session.errors.get(turn, "the call was cancelled")
                if isinstance(error, DataError):  # such as a token that is not in the model's vocabulary
                    raise Refused(400, "prompt_refused", f"the engine refused the call: {error}")
                raise Refused(503, "engine_failed", f"the engine did not answer: {error}")
            turn.delivered = turn.delivered or not await request.is_disconnected()
            return response_with(call.answer(turn, model=self._model, number=number), call)

    def _turn(self, session: _Session, call: Call, headers: Mapping[str, str]) -> Turn:
        """Returns the turn of a call in the session's conversation: a new one, or for a retry an earlier one. Raises
        Refused if a limit or the chat template does not allow the call."""
        idempotent = headers.get("idempotency-key", "")
        if idempotent and idempotent in session.keys:
            return session.keys[idempotent]
        retry = headers.get("x-stainless-retry-count", "0") not in ("", "0")
        before = len(session.conversation.turns)
        try:
            turn = call.turn(session.conversation, retry=retry)
        except LimitExceeded as exceeded:
            raise session.refuse(exceeded.code, str(exceeded)) from exceeded
        except Refused:
            raise
        except DataError as error:
            raise Refused(400, error.reason, str(error)) from error
        except Exception as error:  # the model's template or tokenizer may raise any error for such messages
            raise Refused(400, "bad_messages", f"the messages cannot be rendered: {describe_error(error)}") from error
        if idempotent and len(session.conversation.turns) > before:
            session.keys[idempotent] = turn
        answered_s = session.answered_s.pop(turn.parent, None) if turn.parent else None
        if answered_s is not None:
            session.tool_seconds.append(time.monotonic() - answered_s)
        return turn

    def _asked(self, session: _Session, turn: Turn, call: Call, *, number: int) -> Asked:
        settings = session.settings
        most = settings.answer_tokens
        return Asked(
            session=session.id,
            token_ids=turn.token_ids,
            begun=session.begun,
            max_tokens=min(settings.max_length - turn.length, most, call.answer_tokens or most),
            temperature=settings.temperature,
            seed=None if settings.seed is None else seed_of(settings.seed, settings.child, number),
            stop=strings(call.stop),
            tools=tuple(call.tools or ()) if isinstance(call, ChatCall) else (),
        )

    async def _sampled(self, session: _Session, turn: Turn, asked: Asked) -> None:
        try:
            completion, message = await self._sample(asked)
        except Exception as error:
            session.errors[turn] = error
        else:
            session.errors.pop(turn, None)
            session.conversation.answered(turn, completion, message)
            if message.get("tool_calls"):
                session.answered_s[turn] = time.monotonic()
        finally:
            session.calls.pop(turn, None)


def _no_session() -> Refused:
    return Refused(401, "no_session", "there is no open session with this id and key")
