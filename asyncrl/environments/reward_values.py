"""The values that reward functions return: a number for each completion, or a number for each component of its
reward."""

import asyncio
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sized

from asyncrl.environments.scoring_messages import (
    MAX_COMPONENT_NAME_CHARS,
    MAX_COMPONENTS,
    Components,
    RewardFailure,
)


class Unusable(Exception):
    """A call gave no usable reward."""

    def __init__(self, reason: RewardFailure, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def number(value: object, *, at: str) -> float:
    """Returns a reward as a finite float. `at` says in errors where the value stood. Raises Unusable for other values.

    A NumPy scalar, or an array or tensor with a single value and no dimension, counts as its value.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise Unusable(RewardFailure.WRONG_TYPE, f"returned {_kind(value)}{at}; {_wanted(value)}")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise Unusable(RewardFailure.NOT_FINITE, f"returned {reward}{at}; a reward is a finite number")
    return reward


def listed(value: object, count: int) -> list[object]:
    """Returns the rewards that a batched call returned for `count` completions as a list. Raises Unusable if `value` is
    not a list or the like with `count` entries."""
    if hasattr(value, "tolist"):  # a NumPy array or a torch tensor
        value = value.tolist()
    unordered = isinstance(value, str | bytes | Mapping | set)
    if unordered or not isinstance(value, Iterable) or not isinstance(value, Sized):
        raise Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned {_kind(value)} for {count} completions; a reward with the parameter `completions` returns a "
            "list with one number for each",
        )
    rewards = list(value)
    if len(rewards) != count:
        raise Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned {len(rewards)} rewards for {count} completions; return one number for each",
        )
    return rewards


def _kind(value: object) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def _wanted(value: object) -> str:
    if asyncio.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        return "declare the function with `async def`"
    if isinstance(value, list | tuple):
        return "name the second parameter `completions` to score a group in one call"
    return "a reward is a number"


def components(parts: Mapping[object, object], *, weights: Mapping[str, float], at: str) -> Components:
    """Returns the components of a reward, and their sum, in which each counts by its weight (1 if it has none). Raises
    Unusable if `parts` is empty, a name or a value cannot be used, or the sum is not finite."""
    parts = dict(parts)
    if not parts:
        raise Unusable(RewardFailure.WRONG_TYPE, f"returned an empty dict{at}; name each component of the reward")
    try:
        check_names(parts.keys())
    except Unusable as unusable:
        raise Unusable(unusable.reason, f"{unusable}{at}") from None
    found: dict[str, float] = {}
    for key, value in parts.items():
        name = str.__str__(key)  # the __str__ of a subclass of str may return another text
        found[name] = number(value, at=f" as {name!r}{at}")
    total = sum(weights.get(name, 1.0) * value for name, value in found.items())
    if not math.isfinite(total):
        raise Unusable(RewardFailure.NOT_FINITE, f"returned components whose sum is {total}{at}; it must be finite")
    return Components(total=total, parts=found)


def check_names(names: Collection[object]) -> None:
    """Raises Unusable if `names` cannot be the names of components: too many of them, or one that is not a text, is too
    long, or contains characters that cannot be shown."""
    if len(names) > MAX_COMPONENTS:
        raise Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned rewards that have {len(names)} different components; at most {MAX_COMPONENTS} are possible, "
            "because each of them is a curve: use fewer names, and the same ones for all completions",
        )
    for name in names:
        if not isinstance(name, str):
            fault = "is not a text"
        elif len(name) > MAX_COMPONENT_NAME_CHARS:
            fault = f"has {len(name)} characters, more than {MAX_COMPONENT_NAME_CHARS}"
        elif not name.isprintable():
            fault = "contains characters that cannot be shown"
        else:
            continue
        raise Unusable(
            RewardFailure.WRONG_TYPE,
            f"returned a dict with the key {ascii(name)[:MAX_COMPONENT_NAME_CHARS]}, which {fault}; name components by "
            "short texts",
        )
