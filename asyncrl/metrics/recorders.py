"""Records metrics: one class per process, `LearnerMetrics`, `GeneratorMetrics` and `BufferMetrics`.

The methods take strings, ints and floats, the configuration, or records of the buffer. They never raise: an error is
logged once per method, and the value is lost. A metric of the catalogue without a recording method must be deleted.
tests/metrics/test_recorders.py checks this: it calls every method and looks for a value of every metric.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from asyncrl import __version__
from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.ledger import OPEN_FATES, TOKEN_EVENTS, Account
from asyncrl.buffer.records import Counts, GroupMeta
from asyncrl.buffer.staleness import Limits
from asyncrl.config.load import flat_config
from asyncrl.config.parts import environment_name
from asyncrl.config.schema import Config
from asyncrl.metrics.catalogue import BUFFER_STATES, DEADLINES, REPLICA_STATES, Role
from asyncrl.metrics.instruments import Instruments, Totals
from asyncrl.metrics.numbers import GAUGES

logger = logging.getLogger(__name__)

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

    def __init__(self) -> None:
        self._instruments = Instruments(self.role)
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
        self._instruments.read_from(f"asyncrl_{self.role.value}_state_seconds_total", seconds)

    def run_info(self, config: Config) -> None:
        """Records the run's name, model, environment and loss and the package's version; once per process."""
        self._instruments.set(
            "asyncrl_run_info",
            1,
            run_name=config.run.name,
            version=__version__,
            model=config.model.path,
            environment=environment_name(config),
            loss=config.algorithm.loss if isinstance(config.algorithm.loss, str) else "axes",
        )

    def heartbeat(self, *, unix_time_s: float) -> None:
        """Records the time of an iteration of the process's main loop."""
        self._instruments.set("asyncrl_heartbeat_timestamp_seconds", unix_time_s)


@never_raises
class LearnerMetrics(ProcessMetrics):
    """The metrics of the learner."""

    role = Role.LEARNER

    def limits(self, config: Config) -> None:
        """Records the limits that alerts compare with, and every timeout of the configuration; once, at the start."""
        weights = config.weights
        limits = {
            "asyncrl_stall_timeout_seconds": config.run.stall_timeout_s,
            "asyncrl_weight_sync_timeout_seconds": weights.load_timeout_s,
            "asyncrl_weight_lag_limit_versions": weights.max_lag_publications * weights.publish_every_steps,
            "asyncrl_checkpoint_interval_versions": config.checkpoint.every_steps,
            "asyncrl_checkpoint_policy_version": 0,
        }
        for name, limit in limits.items():
            self._instruments.set(name, limit)
        settings: Mapping[str, Any] = flat_config(config)
        for key in DEADLINES:
            self._instruments.set("asyncrl_deadline_seconds", settings[key], deadline=key)

    def incarnation(self, number: int, *, nonce: str, restarts: int, resumed_unix_s: float | None) -> None:
        """Records the number of the run's incarnation, and how often and when the run was resumed; once, at the
        start."""
        self._instruments.set("asyncrl_run_incarnation", number, nonce=nonce)
        self._instruments.set("asyncrl_run_restarts", restarts)
        self._instruments.set(
            "asyncrl_run_resumed_timestamp_seconds", math.nan if resumed_unix_s is None else resumed_unix_s
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
        self._instruments.add("asyncrl_learner_steps_total", 1, outcome=outcome)
        self._instruments.add("asyncrl_learner_tokens_total", tokens)
        self._instruments.observe("asyncrl_learner_step_duration_seconds", duration_s)
        self._instruments.add("asyncrl_learner_model_flops_total", model_flops or 0)
        peak = math.nan if peak_flops_per_s is None else peak_flops_per_s
        self._instruments.set("asyncrl_learner_peak_flops_per_second", peak)

    def numbers(self, values: Mapping[str, float]) -> None:
        """Records the numbers of a trained step, by their names in `asyncrl.metrics.numbers`. The gauge of a number
        that is not in `values` becomes NaN."""
        for name, gauge in GAUGES.items():
            self._instruments.set(gauge, values.get(name, math.nan))

    def rewards(self, *, components: Mapping[str, float], parts: Mapping[str, float]) -> None:
        """Records the mean of each component of a step's rewards, and the mean reward of each part of a mixture, by
        name."""
        for name, value in components.items():
            self._instruments.set("asyncrl_learner_reward_component_mean", value, component=name)
        for name, value in parts.items():
            self._instruments.set("asyncrl_learner_reward_part_mean", value, part=name)

    def staleness(
        self,
        *,
        groups: Mapping[int, int],
        tokens: Mapping[int, int],
        in_flight: Mapping[int, int],
        in_buffer: Mapping[int, int],
    ) -> None:
        """Records the staleness of a step's data. Each argument maps versions to a number of groups or tokens."""
        self._instruments.observe_counts("asyncrl_group_staleness_versions", groups)
        self._instruments.set("asyncrl_group_staleness_max_versions", max(groups, default=0))
        self._instruments.observe_counts("asyncrl_token_staleness_versions", tokens)
        self._instruments.observe_counts("asyncrl_staleness_inflight_versions", in_flight)
        self._instruments.observe_counts("asyncrl_staleness_inbuffer_versions", in_buffer)

    def rows_outstanding(self, rows: int) -> None:
        """Records the rows in the data plane after a step's own rows were cleared."""
        self._instruments.set("asyncrl_rows_outstanding", rows)

    def heldout(self, name: str, reward_mean: float) -> None:
        """Records the mean reward of an evaluation on the held-out set `name`."""
        self._instruments.set("asyncrl_learner_heldout_reward_mean", reward_mean, set=name)

    def checkpoint_saved(self, *, step: int, duration_s: float, unix_time_s: float) -> None:
        """Records a complete checkpoint of the weights after `step` steps."""
        self._instruments.add("asyncrl_checkpoints_total", 1, outcome="saved")
        self._instruments.observe("asyncrl_checkpoint_duration_seconds", duration_s)
        self._instruments.set("asyncrl_checkpoint_policy_version", step)
        self._instruments.set("asyncrl_checkpoint_last_success_timestamp_seconds", unix_time_s)

    def checkpoint_staged(self, wait_s: float) -> None:
        """Records the time that training waited for the copies of a checkpoint."""
        self._instruments.observe("asyncrl_checkpoint_wait_seconds", wait_s)

    def checkpoint_missed(self, *, outcome: str) -> None:
        """Records a due checkpoint that there is not: `postponed`, because the last one is still being written, or
        `failed`."""
        self._instruments.add("asyncrl_checkpoints_total", 1, outcome=outcome)

    def parity(self, nats: float, *, ratio: float) -> None:
        """Records the largest difference of log-probs over the step's on-policy tokens, and the judged number as a
        share of its limit."""
        self._instruments.set("asyncrl_weight_parity_nats", nats)
        self._instruments.set("asyncrl_weight_parity_ratio", ratio)

    def versions(self, *, learner: int, published: int) -> None:
        """Records the learner's version and the newest published version, as steps."""
        self._instruments.set("asyncrl_learner_policy_version", learner)
        self._instruments.set("asyncrl_published_policy_version", published)

    def published(self, *, bytes: int, whole_bytes: int, phase_seconds: Mapping[str, float]) -> None:
        """Records a publication: the bytes that were sent, those of all weights, and the duration of each phase."""
        self._instruments.add("asyncrl_weight_bytes_total", bytes)
        self._instruments.set("asyncrl_weight_sent_ratio", bytes / whole_bytes if whole_bytes else 1.0)
        for phase, seconds in phase_seconds.items():
            self._instruments.observe("asyncrl_weight_publish_seconds", seconds, phase=phase)

    def weight_delivery(self, *, outcome: str) -> None:
        """Records the outcome of one attempt to deliver a snapshot of the weights."""
        self._instruments.add("asyncrl_weight_deliveries_total", 1, outcome=outcome)


@never_raises
class GeneratorMetrics(ProcessMetrics):
    """The metrics of one generator replica. `environment` is the name of the environment that scores its rollouts. With
    a mixture, the label `environment` has the name of the part instead."""

    role = Role.GENERATOR

    def __init__(self, *, environment: str) -> None:
        super().__init__()
        self._environment = environment

    def inflight(self, groups: int) -> None:
        """Records the number of groups that are being generated."""
        self._instruments.set("asyncrl_generator_inflight_groups", groups)

    def policy_version(self, step: int) -> None:
        """Records the step of a version that was completely loaded."""
        self._instruments.set("asyncrl_generator_policy_version", step)

    def rollout(self, meta: GroupMeta, *, duration_s: float, scoring_s: float) -> None:
        """Records a group that was generated and scored, and the time that all of it and its scoring took.

        The prompt's tokens count once, because the samples of a group share the prompt's key-value cache.
        """
        self._instruments.add("asyncrl_generator_tokens_total", meta.prompt_tokens, kind="prompt")
        self._instruments.add("asyncrl_generator_tokens_total", meta.generated_tokens, kind="completion")
        environment = meta.part or self._environment
        self._instruments.observe("asyncrl_rollout_duration_seconds", duration_s, environment=environment)
        self._instruments.observe("asyncrl_reward_duration_seconds", scoring_s, environment=environment)
        self._instruments.observe("asyncrl_completion_tokens", *meta.completion_tokens, environment=environment)

    def samples(self, count: int, *, outcome: str) -> None:
        """Records the samples of one group with the outcome of its commit, or `failed`."""
        self._instruments.add("asyncrl_generator_samples_total", count, outcome=outcome)

    def rollout_failed(self, *, failure_class: str, reason: str) -> None:
        """Records a failed rollout of a group."""
        labels = {"class": failure_class, "reason": reason}
        self._instruments.add("asyncrl_rollout_failures_total", 1, **labels)

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
        """Records what the agents of a group did: the calls of each sample, the tool calls of the model and how long
        each took, the forks by reason, and the tokens by origin."""
        environment = part or self._environment
        self._instruments.observe("asyncrl_agent_turns", *turns, environment=environment)
        self._instruments.add("asyncrl_agent_tool_calls_total", tool_calls, environment=environment)
        self._instruments.observe("asyncrl_agent_tool_seconds", *tool_seconds, environment=environment)
        for reason, count in forks.items():
            self._instruments.add("asyncrl_agent_forks_total", count, reason=reason)
        for origin, count in tokens.items():
            self._instruments.add("asyncrl_agent_tokens_total", count, origin=origin)

    def sessions(self, ages_s: Sequence[float]) -> None:
        """Records the open sessions of agents, by their ages in seconds."""
        self._instruments.set("asyncrl_agent_sessions", len(ages_s))
        self._instruments.set("asyncrl_agent_oldest_session_age_seconds", max(ages_s, default=0.0))

    def rewards(self, values: Sequence[float], *, part: str = "") -> None:
        """Records the rewards of a group's samples."""
        self._instruments.observe("asyncrl_reward", *values, environment=part or self._environment)

    def reward_failed(self, *, reason: str, samples: int) -> None:
        """Records samples whose scoring failed."""
        self._instruments.add("asyncrl_reward_failures_total", samples, reason=reason)

    def weight_update(self, *, outcome: str, phase_seconds: Mapping[str, float]) -> None:
        """Records an offered version: the outcome of the update and the duration of each phase."""
        self._instruments.add("asyncrl_weight_updates_total", 1, outcome=outcome)
        for phase, seconds in phase_seconds.items():
            self._instruments.observe("asyncrl_weight_load_seconds", seconds, phase=phase)

    def broadcast(self, *, outcome: str, bytes: int, duration_s: float) -> None:
        """Records a broadcast of weights: what it was for this replica, and the bytes that arrived."""
        self._instruments.add("asyncrl_weight_broadcasts_total", 1, outcome=outcome)
        self._instruments.add("asyncrl_weight_broadcast_bytes_total", bytes)
        if outcome != "absent":
            self._instruments.observe("asyncrl_weight_broadcast_seconds", duration_s)

    def parity(self, nats: float, *, ratio: float) -> None:
        """Records the largest difference of log-probs over the probe of the last weight update, and the judged number
        as a share of its limit."""
        self._instruments.set("asyncrl_weight_parity_nats", nats)
        self._instruments.set("asyncrl_weight_parity_ratio", ratio)


@never_raises
class BufferMetrics(ProcessMetrics):
    """The metrics of the coordinator, whose process has the role `buffer`."""

    role = Role.BUFFER

    def limits(self, limits: Limits) -> None:
        """Records the buffer's limits; at the start and when a limit changes."""
        self._instruments.set("asyncrl_staleness_limit_versions", limits.max_staleness_versions)
        self._instruments.set("asyncrl_buffer_capacity_groups", limits.capacity_groups)
        self._instruments.set("asyncrl_buffer_capacity_bytes", limits.capacity_bytes)

    def fill(self, counts: Counts) -> None:
        """Records the present number of groups by state, their bytes and the age of the oldest."""
        for state in BUFFER_STATES:
            self._instruments.set("asyncrl_buffer_groups", getattr(counts, state), state=state)
        self._instruments.set("asyncrl_buffer_bytes", counts.booked_bytes)
        self._instruments.set("asyncrl_buffer_oldest_group_age_seconds", counts.oldest_group_age_s)

    def replicas(self, counts: Mapping[str, int]) -> None:
        """Records the number of registered replicas by state. A state that is not in `counts` becomes 0."""
        for state in REPLICA_STATES:
            self._instruments.set("asyncrl_replicas", counts.get(state, 0), state=state)

    def causes(self, *, quarantines: Mapping[Cause, int], restarts: Mapping[Cause, int]) -> None:
        """Records how many replicas were quarantined and started again, by cause."""
        for cause, total in quarantines.items():
            self._instruments.raise_to("asyncrl_replica_quarantines_total", total, cause=cause.value)
        for cause, total in restarts.items():
            self._instruments.raise_to("asyncrl_replica_restarts_total", total, cause=cause.value)

    def account(self, account: Account) -> None:
        """Records the ledger's totals by fate and by event.

        Open fates can shrink, so they are not counters; `fill` records them as gauges.
        """
        issued = account.issued.groups
        accounted = sum(amount.groups for amount in account.fates.values())
        self._instruments.raise_to("asyncrl_ledger_issued_groups_total", issued)
        self._instruments.set("asyncrl_ledger_unaccounted_groups", issued - accounted)
        for fate, amount in account.fates.items():
            if fate not in OPEN_FATES:
                self._instruments.raise_to("asyncrl_ledger_groups_total", amount.groups, fate=fate.value)
                self._instruments.raise_to("asyncrl_ledger_tokens_total", amount.tokens, fate=fate.value)
        for event, total in account.events.items():
            counted = "attempt_tokens" if event in TOKEN_EVENTS else "events"
            self._instruments.raise_to(f"asyncrl_buffer_{counted}_total", total, event=event.value)

    def reserve_waited(self, seconds: float) -> None:
        """Records the time that one reserve call waited for tickets."""
        self._instruments.observe("asyncrl_buffer_reserve_wait_seconds", seconds)

    def lease_waited(self, seconds: float) -> None:
        """Records the time that the learner waited for one lease."""
        self._instruments.observe("asyncrl_buffer_lease_wait_seconds", seconds)
