"""A gateway with hostile clients: what they do is refused and bounded, and the sessions of others go on.

All tests use the real server and real sockets.
"""

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from session_settings import session_settings

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.environments.agents import Session
from asyncrl.gateway.gateway import Answered, Asked
from asyncrl.gateway.messages import Message
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.server import ConnectionLimits, GatewayServer
from asyncrl.generation.interfaces import Completion

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

TOKENIZER = build_chat_tokenizer(max_length=4096)
RENDERER = Renderer(TOKENIZER)
CONFIG = Config.model_validate({"model": {"max_length": 2048}})
MIB = 2**20
ENOUGH_S = 20.0
"""Time in which everything here must happen on a busy machine."""


class Engine:
    """Answers with `yes`, and each session in `texts` with its text. Calls of the sessions in `held` wait for `go`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.held: set[str] = set()
        self.go = asyncio.Event()
        self.texts: dict[str, str] = {}

    async def sample(self, asked: Asked) -> Answered:
        self.asked.append(asked.session)
        if asked.session in self.held:
            await self.go.wait()
        text = self.texts.get(asked.session, "yes")
        completion = Completion(
            token_ids=[5, 6], logprobs=[-0.5] * 2, versions=[Version(1, 0)] * 2, text=text, truncated=False
        )
        return completion, {"role": "assistant", "content": text}


class Scene:
    """A server with an engine, and with the sessions of a hostile agent and of a `decent` one."""

    def __init__(self, server: GatewayServer, engine: Engine, sessions: list[tuple[str, Session]]) -> None:
        self.server, self.engine = server, engine
        (self.id, self.access), (self.decent_id, self.decent) = sessions
        self.port = urlsplit(self.access.base_url).port

    async def connect(self, *, buffer: int | None = None) -> "Client":
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return Client(*await asyncio.open_connection(sock=connection))

    async def others_go_on(self) -> None:
        """Checks that the decent agent gets an answer."""
        calls = self.engine.asked.count(self.decent_id)
        assert (await posted(self.decent, f"call {calls}")).status_code == 200
        assert self.engine.asked.count(self.decent_id) == calls + 1


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Reads an answer and returns its status."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), ENOUGH_S)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await asyncio.wait_for(self.reader.readexactly(length), ENOUGH_S)
        return int(head.split()[1])

    async def flood(self, pieces: AsyncIterator[bytes]) -> int:
        """Sends until the server ends the connection. Returns the number of bytes."""
        sent = 0
        with suppress(ConnectionError):
            async for piece in pieces:
                await asyncio.wait_for(self.send(piece), ENOUGH_S)
                sent += len(piece)
        return sent

    async def rest(self) -> bytes:
        """Returns what still comes before the server ends the connection."""
        with suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(-1), ENOUGH_S)
        return b""


class Counting(Renderer):
    """A renderer that adds up the characters of which it makes tokens."""

    characters = 0

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        self.characters += len(json.dumps([*messages, *tools]))
        return super().first(messages, tools)

    def encoded(self, text: str, *, first_token: bool) -> list[int]:
        self.characters += len(text)
        return super().encoded(text, first_token=first_token)


@asynccontextmanager
async def serving(*, max_turns: int = 100, renderer: Renderer = RENDERER, **limits: Any) -> AsyncIterator[Scene]:
    engine = Engine()
    server = GatewayServer(
        config=CONFIG, renderer=renderer, sample=engine.sample, connections=ConnectionLimits(**limits)
    )
    await server.start()
    try:
        sessions = await server.open(2 * [session_settings(max_calls=max_turns, max_length=2048)])
        yield Scene(server, engine, sessions)
        engine.go.set()
        await server.close([id for id, _ in sessions])
    finally:
        await server.shutdown()


def body(text: str = "hello") -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def head(access: Session, *headers: str) -> bytes:
    """Returns the head of a call."""
    path = urlsplit(access.base_url).path
    lines = [f"POST {path}/chat/completions HTTP/1.1", "Host: gateway", f"Authorization: Bearer {access.api_key}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def call(access: Session, text: str = "hello", *headers: str) -> bytes:
    return head(access, f"Content-Length: {len(body(text))}", *headers) + body(text)


def stranger(access: Session) -> Session:
    """Returns the access of a client that does not know the key."""
    return Session(base_url=access.base_url, api_key="wrong", model="")


def objects() -> int:
    """Returns the number of small objects in this process."""
    gc.collect()
    return sys.getallocatedblocks()


async def objects_at_most(most: int) -> None:
    """Waits until the last connections and calls have ended, and no more objects are left."""
    async with asyncio.timeout(ENOUGH_S):
        while objects() > most:
            await asyncio.sleep(0.1)


async def posted(access: Session, text: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=ENOUGH_S, verify=False) as client:
        return await client.post(
            f"{access.base_url}/chat/completions",
            content=body(text),
            headers={"Authorization": f"Bearer {access.api_key}", **headers},
        )


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# --- slow clients, and many of them -------------------------------------------------------------------------------


async def trickled(client: Client, data: bytes) -> bytes:
    """Sends a byte after another, until the server ends the connection."""

    async def send() -> None:
        with suppress(ConnectionError):
            for byte in data:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.05)

    sending = asyncio.create_task(send())
    try:
        return await client.rest()
    finally:
        sending.cancel()


async def test_a_slow_client_loses_its_connection_and_a_long_call_does_not() -> None:
    async with serving(client_timeout_s=1.0) as scene:
        [(unread_id, unread)] = await scene.server.open([session_settings(max_calls=8, max_length=2048)])
        scene.engine.texts[unread_id] = "x" * (16 * MIB)
        scene.engine.held.add(scene.id)
        reads_nothing = await scene.connect(buffer=4096)  # or the system would take all of the answer
        await reads_nothing.send(call(unread))
        assert await asyncio.wait_for(reads_nothing.reader.readexactly(12), ENOUGH_S) == b"HTTP/1.1 200"
        await reads_nothing.send(call(unread, "again"))
        long_call = await scene.connect()
        await long_call.send(call(scene.access))
        silent, slow_head, slow_body, refused, kept = [await scene.connect() for _ in range(5)]
        await slow_body.send(head(scene.access, "Content-Length: 1000"))
        await refused.send(head(stranger(scene.access), "Content-Length: 1000"))
        assert await refused.status() == 401
        await kept.send(call(scene.decent))
        assert await kept.status() == 200
        ends = await asyncio.gather(
            silent.rest(),
            trickled(slow_head, b"POST / HTTP/1.1\r\n" + b"A: b\r\n" * 1000),
            trickled(slow_body, b" " * 1000),
            trickled(refused, b" " * 1000),
            kept.rest(),
        )
        assert ends == [b""] * 5
        assert len(await reads_nothing.rest()) < 15 * MIB, "the end of the answer was dropped"
        scene.engine.go.set()
        assert await long_call.status() == 200
        assert sorted(scene.engine.asked) == sorted([unread_id, unread_id, scene.id, scene.decent_id])


async def test_idle_connections_make_room_for_calls() -> None:
    async with serving(most=8) as scene:
        idle = []
        for number in range(30):
            idle.append(await scene.connect())
            if number % 2:
                await idle[-1].send(call(stranger(scene.access)))
                assert await idle[-1].status() == 401
        await scene.others_go_on()
        await asyncio.gather(*[client.rest() for client in idle[:22]])
        last = idle[-1]
        await last.send(call(scene.access))
        assert await last.status() == 200


async def test_connections_with_calls_are_not_ended_for_new_ones() -> None:
    async with serving(most=8) as scene:
        scene.engine.held.add(scene.id)
        busy = [await scene.connect() for _ in range(8)]
        for number, client in enumerate(busy):
            await client.send(call(scene.access, f"call {number}"))
        while len(scene.engine.asked) < 8:
            await asyncio.sleep(0.01)
        refused = await scene.connect()
        assert await refused.rest() == b""
        scene.engine.go.set()
        assert [await client.status() for client in busy] == [200] * 8


# --- large requests -----------------------------------------------------------------------------------------------


async def endless(piece: bytes, *, most: int = 100 * MIB) -> AsyncIterator[bytes]:
    for _ in range(most // len(piece)):
        yield piece


LARGE = b" " * 65536
CHUNK = b"10000\r\n" + LARGE + b"\r\n"


@pytest.mark.parametrize("framing", [f"Content-Length: {100 * MIB}", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("known", [True, False])
async def test_a_body_of_100_mb_is_refused_before_it_is_read(framing: str, known: bool) -> None:
    async with serving() as scene:
        client = await scene.connect()
        await client.send(head(scene.access if known else stranger(scene.access), framing))
        sending = asyncio.create_task(client.flood(endless(CHUNK if "chunked" in framing else LARGE)))
        assert await client.status() == (413 if known else 401)
        await scene.others_go_on()
        assert await sending < 32 * MIB, "the rest is in the buffers of the system"
        assert scene.engine.asked == [scene.decent_id]


async def test_a_text_of_megabytes_is_refused_by_its_beginning() -> None:
    renderer = Counting(TOKENIZER)
    async with serving(max_turns=3, renderer=renderer) as scene:
        for text in ("The number is higher. " * 180_000, "x" * 3_900_000, "hello"):
            response = await posted(scene.access, text)
            if text != "hello":
                assert code(response) == (400, "context_length_exceeded")
        assert response.status_code == 200
        assert code(await posted(scene.access, "again")) == (400, "max_turns")
        tool = {"type": "function", "function": {"name": "f", "description": "The number is higher. " * 100_000}}
        async with httpx.AsyncClient(timeout=ENOUGH_S, verify=False) as client:
            response = await client.post(
                f"{scene.decent.base_url}/chat/completions",
                json={"messages": [{"role": "user", "content": "hello"}], "tools": [tool]},
                headers={"Authorization": f"Bearer {scene.decent.api_key}"},
            )
            assert code(response) == (400, "context_length_exceeded")
            for access, expected in ((scene.decent, "context_length_exceeded"), (scene.access, "max_turns")):
                response = await client.post(
                    f"{access.base_url}/completions",
                    json={"prompt": "x" * 3_900_000},
                    headers={"Authorization": f"Bearer {access.api_key}"},
                )
                assert code(response) == (400, expected)
        assert renderer.characters < 4 * 16 * 2048 + 200, "tokens are made of the beginnings only"


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\n", b"GET /", b"\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"],
    ids=["headers", "path", "nothing", "trailers"],
)
async def test_a_head_without_end_is_refused(begin: bytes) -> None:
    async with serving() as scene:
        client = await scene.connect()
        await client.send(begin)
        piece = {b"GET /": b"a" * 65536, b"\r\n": b"\r\n" * 32768}.get(begin, b"A: " + b"b" * 65531 + b"\r\n")
        assert await client.flood(endless(piece)) < 32 * MIB
        await scene.others_go_on()


# --- keys and sessions --------------------------------------------------------------------------------------------


async def test_a_session_of_another_run_and_an_ended_session_get_no_answer() -> None:
    async with serving() as scene, serving() as other:
        port = f":{scene.port}/"
        elsewhere = Session(
            base_url=scene.access.base_url.replace(port, f":{other.port}/"), api_key=scene.access.api_key, model=""
        )
        assert code(await posted(elsewhere, "hello")) == (401, "no_session")
        [(id, ended)] = await scene.server.open([session_settings(max_calls=8, max_length=2048)])
        assert (await posted(ended, "hello")).status_code == 200
        await scene.server.close([id])
        assert code(await posted(ended, "hello")) == (401, "no_session")
        assert (other.engine.asked, scene.engine.asked) == ([], [id])


async def test_a_session_that_ends_while_a_call_arrives_asks_no_engine() -> None:
    async with serving() as scene:
        [(id, access)] = await scene.server.open([session_settings(max_calls=8, max_length=2048)])
        client = await scene.connect()
        await client.send(call(access)[:-1])
        await scene.others_go_on()  # by then, the call waits for the last byte
        await scene.server.close([id])
        await client.send(call(access)[-1:])
        assert await client.status() == 401
        assert scene.engine.asked == [scene.decent_id]


async def test_10_000_calls_with_made_up_sessions_and_keys_leave_nothing_behind() -> None:
    async with serving() as scene:

        async def made_up(first: int, count: int) -> list[int]:
            client = await scene.connect()
            calls = []
            for number in range(first, first + count):
                access = scene.access
                if number % 2:
                    url = access.base_url.replace(scene.id, f"{number:016x}")
                    access = Session(base_url=url, api_key=access.api_key, model="")
                else:
                    access = Session(base_url=access.base_url, api_key=f"key-{number}", model="")
                calls.append(call(access))
            client.writer.write(b"".join(calls))
            statuses = [await client.status() for _ in calls]
            client.writer.close()
            return statuses

        async def many(first: int, count: int) -> set[int]:
            each = [made_up(begin, 100) for begin in range(first, first + count, 100)]
            return {status for statuses in await asyncio.gather(*each) for status in statuses}

        objects()  # the clients of earlier tests close themselves now: the log keeps 180 objects for each that fails
        assert await many(0, 1000) == {401}
        before = objects()
        for first in range(1000, 10_000, 1000):
            assert await many(first, 1000) == {401}
        await objects_at_most(before + 4500)  # half an object for each call
        await scene.others_go_on()


# --- an agent that floods -----------------------------------------------------------------------------------------


async def test_an_agent_that_floods_asks_the_engine_no_more_often_than_it_may() -> None:
    async with serving(max_turns=4) as scene:
        headers = [{}, {"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}]
        responses = await asyncio.gather(
            *[posted(scene.access, f"call {number}", **headers[number % 3]) for number in range(60)]
        )
        await scene.others_go_on()
        statuses = [response.status_code for response in responses]
        assert {code(response) for response in responses if response.status_code != 200} == {(400, "max_turns")}
        assert scene.engine.asked.count(scene.id) == 4
        assert statuses.count(200) >= 4


async def test_an_agent_has_so_many_calls_at_once_and_no_more() -> None:
    async with serving(max_turns=1000) as scene:
        scene.engine.held.add(scene.id)
        clients = [await scene.connect() for _ in range(70)]
        for number, client in enumerate(clients):
            await client.send(call(scene.access, f"call {number}"))
        refused = asyncio.gather(*[client.status() for client in clients[64:]])
        assert await refused == [429] * 6
        await scene.others_go_on()
        scene.engine.go.set()
        assert [await client.status() for client in clients[:64]] == [200] * 64
        assert scene.engine.asked.count(scene.id) == 64
        assert (await posted(scene.access, "then")).status_code == 200


async def test_an_answer_does_not_wait_until_its_head_is_confirmed() -> None:
    async with serving() as scene:
        client = await scene.connect()
        begun_s = time.perf_counter()
        for _ in range(100):
            await client.send(call(scene.access, "hello", "x-stainless-retry-count: 1"))
            assert await client.status() == 200
        assert time.perf_counter() - begun_s < 3.0, "each of most calls would wait for 40 ms"


async def test_retries_leave_nothing_behind() -> None:
    async with serving() as scene:
        client = await scene.connect()

        async def retried(numbers: range) -> None:
            calls = [
                call(scene.access, "hello", f"Idempotency-Key: {number}", "x-stainless-retry-count: 1")
                for number in numbers
            ]
            client.writer.write(b"".join(calls))
            assert [await client.status() for _ in calls] == [200] * len(calls)

        await retried(range(200))
        before = objects()
        await retried(range(200, 400))
        await objects_at_most(before + 100)  # half an object for each call
        assert scene.engine.asked == [scene.id]
