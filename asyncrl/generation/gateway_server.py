"""The server of a gateway, and the Ray actor in which a replica runs it, beside the replica's own event loop."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

import ray
import uvicorn
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.data_plane.calls import finished, start
from asyncrl.environments.agents import Session
from asyncrl.errors import ActorGone, CallTimeout, InfraError
from asyncrl.generation.conversations import SessionSettings
from asyncrl.generation.gateway import Answered, Asked, EndedSession, Gateway, Sample
from asyncrl.generation.gateway_connections import ConnectionLimits, Connections
from asyncrl.generation.rendering import Renderer
from asyncrl.shown_text import log_to_stderr

HOST = "127.0.0.1"
"""Agents run on the node of their replica."""
CONCURRENCY = 10_000
"""Calls that the actor serves at once. Each call of an agent waits for its answer."""


class GatewayServer:
    """A gateway that listens on this machine. `sample` answers the calls."""

    def __init__(
        self,
        *,
        config: Config,
        renderer: Renderer,
        sample: Sample,
        connections: ConnectionLimits | None = None,
    ) -> None:
        self._config = config
        self._gateway = Gateway(renderer=renderer, sample=sample, model=config.run.name)
        self._server: uvicorn.Server | None = None
        self._connections = Connections(connections or ConnectionLimits())
        self._url = ""

    async def start(self) -> None:
        """Begins to serve."""
        listening = socket.create_server((HOST, 0))
        # The server writes head and body of an answer one after the other. Without this, the body waits until the
        # client confirms the head, which takes 40 ms. asyncio sets it for sockets that it has made itself only.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._url = f"http://{HOST}:{listening.getsockname()[1]}"
        settings = uvicorn.Config(
            self._gateway.app,
            log_level=logging.ERROR,  # it warns of every request that is no HTTP, and clients could fill the log
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            **self._connections.settings(),
        )
        self._server = uvicorn.Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="gateway")

    async def open(self, sessions: Sequence[SessionSettings]) -> list[tuple[str, Session]]:
        """Opens sessions. Returns the id of each session, and what its agent gets of it."""
        return [self._gateway.open(settings, url=self._url) for settings in sessions]

    async def close(self, ids: Sequence[str]) -> list[EndedSession]:
        """Ends sessions with their running calls."""
        return list(await asyncio.gather(*map(self._gateway.close, ids)))

    async def shutdown(self) -> None:
        """Ends the server. Waits for nothing that clients have left open."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving


class GatewayActor(GatewayServer):
    """Body of the actor. `replica` is the actor name of the replica whose engine answers."""

    def __init__(self, *, config: Config, model_path: str, replica: str) -> None:
        log_to_stderr()
        self._replica = ray.get_actor(replica, namespace=config.run.name)
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        renderer = Renderer(tokenizer, control_tokens=config.data.control_tokens)
        super().__init__(config=config, renderer=renderer, sample=self._ask)

    async def _ask(self, asked: Asked) -> Answered:
        timeout_s = self._config.generator.rollout_timeout_s
        answered: Answered = await finished(
            self._replica.sample.remote(asked), timeout_s=timeout_s, what="an answer of the engine"
        )
        return answered


class RemoteGateway:
    """The gateway of a replica, in a process of its own on the same node, which ends with the replica.

    Each call raises InfraError if the gateway does not answer.
    """

    def __init__(self, *, config: Config, model_path: str, replica: str) -> None:
        node = ray.get_runtime_context().get_node_id()
        self._timeout_s = config.buffer.call_timeout_s
        self._start_timeout_s = config.generator.startup_timeout_s
        self._actor = (
            ray.remote(GatewayActor)
            .options(
                num_cpus=0,
                max_concurrency=CONCURRENCY,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(config=config, model_path=model_path, replica=replica)
        )

    async def start(self) -> None:
        """Begins to serve. Raises the errors of `GatewayServer`."""
        await finished(
            start(self._actor, GatewayActor.start), timeout_s=self._start_timeout_s, what="the start of the gateway"
        )

    async def open(self, sessions: Sequence[SessionSettings]) -> list[tuple[str, Session]]:
        """As `GatewayServer.open`."""
        opened: list[tuple[str, Session]] = await self._answer(start(self._actor, GatewayActor.open, sessions))
        return opened

    async def close(self, ids: Sequence[str]) -> list[EndedSession]:
        """As `GatewayServer.close`."""
        ended: list[EndedSession] = await self._answer(start(self._actor, GatewayActor.close, ids))
        return ended

    async def _answer(self, call: Any) -> Any:
        try:
            return await finished(call, timeout_s=self._timeout_s, what="a call of the gateway")
        except (ActorGone, CallTimeout) as error:
            raise InfraError(str(error), reason="gateway") from error
