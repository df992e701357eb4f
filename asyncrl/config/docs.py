"""Generates docs/configuration.md from the schema, so that the page always agrees with the code.

`python -m asyncrl.config.docs` writes the page. With `--check` it writes nothing, and exits with status 1 if the file
on disk differs from the generated page.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.load import is_own
from asyncrl.config.schema import sections
from asyncrl.config.text_templates import TEMPLATES

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"

_TYPE_NAMES = {"integer": "integer", "number": "number", "boolean": "true or false", "object": "mapping"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def page() -> str:
    """Returns the text of the page, made from the template `configuration.md.j2`."""
    found = dict(sections())
    shown = []
    for path, section in found.items():
        if not path:
            continue
        key = ".".join(path)
        is_optional = found[path[:-1]].model_fields[path[-1]].default is None
        complete = not any(field.is_required() for field in section.model_fields.values())
        defaults = f"; `{key}: {{}}` sets the section with the defaults below" if complete else ""
        unset = f" Unset by default{defaults}." if is_optional else ""
        schema = section.model_json_schema()
        fields = schema["properties"].items()
        rows = [
            _row(f"{key}.{name}", field) for name, field in fields if (*path, name) not in found or _has_many(field)
        ]
        shown.append({"key": key, "meaning": schema["description"] + unset, "rows": rows})
    return TEMPLATES.get_template("config/configuration.md.j2").render(sections=shown)


def main(arguments: Sequence[str]) -> int:
    return write_page(PAGE, page(), arguments, module="asyncrl.config.docs")


def write_page(path: Path, text: str, arguments: Sequence[str], *, module: str) -> int:
    """Writes a generated page, or with `--check` compares it with the file on disk. Returns the exit status.

    `arguments` are those of `python -m module`.
    """
    if list(arguments) not in ([], ["--check"]):
        print(f"usage: python -m {module} [--check]", file=sys.stderr)
        return 2
    if not arguments:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return 0
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"{path} is out of date; run: python -m {module}", file=sys.stderr)
        return 1
    return 0


def _row(key: str, field: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the cells of a key's row."""
    meaning = " ".join(field["description"].split())
    default = "required"
    if "default" in field:
        default = "unset" if field["default"] is None else f"`{json.dumps(field['default'], ensure_ascii=False)}`"
    return (f"`{key}`{' ★' if is_own(key) else ''}", _type(field), default, meaning)


def _has_many(field: Mapping[str, Any]) -> bool:
    """Returns whether a field of the JSON schema is a list or a mapping, so that it has a row of its own beside the
    table of the sections in it."""
    return field.get("type") in ("array", "object")


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return "mappings with the keys below"
    if "anyOf" in field:
        return " or ".join("unset" if option == {"type": "null"} else _type(option) for option in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{option}`" for option in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field["type"] == "string":
        return "path" if field.get("format") == "path" else "text"
    if field["type"] == "array":
        items = field.get("prefixItems")
        return f"list of {len(items)} × {_type(items[0])}" if items else f"list of {_type(field['items'])}"
    bounds = ", ".join(f"{sign} {field[bound]:.10g}" for bound, sign in _BOUNDS.items() if bound in field)
    return f"{_TYPE_NAMES[field['type']]} {bounds}".rstrip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
