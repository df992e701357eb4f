"""Text that a process shows: in its log, on the terminal, and in its errors.

`shown` replaces the values of the run's secrets by their names, and control characters by visible escapes. A completion
or an error may contain the escape sequences of a terminal, which would move the cursor, hide lines, or change the
title. All log records and all lines of the commands pass through `shown`: log records in `LogFormatter`, lines in
`asyncrl.cli.terminal.say`.
"""

import logging
import re
from collections.abc import Callable

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

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


class LogFormatter(logging.Formatter):
    """Formats log records, with their tracebacks, and passes the text through `shown`."""

    def __init__(self) -> None:
        super().__init__(LOG_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def log_to_stderr() -> None:
    """Writes all log records of this process to stderr, which is a file in Ray's session folder for an actor."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
