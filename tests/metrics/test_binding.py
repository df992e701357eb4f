"""The address that a metrics endpoint binds."""

import pytest
import ray
from prometheus_client import CollectorRegistry

from asyncrl.metrics.server import MetricsServer


@pytest.mark.parametrize("host", ["127.0.0.1", "node"])
def test_an_endpoint_binds_the_address_that_it_was_given_or_its_own_ray_nodes(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    with MetricsServer(CollectorRegistry(), host=host, port=0) as server:
        assert server.address.startswith("127.0.0.2:" if host == "node" else "127.0.0.1:")
