"""Starts a local Ray cluster for tests, and ends actors. A busy machine may need more than one attempt for a start."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from asyncrl.deployment.cluster import start_node, without_unused_daemons
from asyncrl.deployment.local_clusters import require_token


@contextlib.contextmanager
def local_ray(*, cpus: int, object_store_mb: int = 80, **options: Any) -> Iterator[None]:
    """A new Ray cluster of this process, without GPUs. It ends with the context."""
    require_token()  # `ray.init` would write a token that all users can read, which the runs of other tests refuse
    with without_unused_daemons():
        start_node(
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


def end_actor(handle: Any) -> None:
    """Kills an actor and waits until its process has ended. `ray.kill` alone returns earlier, so that the actor may
    still answer a call."""
    process = psutil.Process(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=60))
    ray.kill(handle, no_restart=True)
    process.wait(timeout=60)
