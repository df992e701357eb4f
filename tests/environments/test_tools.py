"""Tools by import path and of MCP servers: what the model reads of them, and how its last answer is scored."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from mcp import MCPError
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config
from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments import tools
from asyncrl.environments.agents import Session
from asyncrl.environments.group_scoring import GroupScoring
from asyncrl.environments.interfaces import build_reward
from asyncrl.environments.reward_function import Form, RewardFunction, reward_function
from asyncrl.environments.scoring_messages import Failure, Group, Reply, Request
from asyncrl.environments.tools import ToolAgent
from asyncrl.errors import ConfigError

TASK = Task(question="q", prompt="the prompt", answer="done")
SERVER = [sys.executable, str(Path(__file__).with_name("tools_of_tests.py"))]


class Model:
    """A model that makes calls in turn, and then answers `done`. Records what it was asked."""

    def __init__(self, *calls: tuple[str, Mapping[str, Any]]) -> None:
        self._calls = list(calls)
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.messages: list[Mapping[str, Any]] = []
        self.failures: list[tuple[str, str, str]] = []

    async def tool_failed(self, tool: str, *, error: str, message: str) -> None:
        self.failures.append((tool, error, message))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        self.messages, self.tools = list(messages), tools
        if not self._calls:
            return {"role": "assistant", "content": "done"}
        name, arguments = self._calls.pop(0)
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": str(len(messages)), "type": "function", "function": function}],
        }

    @property
    def read(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "tool"]


def of_answer(task: Task, completion: str) -> dict[str, float]:
    return {"right": float(completion == task.answer), "length": float(len(completion))}


async def of_answer_awaited(task: Task, completion: str) -> float:
    return float(completion == task.answer)


def of_group(task: Task, completions: Sequence[str]) -> list[float]:
    return [float(completion == task.answer) for completion in completions]


def agent(*names: str, scoring: RewardFunction | None = None, **settings: Any) -> ToolAgent:
    section = EnvironmentSection(tools=[f"tools_of_tests:{name}" for name in names], **settings)
    return ToolAgent(section, scoring=scoring or reward_function(of_answer, named="environment.reward"))


async def played(made: ToolAgent, *calls: tuple[str, Mapping[str, Any]], task: Task = TASK) -> tuple[object, Model]:
    model = Model(*calls)
    return await made.run(cast(Session, model), task), model


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOL_KEY", "a key")
    monkeypatch.setenv("OTHER_KEY", ", and one that it must not have")


@pytest.mark.asyncio
async def test_the_model_reads_the_results_of_its_calls_and_its_last_answer_is_scored() -> None:
    made = agent("search", "doubled")
    score, model = await played(made, ("search", {"query": "x", "limit": "3"}), ("doubled", {"number": 4}))
    assert score == {"right": 1.0, "length": 4.0}
    assert model.read == ['["x", "x", "x"]', "8.0"]
    assert model.messages[0] == {"role": "user", "content": "the prompt"}
    [search, doubled] = [tool["function"] for tool in model.tools]
    assert (search["name"], search["description"], doubled["name"]) == ("search", "Finds pages.", "doubled")
    assert search["parameters"]["required"] == ["query"]
    limit = {"type": "integer", "description": "at most so many", "default": 2}
    assert search["parameters"]["properties"] == {"query": {"type": "string"}, "limit": limit}, "no titles"
    asked = Task(question="q", prompt="q", answer="no", messages=({"role": "system", "content": "be brief"},))
    score, model = await played(made, task=asked)
    assert (score, model.messages[0]["content"]) == ({"right": 0.0, "length": 4.0}, "be brief")


@pytest.mark.asyncio
async def test_a_wrong_call_is_an_error_that_the_model_reads() -> None:
    made = agent("search", "slow", "broken", tool_timeout_s=0.2)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("lookup", {}), ("search", {"limit": "many"}), ("slow", {"seconds": 2}), ("broken", {}),
    ]  # fmt: skip
    _, model = await played(made, *calls)
    unknown, wrong, late, raised = model.read
    assert unknown == "error: there is no tool lookup; there are search, slow, broken"
    assert wrong.startswith("error: query: Missing required argument; limit: Input should be a valid integer")
    assert late == "error: slow took longer than 0.2 s"
    assert raised == "error: KeyError: 'no luck'"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("name", "arguments", "read", "error", "logged"),
    [
        ("broken", {}, "error: KeyError: 'no luck'", "KeyError", "tools_of_tests.py:"),
        ("quits", {}, "error: SystemExit: 2", "SystemExit", "tools_of_tests.py:"),
        ("misspelt", {"word": "x"}, "error: NameError: name 'wrod' is not defined", "NameError", "tools_of_tests.py:"),
        ("gives_up", {}, "error: TimeoutError: the shop is closed", "TimeoutError", "tools_of_tests.py:"),
        ("reads_a_number", {"text": "many"}, "error: ValidationError: 1 validation error", "ValidationError",
         "tools_of_tests.py:"),
        ("slow", {"seconds": 2}, "error: slow took longer than 0.2 s", "TimeoutError",
         "environment.tool_timeout_s = 0.2 s"),
    ],
)  # fmt: skip
async def test_the_model_reads_an_error_without_its_place_and_the_log_gets_the_place(
    name: str, arguments: dict[str, Any], read: str, error: str, logged: str
) -> None:
    _, model = await played(agent(name, tool_timeout_s=0.2), (name, arguments))
    assert model.read[0].startswith(read)
    assert "tests.py" not in model.read[0]
    [(tool, kind, message)] = model.failures
    assert (tool, kind) == (name, error)
    assert logged in message


@pytest.mark.asyncio
async def test_a_call_that_does_not_fit_the_tools_is_no_failure_of_a_tool() -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("lookup", {}), ("search", {"limit": 1}), ("search", {"query": ["x"]}), ("doubled", {"number": "many"}),
        ("search", {"query": "x", "more": 1}),
    ]  # fmt: skip
    _, model = await played(agent("search", "doubled"), *calls)
    assert len(model.read) == 5
    assert all(text.startswith("error: ") for text in model.read)
    assert model.failures == []


@pytest.mark.asyncio
async def test_the_agent_with_tools_of_the_docs_runs_and_reports_failures() -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    [code] = [block.partition("```")[0] for block in page.split("```python\n") if block.startswith("# my_shop.py")]
    made: dict[str, Any] = {}
    exec(code, made)
    model = Model(("price", {"item": "tea"}), ("price", {"item": "milk"}), ("price", {}))
    assert await made["run"](cast(Session, model), TASK) == 1.0
    assert model.read == ["3", "error: KeyError: 'milk'", "error: KeyError: 'item'"]
    assert [(tool, error) for tool, error, _ in model.failures] == [("price", "KeyError")] * 2
    assert made["TOOL"] in model.tools


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "read"),
    [("list", '["a", "é"]'), ("dict", '{"a": 1}'), ("None", "null"), ("True", "true"), ("empty", ""),
     ("number", "2.5"), ("date", '"2026-01-02"')],
)  # fmt: skip
async def test_values_of_tools_are_written_as_the_docs_say(kind: str, read: str) -> None:
    _, model = await played(agent("value"), ("value", {"kind": kind}))
    assert model.read == [read]


@pytest.mark.asyncio
async def test_the_last_turn_is_scored_even_if_it_calls_a_tool() -> None:
    score, model = await played(agent("search", max_turns=2), *[("search", {"query": "x"})] * 5)
    assert score == {"right": 0.0, "length": 0.0}
    assert len(model.read) == 1


def hanging() -> list[str]:
    """Returns the tools of the calls whose threads run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tools_of_tests:")]


@pytest.mark.asyncio
async def test_a_tool_that_ends_the_program_is_an_error_and_many_that_hang_end_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = agent("quits", "slow", tool_timeout_s=0.05)
    _, model = await played(made, ("quits", {}), ("slow", {"seconds": 0.3}))
    ended, late = model.read
    assert ended == "error: SystemExit: 2"
    assert late == "error: slow took longer than 0.05 s"
    monkeypatch.setattr(tools, "HUNG_THREADS", 2)
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    while hanging():
        await asyncio.sleep(0.02)  # until the first call has ended
    for _ in range(2):
        await played(made, ("slow", {"seconds": 1.0}))
    assert not ends
    await played(made, ("slow", {"seconds": 1.0}))
    assert ends == [1]
    assert "3 calls of tools hang, such as tools_of_tests:slow" in capsys.readouterr().err
    while hanging():
        await asyncio.sleep(0.02)  # a thread that ends does not count any more


@pytest.mark.asyncio
async def test_the_tools_of_the_last_turn_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    async def recorded(self: ToolAgent, call: object) -> tuple[dict[str, Any], None]:
        called.append(call)
        return {"role": "tool", "content": ""}, None

    monkeypatch.setattr(ToolAgent, "_result", recorded)
    await played(agent("search", max_turns=2), *[("search", {"query": "x"})] * 5)
    assert len(called) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("function", [of_answer_awaited, of_group], ids=["async", "of a group"])
async def test_rewards_of_all_forms_score_the_answer(function: Any) -> None:
    made = agent("search", scoring=reward_function(function, named="environment.reward"))
    assert (await played(made))[0] == 1.0


class Refusing:
    """A session whose calls the gateway refuses after `answered` of them."""

    def __init__(self, why: str, *, answered: int = 0) -> None:
        self._why, self._answered = why, answered
        self._model = Model(("search", {"query": "a"}))

    async def begin(self) -> None:
        pass

    async def chat(self, messages: Any, *, tools: Any) -> dict[str, Any]:
        if not self._answered:
            raise RuntimeError(f"the gateway refused a call: {self._why}")
        self._answered -= 1
        return await self._model.chat(messages, tools=tools)


def broken_reward(task: Task, completion: str) -> float:
    raise KeyError("label")


async def broken_reward_awaited(task: Task, completion: str) -> float:
    raise ZeroDivisionError


def failure_of(made: ToolAgent, session: object, section: EnvironmentSection) -> str:
    """Returns the message with which the sample of an episode fails."""
    replies: list[Reply] = []

    async def episode(task: Task, completion: str) -> object:
        return await made.run(cast(Session, session), task)

    reward = RewardFunction(function=episode, form=Form(asynchronous=True, agent=True))
    GroupScoring(reward, section, send=replies.append).score(
        Request(id=1, groups=(Group(task=TASK, completions=("",)),))
    )
    [failure] = [outcome for reply in replies for _, outcome in reply.outcomes]
    assert isinstance(failure, Failure)
    return failure.message


@pytest.mark.parametrize("answered", [0, 1], ids=["the first call", "a later call"])
@pytest.mark.parametrize("why", ["no room in model.max_length", "too many branches", "the tools are not written"])
def test_a_refused_call_is_a_failure_of_the_episode_and_not_of_the_reward(why: str, answered: int) -> None:
    made = agent("search", max_turns=4)
    section = EnvironmentSection(tools=["tools_of_tests:search"], reward="exact_match", max_turns=4)
    said = failure_of(made, Refusing(why, answered=answered), section)
    assert said == f"the episode with environment.tools failed: the gateway refused a call: {why}"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (broken_reward, "environment.reward = own:scored raised KeyError: 'label'"),
        (broken_reward_awaited, "environment.reward = own:scored raised ZeroDivisionError"),
        (lambda task, completions: 1 / 0, "environment.reward = own:scored raised ZeroDivisionError"),
    ],
    ids=["raises", "async", "group"],
)
def test_a_reward_that_fails_after_an_episode_is_named(function: Any, says: str) -> None:
    scoring = reward_function(function, named="environment.reward")
    section = EnvironmentSection(tools=["tools_of_tests:search"], reward="own:scored")
    made = ToolAgent(section, scoring=scoring)
    assert failure_of(made, Model(), section).startswith(says)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["without_docstring"], "it needs a docstring"),
        (["of_objects"], "tools_of_tests:of_objects cannot be a tool"),
        (["without_type"], "without_type cannot be a tool (its parameter query has no type"),
        (["with_one_type"], "with_one_type cannot be a tool (its parameter limit has no type"),
        (["Page.searched"], "Page.searched cannot be a tool (its parameter self has no type"),
        (["of_a_class"], "JSON cannot express the type of its parameter page, tools_of_tests.Page"),
        (["of_a_function"], "JSON cannot express the type of its parameter key, "),
        (["of_threads"], "JSON cannot express the type of its parameter lock, "),
        (["prepared"], "tools_of_tests:prepared cannot be a tool"),
        (
            ["search", "Other.search"],
            "two tools have the name search, the second one is of tools_of_tests:Other.search",
        ),
        (["lookup"], "names 'lookup', which tools_of_tests lacks"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_function_that_cannot_be_a_tool_is_refused(names: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tools") as caught:
        agent(*names)
    assert says in str(caught.value)


@pytest.mark.usefixtures("keys")
@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_the_tools_of_an_mcp_server_are_called_and_a_server_that_died_is_started_again() -> None:
    made = agent("search", mcp_servers=[{"command": SERVER}], secrets=["TOOL_KEY"], tool_timeout_s=30)
    _, model = await played(
        made, ("put", {"key": "a", "value": "1"}), ("get", {"key": "a"}), ("get", {"key": "b"}), ("die", {}),
        ("put", {"key": "c", "value": "2"}),
    )  # fmt: skip
    assert [tool["function"]["name"] for tool in model.tools] == ["search", "put", "get", "die"]
    assert model.tools[1]["function"]["parameters"]["required"] == ["key", "value"]
    kept, got, missing, died, again = model.read
    assert (kept, got, again) == ("kept a, a key", "1", "kept c, a key")
    assert missing.startswith("error: ")
    assert died.startswith("error: MCPError")
    assert [(tool, error) for tool, error, _ in model.failures] == [("get", "MCP"), ("die", "MCPError")]


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[None]:
    server = await asyncio.create_subprocess_exec(*SERVER, str(port), stderr=asyncio.subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield
    finally:
        server.kill()
        await server.wait()


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_server_behind_a_url_may_be_started_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = agent(mcp_servers=[{"url": f"http://127.0.0.1:{port}/mcp"}], tool_timeout_s=30)
    put = ("put", {"key": "a", "value": "1"})
    async with serving(port):
        _, model = await played(made, put)
        assert model.read == ["kept a, no key"]
    async with serving(port):
        _, model = await played(made, put, put)
        assert model.read == ["kept a, no key"] * 2


@pytest.mark.asyncio
async def test_a_server_that_has_lost_the_session_gets_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of older versions of MCP have sessions, and refuse those of before their restart."""
    lost = MCPError(-32600, "Session terminated")
    answers: list[MCPError | CallToolResult] = [CallToolResult(content=[TextContent(type="text", text="kept")]), lost]
    connections = []

    class Connection:
        async def list_tools(self) -> ListToolsResult:
            return ListToolsResult(tools=[Tool(name="put", description="Keeps a value.", input_schema={})])

        async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
            connections.append(self)
            answer = answers.pop()
            if isinstance(answer, MCPError):
                raise answer
            return answer

    async def serve(self: Any, connected: "asyncio.Future[Any]") -> None:
        connected.set_result(Connection())
        await asyncio.Event().wait()

    monkeypatch.setattr(tools._Server, "_serve", serve)
    _, model = await played(agent(mcp_servers=[{"url": "http://127.0.0.1:1/mcp"}]), ("put", {}), ("put", {}))
    refused, again = model.read
    assert "Session terminated" in refused
    assert again == "kept"
    assert len(set(map(id, connections))) == 2


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.timeout(120)
async def test_a_server_that_cannot_be_reached_costs_the_sample_and_is_tried_again() -> None:
    made = agent(mcp_servers=[{"command": ["/no/such/program"]}])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"mcp_servers: /no/such/program cannot be reached"):
            await played(made)


def test_the_weights_of_several_rewards_stay_with_tools() -> None:
    section = EnvironmentSection(
        tools=["tools_of_tests:search"],
        rewards=[{"name": "a", "fn": "exact_match", "weight": 2.0}, {"name": "b", "fn": "math_verify"}],
    )
    made = build_reward(section)
    assert (made.form.agent, made.weights) == (True, {"a": 2.0, "b": 1.0})
    with pytest.raises(ConfigError, match=r"has no effect with environment.name = guess_the_number"):
        build_reward(EnvironmentSection(tools=["tools_of_tests:search"], name="guess_the_number"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment.tools=[a:b]"], "environment.tools: needs generator.tool_parser"),
        (["environment.mcp_servers=[{url: u}]"], "environment.mcp_servers: needs generator.tool_parser"),
        (
            ["environment.tools=[a:b]", "environment.agent=a:b"],
            "environment.tools: has no effect with environment.agent",
        ),
        (["environment.tools=[search]"], "environment.tools = search: must be an import path"),
        (["environment.mcp_servers=[{}]"], "a server has command = [] and url = ''; set one of the two"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_of_tools_that_do_not_fit_are_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config([], overrides))
    assert says in str(caught.value)


def test_tools_with_a_parser_pass_the_checks() -> None:
    overrides = ["environment.tools=[a:b]", "generator.tool_parser=hermes", "data.chat=auto"]
    config = load_config([], overrides)
    check_config(config)
    assert (config.environment.plays_agents, config.most_branches) == (True, 8)
