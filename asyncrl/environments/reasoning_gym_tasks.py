"""Names of reasoning-gym's tasks, read from its source: to import the library takes seconds, to read it a tenth of one.

Every task is registered at the top level of a module, `register_dataset("name", ...)` or with a constant of that
module in the name's place.
"""

import importlib.util
import re
from pathlib import Path

_REGISTERED = re.compile(r"""^register_dataset\(\s*(?:["'](?P<name>\w+)["']|(?P<constant>\w+))""", re.MULTILINE)


def task_names() -> frozenset[str]:
    """The tasks of the library that is installed; none when it is not, or is not written as above."""
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
