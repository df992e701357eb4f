"""The YAML that configurations are written in: plain data only, no key twice, numbers as people write them.

Two things differ from PyYAML's safe loader, which reads YAML 1.1: `1e-3` is a number (there it is text), and
`2026-01-31` is text (there it is a date). What `dump_yaml` writes, `parse_yaml` reads back as the same data.
"""

import re
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
                raise _refusal(key_node, f"the key {key!r} is there twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes exactly the text that the loader would read as something else."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # PyYAML writes Unicode's line breaks raw between single quotes, and folds them into spaces when it reads them.
        style = '"' if any(line_break in text for line_break in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def _refusal(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _adopt_resolvers(cls: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    cls.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
        for first, resolvers in cls.yaml_implicit_resolvers.items()
    }
    cls.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


_adopt_resolvers(_Loader)
_adopt_resolvers(_Dumper)


def parse_yaml(text: str, *, source: str, mend: str = "") -> object:
    """Data of one YAML document; None for an empty one. ConfigError names `source`, line and column.

    `mend` is what a writer may do whose text is no YAML at all.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        problem = error.problem or error.context or "not YAML"
        if isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError):
            problem = f"not YAML ({problem}){mend}"
        raise ConfigError(f"{place}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not YAML ({error}){mend}") from None
    finally:
        if loader is not None:
            loader.dispose()


def dump_yaml(data: object) -> str:
    """YAML text of plain data, keys in their own order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
