"""Sessions of an OpenEnv environment, in an interpreter that has the package openenv (`own_interpreter_main.py`)."""

import asyncio
import contextlib
import json
import socket
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any

START_TIMEOUT_S = 100.0
"""Time in which a server that was started with a command must listen at its port."""
END_TIMEOUT_S = 5.0
"""Time in which a server must end after SIGTERM."""
FULL_PAUSE_S = 0.2
"""Seconds between two tries to begin a session at a server that has its largest number of sessions."""


class Part:
    """The sessions of one OpenEnv server, which has the URL `url` or is started with `command`."""

    def __init__(self, *, url: str | None, command: Sequence[str]) -> None:
        self._url = url
        self._command = command
        self._server: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._fields: list[str] | None = None
        self._sessions: dict[int, Any] = {}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """When the block ends, ends the sessions, and the server if this process has started it."""
        try:
            yield
        finally:
            for number in list(self._sessions):
                await self._close(number)
            if self._server is not None and self._server.returncode is None:
                self._server.terminate()
                try:
                    await asyncio.wait_for(self._server.wait(), END_TIMEOUT_S)
                except TimeoutError:
                    self._server.kill()
                    await self._server.wait()

    async def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Resets or steps the session of an episode, or closes it. Returns what the environment shows; after a reset
        also `fields`, the names of an action's fields. Returns only `invalid`, with the reason, if the environment
        does not accept the action, and nothing after closing."""
        episode = order["episode"]
        if order["what"] == "close":
            await self._close(episode)
            return {}
        if order["what"] == "reset":
            url = await self._served()
            result = await self._reset(url, episode, order["arguments"])
            return {**_shown(result), "fields": self._fields}
        try:
            return _shown(await self._sessions[episode].step(order["action"]))
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" not in str(error):
                raise
            return {"invalid": str(error)}

    async def _reset(self, url: str, episode: int, arguments: dict[str, Any]) -> Any:
        from openenv.core.generic_client import GenericEnvClient
        from websockets.exceptions import ConnectionClosedOK

        while True:
            # A day, because the scoring process limits the time of an episode.
            self._sessions[episode] = GenericEnvClient(base_url=url, message_timeout_s=86_400.0)
            try:
                return await self._sessions[episode].reset(**arguments)
            except (RuntimeError, ConnectionClosedOK) as error:
                # The server closes the connection after it has sent this error, so the client may see only the closing.
                if "(code: CAPACITY_REACHED)" not in str(error) and not isinstance(error, ConnectionClosedOK):
                    raise
            await self._close(episode)
            await asyncio.sleep(FULL_PAUSE_S)

    async def _close(self, episode: int) -> None:
        client = self._sessions.pop(episode, None)
        if client is not None:
            await client.close()

    async def _served(self) -> str:
        """Returns the URL of the server. If there is a command, starts the server unless it is running."""
        async with self._starting:
            if self._command and (self._server is None or self._server.returncode is not None):
                await self._start()
            assert self._url is not None
            if self._fields is None:
                self._fields = await asyncio.to_thread(_action_fields, self._url)
            return self._url

    async def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [word.replace("{port}", str(port)) for word in self._command]
        self._server = server = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
        import openenv.core.generic_client  # takes seconds, in which the server starts  # noqa: F401

        try:
            await asyncio.wait_for(_listening(port, server), START_TIMEOUT_S)
        except TimeoutError:
            server.kill()
            raise RuntimeError(
                f"{self._command[0]} does not listen at port {port} after {START_TIMEOUT_S:g} s"
            ) from None
        self._url = f"http://127.0.0.1:{port}"


async def _listening(port: int, server: asyncio.subprocess.Process) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if server.returncode is not None:
                raise RuntimeError(f"the command of the server ended with {server.returncode}") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


def _action_fields(url: str) -> list[str]:
    """Returns the names of the fields that an action needs, or may have if it needs none."""
    address = url.rstrip("/").replace("ws", "http", 1) if url.startswith("ws") else url.rstrip("/")
    # Uses no proxy, as the client of OpenEnv does for local servers.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address}/schema", timeout=30) as response:
        schema = json.loads(response.read())["action"]
    needed: list[str] = schema.get("required") or [name for name in schema.get("properties", {}) if name != "metadata"]
    return needed


def _shown(result: Any) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}
