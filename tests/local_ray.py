"""Starts a local Ray cluster for tests. A busy machine may need more than one attempt."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from asyncrl.deployment.cluster import patiently


@contextlib.contextmanager
def local_ray(*, cpus: int, object_store_mb: int = 80, **options: Any) -> Iterator[None]:
    """A new Ray cluster of this process, without GPUs. It ends with the context."""
    patiently(
        lambda: ray.init(
            address="local",  # start a new cluster, even if another test left the address of one
            num_cpus=cpus,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=object_store_mb * 2**20,
            **options,
        )
    )
    try:
        yield
    finally:
        ray.shutdown()
