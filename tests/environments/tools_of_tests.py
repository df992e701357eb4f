"""Tools for tests, and an MCP server with tools: `python tools_of_tests.py`, or with a port for HTTP."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Annotated

from pydantic import Field, TypeAdapter


def search(query: str, limit: Annotated[int, Field(description="at most so many")] = 2) -> list[str]:
    """Finds pages."""
    return [query] * limit


async def doubled(number: float) -> float:
    """Doubles a number."""
    await asyncio.sleep(0)
    return number * 2


def slow(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "awake"


def broken() -> str:
    """Raises an error."""
    raise KeyError("no luck")


VALUES = {
    "list": ["a", "é"],
    "dict": {"a": 1},
    "None": None,
    "True": True,
    "empty": "",
    "number": 2.5,
    "date": date(2026, 1, 2),
}


def value(kind: str) -> object:
    """Returns a value of this kind."""
    return VALUES[kind]


def quits() -> str:
    """Ends the program, as parsers of arguments do."""
    raise SystemExit(2)


def misspelt(word: str) -> str:
    """Has a typo."""
    return wrod  # type: ignore[name-defined]  # noqa: F821


async def gives_up() -> str:
    """Has a time limit of its own."""
    raise TimeoutError("the shop is closed")


def reads_a_number(text: str) -> int:
    """Reads a number with pydantic."""
    return TypeAdapter(int).validate_python(text)


def without_docstring(number: int) -> int:
    return number


def of_objects(thing: object, /) -> str:
    """Takes a thing by its place."""
    return str(thing)


def without_type(query) -> str:  # type: ignore[no-untyped-def]
    """Finds pages."""
    return str(query)


def with_one_type(query: str, limit=3) -> str:  # type: ignore[no-untyped-def]
    """Finds pages."""
    return str(query * limit)


class Page:
    def searched(self, query: str) -> str:
        """Needs an instance."""
        return query


def of_a_class(page: Page) -> str:
    """Reads a page."""
    return str(page)


def of_a_function(key: Callable[[str], int]) -> int:
    """Sorts."""
    return key("a")


def of_threads(name: str, lock: threading.Event | None = None) -> str:
    """Waits for a lock."""
    del lock
    return name


prepared = partial(search, limit=1)


class Other:
    @staticmethod
    def search(query: str) -> str:
        """Has the name of another tool."""
        return query


def serve(port: str = "") -> None:
    """Serves two tools and one that ends the server: over HTTP, or over standard input and output."""
    import os

    from mcp.server import MCPServer

    server = MCPServer("tests")
    kept: dict[str, str] = {}

    @server.tool()
    def put(key: str, value: str) -> str:
        """Keeps a value."""
        kept[key] = value
        return f"kept {key}, {os.environ.get('TOOL_KEY', 'no key')}{os.environ.get('OTHER_KEY', '')}"

    @server.tool()
    def get(key: str) -> str:
        """Returns a kept value."""
        return kept[key]

    @server.tool()
    def die() -> str:
        """Ends the server."""
        signal.raise_signal(signal.SIGKILL)

    if port:
        server.run("streamable-http", host="127.0.0.1", port=int(port))
    else:
        server.run("stdio")


if __name__ == "__main__":
    serve(*sys.argv[1:])
