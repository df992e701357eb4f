"""The metrics endpoint: it serves both registries over HTTP, and the faults of F31 do not affect its process."""

import asyncio
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest
import ray
from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from asyncrl.errors import ConfigError
from asyncrl.metrics import server as server_module
from asyncrl.metrics.discovery import Target, target_groups
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
"""Time limit of a failing test. A passing test does not wait that long."""
FOR_EVER_S = 10 * DEADLINE_S


def scrape(url: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return str(response.read().decode())


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics = LearnerMetrics()
    metrics.versions(learner=7, published=6)
    with closing(MetricsServer(metrics.registry, host="127.0.0.1", port=0)) as running:
        yield running


def test_it_serves_our_registry_and_the_default_one(server: MetricsServer) -> None:
    engine_metric = Gauge("vllm:a_gauge_of_this_test", "Declared in the default registry, where vLLM declares its own.")
    try:
        engine_metric.set(3)
        text = scrape(server.url)
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
        text = scrape(urllib.request.Request(server.url, headers={"Accept": accepted}))
    finally:
        REGISTRY.unregister(engine_metric)
    assert "vllm:a_gauge_of_this_test 0.0" in text


def test_a_scrape_has_no_lines_of_when_a_series_began(server: MetricsServer) -> None:
    text = scrape(server.url)
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
        targets.append(Target(role="buffer", replica="buffer", address="127.0.0.1:1"))
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
            assert response.headers["Content-Type"] == "application/json", "Prometheus refuses anything else"
            [group] = json.loads(response.read())
        assert group == {
            "targets": ["127.0.0.1:1"],
            "labels": {"run": "r", "role": "buffer", "replica": "buffer"},
        }
        assert "asyncrl_learner_policy_version" in scrape(running.url)


def test_ipv6_addresses_are_written_with_brackets() -> None:
    try:
        running = MetricsServer(CollectorRegistry(), host="::1", port=0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with closing(running):
        assert running.address.startswith("[::1]:")
        scrape(running.url)


@pytest.mark.fault("F31")
def test_a_taken_port_becomes_a_free_one_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        registry = LearnerMetrics().registry
        with closing(MetricsServer(registry, host="127.0.0.1", port=port, discovery=lambda: b'["here"]')) as running:
            assert running.address == f"127.0.0.1:{running.port}" != f"127.0.0.1:{port}"
            assert "asyncrl_learner_policy_version" in scrape(running.url)
            assert scrape(f"http://{running.address}/sd") == '["here"]'
    (record,) = caplog.records
    assert f"metrics.learner_port = {port} cannot be used" in record.getMessage()
    assert f"metrics and /sd are on port {running.port} instead" in record.getMessage()


@pytest.mark.fault("F31")
def test_scrapers_that_say_nothing_or_do_not_read_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, server: MetricsServer
) -> None:
    # With the real limit, the server would close these connections, and the test could not fail.
    monkeypatch.setattr(server_module._Handler, "timeout", FOR_EVER_S)
    address = ("127.0.0.1", server.port)
    with socket.create_connection(address, DEADLINE_S), socket.create_connection(address, DEADLINE_S) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        for _ in range(3):
            assert "asyncrl_learner_policy_version 7.0" in scrape(server.url)


@pytest.mark.fault("F31")
def test_a_silent_scraper_is_dropped(monkeypatch: pytest.MonkeyPatch, server: MetricsServer) -> None:
    assert server_module._Handler.timeout == server_module.SCRAPE_TIMEOUT_S
    monkeypatch.setattr(server_module._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as silent:
        assert silent.recv(1) == b"", "the server closes the connection"


@pytest.mark.fault("F31")
def test_a_broken_request_leaves_the_server_running(server: MetricsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as garbage:
        garbage.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        garbage.recv(1024)
    assert "asyncrl_learner_policy_version" in scrape(server.url)


def test_an_address_of_another_machine_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host.*192\.0\.2\.1") as refused:
        MetricsServer(CollectorRegistry(), host="192.0.2.1", port=0)
    assert refused.value.key == "metrics.host"


def test_it_lingers_for_who_watches_and_for_nobody_else(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    scrape(server.url.replace("/metrics", "/sd"))
    assert server.linger_s == 0.0
    scrape(server.url)
    assert server.linger_s == server_module.LINGER_S > 5.0
    monkeypatch.setattr(server_module, "WATCHED_S", 0.0)
    assert server.linger_s == 0.0


@pytest.mark.asyncio
async def test_who_discovers_over_http_is_waited_for_until_the_list_of_the_end_was_given(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DISCOVERY_S", FOR_EVER_S)
    url = f"http://{server.address}/sd"
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.to_thread(scrape, server.url)
        # The scrape above is not a discovery request, so there is no client to wait for.
        await server.told(since_s=time.monotonic())
        await asyncio.to_thread(scrape, url)
        told = asyncio.create_task(server.told(since_s=time.monotonic()))
        await asyncio.to_thread(scrape, server.url)
        assert not told.done(), "the client's list is older than `since_s`"
        await asyncio.to_thread(scrape, url)
        await told


@pytest.mark.asyncio
async def test_jobs_that_discover_each_for_itself_are_all_waited_for(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "DISCOVERY_S", FOR_EVER_S)
    urls = [f"http://{server.address}/sd{query}" for query in ("", "?job=ray")]
    async with asyncio.timeout(DEADLINE_S):
        for url in urls:
            await asyncio.to_thread(scrape, url)
        told = asyncio.create_task(server.told(since_s=time.monotonic()))
        await asyncio.to_thread(scrape, urls[0])
        await asyncio.sleep(2 * server_module.POLL_S)
        assert not told.done(), "the other job's list is older than `since_s`"
        await asyncio.to_thread(scrape, urls[1])
        await told


@pytest.mark.parametrize("limit", ["WATCHED_S", "DISCOVERY_S"])
@pytest.mark.asyncio
async def test_who_does_not_ask_again_is_not_waited_for(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    await asyncio.to_thread(scrape, f"http://{server.address}/sd")
    monkeypatch.setattr(server_module, "DISCOVERY_S", FOR_EVER_S)
    monkeypatch.setattr(server_module, limit, 0.0)
    async with asyncio.timeout(DEADLINE_S):
        await server.told(since_s=time.monotonic())


def test_an_answer_that_was_being_made_when_the_list_changed_is_none() -> None:
    """The recorded time of a request is before its list is made: only then is a list from after the change certain."""
    asked_s: list[float] = []

    def discovery() -> bytes:
        asked_s.append(time.monotonic())
        return b"[]"

    with closing(MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0, discovery=discovery)) as running:
        scrape(f"http://{running.address}/sd")
        assert running._handler.told_s["/sd"] <= asked_s[0]


def test_close_frees_the_port_and_may_be_called_twice() -> None:
    running = MetricsServer(CollectorRegistry(), host="127.0.0.1", port=0)
    running.close()
    running.close()
    with pytest.raises(urllib.error.URLError):
        scrape(running.url)
    with closing(MetricsServer(CollectorRegistry(), host="127.0.0.1", port=running.port)) as again:
        assert again.port == running.port


@pytest.mark.parametrize("host", ["127.0.0.1", "node"])
def test_an_endpoint_binds_the_address_that_it_was_given_or_its_own_ray_nodes(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with closing(MetricsServer(CollectorRegistry(), host=host, port=0)) as server:
        assert server.address.startswith("127.0.0.2:" if host == "node" else "127.0.0.1:")
