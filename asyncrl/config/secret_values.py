"""Finds values of a configuration that look like secrets.

A configuration is written to config.yaml, the report and the trackers, and errors show its values. So it may not
contain a secret. A value is refused in three cases:

- It has the form of a known kind of credential. A URL with a user's name or password is one.
- Its name is one of `_SECRET_NAME`. Names are keys of the configuration, parameters in the query of a URL, options of a
  command (`--api-key=...`), and parts of a connection string (`host=db password=...`).
- Its name ends with `token` or `key`, and it looks random. Such a name may also name something else (`stop_token`,
  `answer_key`).
"""

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote

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
    | :// [^\s/:@?\#]* : [^\s/@?\#]+ @ | https?:// [^\s/@?\#]+ @    # a URL with a password, or with a token
    | \A (?i: bearer | basic ) \ (?! [$<{] ) \S{6,} \Z               # the header Authorization
    """,
    re.VERBOSE,
)
_SECRET_NAME = re.compile(
    r"""
    (?: ^ | _ ) (?:
        secret | passwords? | passwd | passphrase | pwd | passcode | pass | credential | authorization | api_?key
      | (?: access | auth | private | secret | encryption | signing | account | subscription | master ) _? key
      | (?: access | api | auth | bearer | hf | refresh | session | security ) _? token
      | (?: github | gitlab | slack | wandb ) _? token
      | (?: db | user | admin | root | smtp | redis | postgres | mysql | proxy | login ) _? (?: pass | pwd | password )
    ) s? $
    """,
    re.VERBOSE,
)
"""The names of secrets, in lower case and with `_` between words."""
_NO_SECRET_NAME = re.compile(r"(?:first|second|single|two|multi|one|each|per|low|high|band|forward|backward)_pass$")
_SECRET_PARAMETER = re.compile(r"^(?:sig|signature|token|key|auth|apikey|jwt)$|(?:_signature|_credential|_token)$")
"""Further names of secrets in the query of a URL."""
_QUERY = re.compile(r"[?&;#]([\w.%-]+)=([^&;#\s]+)")
_ARGUMENT = re.compile(r"(?:^|\s|--?)([A-Za-z][\w-]*)=(\S+)|(?:^|\s)--?([A-Za-z][\w-]*)\s+([^\s-]\S*)")
"""An option of a command (`--api-key=VALUE`, `--api-key VALUE`), or a part of a connection string."""
_AMBIGUOUS_KEY = re.compile(r"(?:^|_)(?:token|key)s?$")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}")
"""A run of letters and digits that is too long for a word."""
_HARMLESS = re.compile(
    r"""
      (?i: none | null | true | false | dummy | empty | unused | not-needed | -+ | x+ )?    # nothing, or a placeholder
    | \$ [\w{(] .* | < [^<>]* > | \{+ \w+ \}+ | \*+                         # a variable, or a placeholder
    | [A-Z_]+ | [A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+                               # the name of an environment variable
    | [~.]{0,2}/.*                                                          # a path
    """,
    re.VERBOSE,
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_NAMES: KeyPath = ("environment", "secrets")
"""The key whose values are names of environment variables."""


def secret_values(value: object, *, path: KeyPath = (), key: str = "") -> Iterator[KeyPath]:
    """Yields the path of each value that looks like a secret, and of each key that is one, in a configuration or in a
    part of it at `path`. `key` is the last name in the path; the items of a list have their index in the path, and the
    key of the list, or the option of a command before them (`--api-key`)."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            if _CREDENTIAL.search(str(name)):
                yield (*path, str(name))
            else:
                yield from secret_values(below, path=(*path, name), key=name)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            before = value[number - 1] if number else None
            option = before if isinstance(before, str) and before.startswith("-") else key
            yield from secret_values(below, path=(*path, str(number)), key="" if path == _NAMES else option)
    elif isinstance(value, str) and _is_secret(value, key=_words(key)):
        yield path
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1000 and _names_secret(_words(key)):
        yield path  # a password of digits


def _words(name: str) -> str:
    return _CAMEL.sub("_", str(name).strip("-")).replace("-", "_").lower()


def _names_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _NO_SECRET_NAME.search(name)


def _is_secret(value: str, *, key: str) -> bool:
    if _CREDENTIAL.search(value) or any(_is_harmful(*found) for found in _given(value)):
        return True
    random = bool(_RANDOM.search(value))
    if _HARMLESS.fullmatch(value) and not random:
        return False
    return _names_secret(key) or bool(random and _AMBIGUOUS_KEY.search(key))


def _given(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yields the names and values that are written in a text, and whether they are in the query of a URL."""
    if "://" in text:
        yield from ((_words(name), unquote(value), True) for name, value in _QUERY.findall(text))
    for name, value, option, argument in _ARGUMENT.findall(text):
        yield _words(name or option), (value or argument).strip("'\""), False


def _is_harmful(name: str, value: str, in_query: bool) -> bool:
    named = _names_secret(name) or (in_query and _SECRET_PARAMETER.search(name))
    return bool(named) and (not _HARMLESS.fullmatch(value) or bool(_RANDOM.search(value)))


def secret_message(path: KeyPath, *, origin: str) -> str:
    """Returns the error about a value that looks like a secret, without the value. `origin` says where it was set."""
    key = ".".join("<a secret in the place of a key>" if _CREDENTIAL.search(part) else part for part in path)
    advice = (
        "list the name of an environment variable there, and not its value"
        if path[:2] == _NAMES
        else "put it into an environment variable, and list the name of the variable in environment.secrets "
        "(docs/rewards.md); if it is not a secret, give the key another name"
    )
    return f"{key}{origin}: looks like a secret, but the configuration is written to files and shown; {advice}"
