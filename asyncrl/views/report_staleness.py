"""Makes the report's section on staleness: how old the trained data was, and whether its age does harm."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from asyncrl.learner.records import StepRecord, largest, mean
from asyncrl.views.charts import AGE_COLORS, Mark, Series, line_chart, share_chart, version_bars
from asyncrl.views.report_panels import CURVE_POINTS, SHARE_POINTS, Steps, bins_of, curve, last_steps, mean_of

DRIFT = "abs_log_rho_nats_staleness_"
"""Prefix of the diagnostics that measure, by staleness, how far the policy is from the policy that sampled."""

CLOCKS = ((120.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (math.inf, 3600.0, "hours"))
"""(longest run for this unit in seconds, length of the unit in seconds, name of the unit)."""


FAR_VERSIONS = 60
"""A staleness limit above this, and above twice the largest trained staleness, is named in the text and not drawn.

A chart that reached to such a limit would show the data as a thin strip.
"""


def limit_to_draw(steps: Steps, *, limit: int) -> int | None:
    """Returns the staleness limit η, or None if it is so far away that the charts do not reach to it."""
    return limit if limit <= max(FAR_VERSIONS, 2 * _oldest(steps)) else None


def staleness(steps: Steps, *, limit: int | None, marks: Sequence[Mark] = ()) -> Sequence[str]:
    """Returns the charts of the staleness of trained data and of weights. `limit` is the limit to draw. `marks` are
    drawn in the charts over steps."""
    trained = [
        ("groups, by their oldest token", "blue", added([record.group_staleness for record in steps])),
        ("tokens", "teal", added([record.token_staleness for record in steps])),
    ]
    return [
        version_bars("Age when trained", trained, limit=limit),
        _token_ages(steps, oldest=max(_oldest(steps), limit or 0), marks=marks),
        _ages_over_time(steps, limit=limit),
        *_drift(steps, marks),
        *_weights(steps, marks),
    ]


def clock_of(longest_s: float) -> tuple[float, str]:
    """Returns the unit of a time axis that ends at `longest_s` seconds: its length in seconds, and its name.

    >>> clock_of(90), clock_of(600)
    ((1.0, 'seconds'), (60.0, 'minutes'))
    """
    return next((unit_s, clock) for longest, unit_s, clock in CLOCKS if longest_s <= longest)


def _oldest(steps: Steps) -> int:
    """Returns the largest staleness that was trained; 0 if there is none."""
    return max((age for record in steps for age in (*record.group_staleness, *record.token_staleness)), default=0)


def _ages_over_time(steps: Steps, *, limit: int | None) -> str:
    """Returns a chart with the oldest and the mean age of trained tokens. `limit` is drawn as a line; None draws
    none."""
    bins = bins_of(steps, CURVE_POINTS)
    unit_s, clock = clock_of(steps[-1].wall_s)
    series = [
        curve("oldest", "amber", bins, lambda chunk: largest([age for r in chunk for age in r.token_staleness])),
        curve("mean", "blue", bins, mean_age),
    ]
    return line_chart(
        "Age of tokens over time",
        [chunk[-1].wall_s / unit_s for chunk in bins],
        series,
        unit="versions",
        include=(0, (limit or 0) + 1),
        limit=None if limit is None else (f"limit {limit}", limit),
        x_name=clock,
    )


def _weights(steps: Steps, marks: Sequence[Mark]) -> list[str]:
    """Returns charts with the lag of published and loaded weights, and with the differences of log-probs."""
    bins = bins_of(steps, CURVE_POINTS)
    xs = last_steps(bins)

    def lag(name: str, color: str, read: Callable[[StepRecord], int | None]) -> Series:
        def of_chunk(chunk: Steps) -> float | None:
            known = [(record.version_after, version) for record in chunk if (version := read(record)) is not None]
            return mean([float(after - version) for after, version in known])

        return curve(name, color, bins, of_chunk)

    lags = [
        lag("slowest replica", "amber", lambda record: record.oldest_replica_version),
        lag("published", "blue", lambda record: record.published_version),
    ]
    parity = curve("worst token", "blue", bins, lambda chunk: largest([record.parity_nats for record in chunk]))
    return [
        line_chart("Lag behind the learner", xs, lags, unit="versions", include=(0,), marks=marks),
        line_chart("Log-prob parity", xs, [parity], unit="nats; 0 is drawn at the bottom", log=True, marks=marks),
    ]


def _token_ages(steps: Steps, *, oldest: int, marks: Sequence[Mark]) -> str:
    """Returns a chart with the share of each age among the tokens of each step, up to the age `oldest`."""
    bins = bins_of(steps, SHARE_POINTS)
    ages = [added([record.token_staleness for record in chunk]) for chunk in bins]
    bands = age_bands(oldest, most=len(AGE_COLORS))
    shares = [{name: _share(histogram, first, last) for name, first, last in bands} for histogram in ages]
    colors = dict(zip([name for name, _, _ in bands], _age_colors(len(bands)), strict=True))
    return share_chart("Age by step", last_steps(bins), shares, colors=colors, unit="share of tokens", marks=marks)


def _age_colors(count: int) -> list[str]:
    """Returns `count` colours from the lowest age to the highest."""
    spread = (len(AGE_COLORS) - 1) / max(1, count - 1)
    return [AGE_COLORS[round(index * spread)] for index in range(count)]


def age_bands(oldest: int, *, most: int) -> list[tuple[str, int, int]]:
    """Returns (name, first, last) of at most `most` ranges of versions of equal size, which start at 0.

    >>> age_bands(1, most=7)
    [('0 versions', 0, 0), ('1 version', 1, 1)]
    >>> [name for name, _, _ in age_bands(7, most=3)]
    ['0 to 2 versions', '3 to 5 versions', '6 to 8 versions']
    """
    size = math.ceil((oldest + 1) / most)
    starts = range(0, oldest + 1, size)
    return [(_versions(first, first + size - 1), first, first + size - 1) for first in starts]


def _versions(first: int, last: int) -> str:
    if first == last:
        return "1 version" if first == 1 else f"{first} versions"
    return f"{first} to {last} versions"


def _share(histogram: Mapping[int, int], first: int, last: int) -> float:
    total = sum(histogram.values())
    return sum(count for age, count in histogram.items() if first <= age <= last) / total if total else 0.0


def _drift(steps: Steps, marks: Sequence[Mark]) -> list[str]:
    """Returns a list of one chart: the distance of the policy from the policy that sampled, by age of the tokens. The
    list is empty if the distance was not measured."""
    names = {name for record in steps for name in record.diagnostics if name.startswith(DRIFT)}
    if not names:
        return []
    bins = bins_of(steps, CURVE_POINTS)
    ordered = sorted(names, key=_first_age)

    colored = zip(ordered, _age_colors(len(ordered)), strict=True)
    series = [curve(_drift_label(name), color, bins, mean_of(name)) for name, color in colored]
    unit = "mean |log ratio| to the sampler, nats"
    return [line_chart("Drift by age", last_steps(bins), series, unit=unit, include=(0,), marks=marks)]


def _drift_label(name: str) -> str:
    """Returns the label of a diagnostic whose name starts with `DRIFT`.

    >>> [_drift_label(DRIFT + ages) for ages in ("1", "2_to_3", "16_to_more")]
    ['1 version', '2 to 3 versions', '16 or more versions']
    """
    ages = name.removeprefix(DRIFT).replace("to_more", "or_more").replace("_", " ")
    return "1 version" if ages == "1" else f"{ages} versions"


def _first_age(name: str) -> int:
    found = re.match(r"\d+", name.removeprefix(DRIFT))
    return int(found[0]) if found else 0


def added(histograms: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Returns the sum of histograms."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(total)


def mean_age(steps: Steps) -> float | None:
    """Returns the mean staleness of the trained tokens; None when there are none."""
    ages = added([record.token_staleness for record in steps])
    tokens = sum(ages.values())
    return sum(age * count for age, count in ages.items()) / tokens if tokens else None
