"""Checks the address of the metrics endpoints. They may bind this machine or, if the user allows it, one network.

They may never bind every network.
"""

import ipaddress
import socket

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

NODE = "node"
"""Value of `metrics.host` for the Ray address of each process, by which other nodes of the cluster reach it."""


def check_exposure(config: Config, *, allow_public: bool) -> None:
    """Raises ConfigError if `metrics.host` binds every address, or if other machines can reach it without
    `allow_public`."""
    host = config.metrics.host.strip()
    if _is_every_address(host):
        raise ConfigError(
            f"metrics.host = {config.metrics.host!r}: would answer to every network, and is not an address that "
            "Prometheus can scrape; set it to 127.0.0.1, or with --allow-public to an address of one network, or to "
            f"{NODE} for the Ray address of each process",
            key="metrics.host",
        )
    if not allow_public and not _is_loopback(host):
        raise ConfigError(
            f"metrics.host = {config.metrics.host!r}: other machines can reach it, and the endpoints have no password; "
            "add --allow-public if that network may read the metrics, or set it to 127.0.0.1",
            key="metrics.host",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_every_address(host: str) -> bool:
    if host in ("", "*"):
        return True
    try:
        address = ipaddress.ip_address(host)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return (mapped or address).is_unspecified
    except ValueError:
        pass
    try:
        # Sockets accept forms of 0.0.0.0 that ipaddress does not: 0, 0.0, 0x0.
        return not any(socket.inet_aton(host))
    except OSError:
        return False  # a host name
