"""The tool and the reward of the example agents in this folder."""

import json
import operator
import re
from typing import Any

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
"""The calculator, as the tiny model of `calculator.yaml` knows it."""
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


def called(arguments: str) -> str:
    """Returns what the calculator answers to a call of the model, which may have written wrong arguments."""
    try:
        return calculated(str(json.loads(arguments)["expression"]))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def reward(text: str, answer: str) -> float:
    """Returns 1 if the last number of a text is the answer, and 0 otherwise."""
    numbers = re.findall(r"-?\d+", text)
    return float(numbers[-1:] == [answer])
