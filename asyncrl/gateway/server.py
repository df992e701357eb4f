"""The server of a gateway, and the Ray actor in which a replica runs it, beside the replica's own event loop."""

import asyncio
import logging
import math
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
import uvicorn
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from asyncrl.common.names import REPLICAS
from asyncrl.config.schema import Config
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.data_plane.calls import finished, start
from asyncrl.environments.agents import Session
from asyncrl.errors import ActorGone, CallTimeout, InfraError
from asyncrl.gateway.calls import MAX_BODY_BYTES
from asyncrl.gateway.conversations import SessionSettings
from asyncrl.gateway.gateway import Answered, Asked, EndedSession, Gateway, Sample
from asyncrl.gateway.rendering import Renderer
from asyncrl.log_files import LogFile
from asyncrl.shown_text import describe_process, log_to_stderr

# The connections of a gateway's clients, with bounds for their number, for the bytes of a request, and for its time.
#
# uvicorn has none of these bounds: a client that sends a request slowly, or does not read its answer, keeps its
# connection for ever. One agent must not stop the sessions of other samples.

HEAD_BYTES = 64 * 2**10
"""Largest head of a request, bytes: its line and its headers. Common clients send less than 1 KiB."""
REQUEST_BYTES = MAX_BODY_BYTES + 2**20
"""Largest request, bytes, with the lines that give the sizes of its chunks. A connection with a larger one is aborted.
A body over `MAX_BODY_BYTES` is refused with an answer before that (`read_call`)."""


def most_connections() -> int:
    """Returns the default of the largest number of connections: 4096, or half of the files that this process may open
    if that is less, because each connection is a file."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if files == resource.RLIM_INFINITY else min(4096, files // 2)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """`most` is the largest number of open connections. `client_timeout_s` limits the time in which a connection waits
    for its client: from its start or its last answer until a whole request has arrived, or until an answer is read.

    Clients keep an unused connection for less than `client_timeout_s` (httpx 5 s, aiohttp 15 s), so none sends a
    request at the moment at which its connection is closed.
    """

    most: int = field(default_factory=most_connections)
    client_timeout_s: float = 60.0


class Connections:
    """The open connections of a server. It ends connections so that the limits are kept."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._waiting: dict[_Connection, float] = {}
        """Since when each connection waits for its client, in the order of these times."""

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of `uvicorn.Config` that make its server keep the limits."""
        return {
            "http": cast(type[asyncio.Protocol], partial(_Connection, among=self)),
            "ws": "none",  # an upgraded connection would leave this protocol, and its limits with it
            "timeout_keep_alive": math.ceil(self._limits.client_timeout_s),
            # The server calls this once a second.
            "callback_notify": self.end_slow,
            "timeout_notify": 0,
        }

    def opened(self, connection: "_Connection") -> None:
        """Makes room for a new connection: if there are more than `most` now, ends the one that has waited longest for
        its client. If no other connection waits, this is the new one."""
        if len(connection.connections) > self._limits.most:
            self._end(next(iter(self._waiting)))

    def settle(self, connection: "_Connection") -> None:
        """Records whether a connection waits for its client."""
        if connection.waits:
            self._waiting.setdefault(connection, connection.loop.time())
        else:
            self.forget(connection)

    def forget(self, connection: "_Connection") -> None:
        """Records that a connection does not wait for its client."""
        self._waiting.pop(connection, None)

    async def end_slow(self) -> None:
        """Ends the connections that have waited too long for their clients."""
        begun_s = asyncio.get_running_loop().time() - self._limits.client_timeout_s
        for connection, since_s in list(self._waiting.items()):
            if since_s > begun_s:
                break
            self._end(connection)

    def _end(self, connection: "_Connection") -> None:
        self.forget(connection)
        connection.connections.discard(connection)
        connection.transport.abort()  # `close` would wait until the client has read all sent bytes


class _Connection(HttpToolsProtocol):
    def __init__(self, config: uvicorn.Config, *, among: Connections, **state: Any) -> None:
        super().__init__(config, **state)
        self._among = among
        self._received = 0
        self._in_head = False

    @property
    def waits(self) -> bool:
        """True if the connection waits for its client: for a whole request, or until an answer is read."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._among.settle(self)
        self._among.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._among.forget(self)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        self._received += len(data)
        if self._received > (HEAD_BYTES if was_in_head and self._in_head else REQUEST_BYTES):
            self.transport.abort()
        self._among.settle(self)

    def on_message_begin(self) -> None:
        self._received, self._in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._among.settle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._among.settle(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._among.settle(self)


HOST = "127.0.0.1"
"""The gateway listens only on its own machine, because agents run on the node of their replica."""
CONCURRENCY = 10_000
"""Calls of its methods that the actor serves at once. Agents' calls come by HTTP and are not among them."""


class GatewayServer:
    """A gateway with its HTTP server, which listens on this machine. `sample` lets an engine answer the calls."""

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
        # The server writes head and body of an answer one after the other. Without this option, the body waits until
        # the client confirms the head, which takes 40 ms. asyncio sets it only for sockets that it has made itself.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._url = f"http://{HOST}:{listening.getsockname()[1]}"
        settings = uvicorn.Config(
            self._gateway.app,
            log_level=logging.ERROR,  # uvicorn warns of each request that is not HTTP, so clients could fill the log
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            **self._connections.settings(),
        )
        self._server = uvicorn.Server(settings)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="gateway")

    async def open(self, sessions: Sequence[SessionSettings]) -> list[tuple[str, Session]]:
        """Opens sessions. Returns the id of each session, and the URL, key and model name for its agent."""
        return [self._gateway.open(settings, url=self._url) for settings in sessions]

    async def close(self, ids: Sequence[str]) -> list[EndedSession]:
        """Ends sessions, cancels their running calls, and returns their results."""
        return list(await asyncio.gather(*map(self._gateway.close, ids)))

    async def shutdown(self) -> None:
        """Ends the server. Waits for nothing that clients have left open."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving


class GatewayActor(GatewayServer):
    """Body of the Ray actor that runs a gateway. `replica` is the actor name of the replica whose engine answers.
    `logs` is the folder for the log of this process."""

    def __init__(self, *, config: Config, model_path: str, replica: str, logs: Path) -> None:
        log_to_stderr(config.run.log_format)
        describe_process(run=config.run.name, role="gateway", replica=replica)
        LogFile(logs / f"gateway-{replica}.log", form=config.run.log_format)
        self._replica = ray.get_actor(replica, namespace=REPLICAS)
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

    `open` and `close` raise InfraError if the gateway does not answer within `buffer.call_timeout_s`, or has ended.
    """

    def __init__(self, *, config: Config, model_path: str, replica: str, logs: Path) -> None:
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
            .remote(config=config, model_path=model_path, replica=replica, logs=logs)
        )

    async def start(self) -> None:
        """Begins to serve. Raises ActorGone with the cause if the gateway cannot be made, and CallTimeout after
        `generator.startup_timeout_s`."""
        await finished(
            start(self._actor, GatewayActor.start), timeout_s=self._start_timeout_s, what="the start of the gateway"
        )

    async def open(self, sessions: Sequence[SessionSettings]) -> list[tuple[str, Session]]:
        """Opens sessions. Returns the id of each session, and the URL, key and model name for its agent."""
        opened: list[tuple[str, Session]] = await self._answer(start(self._actor, GatewayActor.open, sessions))
        return opened

    async def close(self, ids: Sequence[str]) -> list[EndedSession]:
        """Ends sessions, cancels their running calls, and returns their results."""
        ended: list[EndedSession] = await self._answer(start(self._actor, GatewayActor.close, ids))
        return ended

    async def _answer(self, call: Any) -> Any:
        try:
            return await finished(call, timeout_s=self._timeout_s, what="a call of the gateway")
        except (ActorGone, CallTimeout) as error:
            raise InfraError(str(error), reason="gateway") from error
