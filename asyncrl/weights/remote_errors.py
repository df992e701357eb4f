"""A WeightError on its way out of vLLM's processes, which pass on nothing of an exception but its text."""

import re

from asyncrl import errors
from asyncrl.errors import WeightError

_BY_NAME = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WeightError)
}
_MARKED = re.compile(rf"asyncrl\.({'|'.join(_BY_NAME)}): (.*)", re.DOTALL)


def as_text(error: WeightError) -> str:
    """The error's type and message, for `from_text`."""
    return f"asyncrl.{type(error).__name__}: {error}"


def from_text(text: str) -> WeightError | None:
    """The error in a text that `as_text` made and others have wrapped; None when there is none.

    >>> from_text("Call to collective_rpc method failed: asyncrl.ManifestMismatch: a is missing")
    ManifestMismatch('a is missing')
    >>> from_text("out of memory")
    """
    found = _MARKED.search(text)
    return _BY_NAME[found[1]](found[2]) if found else None
