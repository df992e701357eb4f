"""Checks `metrics.host`, the address at which the metrics endpoints listen.

It may be a loopback address, which only this machine can reach. If the user allows it, it may be one address of this
machine in a network. It may never be the address that means all networks, such as 0.0.0.0.
"""

import ipaddress
import re
import socket

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

NODE = "node"
"""Value of `metrics.host` for the Ray address of each process, by which other nodes of the cluster reach it."""

_ALLOWED = "--allow-public to the command (asyncrl.run has no such option: use `asyncrl up` instead)"

_HOST = re.compile(r"[\w.:%-]+")
"""Characters of addresses and names. `socket.inet_aton` ignores a blank and everything after it: `127.0.0.1 x`."""


def check_metrics_host(config: Config, *, allow_public: bool) -> None:
    """Raises ConfigError if `metrics.host` binds every address, if other machines can reach it without `allow_public`,
    or if it is neither an address nor a name."""
    host = config.metrics.host
    address = _address(host)
    if host not in ("", "*") and not _HOST.fullmatch(host):
        problem = (
            "is neither an address nor the name of a machine; set it to one address without blanks, e.g. 127.0.0.1"
        )
    elif host in ("", "*") or (address is not None and address.is_unspecified):
        problem = (
            "would answer to every network, and is not an address that Prometheus can scrape; set it to 127.0.0.1, or "
            f"add {_ALLOWED}, and set it to an address of one network, or to {NODE} for the Ray address of each process"
        )
    elif allow_public or host == "localhost" or (address is not None and address.is_loopback):
        return
    else:
        problem = (
            f"other machines can reach it, and the endpoints have no password; set it to 127.0.0.1, or add {_ALLOWED} "
            "if that network may read the metrics"
        )
    raise ConfigError(f"metrics.host = {host!r}: {problem}")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the IP address that `host` writes, also in a short form such as `0`; None for a name and for ""."""
    try:
        address = ipaddress.ip_address(host)
        return getattr(address, "ipv4_mapped", None) or address
    except ValueError:
        pass
    try:
        # Sockets accept forms of 0.0.0.0 that ipaddress does not: 0, 0.0, 0x0.
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):  # ValueError: a null character
        return None
