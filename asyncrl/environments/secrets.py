"""Passes the environment variables of `environment.secrets` from a command to its scoring processes only.

The command that starts generators reads the values and sends them to its replicas, which give them to the scoring
processes. Each of these processes redacts the values in what it shows, so they are not in files, logs or errors. Values
with fewer than 8 characters are not redacted.
"""

import json
import logging
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from urllib.parse import quote, quote_plus

from asyncrl.config.schema import EnvironmentSection
from asyncrl.errors import ConfigError
from asyncrl.shown_text import hide
from asyncrl.user_code import describe_error

_SHORTEST_LINE = 8
"""Characters. The single lines of a multi-line secret are redacted if they have at least this length. Shorter lines are
likely to occur in other texts too."""

_SHORTEST_HIDDEN = 8
"""Characters. Shorter values are not redacted, because they are likely to occur in other text by chance."""

_LONGEST_CHAIN = 10
"""The most exceptions of a chain of causes (`__cause__`, `__context__`) that are searched."""
_OF_A_CONNECTION = re.compile(r"(Connect|Connection|Connector|Transport|Proxy|SSL|URL|Timeout)\w*Error$|^gaierror$")
_FOR_A_CONNECTION = re.compile(r"PROXY|SSL|CERT|CA_BUNDLE|URL|HOST|ENDPOINT|TOKEN|KEY|^HF_", re.IGNORECASE)
_MOST_NAMES = 6
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


_log = logging.getLogger(__name__)


class Secrets:
    """Values of environment variables. Its `repr` shows only their names."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})
        long = {name: value for name, value in self._values.items() if len(value) >= _SHORTEST_HIDDEN}
        self._names = {form: name for name, value in long.items() for form in _forms(value)}
        longest_first = sorted(self._names, key=len, reverse=True)  # a secret may be the beginning of another secret
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.longest = max(map(len, self._names), default=0)
        """Length (characters) of the longest text that `redact` replaces."""

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values)})"

    @property
    def environment(self) -> dict[str, str]:
        """The variables for the environment of a scoring process."""
        return dict(self._values)

    def redact(self, text: str) -> str:
        """Returns `text` with `<NAME>` instead of each value of at least 8 characters, also where the value is quoted
        or escaped."""
        return self._pattern.sub(lambda found: f"<{self._names[found[0]]}>", text) if self._names else text


def read_secrets(section: EnvironmentSection, environ: Mapping[str, str]) -> Secrets:
    """Returns the values of `environment.secrets`.

    Raises ConfigError with one line for each name that is unset or empty in the command's environment.
    """
    missing = [
        f"environment.secrets: {name} is not set in the environment of this command; run `export {name}=...` before "
        "the command, or remove the name from environment.secrets"
        for name in section.secrets
        if not environ.get(name)
    ]
    if missing:
        raise ConfigError("\n".join(missing))
    return Secrets({name: environ[name] for name in section.secrets})


def warn_of_short(secrets: Secrets) -> None:
    """Logs the names of the secrets whose values are too short to be redacted. It is not a part of `read_secrets`,
    because a command reads the secrets several times and logs this once."""
    if short := [name for name, value in secrets.environment.items() if len(value) < _SHORTEST_HIDDEN]:
        _log.warning(
            "environment.secrets: the values of %s have fewer than %d characters and are not replaced in outputs and "
            "errors, because they are likely to occur in other text; use longer values for keys",
            ", ".join(short),
            _SHORTEST_HIDDEN,
        )


def hide_secrets(section: EnvironmentSection, environ: Mapping[str, str]) -> None:
    """Makes this process show the names of `environment.secrets` instead of their values, in its log, on the terminal,
    and in errors. Names that are not in `environ` are ignored."""
    hide(Secrets({name: environ.get(name, "") for name in section.secrets}).redact)


def secrets_hint(error: BaseException, withheld: Collection[str]) -> str:
    """Returns the end of the message about `error`, if reward code did not find an environment variable, or could not
    connect and a withheld variable may be the cause; otherwise "".

    `withheld` are the variables that exist in the generator's process but not in scoring processes.
    """
    name = _needed_variable(error, withheld)
    if name is None:
        return _withheld_hint(withheld) if any(map(_is_of_a_connection, _chain(error))) else ""
    return f"; add {name} to environment.secrets: reward code sees only the variables that are named there"


def _needed_variable(error: BaseException, withheld: Collection[str]) -> str | None:
    """Returns the name of the environment variable that reward code did not find, or None if `error` has another cause.

    Three kinds of errors count: a KeyError of `os.environ`, a KeyError for a name in `withheld`, and an error whose
    text mentions a name in `withheld` that has an underscore, as clients of judges raise it.
    """
    for link in _chain(error):
        if isinstance(link, KeyError) and link.args and isinstance(name := link.args[0], str):
            if name in withheld or _is_of_environ(link.__traceback__):
                return name
        else:
            for name in _VARIABLE.findall(describe_error(link)):
                if name in withheld:
                    return str(name)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and its causes, up to `_LONGEST_CHAIN`."""
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__


def _is_of_a_connection(error: BaseException) -> bool:
    """Detects errors of sockets, TLS and HTTP clients (httpx, requests, aiohttp, openai, urllib) by the names of their
    classes, because this module imports none of these packages."""
    return any(_OF_A_CONNECTION.search(each.__name__) for each in type(error).__mro__)


def _withheld_hint(withheld: Collection[str]) -> str:
    """Returns the end of a message that names the withheld variables which connections often need; otherwise ""."""
    names = sorted(filter(_FOR_A_CONNECTION.search, withheld))
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        f"; if the connection needs one of the variables {', '.join(names[:_MOST_NAMES])}{more}, add it to "
        "environment.secrets: they are withheld from reward code"
    )


def _is_of_environ(trace: TracebackType | None) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    raised_in = [(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames[-1:]]
    return raised_in == [("os", "__getitem__")]


def _forms(value: str) -> set[str]:
    """Returns the forms in which a value may appear: unchanged, stripped, in a `repr`, in JSON, in a URL, and its
    lines.
    """
    forms = {value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""), quote_plus(value)}
    lines = value.splitlines()
    if len(lines) > 1:
        forms |= {line for line in lines if len(line) >= _SHORTEST_LINE}
    return forms - {""}
