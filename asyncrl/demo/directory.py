"""The directory of a tiny model: how it is recognised, and where one may be built. Imports no large library."""

from collections.abc import Mapping
from pathlib import Path

from asyncrl.config.schema import Config, KeyPath

TINY_RECIPE = "tiny.json"
"""Name of the file that marks a directory as a tiny model that asyncrl has built."""


def is_tiny(path: Path) -> bool:
    """Returns True if the directory is marked as a tiny model of asyncrl."""
    return (path / TINY_RECIPE).is_file()


def why_not_built(config: Config, origins: Mapping[KeyPath, str]) -> str | None:
    """Returns advice for the user, and the reason why a run builds no tiny model at `model.path`, which does not exist.
    None if a run builds one there.

    `origins` says where each key was set (`config_origins`). A tiny model is built if the file or the command line that
    sets `model.path` also sets a key of `model.tiny`, or if `model.path` is not set: its default is the path of a tiny
    model.
    """
    if Path(config.model.path).resolve().is_relative_to(config.run.dir.resolve()):
        return (
            "name an existing directory, or a directory outside run.dir (tiny models are not built in run.dir = "
            f"{config.run.dir})"
        )
    where = origins.get(("model", "path"))
    if where is None or any(key[:2] == ("model", "tiny") and origin == where for key, origin in origins.items()):
        return None
    return (
        "name an existing directory, or set model.tiny={} in the same place as model.path to build a tiny model (no "
        f"tiny model is built there, because model.path is set {where} and model.tiny is not)"
    )
