"""Agents: the user's code that calls the model as often as it likes and returns a reward.

    async def run(session: Session, task: Task) -> float:
        messages = [{"role": "user", "content": task.prompt}]
        message = await session.chat(messages)
        ...

An agent runs in a scoring process, as a reward does. So it may hang, crash or use too much memory without harm to the
generator. It reaches the model by an OpenAI-style URL only, so it may be any program that can be given a URL and a key.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form, RewardFunction
from asyncrl.environments.scoring_messages import sendable
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    import httpx


class ToolFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed call of a tool: the tool's name, the type of the error, and the message for the log."""

    tool: Annotated[str, msgspec.Meta(max_length=100)]
    error: Annotated[str, msgspec.Meta(max_length=100)]
    message: str


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """The model, as an agent sees it. Each sample of a group has its own session, which ends with the sample.

    `base_url` (which ends with `/v1`), `api_key` and `model` are for any client of OpenAI's interface. The run's
    sampling settings apply. Of a client's, only the stop strings and a lower limit of tokens count.
    """

    base_url: str
    api_key: str
    model: str

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> dict[str, Any]:
        """Returns the model's message that follows `messages`, with the keys `role`, `content` and, if it calls tools,
        `tool_calls`. Append it to `messages` unchanged: the next call then continues this conversation. `options` are
        further fields of the call, such as `stop` and `max_tokens`.

        Raises RuntimeError with the server's message if the call is refused, for example beyond
        `environment.max_turns` or `model.max_length`.
        """
        body = {"model": self.model, "messages": list(messages), **({"tools": list(tools)} if tools else {}), **options}
        answer = await _posted(f"{self.base_url}/chat/completions", self.api_key, body)
        message: dict[str, Any] = answer["choices"][0]["message"]
        return message

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> list[int]:
        """Returns the tokens that the model samples after `token_ids`, for agents that render messages themselves. If
        the next call's `token_ids` are these, the sampled tokens and new ones, that call continues this one.

        Raises RuntimeError with the server's message if the call is refused, as `chat` does.
        """
        body = {"token_ids": list(token_ids), "sampling_params": {"max_tokens": max_tokens, "stop": list(stop)}}
        answer = await _posted(f"{self.base_url.removesuffix('/v1')}/inference/v1/generate", self.api_key, body)
        sampled: list[int] = answer["choices"][0]["token_ids"]
        return sampled

    async def tool_failed(self, tool: str, *, error: str, message: str) -> None:
        """Reports that a tool failed, for the log and the numbers of the run. The model does not read it.

        `error` is the type of the error, such as `ValueError`, and `message` is what the log shows.
        """
        body = {"tool": sendable(tool)[:100], "error": sendable(error)[:100], "message": sendable(message)}
        await _posted(f"{self.base_url.removesuffix('/v1')}/tool_failed", self.api_key, body)

    async def begin(self) -> None:
        """Makes the gateway forget the calls of an earlier attempt, whose process has died."""
        await _posted(f"{self.base_url.removesuffix('/v1')}/begin", self.api_key, {})


Agent = Callable[[Session, Task], Any]
_OF_REWARDS = {"completion", "completions", "prompts"}
"""Names of parameters that only rewards have, of asyncrl and of TRL."""


class Demonstration(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of the model in a conversation, for the warm-up of a tiny model. `answer` is the text that it writes,
    with its tool calls."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    answer: str


def as_reward(agent: Agent, *, named: str, tools: Sequence[dict[str, Any]] = ()) -> RewardFunction:
    """Returns an agent as an async reward function, whose completions are sessions as JSON texts.

    An agent that is not a coroutine function runs in a thread. `named` is the setting that names the agent. `tools` are
    those descriptions of its tools that are known before the first episode. Raises ConfigError if the agent cannot be
    called with a session and a task, or has parameters like a reward.
    """
    try:
        signature = inspect.signature(agent)
        signature.bind("session", "task")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{named} cannot be called with two arguments ({error}); an agent takes (session, task)"
        ) from None
    parameters = [*signature.parameters]
    if parameters[0] == "task" or _OF_REWARDS & {*parameters}:
        raise ConfigError(
            f"{named} has the parameters {signature}, but an agent takes (session, task); change them, or set "
            "environment.reward instead if it is a reward"
        )

    async def episode(task: Task, completion: str) -> object:
        session = msgspec.json.decode(completion, type=Session)
        await session.begin()
        if inspect.iscoroutinefunction(agent):
            return await agent(session, task)
        return await asyncio.to_thread(agent, session, task)

    return RewardFunction(function=episode, form=Form(asynchronous=True, agent=True, tools=tuple(tools)))


async def _posted(url: str, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    response = await _client().post(url, json=body, headers={"Authorization": f"Bearer {key}"})
    answer: dict[str, Any] = response.json()
    if response.status_code != 200:
        raise RuntimeError(f"the gateway refused a call: {answer['error']['message']}")
    return answer


@cache
def _client() -> "httpx.AsyncClient":
    """Returns the HTTP client that all sessions of this process share. Its calls have no timeout, because the whole
    episode has one."""
    import httpx

    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
