"""Records metrics: one class per process, `LearnerMetrics`, `GeneratorMetrics` and `BufferMetrics`.

The methods that record a value never raise: the first error of each method is logged, and the value is lost. A metric
of the catalogue without a recording method must be deleted. tests/metrics/test_recorders.py checks this: it calls every
method and looks for a value of every metric.
"""

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, product
from threading import Lock
from types import FunctionType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from asyncrl import __version__
from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.ledger import OPEN_FATES, TOKEN_EVENTS, Account
from asyncrl.buffer.records import Counts, GroupMeta
from asyncrl.buffer.staleness import Limits
from asyncrl.common.concern import Concern
from asyncrl.common.device_time import DeviceTime
from asyncrl.config.load import flat_config
from asyncrl.config.parts import environment_name
from asyncrl.config.schema import Config
from asyncrl.metrics import catalogue
from asyncrl.metrics.catalogue import (
    BUFFER_STATES,
    CATALOGUE,
    DEADLINES,
    MAX_OPEN_VALUES,
    REPLICA_STATES,
    AgeMetric,
    CounterMetric,
    CountsMetric,
    GaugeMetric,
    HistogramMetric,
    Metric,
    Role,
    ScrapedMetric,
)
from asyncrl.metrics.numbers import KEPT
from asyncrl.metrics.states import caught_up

logger = logging.getLogger(__name__)

# Creates the prometheus_client objects of one process from the catalogue.
#
# `Instruments(role)` has a registry of its own. It does not use the default registry, because vLLM removes unknown
# metrics from it. Every counter with a closed set of labels exists from the start with the value 0, so that a rate over
# it is never missing. A gauge that was not set yet is NaN: comparisons with NaN are false, so no alert fires. A 0 would
# look like a measured collapse. `Instruments` raises errors, and the classes of `ProcessMetrics` log them.

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


Labelled = TypeVar("Labelled", Counter, Gauge, Histogram)


class Instruments:
    """The metrics of one process.

    Raises KeyError for a metric of another process, and ValueError for wrong labels, unknown label values and counts
    that are not finite.
    """

    def __init__(self, role: Role, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.registry = CollectorRegistry()
        own = [metric for metric in CATALOGUE if role in metric.roles]
        self._counters = {each.name: _started(Counter, each) for each in own if isinstance(each, CounterMetric)}
        self._gauges = {each.name: _started(Gauge, each) for each in own if isinstance(each, GaugeMetric)}
        self._histograms = {each.name: _histogram(each) for each in own if isinstance(each, HistogramMetric)}
        self._counted = {each.name: CountedHistogram(each) for each in own if isinstance(each, CountsMetric)}
        self._scraped = {each.name: ScrapedCounter(each) for each in own if isinstance(each, ScrapedMetric)}
        ages = {each.name: _started(Gauge, each) for each in own if isinstance(each, AgeMetric)}
        self._began_s = dict.fromkeys(ages, math.nan)
        for name, age in ages.items():
            age.set_function(lambda name=name: self._clock() - self._began_s[name])  # type: ignore[misc]
        made = self._counters | self._gauges | self._histograms | self._counted | self._scraped | ages
        for metric in own:
            self.registry.register(made[metric.name])
        self._open_values: dict[tuple[str, str], set[str]] = {}
        self._last_totals: dict[tuple[str, tuple[str, ...]], float] = {}

    def add(self, counter: CounterMetric, amount: float, **labels: str) -> None:
        """Increases a counter by `amount`."""
        made = self._counters[counter.name]
        self._child(made, counter, labels).inc(_finite(counter, amount))

    def raise_to(self, counter: CounterMetric, total: float, **labels: str) -> None:
        """Increases a counter to a total that was counted elsewhere.

        A total below the last one means that the learner went back to a checkpoint. The counter then stays, and grows
        with the total from there.
        """
        values = self._label_values(counter, labels)
        last = self._last_totals.get((counter.name, values), 0.0)
        self.add(counter, max(0.0, total - last), **labels)
        self._last_totals[counter.name, values] = total

    def set(self, gauge: GaugeMetric, value: float, **labels: str) -> None:
        """Sets a gauge. NaN is allowed and means that there is no value."""
        self._child(self._gauges[gauge.name], gauge, labels).set(float(value))

    def begin(self, age: AgeMetric) -> None:
        """Sets the age to 0. It grows with the clock from now on."""
        if age.name not in self._began_s:
            raise KeyError(age.name)
        self._began_s[age.name] = self._clock()

    def observe(self, histogram: HistogramMetric, *values: float, **labels: str) -> None:
        """Adds values to a histogram."""
        made = self._histograms[histogram.name]
        for value in values:
            self._child(made, histogram, labels).observe(_finite(histogram, value))

    def observe_counts(self, histogram: CountsMetric, counts: Mapping[int, int]) -> None:
        """Adds each value of `counts` to a histogram `counts[value]` times."""
        for value, count in counts.items():
            self._counted[histogram.name].add(float(value), count=count)

    def read_from(self, counter: ScrapedMetric, read: Callable[[], Totals]) -> None:
        """Makes a counter call `read` for its totals during each scrape. `read` is called in the scrape's thread."""
        self._scraped[counter.name].read = read

    def _child(self, made: Labelled, metric: Metric, labels: Mapping[str, str]) -> Labelled:
        """Returns the part of a metric that has these labels."""
        values = self._label_values(metric, labels)
        return made.labels(*values) if values else made

    def _label_values(self, metric: Metric, labels: Mapping[str, str]) -> tuple[str, ...]:
        if set(labels) != set(metric.labels):
            raise ValueError(f"{metric.name} has the labels {sorted(metric.labels)}, but {sorted(labels)} were given")
        return tuple(
            self._bounded(metric.name, label, labels[label], allowed) for label, allowed in metric.labels.items()
        )

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


def _histogram(metric: HistogramMetric) -> Histogram:
    return _started(partial(Histogram, buckets=metric.buckets), metric)


def _started(kind: Callable[..., Labelled], metric: Metric) -> Labelled:
    """Returns the prometheus_client object of a metric. If all of its labels have a closed set of values, each
    combination exists from the start: a counter with 0, a gauge with NaN."""
    made = kind(metric.name, metric.help, tuple(metric.labels), registry=None)
    closed = [values for values in metric.labels.values() if values is not None]
    if len(closed) == len(metric.labels):
        for values in product(*closed):  # one empty combination if there are no labels
            child = made.labels(*values) if values else made
            if isinstance(child, Gauge):
                child.set(math.nan)
    return made


def _finite(metric: Metric, value: float) -> float:
    """Returns `value` as a float. Raises ValueError when it is not finite.

    One NaN would make a counter or the sum of a histogram NaN until the process ends.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{metric.name} cannot count {number}: a counter or histogram takes finite numbers only")
    return number


R = TypeVar("R", bound="ProcessMetrics")


def never_raises(kind: type[R]) -> type[R]:
    """Wraps the public methods of a class so that they never raise, because training must not fail because of a
    metric."""

    def guarded(method: FunctionType) -> Callable[..., None]:
        @functools.wraps(method)
        def record(self: R, /, *args: object, **kwargs: object) -> None:
            try:
                method(self, *args, **kwargs)
            except Exception:
                self._failed(method.__name__)

        return record

    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, guarded(method))
    return kind


@never_raises
class ProcessMetrics:
    """The metrics that every process records."""

    role: Role
    state_seconds: ScrapedMetric

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._instruments = Instruments(self.role, clock=clock)
        self._failed_methods: set[str] = set()

    @property
    def registry(self) -> CollectorRegistry:
        return self._instruments.registry

    def _failed(self, method: str) -> None:
        """Logs the current exception, but only the first one of each method."""
        if method not in self._failed_methods:
            self._failed_methods.add(method)
            logger.warning(
                "%s.%s could not record a metric: the value is lost, and further errors of this method are not logged",
                type(self).__name__,
                method,
                exc_info=True,
            )

    def states_from(self, seconds: Callable[[], Totals]) -> None:
        """Makes every scrape show the current `StateClock.seconds` or `SlotStates.seconds`."""
        self._instruments.read_from(self.state_seconds, seconds)

    def run_info(self, config: Config) -> None:
        """Records the run's name, model, environment and loss and the package's version; once per process."""
        self._instruments.set(
            catalogue.Run.run_info,
            1,
            run_name=config.run.name,
            version=__version__,
            model=config.model.path,
            environment=environment_name(config),
            loss=config.algorithm.loss_name,
        )

    def heartbeat(self) -> None:
        """Records an iteration of the process's main loop."""
        self._instruments.begin(catalogue.Run.heartbeat_age_seconds)


@never_raises
class LearnerMetrics(ProcessMetrics):
    """The metrics of the learner."""

    role = Role.LEARNER
    state_seconds = catalogue.Learner.learner_state_seconds_total

    def limits(self, config: Config) -> None:
        """Records the limits that alerts compare with, and every timeout of the configuration; once, at the start."""
        weights = config.weights
        self._instruments.set(catalogue.Limits.stall_timeout_seconds, config.run.stall_timeout_s)
        self._instruments.set(catalogue.Limits.weight_sync_timeout_seconds, weights.load_timeout_s)
        self._instruments.set(
            catalogue.Limits.weight_lag_limit_versions, weights.max_lag_publications * weights.publish_every_steps
        )
        self._instruments.set(catalogue.Limits.checkpoint_interval_versions, config.checkpoint.every_steps)
        self._instruments.set(catalogue.Checkpoint.checkpoint_policy_version, 0)
        steps, ratio = config.metrics.objective_steps_per_hour, config.metrics.objective_training_ratio
        self._instruments.set(catalogue.Limits.objective_steps_per_hour, math.nan if steps is None else steps)
        self._instruments.set(catalogue.Limits.objective_training_ratio, math.nan if ratio is None else ratio)
        settings: Mapping[str, Any] = flat_config(config)
        for key in DEADLINES:
            self._instruments.set(catalogue.Limits.deadline_seconds, settings[key], deadline=key)

    def incarnation(self, number: int, *, nonce: str, restarts: int, resumed_unix_s: float | None) -> None:
        """Records the number of the run's incarnation, and how often and when the run was resumed; once, at the
        start."""
        self._instruments.set(catalogue.Run.run_incarnation, number, nonce=nonce)
        self._instruments.set(catalogue.Run.run_restarts, restarts)
        self._instruments.set(
            catalogue.Run.run_resumed_timestamp_seconds, math.nan if resumed_unix_s is None else resumed_unix_s
        )

    def step(
        self,
        *,
        outcome: str,
        duration_s: float,
        tokens: int,
        model_flops: int | None,
        peak_flops_per_s: float | None,
    ) -> None:
        """Records the end of a step. `outcome` is `trained` or `skipped`, `tokens` the number of trained tokens.
        `model_flops` are the model FLOPs of the step, and `peak_flops_per_s` is the devices' peak speed in FLOP/s; None
        where they are not known."""
        self._instruments.add(catalogue.Learner.learner_steps_total, 1, outcome=outcome)
        self._instruments.add(catalogue.Learner.learner_tokens_total, tokens)
        self._instruments.observe(catalogue.Learner.learner_step_duration_seconds, duration_s)
        self._instruments.add(catalogue.Learner.learner_model_flops_total, model_flops or 0)
        peak = math.nan if peak_flops_per_s is None else peak_flops_per_s
        self._instruments.set(catalogue.Limits.learner_peak_flops_per_second, peak)

    def numbers(self, values: Mapping[str, float]) -> None:
        """Records the numbers of a trained step, by their names in `asyncrl.metrics.numbers`. The gauge of a number
        that is not in `values` becomes NaN, unless it is one of `KEPT`."""
        for name, gauge in catalogue.Learner.numbers.items():
            if name in values or name not in KEPT:
                self._instruments.set(gauge, values.get(name, math.nan))

    def rewards(self, *, components: Mapping[str, float], parts: Mapping[str, float]) -> None:
        """Records the mean of each component of a step's rewards, and the mean reward of each part of a mixture, by
        name."""
        for name, value in components.items():
            self._instruments.set(catalogue.Learner.learner_reward_component_mean, value, component=name)
        for name, value in parts.items():
            self._instruments.set(catalogue.Learner.learner_reward_part_mean, value, part=name)

    def staleness(
        self,
        *,
        groups: Mapping[int, int],
        tokens: Mapping[int, int],
        in_flight: Mapping[int, int],
        in_buffer: Mapping[int, int],
    ) -> None:
        """Records the staleness of a step's data. Each argument maps a number of versions to the number of groups with
        it, and `tokens` to that of tokens. `in_flight` has the versions that passed while a group was generated, and
        `in_buffer` those that passed while it waited in the buffer."""
        self._instruments.observe_counts(catalogue.Staleness.group_staleness_versions, groups)
        self._instruments.set(catalogue.Staleness.group_staleness_max_versions, max(groups, default=0))
        self._instruments.observe_counts(catalogue.Staleness.token_staleness_versions, tokens)
        self._instruments.observe_counts(catalogue.Staleness.staleness_inflight_versions, in_flight)
        self._instruments.observe_counts(catalogue.Staleness.staleness_inbuffer_versions, in_buffer)

    def rows_outstanding(self, rows: int) -> None:
        """Records the number of rows of finished groups that are in the data plane now."""
        self._instruments.set(catalogue.Staleness.rows_outstanding, rows)

    def heldout(self, name: str, reward_mean: float) -> None:
        """Records the mean reward of an evaluation on the held-out set `name`."""
        self._instruments.set(catalogue.Learner.learner_heldout_reward_mean, reward_mean, set=name)

    def effective_training_time(self, ratio: float) -> None:
        """Records the effective training time ratio: the share of the wall time since the run's first start that its
        steps took, with their waits and saves. Starts, steps that were trained again, and the time without a learner
        are not in it."""
        self._instruments.set(catalogue.Run.run_effective_training_time_ratio, ratio)

    def device_time(self, times: Iterable[DeviceTime]) -> None:
        """Records the device-seconds of each pool since the run began."""
        for spent in times:
            parts = {"starting": spent.starting_s, "waiting": spent.waiting_s, "working": spent.working_s}
            for part, total_s in parts.items():
                labels = {"pool": spent.pool.value, "device": spent.device.value, "part": part}
                self._instruments.raise_to(catalogue.Run.device_seconds_total, total_s, **labels)

    def health(self, notes: Iterable[Concern]) -> None:
        """Records the health notes that the run has now."""
        shown = set(notes)
        for note in catalogue.NOTES:
            self._instruments.set(catalogue.Learner.learner_health_note, float(note in shown), note=note)

    def checkpoint_saved(self, *, step: int, duration_s: float) -> None:
        """Records a complete checkpoint of the weights after `step` steps."""
        self._instruments.add(catalogue.Checkpoint.checkpoints_total, 1, outcome="saved")
        self._instruments.observe(catalogue.Checkpoint.checkpoint_duration_seconds, duration_s)
        self._instruments.set(catalogue.Checkpoint.checkpoint_policy_version, step)
        self._instruments.begin(catalogue.Checkpoint.checkpoint_age_seconds)

    def checkpoint_staged(self, wait_s: float) -> None:
        """Records the time that training waited for the copies of a checkpoint."""
        self._instruments.observe(catalogue.Checkpoint.checkpoint_wait_seconds, wait_s)

    def mirrored(self) -> None:
        """Records that the mirror (`run.mirror`) has everything that is finished now, or that it begins now."""
        self._instruments.begin(catalogue.Checkpoint.mirror_behind_seconds)

    def mirror_failed(self) -> None:
        """Records a failed try to send something to the mirror."""
        self._instruments.add(catalogue.Checkpoint.mirror_failures_total, 1)

    def checkpoint_missed(self, *, outcome: str) -> None:
        """Records a checkpoint that was due but was not saved: `postponed`, because the last one is still being
        written, or `failed`."""
        self._instruments.add(catalogue.Checkpoint.checkpoints_total, 1, outcome=outcome)

    def parity(self, nats: float, *, ratio: float) -> None:
        """Records the largest difference of log-probs over the step's on-policy tokens, and `ratio`: the number that is
        compared with a limit (`weights.parity_*`), divided by this limit."""
        self._instruments.set(catalogue.Weights.weight_parity_nats, nats)
        self._instruments.set(catalogue.Weights.weight_parity_ratio, ratio)

    def versions(self, *, learner: int, published: int) -> None:
        """Records the learner's version and the newest published version, as numbers of steps."""
        self._instruments.set(catalogue.Weights.learner_policy_version, learner)
        self._instruments.set(catalogue.Weights.published_policy_version, published)

    def published(self, *, bytes: int, whole_bytes: int, phase_seconds: Mapping[str, float]) -> None:
        """Records a publication: the bytes that were sent, the bytes of all weights, and the duration of each phase."""
        self._instruments.add(catalogue.Weights.weight_bytes_total, bytes)
        self._instruments.set(catalogue.Weights.weight_sent_ratio, bytes / whole_bytes if whole_bytes else 1.0)
        for phase, seconds in phase_seconds.items():
            self._instruments.observe(catalogue.Weights.weight_publish_seconds, seconds, phase=phase)

    def weight_delivery(self, *, outcome: str) -> None:
        """Records the outcome of one attempt to deliver a snapshot of the weights to the generators."""
        self._instruments.add(catalogue.Weights.weight_deliveries_total, 1, outcome=outcome)


@never_raises
class GeneratorMetrics(ProcessMetrics):
    """The metrics of one generator replica. `environment` is the name of the environment that scores its rollouts. With
    a mixture, the label `environment` has the name of the part instead."""

    role = Role.GENERATOR
    state_seconds = catalogue.Generator.generator_state_seconds_total

    def __init__(self, *, environment: str) -> None:
        super().__init__()
        self._environment = environment

    def inflight(self, groups: int) -> None:
        """Records the number of groups that are being generated."""
        self._instruments.set(catalogue.Generator.generator_inflight_groups, groups)

    def policy_version(self, step: int) -> None:
        """Records the step of a version that was completely loaded."""
        self._instruments.set(catalogue.Generator.generator_policy_version, step)

    def rollout(self, meta: GroupMeta, *, duration_s: float, scoring_s: float) -> None:
        """Records a group that was generated and scored, the duration of the whole rollout, and that of its scoring.

        The prompt's tokens count once, because the samples of a group share the prompt's key-value cache.
        """
        self._instruments.add(catalogue.Generator.generator_tokens_total, meta.prompt_tokens, kind="prompt")
        self._instruments.add(catalogue.Generator.generator_tokens_total, meta.generated_tokens, kind="completion")
        environment = meta.part or self._environment
        self._instruments.observe(catalogue.Generator.rollout_duration_seconds, duration_s, environment=environment)
        self._instruments.observe(catalogue.Reward.reward_duration_seconds, scoring_s, environment=environment)
        self._instruments.observe(
            catalogue.Generator.completion_tokens, *meta.completion_tokens, environment=environment
        )

    def samples(self, count: int, *, outcome: str) -> None:
        """Records the samples of one group. `outcome` is that of its commit to the buffer; it is `failed` or
        `cancelled` for a group without a commit."""
        self._instruments.add(catalogue.Generator.generator_samples_total, count, outcome=outcome)

    def rollout_failed(self, *, failure_class: str, reason: str) -> None:
        """Records a failed rollout of a group."""
        labels = {"class": failure_class, "reason": reason}
        self._instruments.add(catalogue.Generator.rollout_failures_total, 1, **labels)

    def agents(
        self,
        *,
        turns: Sequence[int],
        tool_calls: int,
        tool_seconds: Sequence[float],
        forks: Mapping[str, int],
        tokens: Mapping[str, int],
        part: str = "",
    ) -> None:
        """Records what the agents of a group did: the calls of the model in each sample (`turns`), the tool calls of
        the model and how long each took, the changes of a conversation's history (`forks`) by reason, and the tokens
        by origin."""
        environment = part or self._environment
        self._instruments.observe(catalogue.Agents.agent_turns, *turns, environment=environment)
        self._instruments.add(catalogue.Agents.agent_tool_calls_total, tool_calls, environment=environment)
        self._instruments.observe(catalogue.Agents.agent_tool_seconds, *tool_seconds, environment=environment)
        for reason, count in forks.items():
            self._instruments.add(catalogue.Agents.agent_forks_total, count, reason=reason)
        for origin, count in tokens.items():
            self._instruments.add(catalogue.Agents.agent_tokens_total, count, origin=origin)

    def sessions(self, ages_s: Sequence[float]) -> None:
        """Records the open sessions of agents, by their ages in seconds."""
        self._instruments.set(catalogue.Agents.agent_sessions, len(ages_s))
        self._instruments.set(catalogue.Agents.agent_oldest_session_age_seconds, max(ages_s, default=0.0))

    def rewards(self, values: Sequence[float], *, part: str = "") -> None:
        """Records the rewards of a group's samples."""
        self._instruments.observe(catalogue.Reward.reward, *values, environment=part or self._environment)

    def reward_failed(self, *, reason: str, samples: int) -> None:
        """Records samples whose scoring failed."""
        self._instruments.add(catalogue.Reward.reward_failures_total, samples, reason=reason)

    def weight_update(self, *, outcome: str, phase_seconds: Mapping[str, float]) -> None:
        """Records the update of a replica to a version that the learner offered: its outcome and the duration of each
        phase."""
        self._instruments.add(catalogue.Weights.weight_updates_total, 1, outcome=outcome)
        for phase, seconds in phase_seconds.items():
            self._instruments.observe(catalogue.Weights.weight_load_seconds, seconds, phase=phase)

    def broadcast(self, *, outcome: str, bytes: int, duration_s: float) -> None:
        """Records a broadcast of weights: its outcome for this replica (`received`, `missed` or `absent`), the bytes
        that arrived here, and the duration, unless the replica was absent."""
        self._instruments.add(catalogue.Weights.weight_broadcasts_total, 1, outcome=outcome)
        self._instruments.add(catalogue.Weights.weight_broadcast_bytes_total, bytes)
        if outcome != "absent":
            self._instruments.observe(catalogue.Weights.weight_broadcast_seconds, duration_s)

    def parity(self, nats: float, *, ratio: float) -> None:
        """Records the largest difference of log-probs over the probe of the last weight update (token sequences that
        the learner has scored), and `ratio`: the number that is compared with a limit (`weights.parity_*`), divided by
        this limit."""
        self._instruments.set(catalogue.Weights.weight_parity_nats, nats)
        self._instruments.set(catalogue.Weights.weight_parity_ratio, ratio)


@never_raises
class BufferMetrics(ProcessMetrics):
    """The metrics of the coordinator, the process that holds the replay buffer. Its role is `buffer`."""

    role = Role.BUFFER
    state_seconds = catalogue.Buffer.buffer_state_seconds_total

    def limits(self, limits: Limits) -> None:
        """Records the buffer's limits; once, at the start."""
        self._instruments.set(catalogue.Limits.staleness_limit_versions, limits.max_staleness_versions)
        self._instruments.set(catalogue.Limits.buffer_capacity_groups, limits.capacity_groups)
        self._instruments.set(catalogue.Limits.buffer_capacity_bytes, limits.capacity_bytes)

    def fill(self, counts: Counts) -> None:
        """Records the present number of groups by state, their bytes and the age of the oldest."""
        for state in BUFFER_STATES:
            self._instruments.set(catalogue.Buffer.buffer_groups, getattr(counts, state), state=state)
        self._instruments.set(catalogue.Buffer.buffer_bytes, counts.booked_bytes)
        self._instruments.set(catalogue.Buffer.buffer_oldest_group_age_seconds, counts.oldest_group_age_s)

    def replicas(self, counts: Mapping[str, int], *, wanted: int) -> None:
        """Records the number of registered replicas by state, and how many there should be. A state that is not in
        `counts` becomes 0."""
        self._instruments.set(catalogue.Run.wanted_replicas, wanted)
        for state in REPLICA_STATES:
            self._instruments.set(catalogue.Run.replicas, counts.get(state, 0), state=state)

    def causes(self, *, quarantines: Mapping[Cause, int], restarts: Mapping[Cause, int]) -> None:
        """Records how many replicas were quarantined (got no groups any more), and how many were started again, by
        cause."""
        for cause, total in quarantines.items():
            self._instruments.raise_to(catalogue.Run.replica_quarantines_total, total, cause=cause.value)
        for cause, total in restarts.items():
            self._instruments.raise_to(catalogue.Run.replica_restarts_total, total, cause=cause.value)

    def account(self, account: Account) -> None:
        """Records the ledger's totals by fate and by event.

        Open fates can shrink, so they are not counters; `fill` records them as gauges.
        """
        issued = account.issued.groups
        accounted = sum(amount.groups for amount in account.fates.values())
        self._instruments.raise_to(catalogue.Buffer.ledger_issued_groups_total, issued)
        self._instruments.set(catalogue.Buffer.ledger_unaccounted_groups, issued - accounted)
        for fate, amount in account.fates.items():
            if fate not in OPEN_FATES:
                self._instruments.raise_to(catalogue.Buffer.ledger_groups_total, amount.groups, fate=fate.value)
                self._instruments.raise_to(catalogue.Buffer.ledger_tokens_total, amount.tokens, fate=fate.value)
        for event, total in account.events.items():
            tokens = event in TOKEN_EVENTS
            counter = catalogue.Buffer.buffer_attempt_tokens_total if tokens else catalogue.Buffer.buffer_events_total
            self._instruments.raise_to(counter, total, event=event.value)

    def reserve_waited(self, seconds: float) -> None:
        """Records the time that one call of a replica waited for tickets, the permissions to generate a group."""
        self._instruments.observe(catalogue.Buffer.buffer_reserve_wait_seconds, seconds)

    def lease_waited(self, seconds: float) -> None:
        """Records the time that the learner waited for one lease, the groups of a step."""
        self._instruments.observe(catalogue.Buffer.buffer_lease_wait_seconds, seconds)
