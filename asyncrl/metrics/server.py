"""One `/metrics` endpoint a process, in threads of its own.

It serves the process's asyncrl registry and, on the same port, the default registry, where vLLM puts `vllm:*`; the
learner's also answers `GET /sd`, Prometheus' HTTP service discovery of the whole run.
Nothing here can hold up training: a taken port becomes any free one with a warning (F31), each scrape has a thread,
and a scraper that does not read is dropped after `SCRAPE_TIMEOUT_S`.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Thread
from types import TracebackType

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import MetricsHandler

from asyncrl.errors import ConfigError
from asyncrl.metrics.binding import bind_host

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 10.0
"""Prometheus' own default scrape timeout: whoever is slower has given up."""

CLOSE_TIMEOUT_S = 5.0

POLL_S = 0.1
"""How soon the server notices that it is being closed."""

LINGER_S = 6.0
"""Prometheus takes up to five seconds to let go of a target that is listed no more, and scrapes it until then."""

WATCHED_S = 60.0
"""Whoever has not asked for so long has stopped watching."""

DISCOVERY_S = 20.0
"""Whoever discovers over HTTP asks again within so long: twice the longest refresh in deploy/."""

DISCOVERY_PATH = "/sd"

PORT_REFUSED = {errno.EADDRINUSE, errno.EACCES}


class MetricsServer:
    """Serves from construction to `close`.

    >>> with MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str,
        port: int,
        discovery: Callable[[], bytes] | None = None,
    ) -> None:
        """`discovery` makes the answer to `GET /sd`, on a thread of the server."""
        # when each series began: a quarter of a scrape's lines, and nobody asks for it
        disable_created_metrics()  # type: ignore[no-untyped-call]
        both = CollectorRegistry()
        both.register(registry)
        both.register(REGISTRY)
        parts = {"registry": both, "discovery": staticmethod(discovery or _no_targets), "told_s": {}}
        self._handler: type[_Handler] = type("Handler", (_Handler,), parts)
        self._server = _bind(self._handler, host=host, port=port)
        self._thread = Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """`host:port`, as Prometheus wants its targets."""
        host = str(self._server.server_address[0])
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    @property
    def linger_s(self) -> float:
        """How long to go on serving at a run's end, so that whoever watches sees the last values, and no target that is
        listed and dead. 0 when nobody does."""
        last_s = self._handler.scraped_s
        return LINGER_S if last_s is not None and time.monotonic() - last_s < WATCHED_S else 0.0

    async def told(self, *, since_s: float) -> None:
        """Returns when whoever discovers over HTTP has the list as it is since that moment of the monotonic clock: at
        once when nobody does, after `DISCOVERY_S` at the latest."""
        told_s = self._handler.told_s
        waiting = [path for path, asked_s in told_s.copy().items() if since_s - asked_s < WATCHED_S]
        while time.monotonic() - since_s < DISCOVERY_S:
            if all(told_s[path] >= since_s for path in waiting):
                return
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Stop serving and free the port. May be called twice."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(CLOSE_TIMEOUT_S)
        self._server.server_close()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _no_targets() -> bytes:
    return b"[]\n"


class _Handler(MetricsHandler):
    timeout = SCRAPE_TIMEOUT_S
    discovery: Callable[[], bytes]
    scraped_s: float | None = None
    """Of the class, which is one server's own: the last scrape on the monotonic clock."""
    told_s: dict[str, float]
    """The same of the last question for the list, by path and query: jobs of one Prometheus ask each for itself."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != DISCOVERY_PATH:
            # Asked for OpenMetrics, as Prometheus 2 does, prometheus_client writes the colon of vLLM's names as `_`.
            del self.headers["Accept"]
            # Compressing takes a fifth of the time again, of a process that has other things to do.
            del self.headers["Accept-Encoding"]
            super().do_GET()
            type(self).scraped_s = time.monotonic()
            return
        asked_s = time.monotonic()
        body = self.discovery()
        self.told_s[self.path] = asked_s
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a scrape by %s broke off", client_address, exc_info=True)


def _bind(handler: type[_Handler], *, host: str, port: int) -> _Server:
    host = bind_host(host)
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server_class: type[_Server] = type("Server", (_Server,), {"address_family": family})
        try:
            return server_class((host, port), handler)
        except OSError as error:
            if port == 0 or error.errno not in PORT_REFUSED:
                raise
            server = server_class((host, 0), handler)
            logger.warning(
                "metrics.learner_port = %d cannot be had on %s (%s): metrics and /sd are on %d instead, as "
                "metrics/targets.json says too; end who has it, or name another port",
                port,
                host,
                error.strerror,
                server.server_port,
            )
            return server
    except OSError as error:
        raise ConfigError(
            f"metrics.host: cannot serve on {host!r} ({error.strerror or error}); name an address of this machine, "
            "such as 127.0.0.1",
            key="metrics.host",
        ) from error
