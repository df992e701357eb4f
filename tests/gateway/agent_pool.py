"""A generator pool whose groups are played by agents, in one process: a real gateway without a socket, fake engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import cache
from typing import Any

import httpx
import msgspec
from fake_engine import FakeEngine
from pool import Pool

from asyncrl.data.prompts import Task
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.environments.agents import Session
from asyncrl.environments.scores import Score
from asyncrl.gateway.agent_rollouts import AgentRollouts
from asyncrl.gateway.conversations import SessionSettings
from asyncrl.gateway.gateway import EndedSession, Gateway, Sample
from asyncrl.gateway.rendering import Renderer
from asyncrl.generation.rollout import Rollouts

ANSWER_TOKENS = 4
"""An answer has so many tokens if the engine does not end it before."""


class LocalSession:
    """The model, as an agent on a replica sees it."""

    def __init__(self, session: Session, *, gateway: "LocalGateway", replica: str) -> None:
        self.replica = replica
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=gateway.app),
            base_url=session.base_url,
            headers={"Authorization": f"Bearer {session.api_key}"},
        )

    async def chat(self, messages: Sequence[Any], **options: Any) -> dict[str, Any]:
        response = await self._client.post("/chat/completions", json={"messages": list(messages), **options})
        assert response.status_code == 200, response.text
        message: dict[str, Any] = response.json()["choices"][0]["message"]
        return message


Agent = Callable[[LocalSession, Task], Awaitable[float]]


class LocalGateway:
    """Has the methods of `GatewayServer` that a replica calls, without a server."""

    def __init__(self, *, renderer: Renderer, sample: Sample, url: str) -> None:
        self._gateway = Gateway(renderer=renderer, sample=sample, model="m")
        self._url = url
        self.app = self._gateway.app

    async def open(self, sessions: Sequence[SessionSettings]) -> list[tuple[str, Session]]:
        return [self._gateway.open(settings, url=self._url) for settings in sessions]

    async def close(self, ids: Sequence[str]) -> list[EndedSession]:
        return list(await asyncio.gather(*map(self._gateway.close, ids)))


class LocalAgents:
    """A scorer that runs the agents of a replica in this process."""

    def __init__(self, agent: Agent, *, replica: str) -> None:
        self._agent = agent
        self._replica = replica
        self.gateway: LocalGateway

    def runs_agent(self, task: Task) -> bool:
        return True

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        given = [msgspec.json.decode(each, type=Session) for each in completions]
        sessions = [LocalSession(session, gateway=self.gateway, replica=self._replica) for session in given]
        return list(await asyncio.gather(*(self._agent(session, task) for session in sessions)))


class AgentPool(Pool):
    def __init__(self, agent: Agent, **overrides: Any) -> None:
        self._agent = agent
        super().__init__(
            environment={"agent": "a:b"},
            model={"max_length": 400},
            generator={
                "max_concurrent_groups": 1,
                "max_completion_tokens": ANSWER_TOKENS,
                "persist_every_tokens": 2,
                "seeded": True,
            },
            staleness={"max_versions": 2},
            **overrides,
        )

    def rollouts_with(self, engine: FakeEngine, *, name: str) -> Rollouts:
        scorer = LocalAgents(self._agent, replica=name)
        tokenizer = _tokenizer()
        scorer.gateway = gateway = LocalGateway(
            renderer=Renderer(tokenizer), sample=lambda asked: agents.sample(asked), url=f"http://{name}"
        )
        agents = AgentRollouts(
            config=self.config,
            gateway=gateway,  # type: ignore[arg-type]
            engine=engine,
            scorer=scorer,  # type: ignore[arg-type]
            tokenizer=tokenizer,
        )
        return Rollouts(
            config=self.config,
            engine=engine,
            tokenizer=tokenizer,
            scorer=scorer,  # type: ignore[arg-type]
            replica=name,
            agents=agents,
        )


@contextlib.asynccontextmanager
async def agent_pool(agent: Agent, **overrides: Any) -> AsyncIterator[AgentPool]:
    """Yields a pool without replicas. Ends all replicas that are added to it."""
    pool = AgentPool(agent, **overrides)
    try:
        yield pool
    finally:
        await pool.close()


@cache
def _tokenizer() -> Any:
    return build_chat_tokenizer(max_length=4096)
