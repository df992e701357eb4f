"""The metrics endpoints never bind every network, and bind an address of a network only with --allow-public."""

import pytest

from asyncrl.config.rules import check_metrics_host
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


def with_host(host: str) -> Config:
    return Config.model_validate({"metrics": {"host": host}})


@pytest.mark.parametrize("allow_public", [False, True])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0::0", "", "0", "0.0", "0x0", "::ffff:0:0", "*"])
def test_metrics_never_bind_every_network(host: str, allow_public: bool) -> None:
    with pytest.raises(ConfigError, match="would answer to every network") as refused:
        check_metrics_host(with_host(host), allow_public=allow_public)
    assert "metrics.host" in str(refused.value)


@pytest.mark.parametrize("allow_public", [False, True])
@pytest.mark.parametrize(
    "host", ["127.0.0.1 x", " 127.0.0.1", " 0.0.0.0 ", "0 x", "127.0.0.1\n", "a\x00b", "a b", "a/b"]
)
def test_a_host_that_is_neither_an_address_nor_a_name_is_refused(host: str, allow_public: bool) -> None:
    with pytest.raises(ConfigError, match="neither an address nor the name of a machine") as refused:
        check_metrics_host(with_host(host), allow_public=allow_public)
    assert "metrics.host" in str(refused.value)


@pytest.mark.parametrize("host", ["10.0.0.7", "192.168.1.2", "fd00::7", "node-3", "node"])
def test_metrics_bind_a_network_only_where_that_was_allowed(host: str) -> None:
    with pytest.raises(ConfigError, match="add --allow-public") as refused:
        check_metrics_host(with_host(host), allow_public=False)
    assert "metrics.host" in str(refused.value)
    check_metrics_host(with_host(host), allow_public=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "127.1", "::1", "::ffff:127.0.0.1", "localhost"])
def test_metrics_bind_this_machine_without_asking(host: str) -> None:
    check_metrics_host(with_host(host), allow_public=False)
