"""Finds the names of reasoning-gym's tasks in its source, because importing the library takes seconds and reading its
source a tenth of one.

Every task is registered at the top level of a module, by `register_dataset("name", ...)`. In place of the name there
may be a constant of the same module.
"""

import functools
import importlib.util
import re
from pathlib import Path

_REGISTERED = re.compile(r"""^register_dataset\(\s*(?:["'](?P<name>\w+)["']|(?P<constant>\w+))""", re.MULTILINE)


@functools.cache
def task_names() -> frozenset[str]:
    """Returns the task names of the installed library; an empty set if it is not installed, or registers its tasks in
    another way. The source is read once in a process."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = spec.submodule_search_locations if spec is not None else None
    sources = [file.read_text(encoding="utf-8") for folder in folders or () for file in Path(folder).rglob("*.py")]
    return frozenset(name for source in sources for name in _registered(source))


def _registered(source: str) -> list[str]:
    names: list[str] = []
    for call in _REGISTERED.finditer(source):
        if call["name"]:
            names.append(call["name"])
        elif constant := re.search(rf"""^{call["constant"]}\s*=\s*["'](\w+)["']""", source, re.MULTILINE):
            names.append(constant[1])
    return names
