"""The tool and the reward of the example agents in this folder."""

import operator
import re

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculated(expression: str) -> str:
    """Returns the value of two whole numbers with `+`, `-` or `*` between them, or a message that the model can read.

    >>> calculated("6 * 7")
    '42'
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", expression)
    if found is None:
        return "error: write two numbers with + - or * between them"
    first, operation, second = found.groups()
    return str(_OPERATIONS[operation](int(first), int(second)))


def reward(text: str, answer: str) -> float:
    """Returns 1 if the last number of a text is the answer, and 0 otherwise."""
    numbers = re.findall(r"-?\d+", text)
    return float(numbers[-1:] == [answer])
