"""Imports of large libraries: without garbage collection, and without parts that the process never uses."""

import gc
import os
import sys
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


@contextmanager
def without_compiler() -> Iterator[None]:
    """Modules that are imported in the block do not find `torch._inductor.lowering`, if compilation is off.

    `import vllm` imports it in order to patch it, which takes a fifth of the time of vLLM's import: 1 s of CPU and 500
    modules in each process. vLLM does without it if it is missing, and nothing uses it with TORCH_COMPILE_DISABLE=1. It
    can be imported as usual after the block.
    """
    lowering = "torch._inductor.lowering"
    if os.environ.get("TORCH_COMPILE_DISABLE") != "1" or lowering in sys.modules:
        yield
        return
    sys.modules[lowering] = None  # type: ignore[assignment]  # makes Python raise ImportError for this module
    try:
        yield
    finally:
        del sys.modules[lowering]
