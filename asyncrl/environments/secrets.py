"""Passes the environment variables of `environment.secrets` from a command to its scoring processes only.

The command that starts generators reads the values and sends them to its replicas, which give them to the scoring
processes. The values are not in any file, log or error: each of these processes redacts what it shows.
"""

import json
import re
import traceback
from collections.abc import Collection, Mapping
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
"""Characters. Shorter values are redacted only in the output and the errors of reward code. In all other text, such as
the numbers of a log, a short value is likely to occur by chance."""

_LONGEST_CHAIN = 10
"""Links of an exception's chain of causes that are searched."""
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


class Secrets:
    """Values of environment variables. Its `repr` shows only their names."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})
        self._names = {form: name for name, value in self._values.items() for form in _forms(value)}
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
        """Returns `text` with `<NAME>` instead of each value, also where the value is quoted or escaped."""
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


def hide_secrets(section: EnvironmentSection, environ: Mapping[str, str]) -> None:
    """Makes this process show the names of `environment.secrets` instead of their values, in its log, on the terminal,
    and in errors. Names that are not in `environ` are ignored."""
    values = {name: environ.get(name, "") for name in section.secrets}
    hide(Secrets({name: value for name, value in values.items() if len(value) >= _SHORTEST_HIDDEN}).redact)


def secrets_hint(error: BaseException, withheld: Collection[str]) -> str:
    """Returns the end of the message about `error`, if reward code did not find an environment variable; otherwise "".

    `withheld` are the variables that exist in the generator's process but not in scoring processes.
    """
    name = _needed_variable(error, withheld)
    if name is None:
        return ""
    return f"; add {name} to environment.secrets: reward code sees only the variables that are named there"


def _needed_variable(error: BaseException, withheld: Collection[str]) -> str | None:
    """Returns the name of the environment variable that reward code did not find, or None if `error` has another cause.

    Three kinds of errors count: a KeyError of `os.environ`, a KeyError for a name in `withheld`, and an error whose
    text mentions a name in `withheld` that has an underscore, as clients of judges raise it.
    """
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            break
        if isinstance(link, KeyError) and link.args and isinstance(name := link.args[0], str):
            if name in withheld or _is_of_environ(link.__traceback__):
                return name
        else:
            for name in _VARIABLE.findall(describe_error(link)):
                if name in withheld:
                    return str(name)
        link = link.__cause__ or link.__context__
    return None


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
