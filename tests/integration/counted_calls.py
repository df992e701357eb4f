"""Counts the bytes that pass through a driver's calls."""

import pickle
from typing import Any


class Counted:
    """Counts the bytes of the arguments and results of the driver's calls."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.bytes = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        answer = self._function(*args, **options)
        self.bytes += len(pickle.dumps((args, options, answer)))
        return answer
