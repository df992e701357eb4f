"""Fills the sections of named held-out sets up with the run's own keys, before a configuration is validated.

So a set names only what differs, and a dumped configuration, which has all keys, is read back as the same one.
"""

from collections.abc import Collection, Mapping
from typing import Any

from asyncrl.config.schema import DatasetSection, ScoringSection

_NOT_TAKEN_OVER: Mapping[str, Collection[str]] = {
    "dataset": ("path", "subset", "split", "columns", "options"),
    "name": ("options", "reward", "rewards"),
    "reward": ("rewards",),
    "rewards": ("reward",),
}
"""Keys that a held-out set does not take over from the run if it has its own value of another key."""


def with_whole_sets(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree of a configuration in which each set of `eval.sets` has the keys of `data` and `environment`
    that it does not set itself. Sections that are not mappings stay as they are: the validation refuses them."""
    sets = _below(_below(given, "eval"), "sets")
    if not isinstance(sets, Mapping):
        return dict(given)
    whole = {name: _completed(each, given) for name, each in sets.items()}
    return {**given, "eval": {**given["eval"], "sets": whole}}


def _below(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else None


def _completed(each: Any, given: Mapping[str, Any]) -> Any:
    """Returns a held-out set with the keys of the run's sections that it does not set itself."""
    found = {}
    for section, kind in (("data", DatasetSection), ("environment", ScoringSection)):
        own, of_run = _below(each, section), _below(given, section)
        if isinstance(own, Mapping) and isinstance(of_run, Mapping):
            left_out = {key for name in own for key in _NOT_TAKEN_OVER.get(name, ())}
            taken = {key: of_run[key] for key in kind.model_fields if key in of_run and key not in left_out}
            found[section] = taken | dict(own)
    return {**each, **found} if found else each
