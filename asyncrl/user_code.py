"""Describes errors, above all those that the user's own code raises: rewards, environments, datasets, losses,
advantages. Also makes the user's modules known to a process."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path

from asyncrl.shown_text import redacted

MAX_TEXT_CHARS = 500
"""Longest error text that is shown, in characters. An error of a user's reward may contain a whole document."""

USER_FOLDERS = "ASYNCRL_USER_FOLDERS"
"""Environment variable with the folders of the user's modules (`config.import_path.search_folders`), for the processes
that a command starts."""

_ASYNCRL = Path(__file__).parent
_RECIPES = _ASYNCRL / "recipes"
"""Folder of the recipes in an installed package. Their modules are examples of a user's own code, and count as a user's
code, not as asyncrl's."""
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def find_user_modules() -> None:
    """Appends the folders of `USER_FOLDERS` to `sys.path`, so that this process finds the user's modules. All other
    folders come first."""
    folders = filter(None, os.environ.get(USER_FOLDERS, "").split(os.pathsep))
    sys.path += [folder for folder in folders if folder not in sys.path]


def describe_error(error: BaseException) -> str:
    """Returns the type, text and place of an error, for example `KeyError: 'JUDGE_API_KEY' (tasks.py:30)`.

    The place is the innermost line of the traceback in the user's own files. If there is none, it is the innermost line
    in an installed package. If only asyncrl or the standard library raised the error, there is no place. A path below
    the working directory is shown relative to it.

    The text shows no secret of the run, and at most `MAX_TEXT_CHARS` characters.
    """
    return f"{type_and_text(error)}{_place(error)}"


def type_and_text(error: BaseException) -> str:
    """Returns the type and the text of an error, as in `describe_error`, but not the file and the line: text that the
    model reads must not name the user's files."""
    try:
        text = str(error)
    except Exception:  # an exception's own __str__ may raise; its type and place can still be shown
        text = "(its message cannot be shown)"
    text = redacted(text)  # before it is cut: half of a secret would not be recognised
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]}…"
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be written to a file or sent
    return f"{type(error).__name__}: {text}"


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
    """Returns True if the file belongs to asyncrl, but not to its recipes, which count as user code, or to Python
    itself. Names such as `<frozen …>` or `<string>` are not files and count as Python's."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    in_python = path.is_relative_to(_STANDARD_LIBRARY) and not _INSTALLED & set(path.parts)
    return in_python or (path.is_relative_to(_ASYNCRL) and not path.is_relative_to(_RECIPES))
