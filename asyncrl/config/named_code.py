"""Lists the code, the programs, the servers and the secrets that a configuration names. The configuration in a run
directory may come from elsewhere, so commands that read it use none of them without the option --trust.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from asyncrl.config.import_path import IMPORT_PATH
from asyncrl.config.schema import Config

_SECTIONS = ("data", "environment", "algorithm", "eval", "learner.optimizer", "critic.optimizer")
_NAMING = ("command", "python", "secrets", "url")
"""Names of settings, and of options of environments, whose values are programs (`command`, `python`), environment
variables that code and servers get (`secrets`), or addresses of servers (`url`). Servers get the prompts and the
completions, and prompts may come from any file of this user that `data.path` names."""
_CODE_OF_ENGINE = re.compile(r"\w\.[^\W\d]|/")
"""A module, a file or a folder in `generator.engine_args`. vLLM imports some of them, as
`compilation_config.backend`."""


def named_code(config: Config, *, sections: Collection[str] = ()) -> dict[str, str]:
    """Returns the import paths, the programs, the servers and the secrets that the configuration names, by dotted key.
    One of the servers is the storage of `run.mirror`, which gets the whole run. With `sections`, only these sections,
    given by dotted key, are searched."""
    tree = config.model_dump(mode="json")
    found = dict[str, str]()
    for name in sections or _SECTIONS:
        below: Any = tree
        for part in name.split("."):
            below = None if below is None else below[part]
        found |= _of(below, key=name)
    if not sections and config.run.mirror is not None:
        found["run.mirror"] = config.run.mirror
    of_engine = {} if sections else dict(_texts(config.generator.engine_args, key="generator.engine_args"))
    return found | {key: value for key, value in of_engine.items() if _CODE_OF_ENGINE.search(value)}


def untrusted(config: Config, *, sections: Collection[str] = ()) -> str:
    """Returns the message with which a command without --trust refuses the configuration of a run, because it names
    code, programs, servers or secrets (`named_code`); "" if it names none."""
    named = [f"{key} = {value}" for key, value in named_code(config, sections=sections).items()]
    if not named:
        return ""
    return (
        "config.yaml of the run names code, programs, servers or secrets, which would be used here: "
        f"{', '.join(named)}; if you trust it, pass --trust"
    )


def _of(value: object, *, key: str) -> Iterator[tuple[str, str]]:
    for place, text in _texts(value, key=key):
        if place.rpartition(".")[2] in _NAMING or IMPORT_PATH.fullmatch(text):
            yield place, text


def _texts(value: object, *, key: str) -> Iterator[tuple[str, str]]:
    """Yields the dotted key and the value of each text at any depth of a setting. A list under a key of `_NAMING`, such
    as the words of a command, is yielded as one text."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            yield from _texts(below, key=f"{key}.{name}")
    elif isinstance(value, list) and key.rpartition(".")[2] not in _NAMING:
        for number, below in enumerate(value):
            yield from _texts(below, key=f"{key}.{number}")
    elif value and isinstance(value, str | list):
        yield key, " ".join(map(str, value)) if isinstance(value, list) else value
