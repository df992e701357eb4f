"""Imports of large libraries, of which Python's garbage collector would take a large part of the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's garbage collector does not run in the block. It would scan the new modules again and again.

    A process that asyncrl has started calls `gc.freeze` afterwards, so that no later collection scans them either. The
    user's process does not: when it ends, libraries would write that their objects have leaked.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
