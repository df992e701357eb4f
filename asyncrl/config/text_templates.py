"""The Jinja environment of pages and files in plain text. A name that is missing is an error."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.config.load import dump_yaml


def _scalar(value: str) -> str:
    """Returns a string as a YAML scalar, in quotes if YAML needs them."""
    return dump_yaml({"_": value}).partition(": ")[2].strip()


TEMPLATES = Environment(
    loader=PackageLoader("asyncrl", ""),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["scalar"] = _scalar
