"""Learning: is it learning, and is staleness hurting?"""

from panels import REPLICA, RUN, STEPS, Query, heat, lines, mean, now, quantiles, rate

TITLE = "asyncrl / Learning"
UID = "asyncrl-learning"
DESCRIPTION = "Is it learning, and is staleness hurting? Reward and its groups, the optimizer, how far the data is off."


def gauge(name: str, legend: str) -> Query:
    """A gauge of the learner."""
    return Query(now(f"asyncrl_learner_{name}", RUN), legend)


ROWS = {
    "Is it learning?": [
        lines(
            "Reward",
            "Mean reward of each step's samples, and of held-out evaluations.",
            gauge("reward_mean", "trained"),
            gauge("heldout_reward_mean", "held out"),
            unit="none",
        ),
        heat(
            "Rewards",
            "How the rewards of samples spread.",
            "asyncrl_reward",
            REPLICA,
            unit="none",
        ),
        lines(
            "Groups that teach nothing",
            "Groups whose rewards are all equal: with a group baseline they have no gradient. Too easy, or too hard. "
            "Empty where a group has one sample.",
            gauge("zero_variance_ratio", "equal"),
            gauge("all_right_ratio", "all right"),
            gauge("all_wrong_ratio", "all wrong"),
            unit="percentunit",
        ),
        lines(
            "Loss", "Loss of each step; its level says little in policy gradients.", gauge("loss", "loss"), unit="none"
        ),
        lines(
            "Gradient",
            "Global gradient norm before it is clipped to learner.optimizer.max_grad_norm.",
            gauge("grad_norm", "norm"),
            unit="none",
        ),
        lines(
            "Learning rate",
            "As learner.optimizer's schedule has it.",
            gauge("learning_rate", "rate"),
            unit="none",
        ),
        lines(
            "Entropy",
            "Mean entropy over the trained tokens. Towards 0 the policy no longer explores.",
            gauge("entropy_nats", "entropy"),
            unit="suffix: nats",
        ),
        lines(
            "KL to the reference",
            "How far the policy is from the first weights. Empty where the objective does not look at them.",
            gauge("kl_to_reference_nats", "KL"),
            unit="suffix: nats",
        ),
        lines(
            "Completions",
            "Tokens of a completion.",
            *quantiles("asyncrl_completion_tokens", REPLICA),
            unit="suffix: tokens",
        ),
    ],
    "Is staleness hurting?": [
        lines(
            "Staleness of groups",
            "Of each group's oldest token, when it is trained, against the limit staleness.max_versions.",
            Query(mean("asyncrl_group_staleness_versions", RUN), "mean"),
            Query(now("asyncrl_group_staleness_max_versions", RUN), "oldest"),
            Query(now("asyncrl_staleness_limit_versions", RUN), "limit"),
            unit="suffix: versions",
        ),
        heat(
            "Staleness of tokens",
            "Versions between the weights that sampled a token and those that trained on it.",
            "asyncrl_token_staleness_versions",
            RUN,
            unit="none",
            over=STEPS,
        ),
        lines(
            "Where it comes from",
            "Versions that passed while a group was generated, and while it waited in the buffer.",
            Query(mean("asyncrl_staleness_inflight_versions", RUN), "in flight"),
            Query(mean("asyncrl_staleness_inbuffer_versions", RUN), "in the buffer"),
            unit="suffix: versions",
        ),
        lines(
            "Effective samples",
            "Share of the tokens that count: by the untruncated importance weights, and by how strongly the objective "
            "pushes each. Falling: lower staleness.max_versions.",
            gauge("ess_ratio", "importance weights"),
            gauge("kernel_ess_ratio", "objective"),
            unit="percentunit",
        ),
        lines(
            "Importance weights",
            "Proximal over behaviour probability: mean, largest, and how far apart the two are whichever is larger.",
            gauge("importance_weight_mean", "mean"),
            gauge("importance_weight_max", "largest"),
            gauge("exp_abs_log_rho_mean", "mean distance"),
            unit="none",
        ),
        lines(
            "Log-probs apart",
            "KL of behaviour and proximal policy, and the largest difference of a token's log-prob.",
            gauge("kl_to_behaviour_nats", "KL"),
            gauge("abs_log_rho_max_nats", "largest"),
            unit="suffix: nats",
        ),
        lines(
            "Tokens without gradient",
            "Shares that the clip, a weight or a gate took out, and all that have an advantage and no push.",
            gauge("clipped_ratio", "clipped"),
            gauge("gated_ratio", "gated"),
            gauge("silent_ratio", "silent"),
            unit="percentunit",
        ),
        lines(
            "By the advantage's sign",
            "The same, for tokens that are to become more and less likely.",
            gauge("clipped_positive_ratio", "clipped, positive"),
            gauge("clipped_negative_ratio", "clipped, negative"),
            gauge("gated_positive_ratio", "gated, positive"),
            gauge("gated_negative_ratio", "gated, negative"),
            unit="percentunit",
        ),
        lines(
            "Length ratio",
            "Mean length of trained completions over that of all finished ones. Below 1, long ones are lost.",
            Query(now("asyncrl_trained_to_dispatched_length_ratio", RUN), "trained / finished"),
            unit="none",
        ),
    ],
    "Is it sound?": [
        lines(
            "Steps",
            "Steps a second by outcome. A skipped one had a loss or gradient that was not finite.",
            Query(rate("asyncrl_learner_steps_total", RUN, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: steps/s",
        ),
        lines(
            "Parity",
            "Largest difference between engine and learner of a token's log-prob, against "
            "weights.parity_tolerance_nats.",
            Query(now("asyncrl_weight_parity_nats", RUN, by="replica"), "{{replica}}"),
            Query(now("asyncrl_weight_parity_limit_nats", RUN), "limit"),
            unit="suffix: nats",
        ),
        lines(
            "Tokens left out",
            "Tokens of a step whose log-prob or advantage was no finite number.",
            gauge("nonfinite_tokens", "tokens"),
            unit="suffix: tokens",
        ),
        lines(
            "Samples left out",
            "Cut at their length limit, and masked out of the loss.",
            gauge("overlong_ratio", "cut"),
            gauge("masked_samples_ratio", "masked"),
            unit="percentunit",
        ),
        lines(
            "Failed scoring",
            "Samples without a reward, by reason.",
            Query(rate("asyncrl_reward_failures_total", REPLICA, by="reason"), "{{reason}}"),
            unit="suffix: samples/s",
        ),
    ],
    "Critic": [
        lines(
            "Value loss",
            "Loss of the critic's last step. This row is empty in a run without `critic`.",
            gauge("value_loss", "loss"),
            unit="none",
        ),
        lines(
            "Explained variance",
            "Share of the returns' variance that the critic foresaw: 1 is perfect, below 0 worse than their mean.",
            gauge("explained_variance", "explained"),
            unit="none",
        ),
        lines(
            "Clipped values",
            "Share of tokens whose value has no gradient because of the clip.",
            gauge("value_clipped_ratio", "clipped"),
            unit="percentunit",
        ),
    ],
}
