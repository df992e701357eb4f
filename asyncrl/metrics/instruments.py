"""Creates the prometheus_client objects of one process from the catalogue.

`Instruments(role)` has a registry of its own. It does not use the default registry, because vLLM removes unknown
metrics from it. Every counter with a closed set of labels exists from the start with the value 0, so that a rate over
it is never missing. A gauge that was not set yet is NaN: comparisons with NaN are false, so no alert fires. A 0 would
look like a measured collapse. Errors are raised here; `recorders.py` logs them instead of raising.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, product
from threading import Lock
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from asyncrl.metrics.catalogue import CATALOGUE, MAX_OPEN_VALUES, Feed, Kind, Metric, Role
from asyncrl.metrics.states import caught_up

Totals = Mapping[str, float]


class CountedHistogram(Collector):
    """A histogram that takes (value, count) pairs. prometheus_client's own histogram takes one observation per call."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._lock = Lock()
        self._bounds = (*metric.buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, *, count: int) -> None:
        slot = next(index for index, bound in enumerate(self._bounds) if value <= bound)
        with self._lock:
            self._counts[slot] += count
            self._sum += value * count

    def collect(self) -> Iterator[Family]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        names = [str(float(bound)) for bound in self._metric.buckets]
        buckets = list(zip([*names, "+Inf"], accumulate(counts), strict=True))
        family = HistogramMetricFamily(self._metric.name, self._metric.help)
        family.add_metric([], buckets, total)
        yield family


class ScrapedCounter(Collector):
    """A counter with one label whose totals are read during each scrape.

    When the read function raises, the counter shows the last totals. The totals may move between labels from one read
    to the next. The counter still never falls for any label, and its labels add up to the total that was read.
    """

    def __init__(self, metric: Metric) -> None:
        ((self._label, values),) = metric.labels.items()
        self._metric = metric
        self._totals: dict[str, float] = dict.fromkeys(values or (), 0.0)
        self.read: Callable[[], Totals] = dict
        self._lock = Lock()  # the server handles each scrape in a thread of its own

    def collect(self) -> Iterator[Family]:
        with self._lock:
            try:
                current = self.read()
            except Exception:  # a failed read must not fail the scrape of all other metrics
                current = {}
            totals = self._totals = caught_up(self._totals, current)
        family = CounterMetricFamily(self._metric.name, self._metric.help, labels=[self._label])
        for value, total in totals.items():
            family.add_metric([value], total)
        yield family


Made = Counter | Gauge | Histogram | CountedHistogram | ScrapedCounter
Labelled = TypeVar("Labelled", Counter, Gauge, Histogram)
Kept = TypeVar("Kept", Counter, Gauge, Histogram, CountedHistogram, ScrapedCounter)


class Instruments:
    """The metrics of one process, by their names in the catalogue.

    Raises KeyError for an unknown name and for a metric of another type, and ValueError for wrong labels, unknown label
    values and counts that are not finite.
    """

    def __init__(self, role: Role) -> None:
        self.registry = CollectorRegistry()
        self._declared = {metric.name: metric for metric in CATALOGUE if role in metric.roles}
        self._made = {name: _made(metric) for name, metric in self._declared.items()}
        for made in self._made.values():
            self.registry.register(made)
        self._open_values: dict[tuple[str, str], set[str]] = {}
        self._last_totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Increases a counter by `amount`."""
        self._labelled(Counter, name, labels).inc(_finite(name, amount))

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """Increases a counter to a total that was counted elsewhere.

        A total below the last one means that the learner went back to a checkpoint. The counter then stays, and grows
        with the total from there.
        """
        values = self._label_values(name, labels)
        last = self._last_totals.get((name, values), 0.0)
        self.add(name, max(0.0, total - last), **labels)
        self._last_totals[name, values] = total

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge. NaN is allowed and means that there is no value."""
        self._labelled(Gauge, name, labels).set(float(value))

    def observe(self, name: str, *values: float, **labels: str) -> None:
        """Adds values to a histogram."""
        for value in values:
            self._labelled(Histogram, name, labels).observe(_finite(name, value))

    def observe_counts(self, name: str, counts: Mapping[int, int]) -> None:
        """Adds each value of `counts` to a histogram `counts[value]` times."""
        for value, count in counts.items():
            self._kept(CountedHistogram, name).add(float(value), count=count)

    def read_from(self, name: str, read: Callable[[], Totals]) -> None:
        """Makes a counter call `read` for its totals during each scrape. `read` is called in the scrape's thread."""
        self._kept(ScrapedCounter, name).read = read

    def _kept(self, kind: type[Kept], name: str) -> Kept:
        made = self._made[name]
        if not isinstance(made, kind):
            raise KeyError(f"{name} is a {type(made).__name__}, not a {kind.__name__}")
        return made

    def _labelled(self, kind: type[Labelled], name: str, labels: Mapping[str, str]) -> Labelled:
        """Returns the part of a metric that has these labels."""
        metric, values = self._kept(kind, name), self._label_values(name, labels)
        return metric.labels(*values) if values else metric

    def _label_values(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        declared = self._declared[name].labels
        if set(labels) != set(declared):
            raise ValueError(f"{name} has the labels {sorted(declared)}, but {sorted(labels)} were given")
        return tuple(self._bounded(name, label, labels[label], allowed) for label, allowed in declared.items())

    def _bounded(self, name: str, label: str, value: str, allowed: tuple[str, ...] | None) -> str:
        if allowed is not None:
            if value not in allowed:
                raise ValueError(f"{name}: {label}={value!r} is not one of {', '.join(allowed)}")
            return value
        seen = self._open_values.setdefault((name, label), set())
        if value not in seen and len(seen) >= MAX_OPEN_VALUES:
            return "other"
        seen.add(value)
        return value


def _made(metric: Metric) -> Made:
    """Returns the object of a metric. Each combination of closed labels exists from the start."""
    if metric.feed is Feed.COUNTS:
        return CountedHistogram(metric)
    if metric.feed is Feed.SCRAPE:
        return ScrapedCounter(metric)
    labels = tuple(metric.labels)
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(metric.name, metric.help, labels, registry=None, buckets=metric.buckets)
    kind = Counter if metric.kind is Kind.COUNTER else Gauge
    made = kind(metric.name, metric.help, labels, registry=None)
    closed = [values for values in metric.labels.values() if values is not None]
    if len(closed) == len(labels):
        for values in product(*closed):  # one empty combination if there are no labels
            child = made.labels(*values) if values else made
            if isinstance(child, Gauge):
                child.set(math.nan)
    return made


def _finite(name: str, value: float) -> float:
    """Returns `value` as a float. Raises ValueError when it is not finite.

    One NaN would make a counter or the sum of a histogram NaN until the process ends.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} cannot count {number}: a counter or histogram takes finite numbers only")
    return number
