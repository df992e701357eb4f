"""Text that a process shows: in its log, on the terminal, and in its errors.

`shown` replaces the values of the run's secrets by their names, and control characters by visible escapes. A completion
or an error may contain the escape sequences of a terminal, which would move the cursor, hide lines, or change the
title. All log records and all lines of the commands pass through `shown` or its parts: log records in `LogFormatter`
or `JsonLogFormatter`, lines in `asyncrl.cli.terminal.say`.
"""

import json
import logging
import re
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def utc(unix_time_s: float) -> str:
    """Returns a time in UTC as text, ISO 8601. Machines may have other zones, and their logs are read together.

    >>> utc(1_796_025_600.25)
    '2026-11-30T08:00:00.250Z'
    """
    return datetime.fromtimestamp(unix_time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""Control characters, without tab and newline. U+009B alone begins an escape sequence too. U+2028 and U+2029 separate
lines. The others change the direction of the text after them, which then shows words in another order (Boucher and
Anderson 2021, "Trojan Source")."""

_redact: Callable[[str], str] = str


def hide(redact: Callable[[str], str]) -> None:
    """Sets the function that replaces the run's secrets in all text that this process shows from now on."""
    global _redact
    _redact = redact


def redacted(text: str) -> str:
    """Returns `text` without the run's secrets."""
    return _redact(text)


def escaped(text: str) -> str:
    r"""Returns `text` with escapes instead of control characters. Tabs and newlines stay.

    The escapes are those of JSON, so that text in JSON stays valid.

    >>> escaped("a\x1b[2Jb\n")
    'a\\u001b[2Jb\n'
    """
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def shown(text: str) -> str:
    """Returns `text` without the run's secrets, and with escapes instead of control characters."""
    return escaped(redacted(text))


LogForm = Literal["text", "json"]
"""The form of the lines of a log: `run.log_format`."""

_facts: dict[str, object] = {}


def describe_process(**facts: object) -> None:
    """Adds facts of this process to each line of its log in JSON: its run, role, incarnation, replica or rank, step.

    A fact may be a function, which is called for each line and must not raise an error. A fact that is None is left out
    of the line.
    """
    _facts.update(facts)


def fact(name: str) -> object:
    """Returns the present value of the fact `name` of `describe_process`; None if this process has no such fact."""
    found = _facts.get(name)
    return found() if callable(found) else found


class LogFormatter(logging.Formatter):
    """Formats log records with their time in UTC and their tracebacks, and passes the text through `shown`."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return utc(record.created)

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


class JsonLogFormatter(logging.Formatter):
    """Formats each log record as one line of JSON, for a collector of logs. The keys are `time` (ISO 8601, UTC),
    `level`, `logger`, `message`, `exception` with the traceback if there is one, `node`, `pid`, and the facts of
    `describe_process`."""

    def __init__(self) -> None:
        super().__init__()
        self._node = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": utc(record.created),
            "level": record.levelname,
            "logger": record.name,
            # secrets are replaced before the text becomes JSON: with JSON's escapes, they would not be recognised
            "message": redacted(record.getMessage()),
            "node": self._node,
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        line |= {name: value for name in _facts if (value := fact(name)) is not None}
        return json.dumps(line)  # writes all but printable ASCII as escapes, so nothing is left for `escaped`


def log_formatter(form: LogForm) -> logging.Formatter:
    """Returns the formatter of a log whose lines have this form."""
    return JsonLogFormatter() if form == "json" else LogFormatter()


def log_to_stderr(form: LogForm = "text") -> None:
    """Writes the log records of this process, from level INFO on, to stderr, which is a file in Ray's session folder
    for an actor."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
