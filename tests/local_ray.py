"""Starts a local Ray cluster for tests. A busy machine may need more than one attempt."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import psutil
import ray

Started = TypeVar("Started")

STARTS = 3


def patiently(start: Callable[[], Started]) -> Started:
    """Calls `start` again if a node of Ray does not register within 30 s. Ray has no setting for this limit."""
    for left in reversed(range(STARTS)):
        before = psutil.Process().children(recursive=True)
        try:
            return start()
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            for process in set(psutil.Process().children(recursive=True)) - set(before):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    raise AssertionError


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
