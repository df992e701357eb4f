"""Serves the `/metrics` endpoint of a process, in threads.

The endpoint shows the process's asyncrl registry and the default registry, to which vLLM adds `vllm:*`. The learner's
endpoint also answers `GET /sd`, Prometheus' HTTP service discovery, for the whole run.

The endpoint cannot block training. If the port is taken, it uses a free port and logs a warning (F31 in
docs/faults.md). Each connection has a thread of its own and takes one request. It is closed after `scrape_timeout_s`,
however slowly its client sends or reads. Beyond `connections` open ones, a new connection ends the oldest one of the
client address with the most connections. A scrape takes milliseconds, so the ended connections are those that a client
holds open.
"""

import asyncio
import contextlib
import errno
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import MetricsHandler

from asyncrl.config.schema import NODE
from asyncrl.errors import ConfigError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0

POLL_S = 0.1
"""Interval at which the server checks whether it is being closed and ends connections that take too long, and at which
`told` checks whether it can return."""

LINGER_S = 6.0
"""How long the server stays up after the run has removed its targets. Prometheus scrapes a removed target for up to
five seconds more."""

DISCOVERY_S = 20.0
"""Longest wait, at the end of a run, for the next requests of the clients of `/sd`: twice the longest refresh interval
in deploy/."""

DISCOVERY_PATH = "/sd"
REFRESH_HEADER = "X-Prometheus-Refresh-Interval-Seconds"
"""Header of a client of `/sd` that will ask again. Prometheus sends it with every request for a target list."""

PORT_REFUSED = {errno.EADDRINUSE, errno.EACCES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """How many clients the server serves, and for how long. Times are seconds."""

    scrape_timeout_s: float = 10.0
    """Time limit of a connection. It is Prometheus' default scrape timeout, so no scraper waits longer."""
    connections: int = 16
    """Largest number of open connections. Each job of a Prometheus needs one for some milliseconds."""
    threads: int = 32
    """Largest number of threads of connections, with those of connections that were ended. Beyond it, a new connection
    is closed at once."""
    watched_s: float = 60.0
    """A client that has sent no request for this time counts as gone: the end of the run does not wait for it."""
    discovery_s: float = DISCOVERY_S
    """Longest time for which the end of a run waits for the clients of `/sd`."""
    clients: int = 16
    """Largest number of clients of `/sd` for which the end of a run waits."""


class MetricsServer:
    """Serves metrics from construction to `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        discovery: Callable[[], bytes] = lambda: b"[]\n",
        limits: ServerLimits | None = None,
    ) -> None:
        """Starts the server. The host `node` is this node's Ray address; the process must have joined Ray before.

        `discovery` returns the answer to `GET /sd`, by default no targets; it is called in a thread of the server.

        Raises ConfigError when `host` is not an address of this machine.
        """
        # The `_created` series (the start time of each series) are a quarter of the lines, and no dashboard uses them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        both = CollectorRegistry()
        both.register(registry)
        both.register(REGISTRY)
        self._limits = limits or ServerLimits()
        self._server = _bind(host, port, both, discovery, self._limits)
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """`host:port`, in the form of a Prometheus target."""
        host = str(self._server.server_address[0])
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def linger_s(self) -> float:
        """Seconds to keep serving after the end of the run; 0 when the endpoint was not scraped in the last
        `watched_s`.

        In this time Prometheus scrapes the last values, and it does not report a listed target that is down.
        """
        last_s = self._server.scraped_s
        return LINGER_S if last_s is not None and time.monotonic() - last_s < self._limits.watched_s else 0.0

    async def told(self, *, since_s: float) -> None:
        """Waits until every client of `/sd` has asked for the list of targets at `since_s` (on the monotonic clock) or
        later. A run that ends without an error has emptied the list by then.

        A client counts only if it sent a request for `/sd` in the `watched_s` before `since_s`, and announced that it
        asks again. Returns at the latest `discovery_s` after `since_s`, even if a client has not asked again.
        """
        told_s = self._server.told_s
        waiting = [path for path, asked_s in told_s.copy().items() if since_s - asked_s < self._limits.watched_s]
        while time.monotonic() - since_s < self._limits.discovery_s:
            if all(told_s.get(path, since_s) >= since_s for path in waiting):
                return
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stops the server and frees the port. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        self._server.server_close()


class _Handler(MetricsHandler):
    server: "_Server"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != DISCOVERY_PATH:
            # Prometheus 2 asks for OpenMetrics. In this format prometheus_client replaces the colon in vLLM's names by
            # `_`, so the header is ignored.
            del self.headers["Accept"]
            # Compression would add a fifth to the time of a scrape, in a process that has other work to do.
            del self.headers["Accept-Encoding"]
            super().do_GET()
            self.server.scraped_s = time.monotonic()
            return
        asked_s = time.monotonic()  # before the list is made: the targets may change in the meantime
        body = self.server.discovery()
        if REFRESH_HEADER in self.headers:
            self.server.remember(self.path, asked_s)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Connection(NamedTuple):
    """When a connection was opened, on the monotonic clock, and the address of its client."""

    opened_s: float
    peer: str


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Connections that the kernel keeps until they are accepted. With Python's default of 5, some of many simultaneous
    connections wait a second."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        discovery: Callable[[], bytes],
        limits: ServerLimits,
    ) -> None:
        self.address_family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.discovery = discovery
        self._limits = limits
        self.scraped_s: float | None = None
        """Time of the last scrape on the monotonic clock."""
        self.told_s: dict[str, float] = {}
        """Time of the last `/sd` request on the monotonic clock, by path and query, of at most `clients` clients that
        will ask again. Each job of a Prometheus sends its own requests, so two jobs with different queries are two
        clients."""
        self._told_lock = Lock()
        self._opened: dict[socket.socket, _Connection] = {}
        """The open connections, in the order in which they were opened."""
        self._ending: set[socket.socket] = set()
        """Ended connections whose threads still run."""
        super().__init__((host, port), _Handler.factory(registry))

    def remember(self, client: str, asked_s: float) -> None:
        """Remembers that a client of `/sd` which will ask again has asked."""
        with self._told_lock:
            self.told_s[client] = asked_s
            if len(self.told_s) > self._limits.clients:
                del self.told_s[min(self.told_s, key=self.told_s.__getitem__)]

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._opened) >= self._limits.connections:
            self._end_oldest()
        if len(self._opened) + len(self._ending) >= self._limits.threads:
            logger.debug("a connection by %s is closed, because %d threads run", client_address, self._limits.threads)
            self.shutdown_request(request)
            return
        self._opened[request] = _Connection(opened_s=time.monotonic(), peer=str(client_address[0]))
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection. The thread of the connection calls it at its end, and `process_request` for a connection
        that gets no thread."""
        self._opened.pop(request, None)
        self._ending.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that take too long. Their threads then see the end of the data. Called every `POLL_S`."""
        self._end_connections(opened_before_s=time.monotonic() - self._limits.scrape_timeout_s)

    def server_close(self) -> None:
        super().server_close()
        self._end_connections(opened_before_s=math.inf)

    def _end_connections(self, *, opened_before_s: float) -> None:
        for connection, of_it in self._opened.copy().items():
            if of_it.opened_s < opened_before_s:
                self._end(connection)

    def _end_oldest(self) -> None:
        """Ends the oldest connection of the client address with the most connections, so that a slow or hostile client
        does not shut out the clients at other addresses."""
        opened = self._opened.copy()
        counts = Counter(of_it.peer for of_it in opened.values())
        oldest = next((each for each, of_it in opened.items() if counts[of_it.peer] == max(counts.values())), None)
        if oldest is not None:
            self._end(oldest)

    def _end(self, connection: socket.socket) -> None:
        """Ends a connection. Its thread then reads the end of the data."""
        self._ending.add(connection)
        if self._opened.pop(connection, None) is None:  # its thread has just closed it
            self._ending.discard(connection)
            return
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a scrape by %s broke off", client_address, exc_info=True)


def _bind(
    host: str, port: int, registry: CollectorRegistry, discovery: Callable[[], bytes], limits: ServerLimits
) -> _Server:
    if host == NODE:
        import ray

        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    try:
        try:
            return _Server(host, port, registry, discovery, limits)
        except OSError as error:
            if port == 0 or error.errno not in PORT_REFUSED:
                raise
            server = _Server(host, 0, registry, discovery, limits)
            logger.warning(
                "metrics.learner_port = %d cannot be used on %s (%s): metrics and /sd are on port %d instead, which "
                "metrics/targets.json lists; end the process that uses the port, or choose another port",
                port,
                host,
                error.strerror,
                server.server_port,
            )
            return server
    except OSError as error:
        raise ConfigError(
            f"metrics.host: cannot serve metrics on {host!r} ({error.strerror or error}): set it to an address of this "
            "machine, such as 127.0.0.1"
        ) from error
