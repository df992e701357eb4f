"""The numbers of a comparison: totals of each run, means and intervals of groups, and tests of their differences."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from asyncrl.common.device_time import Device, Pool
from asyncrl.learner.records import HeldoutEnds, Summary
from asyncrl.views.compare_curves import of_set
from asyncrl.views.compared_runs import UNKNOWN, Compared, Group, Row
from asyncrl.views.quantities import change, duration, held_out, held_out_number, number
from asyncrl.views.seed_statistics import Difference, difference, estimate

CSV_COLUMNS = (
    "kind", "name", "settings", "number", "n", "value", "low", "high", "p", "test", "compared_with"
)  # fmt: skip
"""Columns of the CSV file. `kind` is run, group or difference. `settings` are those in which the groups differ, and for
a run also those by which the runs are grouped. `low` and `high` are the ends of the 95 % t-interval. `compared_with` is
the group that was subtracted."""


class Total(NamedTuple):
    """A number of a run's summary. `tested` is whether a test of the difference of groups is shown for it."""

    name: str
    read: Callable[[Summary], float | None]
    tested: bool = True


def totals_of(runs: Sequence[Compared]) -> list[Total]:
    """Returns the numbers that at least one of the runs has: what was learned, then speed and staleness, then the
    others. A terminal shows the first ones."""
    found = [
        Total("reward, last steps", lambda total: total.reward_last),
        *(
            Total(f"held-out reward{of_set(name)}, last", partial(_last_of, name=name))
            for name in dict.fromkeys(name for name, _ in _heldout_numbers(runs))
        ),
        Total("steps", lambda total: total.steps, tested=False),
        Total("trained samples per second", lambda total: total.samples_per_s),
        Total("oldest trained token, versions", lambda total: total.max_token_staleness, tested=False),
        Total("effective sample size, mean", lambda total: total.ess_ratio_mean),
        Total("seconds until the first step", lambda total: total.time_to_first_step_s, tested=False),
        Total("seconds after the first step", lambda total: total.wall_s - total.time_to_first_step_s),
        Total("effective training time, share of the wall time", lambda total: total.effective_training_time_ratio),
        Total("trained tokens", lambda total: total.trained_tokens, tested=False),
        *(
            Total(f"{_in_words(name, of)}, last", partial(_last_number, name=name, of=of), tested=False)
            for name, of in _heldout_numbers(runs)
            if of is not None
        ),
        *(
            Total(f"{device.words} of the {pool}{what}", partial(_cost_of, pool=pool, device=device, part=part))
            for pool, device in _cost_pools(runs)
            for part, what in COST_PARTS.items()
        ),
    ]
    return [each for each in found if any(_values(each, runs))]


COST_PARTS = {
    "device_s": "",
    "per_token_s": " for each trained token",
    "starting_s": ", starts",
    "waiting_s": ", waiting",
    "again_s": ", steps that were trained again",
    "skipped_s": ", steps that were skipped",
}
"""The fields of a pool's cost (`PoolCost`), each with the end of its name in tables, after the unit and the pool."""


def _cost_pools(runs: Sequence[Compared]) -> list[tuple[Pool, Device]]:
    """Returns the pools of the runs whose costs are known, each with the kind of device that it counts."""
    return [*dict.fromkeys((spent.pool, spent.device) for run in runs for spent in run.summary.costs)]


def _cost_of(total: Summary, *, pool: Pool, device: Device, part: str) -> float | None:
    found = (getattr(spent, part) for spent in total.costs if (spent.pool, spent.device) == (pool, device))
    value: float | None = next(found, None)
    return value


def _cost_text(total: Summary, *, pool: Pool, device: Device, part: str) -> str:
    value = _cost_of(total, pool=pool, device=device, part=part)
    return UNKNOWN if value is None else number(value)


def _heldout_numbers(runs: Sequence[Compared]) -> list[tuple[str, str | None]]:
    """Returns pairs (name of a held-out set, name of a number of its newest evaluation) that at least one run has. The
    first name of each set is None, which stands for its reward."""
    sets = [(name, ends) for run in runs for name, ends in run.summary.heldout_ends().items()]
    numbers = {
        name: dict.fromkeys(of for other, ends in sets if other == name for of in ends.numbers) for name, _ in sets
    }
    return [(name, of) for name, found in numbers.items() for of in (None, *found)]


def _in_words(name: str, of: str) -> str:
    return f"held-out {held_out_number(of)}{of_set(name)}"


def _last_of(total: Summary, *, name: str) -> float | None:
    return total.heldout_ends().get(name, HeldoutEnds()).last


def _last_number(total: Summary, *, name: str, of: str) -> float | None:
    return total.heldout_ends().get(name, HeldoutEnds()).numbers.get(of)


def _values(total: Total, runs: Sequence[Compared]) -> list[tuple[tuple[str, ...], float]]:
    """Returns the finite values of the runs, each with the run's seed."""
    found = [(run.seed, total.read(run.summary)) for run in runs]
    return [(seed, value) for seed, value in found if value is not None and math.isfinite(value)]


def all_runs(groups: Sequence[Group]) -> list[Compared]:
    """Returns the runs of all groups."""
    return [run for group in groups for run in group.runs]


def group_table(groups: Sequence[Group]) -> tuple[list[str], list[Row]]:
    """Returns the head and the rows of the table of groups: a row for each group, a column for each number."""
    found = totals_of(all_runs(groups))
    rows = [Row(group.label, [str(len(group.runs)), *(_mean_text(each, group) for each in found)]) for group in groups]
    return ["group", "runs", *(each.name for each in found)], rows


def _mean_text(total: Total, group: Group) -> str:
    mean = estimate([value for _, value in _values(total, group.runs)])
    if mean is None:
        return UNKNOWN
    spread = "" if mean.high is None else f" ± {number(mean.high - mean.mean)}"
    return f"{number(mean.mean)}{spread}" + (f" (n = {mean.n})" if mean.n < len(group.runs) else "")


def differences_to_first(groups: Sequence[Group]) -> Iterator[tuple[Group, Total, Difference]]:
    """Yields the difference of each later group to the first one, for each tested number that both have."""
    found = totals_of(all_runs(groups))
    for group in groups[1:]:
        for total in found:
            compared = difference(_values(total, group.runs), _values(total, groups[0].runs))
            if total.tested and compared is not None:
                yield group, total, compared


DIFFERENCE_HEAD = ["group", "number", "difference", "95 % interval", "p", "test"]


def difference_rows(groups: Sequence[Group]) -> list[Row]:
    """Returns the rows of the table of differences to the first group, with the columns of `DIFFERENCE_HEAD`."""
    return [
        Row(group.label, [total.name, number(compared.mean), *_test_texts(compared)])
        for group, total, compared in differences_to_first(groups)
    ]


def _test_texts(compared: Difference) -> list[str]:
    if compared.low is None or compared.high is None or compared.p is None:
        return [UNKNOWN, UNKNOWN, "too few runs"]
    test = f"paired, n = {compared.n}" if compared.test == "paired" else f"Welch, {compared.n} runs"
    p = "< 0.001" if compared.p < 0.001 else f"{compared.p:.3f}"
    return [f"{number(compared.low)} to {number(compared.high)}", p, test]


def compare_csv(groups: Sequence[Group]) -> str:
    """Returns all numbers as CSV with the columns `CSV_COLUMNS`: a line for each run and number, and, if there are
    groups of several runs, for each group and number, and for each difference to the first group."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    found = totals_of(all_runs(groups))
    for of_group, run in [(group.settings, run) for group in groups for run in group.runs]:
        for total in found:
            for seed, value in _values(total, [run]):
                settings = ", ".join([*of_group, *seed])
                line: dict[str, object] = {"kind": "run", "name": run.label, "settings": settings}
                writer.writerow(line | {"number": total.name, "n": 1, "value": value})
    if all(len(group.runs) == 1 for group in groups):
        return text.getvalue()
    for group in groups:
        for total in found:
            if mean := estimate([value for _, value in _values(total, group.runs)]):
                line = {"kind": "group", "name": group.label, "number": total.name, "n": mean.n}
                writer.writerow(
                    line
                    | {"settings": ", ".join(group.settings)}
                    | {"value": mean.mean, "low": mean.low, "high": mean.high}
                )
    for group, total, compared in differences_to_first(groups):
        line = {"kind": "difference", "name": group.label, "number": total.name, "n": compared.n}
        line |= {"value": compared.mean, "low": compared.low, "high": compared.high, "p": compared.p}
        line |= {"settings": ", ".join(group.settings)}
        writer.writerow(line | {"test": compared.test, "compared_with": groups[0].label})
    return text.getvalue()


def totals(runs: Sequence[Compared]) -> list[Row]:
    """Returns the rows of the table of totals, with a column for each run. Rows in which no run has a number, or every
    run has 0, are left out."""

    def row(name: str, text: Callable[[Summary], str]) -> Row:
        return Row(name, [text(run.summary) for run in runs])

    def optional(value: float | None, *, text: Callable[[float], str] = number) -> str:
        return UNKNOWN if value is None else text(value)

    rows = [
        Row("settings", [", ".join(run.seed) or UNKNOWN for run in runs]),
        Row("state", [run.records.info.state for run in runs]),
        row("steps", lambda total: f"{total.steps:,}"),
        row("time", lambda total: duration(total.wall_s)),
        row("reward, first to last steps", lambda total: change(total.reward_first, total.reward_last)),
        *(
            row(f"held-out reward{of_set(name)}", partial(_ends_of, name=name))
            if of is None
            else row(_in_words(name, of), partial(_newest_of, name=name, of=of))
            for name, of in _heldout_numbers(runs)
        ),
        row("trained samples per second", lambda total: number(total.samples_per_s)),
        row(
            "effective training time", lambda total: optional(total.effective_training_time_ratio, text="{:.0%}".format)
        ),
        *(
            row(f"{device.words} of the {pool}{what}", partial(_cost_text, pool=pool, device=device, part=part))
            for pool, device in _cost_pools(runs)
            for part, what in COST_PARTS.items()
        ),
        row("trained tokens", lambda total: number(total.trained_tokens)),
        row("oldest trained token, versions", lambda total: f"{total.max_token_staleness} of {total.staleness_limit}"),
        row("effective sample size, mean", lambda total: optional(total.ess_ratio_mean)),
        row("effective sample size, lowest", lambda total: optional(total.ess_ratio_lowest)),
        row("learner busy", lambda total: f"{total.learner_busy_ratio:.0%}"),
        row("generators busy", lambda total: f"{total.generator_busy_ratio:.0%}"),
        row("log-prob parity, nats", lambda total: optional(total.parity_max_nats)),
        row("restarts", lambda total: f"{total.restarts:,}"),
    ]
    return [each for each in rows if {*each.values} not in ({UNKNOWN}, {"0"})]


def _ends_of(total: Summary, *, name: str) -> str:
    return held_out(total.heldout_ends().get(name, HeldoutEnds()))


def _newest_of(total: Summary, *, name: str, of: str) -> str:
    ends = total.heldout_ends().get(name, HeldoutEnds())
    return f"{number(ends.numbers[of])} (step {ends.newest_step})" if of in ends.numbers else UNKNOWN
