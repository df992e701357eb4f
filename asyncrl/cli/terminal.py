"""Output of commands that run for long: the terminal, or the process at the other end of a pipe, may go away first."""

import contextlib
import io
import os
import sys
from typing import Any

_SHOW_CURSOR = b"\x1b[?25h\n"


class _LastingFile(io.FileIO):
    """A file that drops what cannot be written to it: its reader is gone, or its disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)  # else Python's buffers would keep it, and raise when the interpreter exits


def lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream like `stream`, on the same file, that raises no OSError."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def outlive_terminal() -> None:
    """From now on a terminal that is closed, or a pipe that nothing reads any more, does not end this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # no file: a test has put something else there
            setattr(sys, name, lasting(stream))


def show_cursor() -> None:
    """The live view hides it, and a process that ends at once has no time to end the view."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
