"""A lack of memory for the memory files of this process."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_memory(most_bytes: int) -> Iterator[None]:
    """No file of this process can become larger than `most_bytes`."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
