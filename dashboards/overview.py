"""The dashboard Overview: is the run healthy? A reader should see the answer in ten seconds."""

from panels import BAD, DOUBTFUL, HEALTHY, RAY, REPLICA, RUN, STEPS, Query, lines, now, number, rate, state_shares

TITLE = "asyncrl / Overview"
UID = "asyncrl-overview"
DESCRIPTION = (
    "Is the run healthy? A healthy run has green tiles and a rising reward, and neither side waits for the other."
)

ROWS = {
    "Is it healthy?": [
        number(
            "Processes up",
            "Endpoints of the run that answer Prometheus, by role: the learner, the buffer, each generator replica and "
            "each Ray node have one.",
            Query(f"sum by (role) (up{{{RUN}}})", "{{role}}"),
            Query(f"count by (role) (up{{{RUN}}} == 0)", "{{role}} down"),
            unit="none",
            thresholds=[(None, BAD), (1, HEALTHY)],
            span=8,
        ),
        number(
            "Alerts firing",
            "Firing alerts of the run, and of Ray nodes that have no label `run` (Kubernetes). The annotation of each "
            "alert says what it means and which setting to change.",
            Query(
                f'count by (alertname) (ALERTS{{alertstate="firing", alertname=~"Asyncrl.*", {RAY}}})',
                "{{alertname}}",
            ),
            unit="none",
            thresholds=[(None, BAD)],
            span=8,
        ),
        number(
            "Health notes",
            "Number of health notes, and which: what is wrong with the training. `asyncrl status RUN` says since when, "
            "why, and where to look.",
            Query(f"sum(max by (note) (asyncrl_learner_health_note{{{RUN}}}))", "notes"),
            Query(f"max by (note) (asyncrl_learner_health_note{{{RUN}}} > 0)", "{{note}}"),
            unit="none",
            thresholds=[(None, HEALTHY), (1, DOUBTFUL)],
        ),
        number(
            "Step",
            "The learner's version: the number of trained steps.",
            Query(now("asyncrl_learner_policy_version", RUN), "step"),
            unit="none",
            thresholds=[(None, HEALTHY)],
        ),
        number(
            "Stall limit used",
            "Time since the learner's last step, divided by run.stall_timeout_s. From 100 % on, the run ends itself if "
            "no group is committed either.",
            Query(
                f'min(asyncrl_heartbeat_age_seconds{{role="learner", {RUN}}}) '
                f"/ max(asyncrl_stall_timeout_seconds{{{RUN}}})",
                "of the limit",
            ),
            unit="percentunit",
            thresholds=[(None, HEALTHY), (0.5, DOUBTFUL), (1, BAD)],
        ),
        number(
            "Oldest trained data",
            "Largest staleness of a group in the last step, and the limit η (staleness.max_versions).",
            Query(now("asyncrl_group_staleness_max_versions", RUN), "oldest"),
            Query(now("asyncrl_staleness_limit_versions", RUN), "limit"),
            unit="suffix: versions",
            thresholds=[(None, HEALTHY)],
        ),
        number(
            "Effective sample size",
            "Effective sample size after importance weighting, as a share of the tokens. If it falls, lower "
            "staleness.max_versions.",
            Query(now("asyncrl_learner_ess_ratio", RUN), "effective"),
            unit="percentunit",
            thresholds=[(None, BAD), (0.5, DOUBTFUL), (0.95, HEALTHY)],
        ),
        number(
            "Parity limit used",
            "How much the engines' and the learner's log-probs differ, as a share of the accepted difference "
            "(weights.parity_tolerance_nats, in bfloat16 weights.parity_factor). Infinite if a live weight of an "
            "engine is not as published. "
            "Above 100 %, the engines do not compute the same model as the learner.",
            Query(f"max(asyncrl_weight_parity_ratio{{{RUN}}})", "of the limit"),
            unit="percentunit",
            thresholds=[(None, HEALTHY), (0.5, DOUBTFUL), (1, BAD)],
        ),
        number(
            "Groups lost",
            "Groups that ended without being trained, except groups that a filter removed. 0 in a healthy run.",
            Query(f'sum(asyncrl_ledger_groups_total{{fate!~"trained|filtered", {RUN}}})', "groups"),
            unit="none",
            thresholds=[(None, HEALTHY), (1, DOUBTFUL)],
        ),
        number(
            "Restarts",
            "How often the run was resumed since its first start. The dashboards mark each restart with a line. "
            "run.max_restarts limits the restarts of `asyncrl up` within an hour.",
            Query(now("asyncrl_run_restarts", RUN), "restarts"),
            unit="none",
            thresholds=[(None, HEALTHY), (1, DOUBTFUL)],
        ),
        number(
            "Effective training time",
            "Share of the wall time since the first start of the run in which its steps were trained (ETTR). The rest "
            "went to starts, to steps that were trained again after a crash, and to the time without a learner.",
            Query(now("asyncrl_run_effective_training_time_ratio", RUN), "of the time"),
            unit="percentunit",
            thresholds=[(None, HEALTHY)],
        ),
        number(
            "Device time",
            "GPU-seconds of each pool since the run began; on CPUs, seconds of its processes.",
            Query(
                f"sum by (pool, device) (max by (pool, device, part) (asyncrl_device_seconds_total{{{RUN}}}))",
                "{{pool}} ({{device}})",
            ),
            unit="s",
            thresholds=[(None, HEALTHY)],
            span=8,
        ),
        number(
            "Generators",
            "Replicas that are registered at the buffer, by state.",
            Query(now("asyncrl_replicas", RUN, by="state"), "{{state}}"),
            unit="none",
            thresholds=[(None, HEALTHY)],
        ),
    ],
    "Does it learn, and which side waits for the other?": [
        lines(
            "Reward",
            "Mean reward of each step's samples, and of held-out evaluations.",
            Query(now("asyncrl_learner_reward_mean", RUN), "trained"),
            Query(now("asyncrl_learner_heldout_reward_mean", RUN, by="set"), "held out: {{set}}"),
            unit="none",
        ),
        lines(
            "Learner's time",
            "Share of the learner's time by state. If waiting_for_groups is large, add generators, unless the "
            "generators are blocked.",
            Query(state_shares("asyncrl_learner_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            shares=True,
        ),
        lines(
            "Generators' time",
            "Share of the generator slots' time by state. If blocked_on_staleness is large, add learner ranks. If the "
            "learner waits too, raise staleness.max_versions while the effective sample size stays high.",
            Query(state_shares("asyncrl_generator_state_seconds_total", REPLICA), "{{state}}"),
            unit="percentunit",
            shares=True,
        ),
        lines(
            "Tokens",
            "Generated and trained completion tokens. In the long run both rates are equal.",
            Query(rate("asyncrl_generator_tokens_total", f'kind="completion", {REPLICA}'), "generated"),
            Query(rate("asyncrl_learner_tokens_total", RUN, over=STEPS), "trained"),
            unit="suffix: tokens/s",
            span=12,
        ),
        lines(
            "Buffer",
            "Groups that hold a slot, by state, and the capacity of the buffer.",
            Query(now("asyncrl_buffer_groups", RUN, by="state"), "{{state}}"),
            Query(now("asyncrl_buffer_capacity_groups", RUN), "capacity"),
            unit="suffix: groups",
            span=12,
        ),
    ],
}
