"""The address that this process's endpoint binds, from `metrics.host`."""

from asyncrl.config.exposure import NODE


def bind_host(host: str) -> str:
    """`host` itself, or where it says `node` this process's own Ray address; Ray is joined by then."""
    if host != NODE:
        return host
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
