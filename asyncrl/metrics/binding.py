"""Turns `metrics.host` into the address that this process's metrics endpoint binds."""

from asyncrl.config.metrics_host import NODE


def bind_host(host: str) -> str:
    """Returns `host`, or this node's Ray address when `host` is `node`. The process must have joined Ray before."""
    if host != NODE:
        return host
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
