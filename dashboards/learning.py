"""The dashboard Learning: does the policy learn, and does staleness do harm?"""

from panels import REPLICA, RUN, STEPS, Query, heat, lines, mean, now, quantiles, rate

TITLE = "asyncrl / Learning"
UID = "asyncrl-learning"
DESCRIPTION = (
    "Does the policy learn, and does staleness do harm? Rewards, the optimizer, and how off-policy the data is."
)


def gauge(name: str, legend: str) -> Query:
    """Returns the query of a gauge of the learner."""
    return Query(now(f"asyncrl_learner_{name}", RUN), legend)


ROWS = {
    "Does it learn?": [
        lines(
            "Reward",
            "Mean reward of each step's samples, and of held-out evaluations.",
            gauge("reward_mean", "trained"),
            gauge("heldout_reward_mean", "held out"),
            unit="none",
        ),
        heat(
            "Rewards",
            "Distribution of the rewards of samples.",
            "asyncrl_reward",
            REPLICA,
            unit="none",
        ),
        lines(
            "Groups without a gradient",
            "Share of groups whose rewards are all equal. With a group baseline they have no gradient, because their "
            "question is too easy or too hard. Empty when a group has one sample.",
            gauge("zero_variance_ratio", "equal"),
            gauge("all_right_ratio", "all right"),
            gauge("all_wrong_ratio", "all wrong"),
            unit="percentunit",
        ),
        lines(
            "Loss",
            "Loss of each step. With policy gradients, its value says little about progress.",
            gauge("loss", "loss"),
            unit="none",
        ),
        lines(
            "Gradient",
            "Global gradient norm, before it is clipped to learner.optimizer.max_grad_norm.",
            gauge("grad_norm", "norm"),
            unit="none",
        ),
        lines(
            "Learning rate",
            "Learning rate of each step, by the schedule of learner.optimizer.",
            gauge("learning_rate", "rate"),
            unit="none",
        ),
        lines(
            "Entropy",
            "Mean entropy over the trained tokens. Near 0, the policy no longer explores.",
            gauge("entropy_nats", "entropy"),
            unit="suffix: nats",
        ),
        lines(
            "KL to the reference",
            "KL divergence between the policy and its first weights. Empty when the objective does not use a reference "
            "policy.",
            gauge("kl_to_reference_nats", "KL"),
            unit="suffix: nats",
        ),
        lines(
            "Completions",
            "Number of tokens of a completion.",
            *quantiles("asyncrl_completion_tokens", REPLICA),
            unit="suffix: tokens",
        ),
    ],
    "Does staleness do harm?": [
        lines(
            "Staleness of groups",
            "Staleness of the oldest token of a group when the group is trained, and the limit staleness.max_versions.",
            Query(mean("asyncrl_group_staleness_versions", RUN), "mean"),
            Query(now("asyncrl_group_staleness_max_versions", RUN), "oldest"),
            Query(now("asyncrl_staleness_limit_versions", RUN), "limit"),
            unit="suffix: versions",
        ),
        heat(
            "Staleness of tokens",
            "Number of versions between the weights that sampled a token and the weights that were trained on it.",
            "asyncrl_token_staleness_versions",
            RUN,
            unit="none",
            over=STEPS,
        ),
        lines(
            "Origin of staleness",
            "Number of versions that the learner advanced while a group was generated, and while it waited in the "
            "buffer.",
            Query(mean("asyncrl_staleness_inflight_versions", RUN), "in flight"),
            Query(mean("asyncrl_staleness_inbuffer_versions", RUN), "in the buffer"),
            unit="suffix: versions",
        ),
        lines(
            "Effective samples",
            "Effective sample size as a share of the tokens: by the untruncated importance weights, and by the "
            "strength with which the objective pushes each token. If it falls, lower staleness.max_versions.",
            gauge("ess_ratio", "importance weights"),
            gauge("kernel_ess_ratio", "objective"),
            unit="percentunit",
        ),
        lines(
            "Importance weights",
            "Proximal probability divided by behaviour probability: the mean, the largest, and the mean distance (the "
            "mean of the ratio or its inverse, whichever is larger).",
            gauge("importance_weight_mean", "mean"),
            gauge("importance_weight_max", "largest"),
            gauge("exp_abs_log_rho_mean", "mean distance"),
            unit="none",
        ),
        lines(
            "Differences of log-probs",
            "KL divergence between behaviour and proximal policy, and the largest difference of a token's log-prob.",
            gauge("kl_to_behaviour_nats", "KL"),
            gauge("abs_log_rho_max_nats", "largest"),
            unit="suffix: nats",
        ),
        lines(
            "Tokens without gradient",
            "Share of tokens that the clip removes, share that a gate or a zeroed weight removes, and share of tokens "
            "with an advantage but without a gradient for any reason (silent).",
            gauge("clipped_ratio", "clipped"),
            gauge("gated_ratio", "gated"),
            gauge("silent_ratio", "silent"),
            unit="percentunit",
        ),
        lines(
            "Removed tokens by sign",
            "Shares of clipped and gated tokens, among tokens with a positive and with a negative advantage.",
            gauge("clipped_positive_ratio", "clipped, positive"),
            gauge("clipped_negative_ratio", "clipped, negative"),
            gauge("gated_positive_ratio", "gated, positive"),
            gauge("gated_negative_ratio", "gated, negative"),
            unit="percentunit",
        ),
        lines(
            "Length ratio",
            "Mean length of trained completions divided by that of all finished completions. Below 1, groups with long "
            "completions are lost more often.",
            Query(now("asyncrl_trained_to_dispatched_length_ratio", RUN), "trained / finished"),
            unit="none",
        ),
    ],
    "Are the numbers sound?": [
        lines(
            "Steps",
            "Steps per second by outcome. A step is skipped when a loss or gradient is not finite.",
            Query(rate("asyncrl_learner_steps_total", RUN, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: steps/s",
        ),
        lines(
            "Parity",
            "Largest difference between the engine's and the learner's log-prob of a token, and the limit "
            "weights.parity_tolerance_nats.",
            Query(now("asyncrl_weight_parity_nats", RUN, by="replica"), "{{replica}}"),
            Query(now("asyncrl_weight_parity_limit_nats", RUN), "limit"),
            unit="suffix: nats",
        ),
        lines(
            "Tokens left out",
            "Tokens of a step that were left out because a log-prob or an advantage was not finite.",
            gauge("nonfinite_tokens", "tokens"),
            unit="suffix: tokens",
        ),
        lines(
            "Samples left out",
            "Share of samples that were truncated at their length limit, and share that is left out of the loss.",
            gauge("overlong_ratio", "truncated"),
            gauge("masked_samples_ratio", "masked"),
            unit="percentunit",
        ),
        lines(
            "Failed scoring",
            "Samples whose scoring failed, by reason.",
            Query(rate("asyncrl_reward_failures_total", REPLICA, by="reason"), "{{reason}}"),
            unit="suffix: samples/s",
        ),
    ],
    "Critic": [
        lines(
            "Value loss",
            "Loss of the critic. This row is empty in a run without a critic.",
            gauge("value_loss", "loss"),
            unit="none",
        ),
        lines(
            "Explained variance",
            "Share of the returns' variance that the critic's values explain. 1 is perfect; below 0, the values are "
            "worse than the mean of the returns.",
            gauge("explained_variance", "explained"),
            unit="none",
        ),
        lines(
            "Clipped values",
            "Share of tokens whose value has no gradient because of critic.value_clip.",
            gauge("value_clipped_ratio", "clipped"),
            unit="percentunit",
        ),
    ],
}
