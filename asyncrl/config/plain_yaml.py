"""Reads and writes plain YAML: text, numbers, lists and mappings. A key that stands twice in a mapping is an error.

Scalars are read by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2, section 10.3.2): `on`, `off`, `yes` and
`no` are text, and so are dates, `1:30` and `1_000`. `1e3` is a number, and `010` is ten. PyYAML reads YAML 1.1, so this
module replaces its rules, and keeps its merge key `<<`. `parse_yaml` reads the output of `dump_yaml` back as the same
data.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_TAG}merge"
_CORE_SCHEMA = (
    # (tag, first characters, pattern of the whole scalar)
    ("null", ["~", "n", "N", ""], r"~|null|Null|NULL|"),
    ("bool", list("tTfF"), r"true|True|TRUE|false|False|FALSE"),
    ("int", list("-+0123456789"), r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    (
        "float",
        list("-+.0123456789"),
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
    ("merge", ["<"], "<<"),
)

MOST_NODES, MOST_DEPTH, MOST_CHARACTERS, NODE_CHARACTERS = 10_000, 50, 2**20, 8
"""Limits of a document: its values, the depth of its lists and mappings, and its characters where each alias is written
out. A value counts as `NODE_CHARACTERS` more. A configuration with all of its keys has 500 values and a depth of 5."""


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses repeated keys, keys that are not text, and documents that are much larger than a
    configuration, also those that become large by their aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes, self._depth = self._nodes + 1, self._depth + 1
        if self._nodes > MOST_NODES:
            raise _too_large(self.get_mark(), f"has more than {MOST_NODES:,} values")
        if self._depth > MOST_DEPTH:
            raise _too_large(self.get_mark(), f"is nested more than {MOST_DEPTH} levels deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_expanded(node, {})
        return node

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

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)


_Loader.yaml_implicit_resolvers = {}
for _name, _first, _pattern in _CORE_SCHEMA:
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_core_int)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that puts text in quotes only if YAML 1.1 or YAML 1.2 would otherwise read it as another type."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes these Unicode line breaks unescaped in single quotes, and reads them back as spaces. Double
        # quotes make it write escapes.
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _name, _first, _pattern in _CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)
_Dumper.add_representer(str, _Dumper.represent_text)


def _check_expanded(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Returns the size and the depth of a node in which each alias is replaced by its node. `known` has those of nodes
    before it; those of a node that is not finished are 0. Raises MarkedYAMLError if one of them is too large."""
    if (found := known.get(id(node))) is not None:
        if found == (0, 0):
            raise _refusal(
                node,
                "a config may hold only text, numbers, lists and mappings; an alias in this value stands for itself",
            )
        return found
    known[id(node)] = 0, 0
    if isinstance(node, yaml.ScalarNode):
        size, depth = NODE_CHARACTERS + len(node.value), 1
    else:
        pairs = isinstance(node, yaml.MappingNode)
        below = [_check_expanded(each, known) for value in node.value for each in (value if pairs else (value,))]
        size = NODE_CHARACTERS + sum(size for size, _ in below)
        depth = 1 + max((depth for _, depth in below), default=0)
    if size > MOST_CHARACTERS:
        raise _too_large(node.start_mark, f"has more than {MOST_CHARACTERS:,} characters with its aliases written out")
    if depth > MOST_DEPTH:
        raise _too_large(node.start_mark, f"is nested more than {MOST_DEPTH} levels deep by its aliases")
    known[id(node)] = size, depth
    return size, depth


def _too_large(mark: yaml.Mark, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(
        problem=f"the configuration {problem}; no configuration needs so much", problem_mark=mark
    )


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
