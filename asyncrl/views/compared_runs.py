"""Reads the runs of a comparison, and puts runs that differ only in some settings, such as their seed, into groups."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.load import REPLACED_WHOLE, flat_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import RunInfo, Summary
from asyncrl.views.charts import DASHES
from asyncrl.views.report import RunRecords, read_run
from asyncrl.views.short_values import as_text, digest, is_cut, short_text

RUN_COLORS = ("blue", "amber", "green", "violet", "red", "teal", "rose", "gray")
OWN_KEYS = ("run.name", "run.dir", "run.mirror", "metrics.learner_port", "metrics.project", "ray.address")
"""Settings that name a run, its directories and addresses, or its ports. They do not change how a run trains, so they
are not compared."""
UNKNOWN = "–"
_MISSING = object()
LONGEST_LABEL = 60
"""Largest number of characters of a group's label. If its settings need more, the label has the first settings and a
hash of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One of the runs of a comparison, with its name on the page. `seed` has its values of the settings by which the
    runs are grouped, in their order, without `OWN_KEYS`. `tokens_at` has the number of tokens trained up to each
    version."""

    label: str
    seed: tuple[str, ...]
    records: RunRecords
    summary: Summary
    tokens_at: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that differ only in the settings of `--by`. Without `--by`, each group has one run. A group has the same
    colour and the same dash pattern in all charts. `settings` are the settings in which the group differs from other
    groups, each as `key=value` with the dotted key and the full value. `in_full` is whether the label shows them all in
    full."""

    label: str
    in_full: bool
    settings: Sequence[str]
    color: str
    dash: int
    runs: Sequence[Compared]

    @property
    def note(self) -> str | None:
        """A warning if the runs ended after different numbers of steps."""
        ends = [run.summary.steps for run in self.runs]
        if len({*ends}) == 1:
            return None
        of_runs = ", ".join(f"{run.label} {run.summary.steps:,}" for run in self.runs)
        return (
            f"{self.label}: its runs have different numbers of steps ({of_runs}). Its numbers are of the end of each "
            "run, and its curves end with the shortest one"
        )


class Row(NamedTuple):
    """A line of a table: a name, and a text for each column."""

    name: str
    values: Sequence[str]


def read_compared(
    paths: Sequence[Path],
    *,
    info_of: Callable[[Path], RunInfo | None],
    by: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> list[Group]:
    """Returns the runs of these run directories in groups, in the order of their first runs. Runs that differ only in
    the settings `by` (dotted keys, or sections) are a group. Without `by`, each run is a group.

    `info_of` returns the content of run.json for a directory. For a run that was killed it has the state `died`, while
    the file still says `running`.

    `names` are the words with which the user named the directories, by default their paths. They differ for the URL of
    a mirror, whose path is that of a temporary directory.

    Raises ConfigError if there are fewer than two directories, if a directory or a name is given twice, or if no run
    has a setting of `by`. Raises RunError if a directory is not a run directory, or if its run has trained no step.
    """
    if len(paths) < 2:
        raise ConfigError(f"asyncrl compare: got {len(paths)} run, but it compares two or more; name other runs")
    resolved, names = [path.resolve() for path in paths], names or [str(path) for path in paths]
    seen: set[Path | str] = set()
    for real, name in zip(resolved, names, strict=True):
        if seen & {real, name.rstrip("/")}:
            raise ConfigError(f"asyncrl compare: {name} is named twice; name each run once")
        seen |= {real, name.rstrip("/")}
    unique = len({path.name for path in resolved}) == len(paths)
    runs = [
        _read(path, name=name, label=real.name if unique else name, by=by, info=info_of(path))
        for path, real, name in zip(paths, resolved, names, strict=True)
    ]
    _check_by(runs, by)
    return list(_groups(runs, by))


def _read(path: Path, *, name: str, label: str, by: Sequence[str], info: RunInfo | None) -> Compared:
    records = read_run(path, info=info)
    if (totals := records.totals) is None:
        raise RunError(f"{name} has no trained step to compare; leave this run out, or wait for its first step")
    settings = flat_config(records.config)
    of_by = [key for key in settings if key not in OWN_KEYS and _is_of(key, by)]
    seed = tuple(f"{key}={as_text(settings[key])}" for key in of_by)
    tokens, tokens_at = 0, {records.steps[0].step: 0}
    for record in records.steps:
        tokens += record.trained_tokens
        tokens_at[record.version_after] = tokens
    return Compared(label=label, seed=seed, records=records, summary=totals, tokens_at=tokens_at)


def _check_by(runs: Sequence[Compared], by: Sequence[str]) -> None:
    keys = dict.fromkeys(key for run in runs for key in flat_config(run.records.config))
    for each in by:
        if not any(_is_of(key, [each]) for key in keys):
            raise ConfigError(
                f"--by {each}: no run has such a setting; name the dotted key of a setting, such as run.seed"
            )


def _is_of(key: str, names: Sequence[str]) -> bool:
    """Returns whether a dotted key is one of `names`, or is in a section of that name."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def _groups(runs: Sequence[Compared], by: Sequence[str]) -> Iterator[Group]:
    together: dict[object, list[Compared]] = {}
    for place, run in enumerate(runs):
        rest = [(key, as_text(value)) for key, value in flat_config(run.records.config).items()]
        same = tuple(pair for pair in rest if pair[0] not in OWN_KEYS and not _is_of(pair[0], by))
        together.setdefault(same if by else place, []).append(run)
    found = list(together.values())
    of_groups = _differing([members[0].records.config for members in found], by=by)
    for index, (members, settings) in enumerate(zip(found, of_groups, strict=True)):
        first = members[0].label
        label = first if len(members) == 1 else f"{first} and {len(members) - 1} more"
        in_full = True
        if by and settings:
            label, in_full = _label(settings)
        yield Group(
            label=label,
            in_full=in_full,
            settings=[f"{key}={as_text(value)}" for key, value in settings.items()],
            color=RUN_COLORS[index % len(RUN_COLORS)],
            dash=index // len(RUN_COLORS) % (DASHES + 1),
            runs=members,
        )


def named(groups: Sequence[Group], labels: Sequence[str]) -> list[Group]:
    """Returns the groups with the labels that the user gives them. Raises ConfigError if these are not one for each
    group."""
    if len({*labels}) < len(labels) or len(labels) != len(groups):
        raise ConfigError(
            f"--label: {len({*labels})} different labels for {len(groups)} groups; give one for each group, in this "
            f"order: {'; '.join(group.label for group in groups)}"
        )
    return [replace(group, label=label, in_full=False) for group, label in zip(groups, labels, strict=True)]


def _label(settings: Mapping[str, object]) -> tuple[str, bool]:
    """Returns the settings as a label of at most `LONGEST_LABEL` characters, and whether it shows them in full."""
    words = [f"{key.rpartition('.')[2]}={short_text(key, value)}" for key, value in settings.items()]
    label = ", ".join(words)
    if len(label) <= LONGEST_LABEL:
        return label, not any(is_cut(value) for value in settings.values())
    end = f"… {digest(settings)}"
    while words and len(", ".join([*words, end])) > LONGEST_LABEL:
        words.pop()
    return ", ".join([*words, end]), False


def _differing(configs: Sequence[Config], *, by: Sequence[str]) -> list[dict[str, object]]:
    """Returns the settings in which the configurations differ, by dotted key, for each configuration.

    If some configuration does not have a setting, such as an option of a user's own loss, the innermost section or
    mapping that all configurations have stands for it: `algorithm.loss` is `aipo` in one, and a mapping in another. An
    objective stands for its options if the text of one is cut, so that its hash is that in the names of the runs of a
    sweep.
    """
    trees = [config.model_dump(mode="json") for config in configs]
    keys = dict.fromkeys(_in_all(row.name, trees) for row in differences(configs, but=by))
    for objective in map(".".join, REPLACED_WHOLE):
        inside = [key for key in keys if _is_of(key, [objective])]
        if any(is_cut(_at(tree, key)) for key in inside for tree in trees):
            keys = dict.fromkeys(objective if key in inside else key for key in keys)
    outer = [key for key in keys if not any(other != key and _is_of(key, [other]) for other in keys)]
    return [{key: _at(tree, key) for key in outer} for tree in trees]


def _in_all(key: str, trees: Sequence[object]) -> str:
    while any(_at(tree, key) is _MISSING for tree in trees):
        key = key.rpartition(".")[0]
    return key


def _at(tree: object, key: str) -> object:
    """Returns the value of a dotted key in a tree of mappings; `_MISSING` without one."""
    for name in key.split("."):
        tree = tree.get(name, _MISSING) if isinstance(tree, Mapping) else _MISSING
    return tree


def differences(configs: Sequence[Config], *, but: Sequence[str] = ()) -> list[Row]:
    """Returns the settings in which the configurations differ, each with its value in each configuration. `OWN_KEYS`
    and settings that `but` names are left out. Dotted keys of the first configuration come first, in the order of the
    schema."""
    flat = [flat_config(config) for config in configs]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, _MISSING) for settings in flat]
        if key not in OWN_KEYS and not _is_of(key, but) and any(value != values[0] for value in values):
            rows.append(Row(key, [UNKNOWN if value is _MISSING else as_text(value) for value in values]))
    return rows
