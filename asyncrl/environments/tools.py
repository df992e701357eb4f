"""Tools of the model: Python functions and MCP servers. An agent of asyncrl calls them and asks the model again.

An answer of the model may call tools. Their results are appended to the conversation, until an answer calls none or is
the last one that `environment.max_turns` allows. The run's rewards score the last answer. Functions run in the scoring
process. An MCP server (modelcontextprotocol.io) is a program that the scoring process starts, or an address; the
package mcp talks to it.
"""

import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ArgsKwargs

from asyncrl.config.import_path import resolve
from asyncrl.config.schema import EnvironmentSection, McpServer
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import asked
from asyncrl.environments.agents import Session, ToolFailure
from asyncrl.environments.reward_function import RewardFunction, subject
from asyncrl.environments.reward_terms import TermFailed
from asyncrl.environments.reward_values import Unusable
from asyncrl.environments.scoring_messages import RewardFailure
from asyncrl.errors import ConfigError
from asyncrl.user_code import describe_error, type_and_text

HUNG_THREADS = 32
"""The most calls of tools that may run in threads of a process when one of them is cancelled, for example at its time
limit. With more, they count as hung, and the process ends."""

Call = Callable[[Mapping[str, Any]], Awaitable[object]]
"""Calls a tool with its arguments."""


class ToolAgent:
    """Answers tasks with the tools of `section`. `scoring` scores the last answer.

    Raises ConfigError for a function that cannot be a tool, and for two functions with one name.
    """

    def __init__(self, section: EnvironmentSection, *, scoring: RewardFunction) -> None:
        self._section = section
        self._scoring = scoring
        self._specs: list[dict[str, Any]] = []
        self._calls: dict[str, Call] = {}
        for path in section.tools:
            self._add(*_of_function(resolve(path, key="environment.tools"), path), owner=path)
        secrets = {name: os.environ[name] for name in section.secrets if name in os.environ}
        self._servers = [_Server(each, secrets=secrets) for each in section.mcp_servers]
        self._listing: asyncio.Task[None] | None = None

    @property
    def described(self) -> Sequence[dict[str, Any]]:
        """The descriptions of the tools for the model. The tools of MCP servers are in it from the first episode on."""
        return self._specs

    async def run(self, session: Session, task: Task) -> object:
        """Answers one task, and returns its reward. The number of the model's answers has the limit
        `environment.max_turns`; the last one is scored, even if it calls tools."""
        if self._listing is None or (self._listing.done() and self._listing.exception() is not None):
            self._listing = asyncio.create_task(self._list_servers())
        await asyncio.shield(self._listing)
        messages: list[dict[str, Any]] = [*asked(task.input)]
        text = ""
        for turns_left in reversed(range(self._section.max_turns)):
            try:
                reply = await session.chat(messages, tools=self._specs)
            except RuntimeError as refused:
                raise Unusable(RewardFailure.RAISED, f"failed: {refused}") from refused
            text = reply.get("content") or ""
            calls = reply.get("tool_calls") or ()
            if not calls or not turns_left:
                break
            results = await asyncio.gather(*map(self._result, calls))
            messages += [reply, *(message for message, _ in results)]
            for failure in (failure for _, failure in results if failure is not None):
                await session.tool_failed(failure.tool, error=failure.error, message=failure.message)
        return await self._scored(task, text)

    async def _scored(self, task: Task, text: str) -> object:
        try:
            return await self._reward(task, text)
        except TermFailed:
            raise
        except Exception as error:
            raise TermFailed(subject(self._section), error) from error

    async def _reward(self, task: Task, text: str) -> object:
        form, function = self._scoring.form, self._scoring.function
        given: Any = [text] if form.batched else text
        if form.asynchronous:
            value = await function(task, given)
        else:
            value = await asyncio.to_thread(function, task, given)
        return value[0] if form.batched else value

    async def _result(self, call: Mapping[str, Any]) -> tuple[dict[str, Any], ToolFailure | None]:
        """Returns the message with the result of a call, or with what was wrong, which the model reads. Also returns
        the failure of the tool, if it raised, was late, or is of an MCP server that answered with an error; otherwise
        None. A call of an unknown tool, or of a function with wrong arguments, is not a failure of the tool."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        limit_s = self._section.tool_timeout_s
        tool = self._calls.get(name)
        if tool is None:
            known = ", ".join(self._calls)
            return _told(call, f"error: there is no tool {name}; there are {known}"), None
        failure = None
        try:
            async with asyncio.timeout(limit_s) as limit:
                content = _as_text(await tool(json.loads(arguments)))
        except _WrongArguments as error:
            content = f"error: {error}"
        except _ServerError as error:
            content = f"error: {error}"
            failure = ToolFailure(tool=name, error="MCP", message=f"its MCP server answered with the error: {error}")
        except (Exception, SystemExit) as error:  # the tool's own errors are answers to the model
            raised = error.error if isinstance(error, _Raised) else error
            if limit.expired():
                content = f"error: {name} took longer than {limit_s:g} s"
                message = f"it took longer than environment.tool_timeout_s = {limit_s:g} s"
            else:
                content, message = f"error: {type_and_text(raised)}", describe_error(raised)
            failure = ToolFailure(tool=name, error=type(raised).__name__, message=message)
        return _told(call, content), failure

    async def _list_servers(self) -> None:
        listed = await asyncio.gather(*(server.tools() for server in self._servers))
        for server, tools in zip(self._servers, listed, strict=True):
            for spec, call in tools:
                self._add(spec, call, owner=server.named)

    def _add(self, spec: dict[str, Any], call: Call, *, owner: str) -> None:
        name = spec["function"]["name"]
        if name in self._calls:
            raise ConfigError(
                f"environment.tools: two tools have the name {name}, the second one is of {owner}; remove one"
            )
        self._specs.append(spec)
        self._calls[name] = call


class _WrongArguments(Exception):
    """The model called a tool with arguments that do not fit the tool's parameters."""


class _ServerError(Exception):
    """An MCP server answered a call with an error."""


class _Raised(Exception):
    """Carries an `error` that a tool raised in its thread and that a future of asyncio must not hold."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class _Untitled(GenerateJsonSchema):
    """Makes JSON schemas without titles, which repeat the names of parameters and cost tokens in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


def _of_function(function: Callable[..., Any], path: str) -> tuple[dict[str, Any], Call]:
    """Returns the description of a function for the model, from its signature and docstring, and a coroutine function
    that calls it with the model's arguments."""
    try:
        name = function.__name__
        for problem in _inexpressible(function):
            raise TypeError(problem)
        adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
        schema = adapter.json_schema(schema_generator=_Untitled)
        described = inspect.getdoc(function)
        if schema.get("type") != "object" or not described:
            raise TypeError("it needs a docstring, and parameters that can be given by name")
    except Exception as error:  # pydantic has several errors for what it cannot describe
        raise ConfigError(
            f"environment.tools: {path} cannot be a tool ({error}); a tool is a function with a docstring, and with "
            "parameters whose types JSON can express"
        ) from error

    def called(given: ArgsKwargs) -> Any:
        try:
            return adapter.validate_python(given)
        except ValidationError as error:
            if error.title != adapter.validator.title:
                raise  # the error of a validation inside the function
            wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise _WrongArguments("; ".join(wrong)) from error

    async def call(arguments: Mapping[str, Any]) -> object:
        given = ArgsKwargs((), dict(arguments))
        if inspect.iscoroutinefunction(function):
            return await called(given)
        return await _in_thread(lambda: called(given), named=path)

    return _spec(name, described, schema), call


def _inexpressible(function: Callable[..., Any]) -> Iterator[str]:
    """Yields which parameters have no type, or a type that JSON cannot express."""
    types = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name not in types:
            yield f"its parameter {name} has no type, so the model would not know what to give"
            continue
        try:
            TypeAdapter(types[name]).json_schema()
        except Exception:  # pydantic has several errors for what it cannot describe
            yield f"JSON cannot express the type of its parameter {name}, {inspect.formatannotation(types[name])}"


_running: set[Future[object]] = set()
"""The calls of tools that run in threads of this process."""


async def _in_thread(work: Callable[[], object], *, named: str) -> object:
    """Runs `work` in a thread of its own. A thread that hangs cannot be ended. If the caller is cancelled while more
    than `HUNG_THREADS` such threads run, this process ends, and the generator replaces it."""
    call: Future[object] = Future()
    call.set_running_or_notify_cancel()  # the thread goes on if the caller is cancelled
    call.add_done_callback(_running.discard)
    _running.add(call)

    def run() -> None:
        try:
            call.set_result(work())
        except BaseException as error:
            # A future of asyncio cannot hold StopIteration, and SystemExit would end the event loop.
            usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            call.set_exception(error if usual else _Raised(error))

    threading.Thread(target=run, name=named, daemon=True).start()
    try:
        return await asyncio.wrap_future(call)
    except asyncio.CancelledError:
        if len(_running) > HUNG_THREADS:
            sys.stderr.write(f"{len(_running)} calls of tools hang, such as {named}; the process is replaced\n")
            sys.stderr.flush()
            os._exit(1)
        raise


def _told(call: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Returns the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _spec(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class _Server:
    """The connection to an MCP server. It is opened at the first use, and opened again after it has ended."""

    def __init__(self, section: McpServer, *, secrets: Mapping[str, str]) -> None:
        self._section = section
        self._secrets = secrets
        self._connected: asyncio.Future[Any] | None = None

    @property
    def named(self) -> str:
        return f"environment.mcp_servers: {' '.join(self._section.command) or self._section.url}"

    async def tools(self) -> Sequence[tuple[dict[str, Any], Call]]:
        """Returns the server's tools. Raises RuntimeError if it cannot be reached."""
        listed = await (await self._client()).list_tools()
        return [
            (_spec(tool.name, tool.description or "", tool.input_schema), self._caller(tool.name))
            for tool in listed.tools
        ]

    def _caller(self, name: str) -> Call:
        async def call(arguments: Mapping[str, Any]) -> str:
            from mcp import MCPError
            from mcp_types import CONNECTION_CLOSED

            client = await self._client()
            connected, serving = self._connected, self._serving
            try:
                result = await client.call_tool(name, dict(arguments))
            except MCPError as error:
                # A server that was started again does not know the session.
                gone = error.code == CONNECTION_CLOSED or "session" in error.message.lower()
                if gone and self._connected is connected:
                    self._connected = None
                    serving.cancel()
                raise
            text = "\n".join(part.text for part in result.content if part.type == "text")
            if result.is_error:
                raise _ServerError(text)
            return text

        return call

    async def _client(self) -> Any:
        if self._connected is None or (self._connected.done() and self._connected.exception() is not None):
            self._connected = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._connected))
        try:
            return await asyncio.shield(self._connected)
        except Exception as error:
            raise RuntimeError(f"{self.named} cannot be reached: {describe_error(error)}") from error

    async def _serve(self, connected: "asyncio.Future[Any]") -> None:
        """Opens the connection, keeps it open until it breaks, and closes it, all in one task, as mcp needs it. Gives
        the client to `connected`."""
        from mcp import StdioServerParameters, stdio_client
        from mcp.client import Client

        try:
            if self._section.url:
                target: Any = self._section.url
            else:
                program, *arguments = self._section.command
                target = stdio_client(
                    StdioServerParameters(command=program, args=arguments, env={**self._secrets} or None)
                )
            async with Client(target) as client:
                connected.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # also an ExceptionGroup of the library
            if not connected.done():
                connected.set_exception(error)
        finally:
            if self._connected is connected and connected.done() and connected.exception() is None:
                self._connected = None
            if not connected.done():
                connected.set_exception(RuntimeError("the connection was given up"))
