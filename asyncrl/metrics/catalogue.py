"""Declares every metric of asyncrl once, as data. `docs/metrics.md` is generated from this module and
`numbers.py`.

The help text, unit, labels and buckets of a metric are written only here; `numbers.py` has those of a step's numbers.
Only `recorders.py` turns a declaration into a prometheus_client object.

The classes `Run`, `Limits` and so on are the sections of docs/metrics.md. Each metric is an attribute of its class. The
name of the attribute is the name of the metric without the prefix. The type of a metric says how it is recorded. So a
type checker refuses a metric that does not exist, and a call that adds an amount to a gauge.

Conventions: the prefix `asyncrl_`, base units, `_total` on counters, and counters instead of gauges of rates. Every
label has a bounded set of values. Either the values are listed here, or they belong to the user or to another layer
(environments, failure reasons, phases); then `recorders.py` limits them to `MAX_OPEN_VALUES`. The labels `run`,
`role`, `replica` and `node` come from service discovery, so no metric declares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.ledger import OPEN_FATES, TOKEN_EVENTS, Event, Fate
from asyncrl.buffer.records import CommitOutcome
from asyncrl.common.concern import Concern
from asyncrl.config.load import flat_config
from asyncrl.config.schema import Config
from asyncrl.environments.scoring_messages import RewardFailure
from asyncrl.errors import FailureClass
from asyncrl.metrics import state_colors
from asyncrl.metrics.numbers import GAUGES, NUMBERS

MAX_OPEN_VALUES = 32
"""Distinct values of an open label that a process exports; later ones are recorded as `other`."""


class Role(StrEnum):
    """The long-lived processes that serve metrics."""

    LEARNER = "learner"
    GENERATOR = "generator"
    BUFFER = "buffer"


class Kind(StrEnum):
    """Prometheus types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


LEARNER_STATES = tuple(state_colors.LEARNER)
GENERATOR_STATES = tuple(state_colors.GENERATOR)
BUFFER_WAITS = tuple(state_colors.BUFFER)
BUFFER_STATES = tuple(fate.value for fate in Fate if fate in OPEN_FATES)
FINAL_FATES = tuple(fate.value for fate in Fate if fate not in OPEN_FATES)
"""The final fates of the ledger. The other fates are states in the buffer: see `asyncrl_buffer_groups`."""
CAUSES = tuple(cause.value for cause in Cause)
REPLICA_STATES = ("generating", "waiting", "without_weights", "silent", "quarantined", "restarting")

NOTES = tuple(concern.value for concern in Concern if concern is not Concern.BOTTLENECK)
"""The health notes of a run."""

DEADLINES = tuple(key for key in flat_config(Config()) if key.endswith(("timeout_s", "grace_s")))
"""The config keys that end in `timeout_s` or `grace_s`; each limits a waiting time."""

VERSIONS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
REWARDS = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10)

ALL = frozenset(Role)
LEARNER = frozenset({Role.LEARNER})
GENERATOR = frozenset({Role.GENERATOR})
BUFFER = frozenset({Role.BUFFER})

Labels = Mapping[str, tuple[str, ...] | None]
"""The values of each label. None means an open set, limited to `MAX_OPEN_VALUES`."""


UNITS = (
    *("seconds", "bytes", "versions", "nats", "ratio", "groups", "samples", "tokens", "replicas", "updates", "steps"),
    "events",
)


def _unit_of(name: str) -> str:
    """Returns the unit at the end of a metric's name; empty if there is none.

    >>> [_unit_of(name) for name in ("asyncrl_weight_bytes_total", "asyncrl_published_policy_version", "asyncrl_loss")]
    ['bytes', 'versions', '']
    """
    words = name.removesuffix("_total")
    return "versions" if words.endswith("_version") else next((unit for unit in UNITS if words.endswith(unit)), "")


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric. `own_unit` is its unit if its name does not end in one."""

    kind: ClassVar[Kind]

    roles: frozenset[Role]
    name: str
    help: str
    labels: Labels = field(default_factory=dict)
    own_unit: str | None = None
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """The unit that documentation and dashboards show."""
        return _unit_of(self.name) if self.own_unit is None else self.own_unit


@dataclass(frozen=True, slots=True)
class CounterMetric(Metric):
    """A counter to which each call adds one amount."""

    kind = Kind.COUNTER


@dataclass(frozen=True, slots=True)
class ScrapedMetric(Metric):
    """A counter whose totals are read during each scrape, so that a long wait is visible before it ends."""

    kind = Kind.COUNTER


@dataclass(frozen=True, slots=True)
class GaugeMetric(Metric):
    """A gauge."""

    kind = Kind.GAUGE


@dataclass(frozen=True, slots=True)
class AgeMetric(Metric):
    """A gauge of the seconds since an event. Each scrape reads them from the monotonic clock of the process, so that no
    query subtracts the clocks of two machines. NaN before the first event."""

    kind = Kind.GAUGE


@dataclass(frozen=True, slots=True)
class HistogramMetric(Metric):
    """A histogram to which each call adds one or more values, by default seconds."""

    kind = Kind.HISTOGRAM
    buckets: tuple[float, ...] = SECONDS


@dataclass(frozen=True, slots=True)
class CountsMetric(Metric):
    """A histogram of versions to which each call adds a mapping {value: count}, because a step has thousands of
    tokens."""

    kind = Kind.HISTOGRAM
    buckets: tuple[float, ...] = VERSIONS


class Run:
    """The run, and its replicas."""

    run_info = GaugeMetric(
        ALL,
        "asyncrl_run_info",
        "Always 1. Its labels describe the run; `run_name` identifies the run that the endpoint belongs to.",
        {"run_name": None, "version": None, "model": None, "environment": None, "loss": None},
    )
    heartbeat_age_seconds = AgeMetric(
        ALL,
        "asyncrl_heartbeat_age_seconds",
        "Time since the last iteration of the process's main loop; NaN before the first. An iteration of the learner "
        "is a step.",
    )
    run_incarnation = GaugeMetric(
        LEARNER,
        "asyncrl_run_incarnation",
        "Number of the run's incarnation: 1, and one more after each restart. `nonce` distinguishes this run from "
        "other runs of the same name.",
        {"nonce": None},
    )
    run_restarts = GaugeMetric(LEARNER, "asyncrl_run_restarts", "How often the run was resumed since its first start.")
    run_effective_training_time_ratio = GaugeMetric(
        LEARNER,
        "asyncrl_run_effective_training_time_ratio",
        "Effective training time ratio (ETTR): the share of the wall time since the first start of the run in which "
        "its steps were trained. Starts, steps that were trained again after a crash, and the time without a learner "
        "are not in this share.",
    )
    device_seconds_total = CounterMetric(
        LEARNER,
        "asyncrl_device_seconds_total",
        "Device-seconds of each pool since the run began, up to the last step: GPU-seconds (`device` is `gpu`), or "
        "seconds of processes on CPUs (`process`). `starting`: the processes started. `waiting`: the learner and its "
        "critic waited for groups, or slots of an engine generated nothing. `working`: the rest. A run that is resumed "
        "goes on with the sums of its records, so the largest value of all learners is that of the run.",
        {"pool": None, "device": None, "part": None},
        own_unit="device-seconds",
    )
    run_resumed_timestamp_seconds = GaugeMetric(
        LEARNER,
        "asyncrl_run_resumed_timestamp_seconds",
        "Unix time of the last restart of the run; NaN if there was none.",
        own_unit="unix seconds",
    )
    replicas = GaugeMetric(
        BUFFER,
        "asyncrl_replicas",
        "Replicas that are registered at the buffer, by state. `waiting`: it has weights but no group. "
        "`without_weights`: it has not loaded a version yet. `silent`: it sends no heartbeats. `quarantined`: it "
        "gets no groups. `restarting`: its deployment ends it and starts it again.",
        {"state": REPLICA_STATES},
    )
    wanted_replicas = GaugeMetric(
        BUFFER,
        "asyncrl_wanted_replicas",
        "Replicas that the generator deployments should have together, by their configuration, `asyncrl scale` or "
        "`generator.autoscale`.",
    )
    replica_quarantines_total = CounterMetric(
        BUFFER,
        "asyncrl_replica_quarantines_total",
        "Replicas that got no groups any more, by cause.",
        {"cause": CAUSES},
    )
    replica_restarts_total = CounterMetric(
        BUFFER,
        "asyncrl_replica_restarts_total",
        "Replicas that were started again, by cause.",
        {"cause": CAUSES},
    )


class Limits:
    """The limits with which alerts compare."""

    staleness_limit_versions = GaugeMetric(
        BUFFER,
        "asyncrl_staleness_limit_versions",
        "The staleness limit η: the largest allowed staleness of trained data.",
    )
    buffer_capacity_groups = GaugeMetric(
        BUFFER, "asyncrl_buffer_capacity_groups", "Largest number of groups in the buffer."
    )
    buffer_capacity_bytes = GaugeMetric(
        BUFFER, "asyncrl_buffer_capacity_bytes", "Largest size of the rows of all groups in the buffer."
    )
    stall_timeout_seconds = GaugeMetric(
        LEARNER,
        "asyncrl_stall_timeout_seconds",
        "`run.stall_timeout_s`: a run without any progress for this time ends with an error.",
    )
    weight_sync_timeout_seconds = GaugeMetric(
        LEARNER,
        "asyncrl_weight_sync_timeout_seconds",
        "`weights.load_timeout_s`: the time limit of a replica for loading a version.",
    )
    deadline_seconds = GaugeMetric(
        LEARNER,
        "asyncrl_deadline_seconds",
        "Every timeout of the learner's configuration, by its config key. A generator deployment can have its own "
        "value of some keys, such as `generator.startup_timeout_s`.",
        {"deadline": DEADLINES},
    )
    checkpoint_interval_versions = GaugeMetric(
        LEARNER,
        "asyncrl_checkpoint_interval_versions",
        "`checkpoint.every_steps`; 0 when checkpoints are not saved by steps.",
    )
    weight_lag_limit_versions = GaugeMetric(
        LEARNER,
        "asyncrl_weight_lag_limit_versions",
        "How many versions a replica may be behind the published version and still start groups: "
        "`weights.max_lag_publications` × `weights.publish_every_steps`.",
    )
    objective_steps_per_hour = GaugeMetric(
        LEARNER,
        "asyncrl_objective_steps_per_hour",
        "`metrics.objective_steps_per_hour`; NaN without this objective.",
        own_unit="steps per hour",
    )
    objective_training_ratio = GaugeMetric(
        LEARNER,
        "asyncrl_objective_training_ratio",
        "`metrics.objective_training_ratio`; NaN without this objective.",
    )
    learner_peak_flops_per_second = GaugeMetric(
        LEARNER,
        "asyncrl_learner_peak_flops_per_second",
        "Peak speed of the devices of all learner ranks together, in the precision of training, from the data "
        "sheets and without sparsity. NaN when it is not known: on CPUs, in float32, or on a GPU that is not in "
        "the table of asyncrl/policy/flops.py.",
        own_unit="FLOP/s",
    )


class Generator:
    """A replica's generation."""

    generator_samples_total = CounterMetric(
        GENERATOR,
        "asyncrl_generator_samples_total",
        "Samples by the outcome of their group's commit. `failed`: the rollout failed and there was no commit. "
        "`cancelled`: the buffer had ended the ticket, so the rollout was ended too.",
        # A replica records a commit that was repeated (DUPLICATE) as ACCEPTED.
        {"outcome": (*(each for each in CommitOutcome if each != CommitOutcome.DUPLICATE), "failed", "cancelled")},
    )
    generator_tokens_total = CounterMetric(
        GENERATOR,
        "asyncrl_generator_tokens_total",
        "Prompt tokens (each group's prompt is counted once) and generated completion tokens.",
        {"kind": ("prompt", "completion")},
    )
    generator_state_seconds_total = ScrapedMetric(
        GENERATOR,
        "asyncrl_generator_state_seconds_total",
        "Seconds of the concurrency slots by state, divided by the number of slots: the states add up to the time "
        "since the process started. `starting`: until the engine is ready. `waiting_for_environment`: agents' own "
        "code runs, or the group is only scored. `idle`: a slot that is free for another reason, for example while "
        "admission is paused.",
        {"state": GENERATOR_STATES},
    )
    generator_inflight_groups = GaugeMetric(
        GENERATOR, "asyncrl_generator_inflight_groups", "Groups that are being generated now."
    )
    generator_policy_version = GaugeMetric(
        GENERATOR, "asyncrl_generator_policy_version", "Step of the weights that the replica has loaded."
    )
    rollout_duration_seconds = HistogramMetric(
        GENERATOR,
        "asyncrl_rollout_duration_seconds",
        "Time of one group from its start to its commit.",
        {"environment": None},
    )
    completion_tokens = HistogramMetric(
        GENERATOR, "asyncrl_completion_tokens", "Tokens of one completion.", {"environment": None}, buckets=TOKENS
    )
    rollout_failures_total = CounterMetric(
        GENERATOR,
        "asyncrl_rollout_failures_total",
        "Failed rollouts by class and reason. `infra` failures are retried, `data` failures are not.",
        {"class": tuple(FailureClass), "reason": None},
        own_unit="groups",
    )


class Buffer:
    """The replay buffer and its ledger."""

    buffer_groups = GaugeMetric(
        BUFFER, "asyncrl_buffer_groups", "Groups that hold a slot, by state.", {"state": BUFFER_STATES}
    )
    buffer_bytes = GaugeMetric(
        BUFFER,
        "asyncrl_buffer_bytes",
        "Bytes booked for the rows of groups that hold a slot: the worst case until the commit, then their size.",
    )
    buffer_state_seconds_total = ScrapedMetric(
        BUFFER,
        "asyncrl_buffer_state_seconds_total",
        "Seconds by which side waited for the buffer: the learner for the groups of a step, or at least one "
        "generator for a ticket. The states add up to the time since the process started. `starting`: until the "
        "buffer could answer calls.",
        {"state": BUFFER_WAITS},
    )
    buffer_oldest_group_age_seconds = GaugeMetric(
        BUFFER, "asyncrl_buffer_oldest_group_age_seconds", "Age of the oldest group that holds a slot."
    )
    buffer_events_total = CounterMetric(
        BUFFER,
        "asyncrl_buffer_events_total",
        "Events outside the normal life of a group, such as retries, expired tickets and refused commits.",
        {"event": tuple(event for event in Event if event not in TOKEN_EVENTS)},
    )
    buffer_attempt_tokens_total = CounterMetric(
        BUFFER,
        "asyncrl_buffer_attempt_tokens_total",
        "Tokens of attempts that ended before their group was finished: of stragglers that begin again, of failed "
        "rollouts, of lost replicas. `tokens_thrown_away`: they were not stored. Stored ones "
        "(generator.persist_every_tokens) are `tokens_continued` if a later attempt continued them and the group was "
        "committed. They are `tokens_dropped` if they were too old to be trained in time, their row store or their "
        "weights were lost, the whole run was resumed, or an agent did not make the same calls again.",
        {"event": tuple(sorted(TOKEN_EVENTS))},
    )
    buffer_reserve_wait_seconds = HistogramMetric(
        BUFFER, "asyncrl_buffer_reserve_wait_seconds", "Time that a reserve call waited for tickets."
    )
    buffer_lease_wait_seconds = HistogramMetric(
        BUFFER, "asyncrl_buffer_lease_wait_seconds", "Time that the learner waited for a lease."
    )
    ledger_issued_groups_total = CounterMetric(
        BUFFER,
        "asyncrl_ledger_issued_groups_total",
        "Issued groups. Every issued group holds a slot, waits for a retry, or has one final fate.",
    )
    ledger_unaccounted_groups = GaugeMetric(
        BUFFER,
        "asyncrl_ledger_unaccounted_groups",
        "Issued groups that do not hold a slot, wait for a retry, or have a final fate. Any value but 0 is a bug.",
    )
    ledger_groups_total = CounterMetric(
        BUFFER, "asyncrl_ledger_groups_total", "Groups by final fate.", {"fate": FINAL_FATES}
    )
    ledger_tokens_total = CounterMetric(
        BUFFER,
        "asyncrl_ledger_tokens_total",
        "Generated tokens by their group's final fate.",
        {"fate": FINAL_FATES},
    )


class Staleness:
    """The age of trained data, in versions."""

    rows_outstanding = GaugeMetric(
        LEARNER,
        "asyncrl_rows_outstanding",
        "Rows in the data plane after the last step. They belong to finished groups that wait for training, or "
        "that a learner trains again if it goes back to its checkpoint. It is 0 at the end of a run.",
        own_unit="rows",
    )
    group_staleness_versions = CountsMetric(
        LEARNER,
        "asyncrl_group_staleness_versions",
        "Staleness of the oldest token of a group when the group is trained.",
    )
    group_staleness_max_versions = GaugeMetric(
        LEARNER, "asyncrl_group_staleness_max_versions", "Largest staleness of a group in the last step."
    )
    token_staleness_versions = CountsMetric(
        LEARNER, "asyncrl_token_staleness_versions", "Staleness of a token when it is trained."
    )
    staleness_inflight_versions = CountsMetric(
        LEARNER,
        "asyncrl_staleness_inflight_versions",
        "Number of versions that the learner advanced while a trained group was generated.",
    )
    staleness_inbuffer_versions = CountsMetric(
        LEARNER,
        "asyncrl_staleness_inbuffer_versions",
        "Number of versions that the learner advanced while a trained group waited in the buffer.",
    )


class Weights:
    """Publication, loading and parity of weights."""

    weight_publish_seconds = HistogramMetric(
        LEARNER, "asyncrl_weight_publish_seconds", "Time to publish a version, by phase.", {"phase": None}
    )
    weight_load_seconds = HistogramMetric(
        GENERATOR,
        "asyncrl_weight_load_seconds",
        "Time that a replica needs to load a version, by phase.",
        {"phase": None},
    )
    weight_updates_total = CounterMetric(
        GENERATOR,
        "asyncrl_weight_updates_total",
        "Weight updates that were offered to a replica, by outcome.",
        {"outcome": ("applied", "repeated", "refused", "torn", "failed")},
    )
    weight_deliveries_total = CounterMetric(
        LEARNER,
        "asyncrl_weight_deliveries_total",
        "Deliveries of a snapshot of the weights, by outcome. Failed ones are repeated. `replaced`: a newer "
        "snapshot was taken before the delivery began. `again`: a version was delivered once more, because bytes "
        "of it that a replica fetched were lost or damaged.",
        {"outcome": ("delivered", "failed", "replaced", "again")},
    )
    weight_broadcasts_total = CounterMetric(
        GENERATOR,
        "asyncrl_weight_broadcasts_total",
        "Broadcasts of weights (`weights.transport: collective`), by outcome for a replica. `received`: it got all "
        "bytes. `missed`: it was a member, and lacked bytes when the broadcast ended. `absent`: it was not "
        "a member, because it had just started, had missed an earlier one, or had not answered in time.",
        {"outcome": ("received", "missed", "absent")},
    )
    weight_broadcast_seconds = HistogramMetric(
        GENERATOR,
        "asyncrl_weight_broadcast_seconds",
        "Time that a broadcast took for a replica that was a member, with joining a new process group.",
    )
    weight_broadcast_bytes_total = CounterMetric(
        GENERATOR, "asyncrl_weight_broadcast_bytes_total", "Bytes of weights that came by broadcast."
    )
    weight_bytes_total = CounterMetric(LEARNER, "asyncrl_weight_bytes_total", "Bytes of weights that were sent.")
    weight_sent_ratio = GaugeMetric(
        LEARNER,
        "asyncrl_weight_sent_ratio",
        "Bytes sent for the last version, divided by the bytes of all weights. It is below 1 with `weights.delta`.",
    )
    weight_parity_nats = GaugeMetric(
        LEARNER | GENERATOR,
        "asyncrl_weight_parity_nats",
        "Largest difference between the engine's and the learner's log-prob of a token. The learner compares the "
        "on-policy tokens of the last step; a generator compares the probe of its last weight update: a few token "
        "sequences that the learner has scored.",
    )
    weight_parity_ratio = GaugeMetric(
        LEARNER | GENERATOR,
        "asyncrl_weight_parity_ratio",
        "How much the log-probs of engine and learner differ, as a share of what `weights.parity_*` accept. Above "
        "1 they do not agree. It is the largest of several numbers, each divided by its limit: in float32 the "
        "largest difference; in bfloat16 the mean and, for the learner, the root mean square; for the learner also "
        "how far the mean importance weight is from 1. Infinite if a live weight of an engine is not as published.",
    )
    learner_policy_version = GaugeMetric(
        LEARNER, "asyncrl_learner_policy_version", "The learner's version: number of acked steps."
    )
    published_policy_version = GaugeMetric(
        LEARNER, "asyncrl_published_policy_version", "Step of the newest published weights."
    )


class Learner:
    """The learner's steps."""

    learner_steps_total = CounterMetric(
        LEARNER,
        "asyncrl_learner_steps_total",
        "Steps by outcome. `skipped`: a loss or gradient was not finite, so the policy's weights stayed.",
        {"outcome": ("trained", "skipped")},
    )
    learner_tokens_total = CounterMetric(LEARNER, "asyncrl_learner_tokens_total", "Trained completion tokens.")
    learner_model_flops_total = CounterMetric(
        LEARNER,
        "asyncrl_learner_model_flops_total",
        "Model FLOPs of the policy's training passes, counted as in PaLM (appendix B): only real tokens, "
        "attention over all pairs of a row, no recomputation; a prompt that rows share counts for each of them. "
        "Forward and backward passes count, also of skipped steps; while only the critic is trained there is only "
        "the forward pass. Log-prob passes and the critic do not count, and with `model.lora` the gradients of "
        "frozen weights. Stays 0 with `generator.top_k`, and for models that cannot be counted: a mixture of experts, "
        "a sliding window, or a type other than llama, mistral, qwen2 and qwen3.",
        own_unit="FLOPs",
    )
    learner_state_seconds_total = ScrapedMetric(
        LEARNER,
        "asyncrl_learner_state_seconds_total",
        "Seconds of the learner by state. The states add up to the time since the process started. `starting`: "
        "until the loop starts with the first publication. `other`: all work without a state of its own.",
        {"state": LEARNER_STATES},
    )
    learner_step_duration_seconds = HistogramMetric(
        LEARNER, "asyncrl_learner_step_duration_seconds", "Time of a step from the lease to the ack or skip."
    )
    numbers: Mapping[str, GaugeMetric] = {
        number.name: GaugeMetric(LEARNER, GAUGES[number.name], number.help, own_unit=number.unit)
        for number in NUMBERS
        if number.name in GAUGES
    }
    """Maps the name of a number in steps.jsonl to its gauge."""
    learner_reward_component_mean = GaugeMetric(
        LEARNER,
        "asyncrl_learner_reward_component_mean",
        "Mean of a component of the rewards of a step (environment.rewards), without its weight.",
        {"component": None},
        own_unit="reward",
    )
    learner_reward_part_mean = GaugeMetric(
        LEARNER,
        "asyncrl_learner_reward_part_mean",
        "Mean reward of a step's samples of one part of the mixture (data.mixture).",
        {"part": None},
        own_unit="reward",
    )
    learner_health_note = GaugeMetric(
        LEARNER,
        "asyncrl_learner_health_note",
        "1 while the run has this health note (docs/health.md), else 0. A fault that another one explains has no note "
        "of its own.",
        {"note": NOTES},
    )
    learner_heldout_reward_mean = GaugeMetric(
        LEARNER,
        "asyncrl_learner_heldout_reward_mean",
        "Mean reward of the last evaluation on a held-out set (eval.sets). Every run has the set `heldout`.",
        {"set": None},
        own_unit="reward",
    )


class Reward:
    """Rewards and their time."""

    reward = HistogramMetric(
        GENERATOR,
        "asyncrl_reward",
        "Reward of a sample.",
        {"environment": None},
        own_unit="reward",
        buckets=REWARDS,
    )
    reward_duration_seconds = HistogramMetric(
        GENERATOR,
        "asyncrl_reward_duration_seconds",
        "Time to score one group, including the wait for a free scoring process. Of agents, the time of a group "
        "in which its busiest sample did not wait for the engine.",
        {"environment": None},
    )
    reward_failures_total = CounterMetric(
        GENERATOR,
        "asyncrl_reward_failures_total",
        "Samples whose reward failed. All samples of a group that failed because of its rewards count.",
        {"reason": tuple(RewardFailure)},
        own_unit="samples",
    )


class Agents:
    """Agents and their tools."""

    agent_turns = HistogramMetric(
        GENERATOR,
        "asyncrl_agent_turns",
        "Calls of the model in one episode.",
        {"environment": None},
        buckets=VERSIONS,
    )
    agent_tool_calls_total = CounterMetric(
        GENERATOR,
        "asyncrl_agent_tool_calls_total",
        "Tool calls of the model.",
        {"environment": None},
        own_unit="calls",
    )
    agent_tool_seconds = HistogramMetric(
        GENERATOR,
        "asyncrl_agent_tool_seconds",
        "Time from an answer with tool calls to the agent's next call.",
        {"environment": None},
    )
    agent_forks_total = CounterMetric(
        GENERATOR,
        "asyncrl_agent_forks_total",
        "Calls that changed the history of their conversation, by what they changed.",
        {"reason": None},
        own_unit="calls",
    )
    agent_tokens_total = CounterMetric(
        GENERATOR,
        "asyncrl_agent_tokens_total",
        "Tokens of episodes by origin: sampled by the model, from the agent's first messages or added later "
        "(`environment`), and in the chat template after the model's turns, with the messages there (`template`).",
        {"origin": ("sampled", "environment", "template")},
    )
    agent_sessions = GaugeMetric(GENERATOR, "asyncrl_agent_sessions", "Open sessions of agents.")
    agent_oldest_session_age_seconds = GaugeMetric(
        GENERATOR, "asyncrl_agent_oldest_session_age_seconds", "Age of the oldest open session of an agent."
    )


class Checkpoint:
    """Checkpoints and the mirror."""

    checkpoint_duration_seconds = HistogramMetric(
        LEARNER,
        "asyncrl_checkpoint_duration_seconds",
        "Time from the start of a checkpoint until it is complete. The learner trains meanwhile.",
    )
    checkpoint_wait_seconds = HistogramMetric(
        LEARNER,
        "asyncrl_checkpoint_wait_seconds",
        "Time that training waited for a checkpoint, while the ranks copied weights and optimizer in memory.",
    )
    checkpoint_age_seconds = AgeMetric(
        LEARNER,
        "asyncrl_checkpoint_age_seconds",
        "Time since the newest checkpoint of this process was complete; NaN before the first.",
    )
    checkpoint_policy_version = GaugeMetric(
        LEARNER,
        "asyncrl_checkpoint_policy_version",
        "Number of steps that trained the weights of the newest checkpoint; 0 before the first.",
    )
    checkpoints_total = CounterMetric(
        LEARNER,
        "asyncrl_checkpoints_total",
        "Checkpoints by outcome. `postponed`: was due while the last one was being written.",
        {"outcome": ("saved", "failed", "postponed")},
    )
    mirror_behind_seconds = AgeMetric(
        LEARNER,
        "asyncrl_mirror_behind_seconds",
        "Time since `run.mirror` last had everything that was finished. Before the first time, the time since the "
        "start of the process; NaN without a mirror.",
    )
    mirror_failures_total = CounterMetric(
        LEARNER, "asyncrl_mirror_failures_total", "Failed tries to send records or a checkpoint to `run.mirror`."
    )


def _of(group: type) -> tuple[Metric, ...]:
    """Returns the metrics of one of the classes above, in the order of their declarations."""
    found: list[Metric] = []
    for value in vars(group).values():
        if isinstance(value, Metric):
            found.append(value)
        elif value is Learner.numbers:
            found += Learner.numbers.values()
    return tuple(found)


GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "run": _of(Run),
    "limits": _of(Limits),
    "generator": _of(Generator),
    "buffer": _of(Buffer),
    "staleness": _of(Staleness),
    "weights": _of(Weights),
    "learner": _of(Learner),
    "reward": _of(Reward),
    "agents": _of(Agents),
    "checkpoint": _of(Checkpoint),
}

CATALOGUE: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)
