"""Describes errors of code that users bring: rewards, environments, datasets, losses, advantages."""

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

MAX_TEXT_CHARS = 500
"""Longest text of an error that is passed on. A reward may raise an error that holds a whole document."""

_ASYNCRL = Path(__file__).parent
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def describe_error(error: BaseException, *, redact: Callable[[str], str] | None = None) -> str:
    """Type, text and place of an error, such as `KeyError: 'JUDGE_API_KEY' (tasks.py:30)`.

    The place is the innermost line in the user's own files. If there is none, it is the innermost line in an installed
    package. An error that was raised by asyncrl or by the standard library alone has no place. A path below the
    working directory is shown relative to it. A text of more than `MAX_TEXT_CHARS` characters is cut, after `redact`
    has replaced what it must not contain: a cut secret would not be recognised.
    """
    try:
        text = str(error)
    except Exception:  # an exception's own __str__ may raise; its type and place are still known
        text = "(its message cannot be shown)"
    if redact is not None:
        text = redact(text)
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    text = text.encode("utf-8", "replace").decode()  # lone surrogates can be neither written nor sent
    return f"{type(error).__name__}: {text}{_place(error)}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not _is_ours(frame.filename)]
    own = [frame for frame in foreign if not _INSTALLED & set(Path(frame.filename).parts)]
    if not foreign:
        return ""
    frame = (own or foreign)[-1]
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}:{frame.lineno})"


def _is_ours(filename: str) -> bool:
    """Whether a file belongs to asyncrl or to Python itself. `<frozen …>` and `<string>` have no file to look at."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    in_python = path.is_relative_to(_STANDARD_LIBRARY) and not _INSTALLED & set(path.parts)
    return in_python or path.is_relative_to(_ASYNCRL)
