"""Reads and writes plain YAML: text, numbers, lists and mappings. A key that stands twice in a mapping is an error.

Two things differ from PyYAML's safe loader, which reads YAML 1.1: `1e-3` is a number (PyYAML reads text), and
`2026-01-31` is text (PyYAML reads a date). `parse_yaml` reads the output of `dump_yaml` back as the same data.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError

_FLOAT_TAG = "tag:yaml.org,2002:float"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_MERGE_TAG = "tag:yaml.org,2002:merge"
_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses repeated keys and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(key_node, f"the key {key!r} is not text; put it in quotes")
            if key in seen:
                raise _refusal(key_node, f"the key {key!r} stands twice in this mapping; remove one of the two")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if tag != _TIMESTAMP_TAG]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Safe dumper that puts text in quotes only if the loader would otherwise read it as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these Unicode line breaks unescaped in single quotes, and reads them back as spaces. Double
        # quotes make it write escapes.
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
_Dumper.add_representer(str, _Dumper.represent_text)


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def parse_yaml(text: str, *, source: str, fix: str = "") -> object:
    """Returns the data of one YAML document; None for an empty document.

    Raises ConfigError with `source`, line and column. Data that JSON cannot express (sets, bytes, cycles) is refused
    too. `fix` is appended to the error if the text is not valid YAML; it says what the user can do.
    """
    loader = None
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = error.problem or error.context or "not YAML"
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            problem = f"not YAML ({problem}){fix}"
        raise ConfigError(f"{place}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not YAML ({error}){fix}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return plain(data, source=source)


def plain(data: object, *, source: str) -> Any:
    """Returns a deep copy of `data`, with paths as text. Raises ConfigError for data that JSON cannot express (sets,
    bytes, cycles)."""
    try:
        return json.loads(json.dumps(data, default=lambda value: str(Path(value))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: a config may hold only text, numbers, lists and mappings ({error}); replace the value"
        ) from None


def dump_yaml(data: object) -> str:
    """Returns plain data as YAML text. Keys keep their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
