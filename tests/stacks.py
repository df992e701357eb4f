"""Which functions of asyncrl are between a beginning and its effect: a reader of the one has to know them all."""

import sys
from types import FrameType


def functions_of_asyncrl(frame: FrameType | None = None) -> list[str]:
    """Returns the functions of asyncrl on a stack (default: on the caller's), from the outermost one. Functions that
    make lists and lambdas do not count."""
    names: list[str] = []
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_qualname
        if frame.f_globals["__name__"].startswith("asyncrl.") and not name.endswith(">"):
            names.insert(0, name)
        frame = frame.f_back
    return names
