"""Reads the records of a run into tables, for analysis in Python: `asyncrl.load_run`.

    run = asyncrl.load_run("quickstart")
    run.steps["reward_mean"]            a numpy array with one entry a step
    run.steps["diagnostics.clipped_ratio"] one value of a field that maps names to values
    run.evals.pandas()                  the evaluations as a DataFrame

The directory may be damaged or come from another person. A table is limited to `MOST_VALUES`, because records with
different names in each line would otherwise make a table that is far larger than their file.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.common.device_time import DeviceTime
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import as_it_is, existing_run, trained_runs
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord, Summary
from asyncrl.run_files import OF_DAMAGED_FILES
from asyncrl.views.report import read_run

MOST_VALUES = 2**26
"""Largest number of values in a table, with missing ones: 512 MiB. A run of 300,000 steps with 200 columns fits."""


class Columns(dict[str, NDArray[Any]]):
    """A table: maps the name of each column to an array of shape (rows,). All arrays have the same length."""

    def pandas(self) -> Any:
        """Returns the table as a `pandas.DataFrame`. Raises RunError if pandas is not installed."""
        return _library("pandas").DataFrame(dict(self))

    def polars(self) -> Any:
        """Returns the table as a `polars.DataFrame`, with NaN where a number is missing. Raises RunError if polars is
        not installed."""
        return _library("polars").DataFrame(dict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """The records of a run as tables, with its configuration and its totals.

    `steps` has one row for each `asyncrl.StepRecord`, also for skipped steps (`trained` is False), and `evals` one for
    each `asyncrl.EvalRecord`. A column has the name of a field. A field that maps names to values has a column for each
    name: `reward_components.format`, `token_staleness.2`, `diagnostics.clipped_ratio`. The device-seconds have a column
    for each pool, kind of device and part: `device_time.generators.gpu.waiting_s`.

    A column of integers has the type int64, or float64 if a value is missing or is too large; a column of other numbers
    has float64. A missing number is NaN. Truth values have the type bool; texts have the type object, and None where
    one is missing. Units are those of the records: seconds since the start of the run, nats, versions.

    `summary` has the totals; those of a run without `summary.json` are computed from the records so far. It is None
    without a trained step. `info` is the content of run.json, with the state `died` for a run that was killed.
    """

    directory: Path
    config: Config
    info: RunInfo
    summary: Summary | None
    steps: Columns
    evals: Columns


def load_run(run: Path | str) -> RunTables:
    """Returns the records of a run as tables. `run` is its directory, or the name of a run in `runs/`. The run may
    still be running.

    Raises RunError if there is no such run, if a file of it cannot be read, is damaged or is of another version of
    asyncrl, or if a table would be too large. Raises ConfigError if this version does not accept its configuration.

    >>> import asyncrl
    >>> run = asyncrl.load_run("quickstart")
    >>> run.steps["reward_mean"][-10:].mean(), run.config.run.seed
    """
    directory = existing_run(Path(run))
    try:
        records = read_run(directory, info=as_it_is(directory))
        return RunTables(
            directory=directory,
            config=records.config,
            info=records.info,
            summary=records.totals,
            steps=_columns(records.steps, StepRecord, directory / "steps.jsonl"),
            evals=_columns(records.evals, EvalRecord, directory / "evals.jsonl"),
        )
    except AsyncRLError:
        raise
    except OF_DAMAGED_FILES as error:
        raise RunError(
            f"{directory} cannot be loaded ({type(error).__name__}: {error}): its files are damaged, or this version "
            "of asyncrl did not write them; look at its records, or load another run"
        ) from error


def load_sweep(folder: Path | str) -> dict[str, RunTables]:
    """Returns the records of the runs of a sweep by the name of the run, in the order in which they began. `folder` is
    the folder of the sweep (`runs/NAME`). Runs that have not begun, or have trained no step yet, are left out.

    Raises RunError if no run is left, and the errors of `load_run`.

    >>> import asyncrl
    >>> {name: run.steps["reward_mean"][-1] for name, run in asyncrl.load_sweep("runs/limits").items()}
    """
    if not (runs := trained_runs(Path(folder))):
        raise RunError(f"{folder} has no run that has trained a step; name the folder of a sweep, such as runs/sweep")
    return {run.name: load_run(run) for run in runs}


def _columns(records: Sequence[msgspec.Struct], kind: type[msgspec.Struct], file: Path) -> Columns:
    """Returns the table of the records of `file`, all of the type `kind`. Raises RunError if it would be too large."""
    table = Columns()
    for field in msgspec.structs.fields(kind):
        values, annotated = [getattr(record, field.name) for record in records], field.type
        if annotated == tuple[DeviceTime, ...]:
            values, annotated = [_named(times) for times in values], dict[str, float]
        if get_origin(annotated) is not dict:
            table[field.name] = _array(values, annotated)
            continue
        of_keys, of_values = get_args(annotated)
        keys = list(dict.fromkeys(key for named in values for key in named))
        if (size := (len(table) + len(keys)) * len(records)) > MOST_VALUES:
            raise RunError(
                f"{file} would make a table of {size:,} values, and at most {MOST_VALUES:,} are made: {field.name} has "
                f"{len(keys):,} different names in {len(records):,} records, which asyncrl does not write; look at it"
            )
        for key in sorted(keys) if of_keys is int else keys:
            table[f"{field.name}.{key}"] = _array([named.get(key) for named in values], of_values)
    return table


def _named(times: Sequence[DeviceTime]) -> dict[str, float]:
    """Returns the device-seconds by `pool.device.part`."""
    parts = ("starting_s", "waiting_s", "working_s")
    return {f"{time.pool}.{time.device}.{part}": getattr(time, part) for time in times for part in parts}


def _array(values: Sequence[Any], annotated: Any) -> NDArray[Any]:
    """Returns one column. `annotated` is the type of its values in the record; None values are missing."""
    types = get_args(annotated) or (annotated,)
    if str in types:
        return np.array(values, dtype=object)
    if bool in types:
        return np.array(values, dtype=bool)
    if int in types and all(value is not None and abs(value) < 2**63 for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)


def _library(name: str) -> Any:
    """Returns the module of a library that asyncrl does not require. Raises RunError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise RunError(
            f"a table as a DataFrame of {name} needs the package {name}, which is not installed: run `pip install "
            f"{name}`, or use the arrays of the table"
        ) from None
