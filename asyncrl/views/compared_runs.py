"""Reads the runs of a comparison, and puts runs that differ only in some settings, such as their seed, into groups."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.load import flat_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import RunInfo, Summary
from asyncrl.views.charts import DASHES
from asyncrl.views.report import RunRecords, read_run

RUN_COLORS = ("blue", "amber", "green", "violet", "red", "teal", "rose", "gray")
OWN_KEYS = ("run.name", "run.dir")
"""Settings that name a run. They always differ, so they are not compared."""
UNKNOWN = "–"
LONGEST_LABEL = 60
"""Characters of a group's settings that are used as its name. A group with more has the name of its first run."""


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
    """Runs that differ only in the settings of `--by`; a single run without them. It keeps its colour and the dash
    pattern of its lines in all charts."""

    label: str
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

    `names` are the words with which the user named the directories, by default their paths: for the URL of a mirror,
    the path is that of a temporary directory.

    Raises ConfigError if there are not two different directories and names, or if no run has a setting of `by`. Raises
    RunError if one is not a run directory, or if its run has trained no step.
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
    rows = differences([members[0].records.config for members in found], but=by)
    for index, members in enumerate(found):
        settings = ", ".join(f"{row.name.rpartition('.')[2]}={row.values[index]}" for row in rows)
        named = (
            settings
            if settings and len(settings) <= LONGEST_LABEL
            else f"{members[0].label} and {len(members) - 1} more"
        )
        yield Group(
            label=named if len(members) > 1 else members[0].label,
            color=RUN_COLORS[index % len(RUN_COLORS)],
            dash=index // len(RUN_COLORS) % (DASHES + 1),
            runs=members,
        )


def differences(configs: Sequence[Config], *, but: Sequence[str] = ()) -> list[Row]:
    """Returns the settings in which the configurations differ, each with its value in each of them, without those of
    `but`. Dotted keys of the first configuration come first, in the order of the schema."""
    flat = [flat_config(config) for config in configs]
    missing = object()
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        values = [settings.get(key, missing) for settings in flat]
        if key not in OWN_KEYS and not _is_of(key, but) and any(value != values[0] for value in values):
            rows.append(Row(key, [UNKNOWN if value is missing else as_text(value) for value in values]))
    return rows


def as_text(value: object) -> str:
    """Returns the value of a setting as text."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
