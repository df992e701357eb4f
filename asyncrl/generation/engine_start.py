"""Why an engine did not start: vLLM's engine is a process of its own, and says the cause on stderr alone."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from asyncrl.errors import AsyncRLError, RunError

STDERR = Path("/proc/self/fd/2")
"""In a Ray worker a file, which the engine's processes inherit."""

_LAST_LINE_OF_A_TRACEBACK = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)


@contextlib.contextmanager
def engine_starts(*, memory_knob: str, stderr: Path = STDERR) -> Iterator[None]:
    """Within it whatever vLLM raises becomes a RunError, with what its processes said last and where the rest is; where
    that is of memory, with `memory_knob`, for vLLM's own names of it are not ours."""
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
            cause += f"\nhere that is {memory_knob}"
        raise RunError(f"vLLM did not start: {cause}\nall that its processes said is {rest}") from error
