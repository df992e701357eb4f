"""Carries a WeightError out of vLLM's processes. vLLM passes on only the text of an exception."""

import re

from asyncrl import errors
from asyncrl.errors import WeightError

_BY_NAME = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WeightError)
}
_MARKED = re.compile(rf"asyncrl\.({'|'.join(_BY_NAME)}): (.*)", re.DOTALL)


def as_text(error: WeightError) -> str:
    """Returns the error's type and message as a text for `from_text`."""
    return f"asyncrl.{type(error).__name__}: {error}"


def from_text(text: str) -> WeightError | None:
    """Finds the error that `as_text` has written into `text`, even inside other text. Returns None if there is none.

    >>> from_text("Call to collective_rpc method failed: asyncrl.ManifestMismatch: a is missing")
    ManifestMismatch('a is missing')
    >>> from_text("out of memory")
    """
    found = _MARKED.search(text)
    return _BY_NAME[found[1]](found[2]) if found else None
