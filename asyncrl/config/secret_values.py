"""Finds values of a configuration that look like secrets.

A configuration is written to config.yaml, the report and the trackers, and errors show its values. So it may not
contain a secret. A value is refused if it has the form of a known kind of credential, or if its key names a secret. A
key that ends with `token` or `key` may also name something else (`stop_token`, `answer_key`): then the value is refused
only if it looks random.
"""

import re
from collections.abc import Iterator, Mapping

from asyncrl.config.schema import KeyPath

_CREDENTIAL = re.compile(
    r"""
      \b [spr]k [-_] (?= [\w-]*\d ) (?= [\w-]*[A-Z] ) [\w-]{20,}    # OpenAI, Anthropic, Stripe and others
    | \b (?: hf | gh[pousr] | npm ) _ [A-Za-z0-9]{30,}
    | \b github_pat_ \w{22,} | \b glpat- [\w-]{20,} | \b xox[abprs]- [\w-]{10,}
    | \b AKIA [0-9A-Z]{16} \b                                       # AWS
    | \b AIza [\w-]{30,}                                            # Google
    | \b eyJ [\w-]{8,} \. [\w-]{8,} \. [\w-]*                       # a JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | :// [^\s/:@]* : [^\s/@]+ @                                    # a URL with a password
    """,
    re.VERBOSE,
)
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:secret|password|passwd|passphrase|credential|authorization|api_?key"
    r"|(?:access|auth|private|secret|encryption)_key|(?:access|api|auth|bearer|hf|refresh|session)_token)s?$"
)
_AMBIGUOUS_KEY = re.compile(r"(?:^|_)(?:token|key)s?$")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
"""A run of letters and digits that is too long for a word."""
_HARMLESS = re.compile(
    r"""
      (?i: none | null | dummy | empty | unused | not-needed | -+ | x+ )?    # nothing, or a placeholder
    | \$.* | [A-Z_]+ | [A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+                         # the name of an environment variable
    | [~.]{0,2}/.*                                                           # a path
    """,
    re.VERBOSE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_NAMES: KeyPath = ("environment", "secrets")
"""The key whose values are names of environment variables."""


def secret_values(value: object, *, path: KeyPath = (), key: str = "") -> Iterator[KeyPath]:
    """Yields the path of each value that looks like a secret, in a configuration or in a part of it at `path`. `key` is
    the last name in the path; the items of a list have their index in the path, and the key of the list."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from secret_values(below, path=(*path, name), key=name)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from secret_values(below, path=(*path, str(number)), key="" if path == _NAMES else key)
    elif isinstance(value, str) and _is_secret(value, key=_CAMEL.sub("_", key).replace("-", "_").lower()):
        yield path


def _is_secret(value: str, *, key: str) -> bool:
    if _CREDENTIAL.search(value):
        return True
    random = bool(_RANDOM.search(value))
    if _HARMLESS.fullmatch(value) and not random:
        return False
    return bool(_SECRET_KEY.search(key) or (random and _AMBIGUOUS_KEY.search(key)))


def secret_message(path: KeyPath, *, origin: str) -> str:
    """Returns the error about a value that looks like a secret, without the value. `origin` says where it was set."""
    key = ".".join(path)
    advice = (
        "list the name of an environment variable there, and not its value"
        if path[:2] == _NAMES
        else "put it into an environment variable, and list the name of the variable in environment.secrets "
        "(docs/rewards.md); if it is not a secret, give the key another name"
    )
    return f"{key}{origin}: looks like a secret, but the configuration is written to files and shown; {advice}"
