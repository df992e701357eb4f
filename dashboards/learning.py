"""The dashboard Learning: does the policy learn, and does staleness do harm?

The panels of a step's numbers are declared in `asyncrl.metrics.numbers`.
"""

from panels import REPLICA, RUN, STEPS, Query, declared, heat, lines, mean, now, quantiles, rate

from asyncrl.metrics.numbers import CRITIC, HARMS, LEARNS, SOUND

TITLE = "asyncrl / Learning"
UID = "asyncrl-learning"
DESCRIPTION = (
    "Does the policy learn, and does staleness do harm? Rewards, the optimizer, and how off-policy the data is."
)
STRAGGLERS = "straggler_requeued|straggler_dropped|straggler_masked"
"""The events of staleness.on_deadline."""


ROWS = {
    LEARNS: [
        lines(
            "Reward",
            "Mean reward of each step's samples, and of held-out evaluations.",
            Query(now("asyncrl_learner_reward_mean", RUN), "trained"),
            Query(now("asyncrl_learner_heldout_reward_mean", RUN, by="set"), "held out: {{set}}"),
            unit="none",
        ),
        lines(
            "Reward by component",
            "Mean of each component of the rewards of a step (environment.rewards), without its weight. Empty if the "
            "reward has one number only.",
            Query(now("asyncrl_learner_reward_component_mean", RUN, by="component"), "{{component}}"),
            unit="none",
        ),
        lines(
            "Reward by part",
            "Mean reward of a step's samples of each part of the mixture (data.mixture). Empty without a mixture.",
            Query(now("asyncrl_learner_reward_part_mean", RUN, by="part"), "{{part}}"),
            unit="none",
        ),
        heat(
            "Rewards",
            "Distribution of the rewards of samples.",
            "asyncrl_reward",
            REPLICA,
            unit="none",
        ),
        *declared(LEARNS),
        lines(
            "Completions",
            "Number of tokens of a completion.",
            *quantiles("asyncrl_completion_tokens", REPLICA),
            unit="suffix: tokens",
        ),
    ],
    HARMS: [
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
            "Stragglers in the way",
            "Groups per second on which staleness.on_deadline acted, because they would have kept the learner waiting. "
            "With `wait` there are none: the learner's time in waiting_for_groups shows what stragglers cost.",
            Query(rate("asyncrl_buffer_events_total", f'event=~"{STRAGGLERS}", {RUN}', by="event"), "{{event}}"),
            unit="suffix: groups/s",
        ),
        *declared(HARMS),
    ],
    SOUND: [
        lines(
            "Steps",
            "Steps per second by outcome. A step is skipped when a loss or gradient is not finite.",
            Query(rate("asyncrl_learner_steps_total", RUN, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: steps/s",
        ),
        lines(
            "Parity",
            "Largest difference between the engine's and the learner's log-prob of a token, and the mean over the "
            "on-policy tokens of the last step.",
            Query(now("asyncrl_weight_parity_nats", RUN, by="replica"), "{{replica}}"),
            Query(now("asyncrl_learner_parity_mean_nats", RUN), "mean of the step"),
            unit="suffix: nats",
        ),
        *declared(SOUND),
        lines(
            "Failed scoring",
            "Samples whose scoring failed, by reason.",
            Query(rate("asyncrl_reward_failures_total", REPLICA, by="reason"), "{{reason}}"),
            unit="suffix: samples/s",
        ),
    ],
    CRITIC: [*declared(CRITIC)],
}
