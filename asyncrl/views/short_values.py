"""Short texts for the values of settings, for the labels of compared groups and for the names of the runs of a sweep.

A value with a short text is shown in full. A longer one is shown as its name, its kind or its first characters, and a
hash: `axes-1a2b3c`. Equal values have equal hashes, in each session and on each machine, so the name of a run and the
label of its group have the same hash.
"""

import hashlib
import json
import re
from collections.abc import Mapping

LONGEST_VALUE = 32
"""Largest number of characters of a value that is shown in full."""
LONGEST_NAME = 64
"""Largest number of characters of `run.name`."""
_LONGEST_STEM = 24
_LONGEST_COMBINATION = 40  # with a hash and the longest seed, a name has 63 characters


def as_text(value: object) -> str:
    """Returns the value of a setting as text."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def digest(value: object) -> str:
    """Returns a hash of plain data as 6 hexadecimal digits. The order of the keys of a mapping does not count."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=3).hexdigest()


def short_text(key: str, value: object) -> str:
    """Returns the value of the setting `key` in at most `LONGEST_VALUE` characters.

    >>> short_text("algorithm.loss", {"name": "mine.snis:SNIS", "cap": 1.5})
    'mine.snis:SNIS cap=1.5'
    >>> short_text("algorithm.loss", {"surrogate": {"kind": "linear"}, "anchor": "behaviour"})
    'axes-fc5e09'
    """
    return f"{_stem(key, value)}-{digest(value)}" if is_cut(value) else _words(value)


def is_cut(value: object) -> bool:
    """Returns whether `short_text` shows a value by a hash."""
    return len(_words(value)) > LONGEST_VALUE


def _words(value: object) -> str:
    if not isinstance(value, Mapping) or not value:
        return as_text(value)
    name = [str(value["name"])] if "name" in value else []
    return " ".join([*name, *(f"{key}={as_text(each)}" for key, each in value.items() if key != "name")])


def run_name(values: Mapping[str, object], *, seed: int | None) -> str:
    """Returns a valid `run.name` for a run with these values, by dotted key, and with this seed if it is not None.

    A value that is long, is a list or a mapping, or has other characters than `run.name` may have, gets a hash. A name
    that is still too long is cut, and ends with a hash of all values and with the seed.

    >>> run_name({"algorithm.loss": "grpo", "staleness.max_versions": 4}, seed=1)
    'loss-grpo_max_versions-4_seed-1'
    """
    words = "_".join(f"{_allowed(key.rpartition('.')[2])}-{_word(key, value)}" for key, value in values.items())
    end = [] if seed is None else [f"seed-{seed}"]
    name = "_".join([*filter(None, [words]), *end])
    if len(name) <= LONGEST_NAME:
        return name
    return "_".join([f"{words[:_LONGEST_COMBINATION]}-{digest(values)}", *end])


def _word(key: str, value: object) -> str:
    """Returns a value as a part of the name of a run."""
    if value == {}:
        return "none"
    if not isinstance(value, Mapping | list) and re.fullmatch(rf"[a-zA-Z0-9._-]{{1,{LONGEST_VALUE}}}", str(value)):
        return str(value)
    return f"{_allowed(_stem(key, value))}-{digest(value)}"


def _stem(key: str, value: object) -> str:
    """Returns the readable part of a value that is not shown in full."""
    if isinstance(value, Mapping):
        text = str(value.get("name", "axes" if key.startswith("algorithm.") else "settings"))
    else:
        text = as_text(value)
    return text[:_LONGEST_STEM]


def _allowed(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", text).strip("._-") or "value"
