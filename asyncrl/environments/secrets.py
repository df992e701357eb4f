"""The environment variables of `environment.secrets`: from a command to its scoring processes, and nowhere else.

The command that starts generators reads the values and passes them to its replicas, which give them to scoring
processes. They are in no file, log or error. What leaves a scoring process is redacted.
"""

import json
import re
from collections.abc import Collection, Mapping
from types import TracebackType
from urllib.parse import quote, quote_plus

from asyncrl.config.schema import EnvironmentSection
from asyncrl.errors import ConfigError
from asyncrl.user_code import describe_error

_SHORTEST_LINE = 8
"""Lines of a secret of several lines that are redacted by themselves; shorter ones are also parts of other texts."""

_LONGEST_CHAIN = 10
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


class Secrets:
    """Values of environment variables. `repr` shows only their names."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = dict(values or {})
        self._names = {form: name for name, value in self._values.items() for form in _forms(value)}
        longest_first = sorted(self._names, key=len, reverse=True)  # one secret may begin with another one
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.longest = max(map(len, self._names), default=0)
        """Characters of the longest text that `redact` replaces."""

    def __repr__(self) -> str:
        return f"Secrets({', '.join(self._values)})"

    def __reduce__(self) -> tuple[object, ...]:
        return Secrets, (self._values,)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the environment of a scoring process."""
        return dict(self._values)

    def redact(self, text: str) -> str:
        """`text` with `<NAME>` in the place of each value, also of one that is quoted or escaped."""
        return self._pattern.sub(lambda found: f"<{self._names[found[0]]}>", text) if self._names else text


def missing_secrets(section: EnvironmentSection, environ: Mapping[str, str]) -> list[str]:
    """A message for each name of `environment.secrets` that is not set, or empty, in the environment of the command."""
    return [
        f"environment.secrets: {name} is not set in the environment of this command; run `export {name}=...` before "
        "it, or remove the name"
        for name in section.secrets
        if not environ.get(name)
    ]


def read_secrets(section: EnvironmentSection, environ: Mapping[str, str]) -> Secrets:
    """The values of `environment.secrets`. ConfigError when one is missing."""
    if missing := missing_secrets(section, environ):
        raise ConfigError("\n".join(missing), key="environment.secrets")
    return Secrets({name: environ[name] for name in section.secrets})


def needed_variable(error: BaseException, withheld: Collection[str]) -> str | None:
    """The environment variable that reward code did not find, if the error is of that kind.

    That is a KeyError of `os.environ`, a KeyError for a name in `withheld`, or a text that mentions such a name with an
    underscore, as clients of judges raise it. `withheld` are the variables that exist outside of scoring processes.
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
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        trace is not None
        and trace.tb_frame.f_globals.get("__name__") == "os"
        and trace.tb_frame.f_code.co_name == "__getitem__"
    )


def _forms(value: str) -> set[str]:
    """The texts in which a value shows: as it is, stripped, in a `repr`, in JSON, in a URL, and line by line."""
    forms = {value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""), quote_plus(value)}
    lines = value.splitlines()
    if len(lines) > 1:
        forms |= {line for line in lines if len(line) >= _SHORTEST_LINE}
    return forms - {""}
