"""Imports of large libraries, without garbage collection and without parts that the process never uses."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns Python's garbage collector off for a block that makes many objects which stay: imports, or the tasks of a
    dataset. The collector would scan the new objects again and again.

    A process that asyncrl has started calls `gc.freeze` after its imports, so that no later collection scans them
    either. The user's process does not call it: when it ends, libraries would write that their objects have leaked.
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
    """Hides `torch._inductor.lowering` from the modules that are imported in the block, if compilation is off.

    `import vllm` imports that module in order to patch it, which takes a fifth of the time of vLLM's import: 1 s of CPU
    and 500 modules in each process. vLLM works without the module, and nothing uses it with TORCH_COMPILE_DISABLE=1.
    After the block, the module can be imported as usual.
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
