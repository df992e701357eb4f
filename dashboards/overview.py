"""Overview: is the run healthy? Ten seconds."""

from panels import BAD, DOUBTFUL, HEALTHY, RAY, REPLICA, RUN, STEPS, Query, lines, now, number, rate, state_shares

TITLE = "asyncrl / Overview"
UID = "asyncrl-overview"
DESCRIPTION = "Is the run healthy? Green tiles, a reward that rises, and neither side waiting for the other."

ROWS = {
    "Is it healthy?": [
        number(
            "Processes up",
            "Endpoints of the run that answer Prometheus, by role: one learner, one buffer, one a generator, one a "
            "node of Ray.",
            Query(f"sum by (role) (up{{{RUN}}})", "{{role}}"),
            Query(f"count by (role) (up{{{RUN}}} == 0)", "{{role}} down"),
            unit="none",
            thresholds=[(None, BAD), (1, HEALTHY)],
            span=8,
        ),
        number(
            "Alerts firing",
            "Of the run, and of a Ray that Prometheus found by itself, which knows of no run. Each alert's annotation "
            "says what it means and which knob to turn.",
            Query(
                f'count by (alertname) (ALERTS{{alertstate="firing", alertname=~"Asyncrl.*", {RAY}}})',
                "{{alertname}}",
            ),
            unit="none",
            thresholds=[(None, BAD)],
            span=8,
        ),
        number(
            "Step",
            "v, the learner's version: steps that were trained.",
            Query(now("asyncrl_learner_policy_version", RUN), "step"),
            unit="none",
            thresholds=[(None, HEALTHY)],
        ),
        number(
            "Stall limit used",
            "Time since the learner's last step over run.stall_timeout_s. At 1 the run may end itself.",
            Query(
                f'(time() - max(asyncrl_heartbeat_timestamp_seconds{{role="learner", {RUN}}})) '
                f"/ max(asyncrl_stall_timeout_seconds{{{RUN}}})",
                "of the limit",
            ),
            unit="percentunit",
            thresholds=[(None, HEALTHY), (0.5, DOUBTFUL), (1, BAD)],
        ),
        number(
            "Oldest trained data",
            "Staleness of the last step's oldest group, and the limit η, staleness.max_versions.",
            Query(now("asyncrl_group_staleness_max_versions", RUN), "oldest"),
            Query(now("asyncrl_staleness_limit_versions", RUN), "limit"),
            unit="suffix: versions",
            thresholds=[(None, HEALTHY)],
            span=8,
        ),
        number(
            "Effective samples",
            "Share of the tokens that still count after importance weighting. Falling: lower staleness.max_versions.",
            Query(now("asyncrl_learner_ess_ratio", RUN), "effective"),
            unit="percentunit",
            thresholds=[(None, BAD), (0.5, DOUBTFUL), (0.95, HEALTHY)],
        ),
        number(
            "Parity limit used",
            "Largest difference between the engines' log-probs and the learner's over weights.parity_tolerance_nats. "
            "Above 1 the engines do not run what the learner trains.",
            Query(
                f"max(asyncrl_weight_parity_nats{{{RUN}}}) / max(asyncrl_weight_parity_limit_nats{{{RUN}}})",
                "of the limit",
            ),
            unit="percentunit",
            thresholds=[(None, HEALTHY), (0.5, DOUBTFUL), (1, BAD)],
        ),
        number(
            "Groups lost",
            "Groups that were generated and not trained, but for those that a filter took out. 0 in a healthy run.",
            Query(f'sum(asyncrl_ledger_groups_total{{fate!~"trained|filtered", {RUN}}})', "groups"),
            unit="none",
            thresholds=[(None, HEALTHY), (1, DOUBTFUL)],
        ),
        number(
            "Generators",
            "Replicas that the buffer knows, by what they do.",
            Query(now("asyncrl_replicas", RUN, by="state"), "{{state}}"),
            unit="none",
            thresholds=[(None, HEALTHY)],
        ),
    ],
    "Does it learn, and who waits for whom?": [
        lines(
            "Reward",
            "Mean reward of each step's samples, and of held-out evaluations.",
            Query(now("asyncrl_learner_reward_mean", RUN), "trained"),
            Query(now("asyncrl_learner_heldout_reward_mean", RUN), "held out"),
            unit="none",
        ),
        lines(
            "Learner's time",
            "What the learner does. Much waiting_for_groups: add generators, unless they are blocked.",
            Query(state_shares("asyncrl_learner_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            shares=True,
        ),
        lines(
            "Generators' time",
            "What the generators' slots do. Much blocked_on_staleness: add learner ranks; where the "
            "learner waits too, raise staleness.max_versions if the effective samples allow it.",
            Query(state_shares("asyncrl_generator_state_seconds_total", REPLICA), "{{state}}"),
            unit="percentunit",
            shares=True,
        ),
        lines(
            "Tokens",
            "Completion tokens generated and trained. In the long run the two are equal.",
            Query(rate("asyncrl_generator_tokens_total", f'kind="completion", {REPLICA}'), "generated"),
            Query(rate("asyncrl_learner_tokens_total", RUN, over=STEPS), "trained"),
            unit="suffix: tokens/s",
            span=12,
        ),
        lines(
            "Buffer",
            "Groups that hold a slot, by state, and how many fit.",
            Query(now("asyncrl_buffer_groups", RUN, by="state"), "{{state}}"),
            Query(now("asyncrl_buffer_capacity_groups", RUN), "capacity"),
            unit="suffix: groups",
            span=12,
        ),
    ],
}
