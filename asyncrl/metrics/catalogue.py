"""Declares every metric of asyncrl once, as data. `docs/metrics.md` is generated from this module.

The help text, unit, labels and buckets of a metric are written only here. Only `instruments.py` turns a declaration
into a prometheus_client object.

Conventions: the prefix `asyncrl_`, base units, `_total` on counters, and counters instead of gauges of rates. Every
label has a bounded set of values. Either the values are listed here, or they belong to the user or to another layer
(environments, failure reasons, phases); then `instruments.py` limits them to `MAX_OPEN_VALUES`. The labels `run`,
`role` and `replica` come from service discovery, so no metric declares them.
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
    """How the values of a metric are recorded.

    CALLS: one value per call. COUNTS: a histogram that gets {value: count} per call, because a step has thousands of
    tokens. SCRAPE: totals that are read during each scrape, so that a long wait is visible before it ends.
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
"""The final fates of the ledger. The other fates are states in the buffer: see `asyncrl_buffer_groups`."""
SAMPLE_OUTCOMES = ("accepted", "duplicate", "late", "unknown", "old_incarnation", "failed")
TOKEN_KINDS = ("prompt", "completion")
FAILURE_CLASSES = ("infra", "data")
STEP_OUTCOMES = ("trained", "skipped")
REWARD_FAILURES = ("reward_raised", "reward_not_finite", "reward_wrong_type", "reward_timeout", "reward_crashed")
UPDATE_OUTCOMES = ("applied", "repeated", "refused", "torn", "failed")
CHECKPOINT_OUTCOMES = ("saved", "failed")

DEADLINES = tuple(key for key in flat_config(Config()) if key.endswith(("timeout_s", "grace_s")))
"""The config keys that limit a waiting time."""

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


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of one metric. Documentation and dashboards show `unit`; the name contains the unit too."""

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
            "Always 1. Its labels describe the run; `run_name` identifies the run that the endpoint belongs to.",
            "",
            ALL,
            {"run_name": None, "version": None, "model": None, "environment": None, "loss": None},
        ),
        Metric(
            G,
            "asyncrl_heartbeat_timestamp_seconds",
            "Unix time of the last iteration of the process's main loop.",
            "unix seconds",
            ALL,
        ),
        Metric(
            G,
            "asyncrl_replicas",
            "Replicas that are registered at the buffer, by state. `waiting`: it has weights but no group. "
            "`without_weights`: it has not loaded a version yet. `silent`: it sends no heartbeats and will be removed.",
            "replicas",
            BUFFER,
            {"state": REPLICA_STATES},
        ),
    ),
    "limits": (
        Metric(
            G,
            "asyncrl_staleness_limit_versions",
            "The staleness limit η: the largest allowed staleness of trained data.",
            "versions",
            BUFFER,
        ),
        Metric(G, "asyncrl_buffer_capacity_groups", "Largest number of groups in the buffer.", "groups", BUFFER),
        Metric(
            G, "asyncrl_buffer_capacity_bytes", "Largest size of the rows of all groups in the buffer.", "bytes", BUFFER
        ),
        Metric(
            G,
            "asyncrl_stall_timeout_seconds",
            "`run.stall_timeout_s`: a run without any progress for this time ends with an error.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_sync_timeout_seconds",
            "`weights.load_timeout_s`: the time limit of a replica for loading a version.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_deadline_seconds",
            "Every timeout of the learner's configuration, by its config key. A generator deployment can have its own "
            "value of some keys, such as `generator.startup_timeout_s`.",
            "seconds",
            LEARNER,
            {"deadline": DEADLINES},
        ),
        Metric(
            G,
            "asyncrl_checkpoint_interval_versions",
            "`checkpoint.every_steps`; 0 when only the end of the run is saved.",
            "versions",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_lag_limit_versions",
            "How many versions a replica may be behind the published version and still start groups: "
            "`weights.max_lag_publications` × `weights.publish_every_steps`.",
            "versions",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_weight_parity_limit_nats",
            "`weights.parity_tolerance_nats`: the largest allowed value of `asyncrl_weight_parity_nats`.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_peak_flops_per_second",
            "Peak speed of the devices of all learner ranks together, in the precision of training, from the data "
            "sheets and without sparsity. NaN when it is not known: on CPUs, in float32, or on a GPU that is not in "
            "the table of asyncrl/policy/flops.py.",
            "FLOP/s",
            LEARNER,
        ),
    ),
    "generator": (
        Metric(
            C,
            "asyncrl_generator_samples_total",
            "Samples by the outcome of their group's commit. `failed`: the rollout failed and there was no commit.",
            "samples",
            GENERATOR,
            {"outcome": SAMPLE_OUTCOMES},
        ),
        Metric(
            C,
            "asyncrl_generator_tokens_total",
            "Prompt tokens (each group's prompt is counted once) and generated completion tokens.",
            "tokens",
            GENERATOR,
            {"kind": TOKEN_KINDS},
        ),
        Metric(
            C,
            "asyncrl_generator_state_seconds_total",
            "Seconds of the concurrency slots by state, divided by the number of slots: the states add up to the time "
            "since the process started. `starting`: until the engine is ready. `idle`: a free slot without a request "
            "for a ticket.",
            "seconds",
            GENERATOR,
            {"state": GENERATOR_STATES},
            feed=Feed.SCRAPE,
        ),
        Metric(G, "asyncrl_generator_inflight_groups", "Groups that are being generated now.", "groups", GENERATOR),
        Metric(
            G,
            "asyncrl_generator_policy_version",
            "Step of the weights that the replica has loaded.",
            "versions",
            GENERATOR,
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
            "Failed rollouts by class and reason. `infra` failures are retried, `data` failures are not.",
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
        Metric(
            G,
            "asyncrl_buffer_bytes",
            "Bytes booked for the rows of groups that hold a slot: the worst case until the commit, then their size.",
            "bytes",
            BUFFER,
        ),
        Metric(
            C,
            "asyncrl_buffer_state_seconds_total",
            "Seconds by which side waited for the buffer: the learner for the groups of a step, or at least one "
            "generator for a ticket. The states add up to the time since the process started. `starting`: until the "
            "buffer could answer calls.",
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
            "Events outside the normal life of a group, such as retries, expired tickets and refused commits.",
            "events",
            BUFFER,
            {"event": BUFFER_EVENTS},
        ),
        Metric(
            H,
            "asyncrl_buffer_reserve_wait_seconds",
            "Time that a reserve call waited for tickets.",
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
            "Issued groups. Every issued group holds a slot, waits for a retry, or has one final fate.",
            "groups",
            BUFFER,
        ),
        Metric(
            G,
            "asyncrl_ledger_unaccounted_groups",
            "Issued groups that do not hold a slot, wait for a retry, or have a final fate. Any value but 0 is a bug.",
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
            "Rows in the data plane after the last step, which belong to finished groups that wait for training. It is "
            "0 at the end of a run.",
            "rows",
            LEARNER,
        ),
        Metric(
            H,
            "asyncrl_group_staleness_versions",
            "Staleness of the oldest token of a group when the group is trained.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            G,
            "asyncrl_group_staleness_max_versions",
            "Largest staleness of a group in the last step.",
            "versions",
            LEARNER,
        ),
        Metric(
            H,
            "asyncrl_token_staleness_versions",
            "Staleness of a token when it is trained.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            H,
            "asyncrl_staleness_inflight_versions",
            "Number of versions that the learner advanced while a trained group was generated.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            H,
            "asyncrl_staleness_inbuffer_versions",
            "Number of versions that the learner advanced while a trained group waited in the buffer.",
            "versions",
            LEARNER,
            buckets=VERSIONS,
            feed=Feed.COUNTS,
        ),
        Metric(
            G,
            "asyncrl_trained_to_dispatched_length_ratio",
            "Mean completion length of trained groups divided by that of all finished groups. Below 1, groups with "
            "long completions are lost more often.",
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
            "Time that a replica needs to load a version, by phase.",
            "seconds",
            GENERATOR,
            {"phase": None},
            SECONDS,
        ),
        Metric(
            C,
            "asyncrl_weight_updates_total",
            "Weight updates that were offered to a replica, by outcome.",
            "updates",
            GENERATOR,
            {"outcome": UPDATE_OUTCOMES},
        ),
        Metric(C, "asyncrl_weight_bytes_total", "Bytes of weights published.", "bytes", LEARNER),
        Metric(
            G,
            "asyncrl_weight_parity_nats",
            "Largest difference between the engine's and the learner's log-prob of a token. The learner compares the "
            "on-policy tokens of the last step; a generator compares the probe of its last weight update.",
            "nats",
            LEARNER | GENERATOR,
        ),
        Metric(
            G, "asyncrl_learner_policy_version", "The learner's version: number of acked steps.", "versions", LEARNER
        ),
        Metric(G, "asyncrl_published_policy_version", "Step of the newest published weights.", "versions", LEARNER),
    ),
    "learner": (
        Metric(
            C,
            "asyncrl_learner_steps_total",
            "Steps by outcome. `skipped`: a loss or gradient was not finite, so no weights were changed.",
            "steps",
            LEARNER,
            {"outcome": STEP_OUTCOMES},
        ),
        Metric(C, "asyncrl_learner_tokens_total", "Trained completion tokens.", "tokens", LEARNER),
        Metric(
            C,
            "asyncrl_learner_model_flops_total",
            "Model FLOPs of the policy's training passes, counted as in PaLM (appendix B): only real tokens, attention "
            "over all pairs of a row, no recomputation. Forward and backward passes count, also of skipped steps; "
            "while only the critic is trained there is only the forward pass. Log-prob passes and the critic do not "
            "count. Stays 0 for models that cannot be counted: a mixture of experts, a sliding window, or a type other "
            "than llama, mistral, qwen2 and qwen3.",
            "FLOPs",
            LEARNER,
        ),
        Metric(
            C,
            "asyncrl_learner_state_seconds_total",
            "Seconds of the learner by state. The states add up to the time since the process started. `starting`: "
            "until the loop starts with the first publication. `other`: all work without a state of its own.",
            "seconds",
            LEARNER,
            {"state": LEARNER_STATES},
            feed=Feed.SCRAPE,
        ),
        Metric(
            H,
            "asyncrl_learner_step_duration_seconds",
            "Time of a step from the lease to the ack or skip.",
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
        Metric(
            G, "asyncrl_learner_entropy_nats", "Mean entropy of the policy at the last step's tokens.", "nats", LEARNER
        ),
        Metric(
            G,
            "asyncrl_learner_ess_ratio",
            "Effective sample size of the untruncated importance weights divided by the number of tokens.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_importance_weight_mean",
            "Mean over tokens of the proximal probability divided by the behaviour probability.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_importance_weight_max",
            "Largest proximal probability of a token divided by its behaviour probability.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_clipped_ratio",
            "Share of tokens without a gradient because of the objective's clip.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_gated_ratio",
            "Share of tokens that a gate or an importance weight of 0 removes from the loss.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_kernel_ess_ratio",
            "Effective share of the tokens, (Σκ)² / (N · Σκ²), where κ is the strength with which the objective pushes "
            "a token along its advantage. 0 when it pushes no token, NaN when it was not measured.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_silent_ratio",
            "Share of the tokens with an advantage other than 0 at which the objective has no gradient. NaN when it "
            "was not measured.",
            "ratio",
            LEARNER,
        ),
        *(
            Metric(
                G,
                f"asyncrl_learner_{name}_{sign}_ratio",
                f"Share of the tokens with a {sign} advantage that {why}. NaN for a loss by import path.",
                "ratio",
                LEARNER,
            )
            for name, why in (
                ("clipped", "have no gradient because of the clip"),
                ("gated", "a gate or an importance weight of 0 removes from the loss"),
            )
            for sign in ("positive", "negative")
        ),
        Metric(
            G,
            "asyncrl_learner_exp_abs_log_rho_mean",
            "Mean of e^|log proximal − log behaviour probability| over tokens: 1 when the two agree, more when either "
            "is larger.",
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
            "Tokens of the last step that were left out because a log-prob or an advantage was not finite.",
            "tokens",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_kl_to_behaviour_nats",
            "KL divergence between the behaviour and the proximal policy, by the estimator k3.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_kl_to_reference_nats",
            "KL divergence between the proximal and the reference policy, by the estimator k3. NaN when the objective "
            "does not use the reference policy.",
            "nats",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_packing_efficiency_ratio",
            "Share of real tokens among all tokens, with padding, that went through the models of the ranks.",
            "ratio",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_learning_rate", "Learning rate of the last step.", "", LEARNER),
        Metric(
            G,
            "asyncrl_learner_zero_variance_ratio",
            "Share of groups whose rewards are all equal after the filters. With a group baseline, their advantages "
            "are 0 and they have no gradient. NaN when every group has one sample.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_all_right_ratio",
            "Share of groups whose rewards are all equal and above 0.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_all_wrong_ratio",
            "Share of groups whose rewards are all equal and not above 0.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_overlong_ratio",
            "Share of samples that were truncated at their length limit.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_masked_samples_ratio",
            "Share of samples that are left out of the loss: a filter masks them, or they have no token.",
            "ratio",
            LEARNER,
        ),
        Metric(G, "asyncrl_learner_value_loss", "Loss of the critic in the last step.", "", LEARNER),
        Metric(
            G,
            "asyncrl_learner_explained_variance",
            "Share of the returns' variance that the critic's values explain. 1 is perfect; below 0, the values are "
            "worse than the mean of the returns.",
            "ratio",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_learner_value_clipped_ratio",
            "Share of tokens whose value has no gradient because of `critic.value_clip`.",
            "ratio",
            LEARNER,
        ),
    ),
    "reward": (
        Metric(H, "asyncrl_reward", "Reward of a sample.", "reward", GENERATOR, {"environment": None}, REWARDS),
        Metric(
            H,
            "asyncrl_reward_duration_seconds",
            "Time to score one group, including the wait for a free scoring process.",
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
            "Time to write a checkpoint. The learner does not train meanwhile.",
            "seconds",
            LEARNER,
            buckets=SECONDS,
        ),
        Metric(
            G,
            "asyncrl_checkpoint_last_success_timestamp_seconds",
            "Unix time at which the newest checkpoint was complete; NaN before the first.",
            "seconds",
            LEARNER,
        ),
        Metric(
            G,
            "asyncrl_checkpoint_policy_version",
            "Number of steps behind the weights of the newest checkpoint; 0 before the first.",
            "versions",
            LEARNER,
        ),
        Metric(
            C, "asyncrl_checkpoints_total", "Checkpoints by outcome.", "", LEARNER, {"outcome": CHECKPOINT_OUTCOMES}
        ),
    ),
}

CATALOGUE: tuple[Metric, ...] = tuple(metric for group in GROUPS.values() for metric in group)
