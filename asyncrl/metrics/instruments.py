"""Creates the prometheus_client objects of one process from the catalogue.

`Instruments(role)` has a registry of its own. It does not use the default registry, because vLLM removes unknown
metrics from it. Every counter with a closed set of labels exists from the start with the value 0, so that a rate over
it is never missing. A gauge that was not set yet is NaN: comparisons with NaN are false, so no alert fires. A 0 would
look like a measured collapse. Errors are raised here; `recorders.py` logs them instead of raising.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from threading import Lock

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

    def _family(self) -> Family:
        with self._lock:
            counts, total = list(self._counts), self._sum
        running, buckets = 0, []
        for bound, count in zip(self._bounds, counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == math.inf else str(float(bound)), running))
        family = HistogramMetricFamily(self._metric.name, self._metric.help)
        family.add_metric([], buckets, total)
        return family

    def collect(self) -> Iterator[Family]:
        yield self._family()


class ScrapedCounter(Collector):
    """A counter with one label whose totals are read during each scrape.

    When the read function raises, the counter shows the last totals. The totals may move between labels from one read
    to the next. The counter still never falls for any label, and its labels add up to the total that was read.
    """

    def __init__(self, metric: Metric) -> None:
        ((self._label, values),) = metric.labels.items()
        self._metric = metric
        self._totals: dict[str, float] = dict.fromkeys(values or (), 0.0)
        self._read: Callable[[], Totals] = dict
        self._lock = Lock()  # the server handles each scrape in a thread of its own

    def read_from(self, read: Callable[[], Totals]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        with self._lock:
            try:
                current = self._read()
            except Exception:  # a failed read must not fail the scrape of all other metrics
                current = {}
            totals = self._totals = caught_up(self._totals, current)
        family = CounterMetricFamily(self._metric.name, self._metric.help, labels=[self._label])
        for value, total in totals.items():
            family.add_metric([value], total)
        yield family


class Instruments:
    """The metrics of one process, by their names in the catalogue.

    Raises KeyError for an unknown name, and ValueError for wrong labels, unknown label values and counts that are not
    finite.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        self._metrics = {metric.name: metric for metric in CATALOGUE if role in metric.roles}
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._counted: dict[str, CountedHistogram] = {}
        self._scraped: dict[str, ScrapedCounter] = {}
        self._open_values: dict[tuple[str, str], set[str]] = {}
        self._last_totals: dict[tuple[str, tuple[str, ...]], float] = {}
        for metric in self._metrics.values():
            self._build(metric)

    def _build(self, metric: Metric) -> None:
        labels = tuple(metric.labels)
        closed = [values for values in metric.labels.values() if values is not None]
        every_combination = list(product(*closed)) if labels and len(closed) == len(labels) else []
        if metric.feed is Feed.COUNTS:
            self._counted[metric.name] = counted = CountedHistogram(metric)
            self.registry.register(counted)
        elif metric.feed is Feed.SCRAPE:
            self._scraped[metric.name] = scraped = ScrapedCounter(metric)
            self.registry.register(scraped)
        elif metric.kind is Kind.COUNTER:
            self._counters[metric.name] = counter = Counter(metric.name, metric.help, labels, registry=self.registry)
            for values in every_combination:
                counter.labels(*values)
        elif metric.kind is Kind.GAUGE:
            self._gauges[metric.name] = gauge = Gauge(metric.name, metric.help, labels, registry=self.registry)
            for child in [gauge.labels(*values) for values in every_combination] if labels else [gauge]:
                child.set(math.nan)
        else:
            self._histograms[metric.name] = Histogram(
                metric.name, metric.help, labels, registry=self.registry, buckets=metric.buckets
            )

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Increases a counter by `amount`."""
        counter = self._counters[name]
        values = self._label_values(name, labels)
        (counter.labels(*values) if values else counter).inc(_finite(name, amount))

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """Increases a counter to a total that was counted elsewhere.

        A total below the last one means that the count restarted at 0; the counter then grows by the whole total.
        """
        values = self._label_values(name, labels)
        last = self._last_totals.get((name, values), 0.0)
        self.add(name, total - last if total >= last else total, **labels)
        self._last_totals[name, values] = total

    def set(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge. NaN is allowed and means that there is no value."""
        gauge = self._gauges[name]
        values = self._label_values(name, labels)
        (gauge.labels(*values) if values else gauge).set(float(value))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one value to a histogram."""
        histogram = self._histograms[name]
        values = self._label_values(name, labels)
        (histogram.labels(*values) if values else histogram).observe(_finite(name, value))

    def observe_counts(self, name: str, counts: Mapping[int, int]) -> None:
        """Adds each value of `counts` to a histogram `counts[value]` times."""
        for value, count in counts.items():
            self._counted[name].add(float(value), count=count)

    def read_from(self, name: str, read: Callable[[], Totals]) -> None:
        """Makes a counter call `read` for its totals during each scrape. `read` is called in the scrape's thread."""
        self._scraped[name].read_from(read)

    def _label_values(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        declared = self._metrics[name].labels
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


def _finite(name: str, value: float) -> float:
    """Returns `value` as a float. Raises ValueError when it is not finite.

    One NaN would make a counter or the sum of a histogram NaN until the process ends.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} cannot count {number}: a counter or histogram takes finite numbers only")
    return number
