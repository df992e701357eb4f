"""Every metric of asyncrl, declared once as data; `docs/metrics.md` is generated from it.

Nothing else names a metric's help, unit, labels or buckets, and only `instruments.py` turns a declaration into a
prometheus_client object. Conventions: prefix `asyncrl_`, base units, `_total` on counters, counters instead of gauges
of rates. Labels are bounded sets: a label either lists its values here or, where the values belong to the user or to
another layer (environments, failure reasons, phases), is capped at `MAX_OPEN_VALUES` by `instruments.py`. The labels
`run`, `role` and `replica` come from service discovery and are on no metric.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.config.load import flat_config
from asyncrl.config.schema import Config

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


class Feed(StrEnum):
    """How values arrive.

    CALLS: one recorded value at a time. COUNTS: a histogram that is fed {value: count}, because a step has thousands
    of tokens. SCRAPE: totals that are read when somebody asks, so that a wait is visible while it lasts.
    """

    CALLS = "calls"
    COUNTS = "counts"
    SCRAPE = "scrape"


GENERATOR_STATES = (
    "starting",
    "generating",
    "blocked_on_staleness",
    "blocked_on_capacity",
    "paused_for_weights",
    "starved_of_prompts",
    "idle",
)
LEARNER_STATES = (
    "starting",
    "waiting_for_groups",
    "log_probs",
    "forward_backward",
    "optimizer",
    "publish",
    "checkpoint",
    "other",
)
BUFFER_STATES = ("reserved", "ready", "leased")
BUFFER_WAITS = ("starting", "nobody_waits", "learner_waits", "generators_wait", "both_wait")
BUFFER_EVENTS = (
    "attempt",
    "retry",
    "ticket_expired",
    "replica_lost",
    "commit_duplicate",
    "commit_late",
    "commit_unknown",
    "commit_old_incarnation",
    "reserve_old_incarnation",
    "fail_refused",
    "lease_repeated",
    "lease_given_back",
    "lease_call_refused",
    "publish_refused",
    "rows_lost_refused",
)
REPLICA_STATES = ("generating", "waiting", "without_weights", "silent")
FINAL_FATES = ("trained", "filtered", "skipped", "dropped", "failed", "rows_lost", "returned_on_resume")
"""Fates of the ledger that a group never leaves; the passing ones are `asyncrl_buffer_groups`."""
SAMPLE_OUTCOMES = ("accepted", "duplicate", "late", "unknown", "old_incarnation", "failed")
TOKEN_KINDS = ("prompt", "completion")
FAILURE_CLASSES = ("infra", "data")
STEP_OUTCOMES = ("trained", "skipped")
REWARD_FAILURES = ("reward_raised", "reward_not_finite", "reward_wrong_type", "reward_timeout", "reward_crashed")
UPDATE_OUTCOMES = ("applied", "repeated", "refused", "torn", "failed")
CHECKPOINT_OUTCOMES = ("saved", "failed")

DEADLINES = tuple(key for key in flat_config(Config()) if key.endswith(("timeout_s", "grace_s")))
"""Config keys that say how long somebody may wait."""

VERSIONS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
REWARDS = (-1, -0.5, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10)

ALL = frozenset(Role)
LEARNER = frozenset({Role.LEARNER})
GENERATOR = frozenset({Role.GENERATOR})
BUFFER = frozenset({Role.BUFFER})


Labels = Mapping[str, tuple[str, ...] | None]
"""A label's values; None means an open, capped set."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `unit` is what a reader or a dashboard shows; names carry it too."""

    kind: Kind
    name: str
    help: str
    unit: str
    roles: frozenset[Role]
    labels: Labels = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    feed: Feed = Feed.CALLS


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "run": (
        Metric(
            G,
            "asyncrl_run_info",
            "Always 1; its labels describe the run. By `run_name` is known whose endpoint it is.",
            "",
            ALL,
            {"run_name": None, "version": None, "model": None, "environment": None, "loss": None},
        ),
        Metric(
            G, "asyncrl_heartbeat_timestamp_seconds", "Unix time of the main loop's last turn.", "unix seconds", ALL
        ),
        Metric(
            G,
            "asyncrl_replicas",
            "Generators that the buffer knows: `waiting` have weights but no group, `silent` are soon forgotten.",
            "replicas",
            BUFFER,
            {"state": REPLICA_STATES},
        ),
    ),
    "limits": (
        Metric(G, "asyncrl_staleness_limit_versions", "η: the oldest that trained data may be.", "versions", BUFFER),
        Metric(G, "asyncrl_buffer_capacity_groups", "Groups that the buffer holds at most.", "groups", BUFFER),
        Metric(G, "asyncrl_buffer_capacity_bytes", "Bytes of rows that the buffer holds at most.", "bytes", BUFFER),
        Metric(
            G,
            "asyncrl_stall_timeout_seconds",
            "`run.stall_timeout_s`: without any progress for so long the run ends.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_sync_timeout_seconds",
            "`weights.load_timeout_s`: what a replica may take to load a version.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_deadline_seconds",
            "How long somebody may wait before it is an error, by its key in the learner's configuration; what a "
            "generator deployment may have of its own, such as `generator.startup_timeout_s`, may differ there.",
            "seconds",
            LEARNER,
            {"deadline": DEADLINES},
        ),
        Metric(
            G,
            "asyncrl_checkpoint_interval_versions",
            "`checkpoint.every_steps`; 0 when there is one at the run's end only.",
            "versions",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_lag_limit_versions",
            "How far a replica may be behind the published version before it starts nothing: "
            "`weights.max_lag_publications` × `weights.publish_every_steps`.",
            "versions",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_parity_limit_nats",
            "`weights.parity_tolerance_nats`: what `asyncrl_weight_parity_nats` may be.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_peak_flops_per_second",
            "What the devices of all learner ranks could do together in the precision of training, by their data "
            "sheets and without sparsity; NaN where it is not known: on CPUs, in float32, on a GPU not in the table.",
            "FLOP/s",
            LEARNER,
        ),
    ),
    "generator": (
        Metric(
            C,
            "asyncrl_generator_samples_total",
            "Samples by what became of their group's commit; `failed`: their rollout failed.",
            "samples",
            GENERATOR,
            {"outcome": SAMPLE_OUTCOMES},
        ),
        Metric(
            C,
            "asyncrl_generator_tokens_total",
            "Tokens read (a group's prompt once) and generated.",
            "tokens",
            GENERATOR,
            {"kind": TOKEN_KINDS},
        ),
        Metric(
            C,
            "asyncrl_generator_state_seconds_total",
            "Slot-seconds by state, divided by the slots: they add up to the time since the process started. "
            "`starting`: until the engine is ready; `idle`: nothing is asked of a free slot.",
            "seconds",
            GENERATOR,
            {"state": GENERATOR_STATES},
            feed=Feed.SCRAPE,
        ),
        Metric(G, "asyncrl_generator_inflight_groups", "Groups that are being generated.", "groups", GENERATOR),
        Metric(
            G, "asyncrl_generator_policy_version", "Step of the weights that the replica runs.", "versions", GENERATOR
        ),
        Metric(
            H,
            "asyncrl_rollout_duration_seconds",
            "Time of one group from its start to its commit.",
            "seconds",
            GENERATOR,
            {"environment": None},
            SECONDS,
        ),
        Metric(
            H,
            "asyncrl_completion_tokens",
            "Tokens of one completion.",
            "tokens",
            GENERATOR,
            {"environment": None},
            TOKENS,
        ),
        Metric(
            C,
            "asyncrl_rollout_failures_total",
            "Failed rollouts: `infra` is retried, `data` is not.",
            "groups",
            GENERATOR,
            {"class": FAILURE_CLASSES, "reason": None},
        ),
    ),
    "buffer": (
        Metric(
            G,
            "asyncrl_buffer_groups",
            "Groups that hold a slot, by state.",
            "groups",
            BUFFER,
            {"state": BUFFER_STATES},
        ),
        Metric(G, "asyncrl_buffer_bytes", "Bytes of rows that are booked.", "bytes", BUFFER),
        Metric(
            C,
            "asyncrl_buffer_state_seconds_total",
            "Seconds by who waited at the buffer, the learner for a step's groups, any generator for a ticket: they "
            "add up to the time since the process started. `starting`: until it could be asked.",
            "seconds",
            BUFFER,
            {"state": BUFFER_WAITS},
            feed=Feed.SCRAPE,
        ),
        Metric(
            G,
            "asyncrl_buffer_oldest_group_age_seconds",
            "Age of the oldest group that holds a slot.",
            "seconds",
            BUFFER,
        ),
        Metric(
            C,
            "asyncrl_buffer_events_total",
            "What happened besides the regular life of groups: retries, expired tickets, refused commits.",
            "events",
            BUFFER,
            {"event": BUFFER_EVENTS},
        ),
        Metric(
            H,
            "asyncrl_buffer_reserve_wait_seconds",
            "Time that a reserve waited for tickets.",
            "seconds",
            BUFFER,
            buckets=SECONDS,
        ),
        Metric(
            H,
            "asyncrl_buffer_lease_wait_seconds",
            "Time that the learner waited for a lease.",
            "seconds",
            BUFFER,
            buckets=SECONDS,
        ),
        Metric(
            C,
            "asyncrl_ledger_issued_groups_total",
            "Groups issued. Each holds a slot or has one final fate.",
            "groups",
            BUFFER,
        ),
        Metric(
            G,
            "asyncrl_ledger_unaccounted_groups",
            "Groups issued that neither hold a slot, wait for a retry nor have a final fate: if not 0, a bug.",
            "groups",
            BUFFER,
        ),
        Metric(C, "asyncrl_ledger_groups_total", "Groups by final fate.", "groups", BUFFER, {"fate": FINAL_FATES}),
        Metric(
            C,
            "asyncrl_ledger_tokens_total",
            "Generated tokens by their group's final fate.",
            "tokens",
            BUFFER,
            {"fate": FINAL_FATES},
        ),
    ),
    "staleness": (
        Metric(
            G,
            "asyncrl_rows_outstanding",
            "Rows in the data plane after the last step: those of finished groups that wait. A run ends with none.",
            "rows",
            LEARNER,
        ),
        Metric(
            H,
            "asyncrl_group_staleness_versions",
            "Staleness of a group's oldest token, when trained.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            G,
            "asyncrl_group_staleness_max_versions",
            "Staleness of the oldest group of the last step.",
            "versions",
            LEARNER,
        ),
        Metric(
            H,
            "asyncrl_token_staleness_versions",
            "Staleness of a token, when trained.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            H,
            "asyncrl_staleness_inflight_versions",
            "Versions that passed while a trained group was generated.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            H,
            "asyncrl_staleness_inbuffer_versions",
            "Versions that passed while a trained group waited in the buffer.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            G,
            "asyncrl_trained_to_dispatched_length_ratio",
            "Mean completion length of trained groups over that of all finished ones: below 1, long ones are lost.",
            "ratio",
            LEARNER,
        ),
    ),
    "weights": (
        Metric(
            H,
            "asyncrl_weight_publish_seconds",
            "Time to publish a version, by phase.",
            "seconds",
            LEARNER,
            {"phase": None},
            SECONDS,
        ),
        Metric(
            H,
            "asyncrl_weight_load_seconds",
            "Time of a replica to load a version, by phase.",
            "seconds",
            GENERATOR,
            {"phase": None},
            SECONDS,
        ),
        Metric(
            C,
            "asyncrl_weight_updates_total",
            "Weight updates that a replica was offered.",
            "updates",
            GENERATOR,
            {"outcome": UPDATE_OUTCOMES},
        ),
        Metric(C, "asyncrl_weight_bytes_total", "Bytes of weights published.", "bytes", LEARNER),
        Metric(
            G,
            "asyncrl_weight_parity_nats",
            "Largest difference of a token's log-prob between engine and learner: on the learner over the last step's "
            "on-policy tokens, on a generator over the last update's probe.",
            "nats",
            LEARNER | GENERATOR,
        ),
        Metric(G, "asyncrl_learner_policy_version", "v: steps acked.", "versions", LEARNER),
        Metric(G, "asyncrl_published_policy_version", "Step of the newest published weights.", "versions", LEARNER),
    ),
    "learner": (
        Metric(
            C,
            "asyncrl_learner_steps_total",
            "Steps by outcome; `skipped`: not finite, nothing was trained.",
            "steps",
            LEARNER,
            {"outcome": STEP_OUTCOMES},
        ),
        Metric(C, "asyncrl_learner_tokens_total", "Completion tokens trained.", "tokens", LEARNER),
        Metric(
            C,
            "asyncrl_learner_model_flops_total",
            "Model FLOPs of the policy's training passes, forward and backward (forward alone while only the critic "
            "learns), skipped steps included, by PaLM's count (appendix B): real tokens only, attention over all pairs "
            "of a row, nothing computed twice. Not in it: log-prob passes, the critic. Stays 0 for a model that is not "
            "counted: a mixture of experts, a sliding window, none of llama, mistral, qwen2, qwen3.",
            "FLOPs",
            LEARNER,
        ),
        Metric(
            C,
            "asyncrl_learner_state_seconds_total",
            "Seconds by what the learner was doing: they add up to the time since the process started. `starting`: "
            "until its loop began, with the first publication; `other`: all that has no name of its own.",
            "seconds",
            LEARNER,
            {"state": LEARNER_STATES},
            feed=Feed.SCRAPE,
        ),
        Metric(
            H,
            "asyncrl_learner_step_duration_seconds",
            "Time of a step from lease to ack or skip.",
            "seconds",
            LEARNER,
            buckets=SECONDS,
        ),
        Metric(G, "asyncrl_learner_reward_mean", "Mean reward of the last step's samples.", "reward", LEARNER),
        Metric(
            G, "asyncrl_learner_heldout_reward_mean", "Mean reward of the last held-out evaluation.", "reward", LEARNER
        ),
        Metric(G, "asyncrl_learner_loss", "Loss of the last step.", "", LEARNER),
        Metric(G, "asyncrl_learner_grad_norm", "Global gradient norm of the last step, before clipping.", "", LEARNER),
        Metric(G, "asyncrl_learner_entropy_nats", "Mean entropy over the last step's tokens.", "nats", LEARNER),
        Metric(
            G,
            "asyncrl_learner_ess_ratio",
            "Effective sample size of the untruncated importance weights over the number of tokens.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G, "asyncrl_learner_importance_weight_mean", "Mean of proximal ÷ behaviour probability.", "ratio", LEARNER
        ),
        Metric(
            G, "asyncrl_learner_importance_weight_max", "Largest proximal ÷ behaviour probability.", "ratio", LEARNER
        ),
        Metric(
            G,
            "asyncrl_learner_clipped_ratio",
            "Share of tokens without gradient because of the clip.",
            "ratio",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_gated_ratio", "Share of tokens that a weight or a gate took out.", "ratio", LEARNER),
        Metric(
            G,
            "asyncrl_learner_kernel_ess_ratio",
            "Effective share of the tokens by how strongly the objective pushes each; 0 when none is, NaN unmeasured.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_silent_ratio",
            "Share of tokens with an advantage that the objective does not push at all; NaN when not measured.",
            "ratio",
            LEARNER,
        ),
        *(
            Metric(
                G,
                f"asyncrl_learner_{name}_{sign}_ratio",
                f"Share of tokens with a {sign} advantage {why}; NaN for a loss by import path.",
                "ratio",
                LEARNER,
            )
            for name, why in (("clipped", "that the clip silences"), ("gated", "that a weight or a gate took out"))
            for sign in ("positive", "negative")
        ),
        Metric(
            G,
            "asyncrl_learner_exp_abs_log_rho_mean",
            "Mean of e^|log proximal − log behaviour probability|: 1 when they agree, whichever is the larger.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_abs_log_rho_max_nats",
            "Largest |log proximal − log behaviour probability| of a token.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_nonfinite_tokens",
            "Tokens of the last step left out because a log-prob or an advantage was no finite number.",
            "tokens",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_kl_to_behaviour_nats", "KL of behaviour and proximal policy, k3.", "nats", LEARNER),
        Metric(
            G,
            "asyncrl_learner_kl_to_reference_nats",
            "KL of proximal and reference policy, k3; NaN for an objective that does not look at the reference.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_packing_efficiency_ratio",
            "Share of real tokens among all that went through the ranks' models, padding included.",
            "ratio",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_learning_rate", "Learning rate of the last step.", "", LEARNER),
        Metric(
            G,
            "asyncrl_learner_zero_variance_ratio",
            "Share of groups with equal rewards, as the advantages see them: with a group baseline they teach nothing. "
            "NaN for groups of one sample.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G, "asyncrl_learner_all_right_ratio", "Share of groups whose rewards are equal, above 0.", "ratio", LEARNER
        ),
        Metric(
            G,
            "asyncrl_learner_all_wrong_ratio",
            "Share of groups whose rewards are equal, at most 0.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_overlong_ratio",
            "Share of samples that were cut at their length limit.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_masked_samples_ratio",
            "Share of samples that no loss sees: masked by a filter, or empty.",
            "ratio",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_value_loss", "Loss of the critic's last step.", "", LEARNER),
        Metric(
            G,
            "asyncrl_learner_explained_variance",
            "Share of the returns' variance that the critic foresaw: 1 is perfect, below 0 worse than their mean.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_value_clipped_ratio",
            "Share of tokens whose value has no gradient because of the clip.",
            "ratio",
            LEARNER,
        ),
    ),
    "reward": (
        Metric(H, "asyncrl_reward", "Reward of a sample.", "reward", GENERATOR, {"environment": None}, REWARDS),
        Metric(
            H,
            "asyncrl_reward_duration_seconds",
            "Time to score one group, the wait for a free scoring process included.",
            "seconds",
            GENERATOR,
            {"environment": None},
            SECONDS,
        ),
        Metric(
            C,
            "asyncrl_reward_failures_total",
            "Samples whose scoring failed.",
            "samples",
            GENERATOR,
            {"reason": REWARD_FAILURES},
        ),
    ),
    "checkpoint": (
        Metric(
            H,
            "asyncrl_checkpoint_duration_seconds",
            "Time to write a checkpoint; the learner waits for it.",
            "seconds",
            LEARNER,
            buckets=SECONDS,
        ),
        Metric(
            G,
            "asyncrl_checkpoint_last_success_timestamp_seconds",
            "When the newest checkpoint was whole, as Unix time; NaN before the first.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_checkpoint_policy_version",
            "Steps that the newest checkpoint has; 0 before the first.",
            "versions",
            LEARNER,
        ),
        Metric(
            C, "asyncrl_checkpoints_total", "Checkpoints by outcome.", "", LEARNER, {"outcome": CHECKPOINT_OUTCOMES}
        ),
    ),
}

CATALOGUE: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)
