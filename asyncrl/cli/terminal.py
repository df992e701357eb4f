"""How commands use the terminal: their help, and their output.

The terminal, or the reader of a pipe, may go away before a command ends. Commands that start a run or a cluster
then drop their output and do not fail (`outlive_terminal`). SIGHUP, which a closed terminal sends, ends them cleanly
(`run_until_done`).
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer

from asyncrl.shown_text import shown

_SHOW_CURSOR = b"\x1b[?25h\n"


class _LastingFile(io.FileIO):
    """A file that drops data that cannot be written, because the reader is gone or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            # Pretend that all was written. Otherwise Python's buffers keep the data, and raise when the interpreter
            # exits.
            return len(data)


def say(text: str = "", *, label: str = "", color: str | None = None, err: bool = False) -> None:
    """Prints lines on stdout, or on stderr if `err` is set. `label` comes before them in bold, and in `color`.

    Commands print with this function, or with a `ShownConsole`. Both hide secrets and escape control characters
    (`shown`), because the text may come from a model.
    """
    parts = [typer.style(label, fg=color, bold=True)] if label else []
    typer.echo(" ".join([*parts, shown(text)] if text else parts), err=err)


def print_warnings(warnings: list[str]) -> None:
    """Prints each warning on stderr, so that the output of the command on stdout can be piped."""
    for warning in warnings:
        say(warning, label="note:", color="yellow", err=True)


def lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Returns a stream on the same file as `stream` that drops data instead of raising OSError."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LastingFile(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def command_app(*, help: str | None = None, **settings: Any) -> typer.Typer:
    """Returns a Typer app with the settings of all commands: plain help text, and plain tracebacks for bugs."""
    return typer.Typer(
        help=help,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=help is not None,
        **settings,
    )


def outlive_terminal() -> None:
    """Makes stdout and stderr drop what cannot be written, because the terminal is closed or the reader of a pipe is
    gone. Otherwise the next line would end this process with an error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):  # a test has replaced the stream by one without a file
            setattr(sys, name, lasting(stream))


@contextlib.contextmanager
def sigterm_exits() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit in the block. Ray's own handler would print a stack of each thread."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_cursor() -> None:
    """Shows the terminal's cursor, which the live view hides. For a process that exits without closing the view."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
