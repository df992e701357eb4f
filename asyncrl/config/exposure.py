"""To whom the metrics endpoints answer: this machine, one network that the user has agreed to, never every network."""

import ipaddress
import socket

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

NODE = "node"
"""`metrics.host` for "each process's own Ray address": the one that other nodes of its cluster reach it by."""


def check_exposure(config: Config, *, allow_public: bool) -> None:
    """ConfigError when `metrics.host` is every address, or one that other machines reach and nobody allowed that."""
    host = config.metrics.host.strip()
    if _is_every_address(host):
        raise ConfigError(
            f"metrics.host = {config.metrics.host!r}: would answer to every network, and names no address to scrape; "
            f"bind one: 127.0.0.1, or with --allow-public that of a network, or {NODE} for each process's Ray address",
            key="metrics.host",
        )
    if not allow_public and not _is_loopback(host):
        raise ConfigError(
            f"metrics.host = {config.metrics.host!r}: other machines reach it, and metrics ask nobody for a password; "
            "say --allow-public if that network may read them, or bind 127.0.0.1",
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
        return not any(socket.inet_aton(host))  # what sockets take and ipaddress does not: 0, 0.0, 0x0
    except OSError:
        return False  # a name
