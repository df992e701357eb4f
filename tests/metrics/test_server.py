"""The metrics endpoint: it serves both registries over HTTP, and the faults of F31 do not affect its process."""

import asyncio
import http.client
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest
import ray
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from asyncrl.errors import ConfigError
from asyncrl.metrics import server as server_module
from asyncrl.metrics.discovery import Target, target_groups
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer, ServerLimits

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
"""Time limit of a failing test. A passing test does not wait that long."""
FOR_EVER_S = 10 * DEADLINE_S
PATIENT = ServerLimits(scrape_timeout_s=FOR_EVER_S, discovery_s=FOR_EVER_S)
"""With the real limits, the server would close connections and give up waiting, and some tests could not fail."""


def scrape(url: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return str(response.read().decode())


def metrics_of(server: MetricsServer) -> str:
    return scrape(f"http://{server.address}/metrics")


def discover(server: MetricsServer, query: str = "") -> str:
    """Asks for the targets as Prometheus does."""
    url = f"http://{server.address}/sd{query}"
    return scrape(urllib.request.Request(url, headers={server_module.REFRESH_HEADER: "10"}))


@contextmanager
def served(limits: ServerLimits | None = None) -> Iterator[MetricsServer]:
    metrics = LearnerMetrics()
    metrics.versions(learner=7, published=6)
    with closing(MetricsServer(metrics.registry, host="127.0.0.1", port=0, limits=limits)) as running:
        yield running


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with served() as running:
        yield running


@pytest.fixture
def patient() -> Iterator[MetricsServer]:
    with served(PATIENT) as running:
        yield running


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]


def test_it_serves_our_registry_and_the_default_one(server: MetricsServer) -> None:
    engine_metric = Gauge("vllm:a_gauge_of_this_test", "Declared in the default registry, where vLLM declares its own.")
    try:
        engine_metric.set(3)
        text = metrics_of(server)
    finally:
        REGISTRY.unregister(engine_metric)
    assert "asyncrl_learner_policy_version 7.0" in text
    assert "vllm:a_gauge_of_this_test 3.0" in text


ACCEPTED = {
    "Prometheus 2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}


@pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=ACCEPTED)
def test_vllms_names_keep_their_colon_whatever_format_prometheus_prefers(server: MetricsServer, accepted: str) -> None:
    engine_metric = Gauge("vllm:a_gauge_of_this_test", "Declared in the default registry, where vLLM declares its own.")
    try:
        text = scrape(urllib.request.Request(f"http://{server.address}/metrics", headers={"Accept": accepted}))
    finally:
        REGISTRY.unregister(engine_metric)
    assert "vllm:a_gauge_of_this_test 0.0" in text


def test_a_scrape_has_no_lines_of_when_a_series_began(server: MetricsServer) -> None:
    text = metrics_of(server)
    assert "asyncrl_learner_steps_total{" in text
    assert "_created" not in text


def test_the_port_is_chosen_and_the_address_is_loopback(server: MetricsServer) -> None:
    assert server.port > 0
    assert server.address == f"127.0.0.1:{server.port}"


def test_sd_answers_with_the_targets_of_the_moment() -> None:
    targets: list[Target] = []
    registry = LearnerMetrics().registry
    with closing(
        MetricsServer(registry, host="127.0.0.1", port=0, discovery=lambda: target_groups(run="r", targets=targets))
    ) as running:
        url = f"http://{running.address}/sd"
        assert json.loads(scrape(url)) == []
        targets.append(Target(role="buffer", replica="buffer", address="127.0.0.1:1", node="a1"))
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
            assert response.headers["Content-Type"] == "application/json", "Prometheus refuses anything else"
            [group] = json.loads(response.read())
        assert group == {
            "targets": ["127.0.0.1:1"],
            "labels": {"run": "r", "role": "buffer", "replica": "buffer", "node": "a1"},
        }
        assert "asyncrl_learner_policy_version" in metrics_of(running)


def test_ipv6_addresses_are_written_with_brackets() -> None:
    try:
        running = MetricsServer(CollectorRegistry(), host="::1", port=0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with closing(running):
        assert running.address.startswith("[::1]:")
        metrics_of(running)


@pytest.mark.fault("F31")
def test_a_taken_port_becomes_a_free_one_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        registry = LearnerMetrics().registry
        with closing(MetricsServer(registry, host="127.0.0.1", port=port, discovery=lambda: b'["here"]')) as running:
            assert running.address == f"127.0.0.1:{running.port}" != f"127.0.0.1:{port}"
            assert "asyncrl_learner_policy_version" in metrics_of(running)
            assert scrape(f"http://{running.address}/sd") == '["here"]'
    (record,) = caplog.records
    assert f"metrics.learner_port = {port} cannot be used" in record.getMessage()
    assert f"metrics and /sd are on port {running.port} instead" in record.getMessage()


@pytest.mark.fault("F31")
def test_scrapers_that_say_nothing_or_do_not_read_hold_up_nobody(patient: MetricsServer) -> None:
    address = ("127.0.0.1", patient.port)
    with socket.create_connection(address, DEADLINE_S), socket.create_connection(address, DEADLINE_S) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        for _ in range(3):
            assert "asyncrl_learner_policy_version 7.0" in metrics_of(patient)


@pytest.mark.fault("F31")
@pytest.mark.parametrize("sent", [b"", b"x"])
def test_a_client_is_dropped_after_the_time_of_a_scrape_also_if_it_goes_on_sending(sent: bytes) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    with (
        served(ServerLimits(scrape_timeout_s=0.05)) as hasty,
        socket.create_connection(("127.0.0.1", hasty.port), DEADLINE_S) as slow,
    ):
        slow.settimeout(0.01)
        dropped = False
        while not dropped:
            assert time.monotonic() < deadline_s, "the connection is still open"
            try:
                slow.sendall(sent)
                dropped = slow.recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                dropped = True


REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
HOLDERS = {
    "silent": (b"", 0),
    "in the middle of a line": (b"GET /met", 0),
    "in the middle of the head": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n", 0),
    "with a body": (b"POST /metrics HTTP/1.1\r\nContent-Length: 1000\r\n\r\nx", 0),
    "deaf": (REQUEST, 1),
}
"""What clients that hold a connection send; and whether they do not read the answer, which is made large then."""


@pytest.mark.fault("F31")
@pytest.mark.parametrize(("sent", "deaf"), HOLDERS.values(), ids=HOLDERS)
def test_a_scrape_is_answered_however_many_clients_hold_connections(sent: bytes, deaf: int) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("asyncrl_gauge_of_this_test", "x" * 2**10, ["name"], registry=registry)
    for number in range(3000 * deaf):
        gauge.labels(f"{number:02000d}").set(number)  # an answer that no buffer of a socket holds
    with (
        closing(MetricsServer(registry, host="127.0.0.1", port=0, limits=PATIENT)) as server,
        ExitStack() as held,
    ):
        for _ in range(3):
            for _ in range(30):
                holder = held.enter_context(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
                with suppress(ConnectionError):
                    holder.sendall(sent)
            assert "# TYPE asyncrl_gauge_of_this_test gauge" in metrics_of(server)
        assert len(client_threads()) <= PATIENT.threads


@pytest.mark.fault("F31")
@pytest.mark.parametrize("peers", [["127.0.0.2"], ["127.0.0.2", "127.0.0.3"], ["127.0.0.2", "127.0.0.2", "127.0.0.4"]])
def test_clients_of_an_address_with_many_connections_do_not_end_those_of_another(
    patient: MetricsServer, peers: list[str]
) -> None:
    address = ("127.0.0.1", patient.port)
    with ExitStack() as held:
        slow = held.enter_context(socket.create_connection(address, DEADLINE_S))
        for number in range(60):
            source = (peers[number % len(peers)], 0)
            held.enter_context(socket.create_connection(address, DEADLINE_S, source_address=source))
        slow.sendall(REQUEST)
        assert slow.recv(100).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.fault("F31")
def test_beyond_the_limit_of_threads_a_client_is_refused_until_a_thread_has_ended() -> None:
    limits = ServerLimits(scrape_timeout_s=FOR_EVER_S, connections=2, threads=4)
    go, begun = threading.Event(), threading.Semaphore(0)

    def discovery() -> bytes:
        begun.release()
        assert go.wait(DEADLINE_S)
        return b"[]"

    with (
        closing(
            MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, discovery=discovery, limits=limits)
        ) as server,
        ExitStack() as held,
    ):
        for _ in range(4):
            client = held.enter_context(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))
            client.sendall(b"GET /sd HTTP/1.1\r\n\r\n")
            assert begun.acquire(timeout=DEADLINE_S)
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as refused:
                assert refused.recv(1) == b"", "the server closes the connection at once"
        go.set()
        deadline_s = time.monotonic() + DEADLINE_S
        answer = ""
        while not answer:
            assert time.monotonic() < deadline_s, "an ended connection still has its thread"
            with suppress(OSError, http.client.HTTPException):
                answer = metrics_of(server)
        assert "# HELP python_info" in answer


@pytest.mark.fault("F31")
def test_a_closed_server_leaves_no_thread_of_a_client(patient: MetricsServer) -> None:
    before = client_threads()
    with socket.create_connection(("127.0.0.1", patient.port), DEADLINE_S) as silent:
        deadline_s = time.monotonic() + DEADLINE_S
        while not (begun := set(client_threads()) - {*before}):
            assert time.monotonic() < deadline_s, "the server accepts no connection"
            time.sleep(0.01)  # polls another thread
        patient.close()
        assert silent.recv(1) == b""
    for thread in begun:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@pytest.mark.fault("F31")
@pytest.mark.fault("F32")
@pytest.mark.parametrize(
    "request_of_client",
    [
        b"\x00\xff" * 100 + b"\r\n\r\n",
        b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
        b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n" + b"x" * 2**20,
    ],
    ids=["garbage", "a huge path", "too many headers", "a huge body"],
)
def test_a_malformed_or_huge_request_is_refused_and_leaves_the_server_running(
    server: MetricsServer, request_of_client: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        answer = b""
        with suppress(ConnectionError):  # the server closes the connection before it has read everything
            client.sendall(request_of_client)
            answer = client.recv(1024)
    assert b"200 OK" not in answer
    assert "asyncrl_learner_policy_version" in metrics_of(server)


def test_an_address_of_another_machine_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host.*192\.0\.2\.1") as refused:
        MetricsServer(CollectorRegistry(), host="192.0.2.1", port=0)
    assert "metrics.host" in str(refused.value)


def test_it_lingers_for_who_watches_and_for_nobody_else(server: MetricsServer) -> None:
    scrape(f"http://{server.address}/sd")
    assert server.linger_s == 0.0
    metrics_of(server)
    assert server.linger_s == server_module.LINGER_S > 5.0
    with served(ServerLimits(watched_s=0.0)) as unwatched:
        metrics_of(unwatched)
        assert unwatched.linger_s == 0.0


@pytest.mark.asyncio
async def test_who_discovers_over_http_is_waited_for_until_the_list_of_the_end_was_given(
    patient: MetricsServer,
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(metrics_of, patient)
        # The scrape above is not a discovery request, so there is no client to wait for.
        await patient.told(since_s=time.monotonic())
        await asyncio.to_thread(discover, patient)
        told = asyncio.create_task(patient.told(since_s=time.monotonic()))
        await asyncio.to_thread(metrics_of, patient)
        assert not told.done(), "the client's list is older than `since_s`"
        await asyncio.to_thread(discover, patient)
        await told


@pytest.mark.asyncio
async def test_jobs_that_discover_each_for_itself_are_all_waited_for(
    patient: MetricsServer,
) -> None:
    queries = ["", "?job=ray"]
    async with asyncio.timeout(DEADLINE_S):
        for query in queries:
            await asyncio.to_thread(discover, patient, query)
        told = asyncio.create_task(patient.told(since_s=time.monotonic()))
        await asyncio.to_thread(discover, patient, queries[0])
        assert await still_waits(told), "the other job's list is older than `since_s`"
        await asyncio.to_thread(discover, patient, queries[1])
        await told


async def still_waits(told: asyncio.Task[None]) -> bool:
    """Returns whether a wait for the clients goes on after it has looked again."""
    await asyncio.sleep(2 * server_module.POLL_S)
    return not told.done()


@pytest.mark.asyncio
async def test_a_request_that_announces_no_next_one_is_not_waited_for_and_not_remembered() -> None:
    with served(replace(PATIENT, clients=1)) as server:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(scrape, f"http://{server.address}/sd")
            await server.told(since_s=time.monotonic())
            await asyncio.to_thread(discover, server)
            for number in range(3):
                assert await asyncio.to_thread(scrape, f"http://{server.address}/sd?{number}") == "[]\n"
            told = asyncio.create_task(server.told(since_s=time.monotonic()))
            assert await still_waits(told), "the client that asks again is not forgotten for the others"
            await asyncio.to_thread(discover, server)
            await told


@pytest.mark.asyncio
async def test_the_clients_that_asked_last_are_remembered_up_to_a_limit() -> None:
    with served(replace(PATIENT, clients=3)) as server:
        async with asyncio.timeout(DEADLINE_S):
            for number in (0, 1, 2, 0, 3):
                await asyncio.to_thread(discover, server, f"?{number}")
            told = asyncio.create_task(server.told(since_s=time.monotonic()))
            for number in (0, 2, 3):
                assert await still_waits(told)
                await asyncio.to_thread(discover, server, f"?{number}")
            await told  # not for client 1
            told = asyncio.create_task(server.told(since_s=time.monotonic()))
            await asyncio.sleep(0)
            for number in (4, 5, 6):
                await asyncio.to_thread(discover, server, f"?{number}")
            await told  # not for the clients that are forgotten now


@pytest.mark.parametrize("limits", [replace(PATIENT, watched_s=0.0), replace(PATIENT, discovery_s=0.0)])
@pytest.mark.asyncio
async def test_who_does_not_ask_again_is_not_waited_for(limits: ServerLimits) -> None:
    with served(limits) as server:
        await asyncio.to_thread(discover, server)
        async with asyncio.timeout(DEADLINE_S):
            await server.told(since_s=time.monotonic())


@pytest.mark.asyncio
async def test_an_answer_that_was_being_made_when_the_list_changed_is_none() -> None:
    """The recorded time of a request is before its list is made: only then is a list from after the change certain."""
    made_s: list[float] = []

    def discovery() -> bytes:
        made_s.append(time.monotonic())
        return b"[]"

    with closing(
        MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, discovery=discovery, limits=PATIENT)
    ) as running:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(discover, running)
            told = asyncio.create_task(running.told(since_s=made_s[0]))
            assert await still_waits(told)
            await asyncio.to_thread(discover, running)
            await told


def test_close_frees_the_port_and_may_be_called_twice() -> None:
    running = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0)
    running.close()
    running.close()
    with pytest.raises(urllib.error.URLError):
        metrics_of(running)
    with closing(MetricsServer(CollectorRegistry(), host="127.0.0.1", port=running.port)) as again:
        assert again.port == running.port


@pytest.mark.parametrize("host", ["127.0.0.1", "node"])
def test_an_endpoint_binds_the_address_that_it_was_given_or_its_own_ray_nodes(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with closing(MetricsServer(CollectorRegistry(), host=host, port=0)) as server:
        assert server.address.startswith("127.0.0.2:" if host == "node" else "127.0.0.1:")
