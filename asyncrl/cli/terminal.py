"""Output of commands that run for long: the terminal, or the process at the other end of a pipe, may go away first."""

import contextlib
import errno
import io
import os
import sys
from typing import Any

_GONE = (errno.EIO, errno.EPIPE)
_SHOW_CURSOR = b"\x1b[?25h\n"


class _LastingFile(io.FileIO):
    """A file that raises no OSError when it is written to. Once its reader is gone, all output goes to /dev/null."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in _GONE:
                with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


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
