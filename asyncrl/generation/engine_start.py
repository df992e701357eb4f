"""Turns a failed start of vLLM into an error that names the cause.

vLLM's engine runs in a process of its own. That process writes the cause to stderr only, so this module reads the cause
from there.
"""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import AsyncRLError, RunError

STDERR = Path("/proc/self/fd/2")
"""The stderr of this process. In a Ray worker it is a file, which the engine's processes inherit."""

_LAST_LINE_OF_A_TRACEBACK = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)


@contextlib.contextmanager
def engine_starts(*, memory_knob: str, stderr: Path = STDERR) -> Iterator[None]:
    """Raises RunError for whatever vLLM raises inside the block.

    The message has the last error line that vLLM's processes wrote to `stderr`, and where the whole output is. If that
    line is about memory, the message also names `memory_knob`, the config key for it: vLLM's own message names vLLM's
    options.
    """
    before = stderr.stat().st_size if stderr.is_file() else None
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:
        cause, rest = f"{type(error).__name__}: {error}", "above"
        if before is not None:
            with stderr.open(errors="replace") as file:
                file.seek(before)
                said = _LAST_LINE_OF_A_TRACEBACK.findall(file.read())
            cause, rest = said[-1] if said else cause, f"in {os.path.realpath(stderr)} on {socket.gethostname()}"
        if "memory" in cause.lower():
            cause += f"\nin the configuration of asyncrl this memory is set by {memory_knob}"
        raise RunError(f"vLLM did not start: {cause}\nthe whole output of its processes is {rest}") from error
