"""Flow: who waits for whom, from the reserved prompt to the loaded weights."""

from panels import HEALTHY, RAY, REPLICA, RUN, STEPS, Query, lines, mean, now, number, quantiles, rate, state_shares

TITLE = "asyncrl / Flow"
UID = "asyncrl-flow"
DESCRIPTION = "Who waits for whom: the path of a prompt, from its ticket to the weights that it helped to train."

MODEL_FLOPS = rate("asyncrl_learner_model_flops_total", RUN, over=STEPS)
TRAINING = rate("asyncrl_learner_state_seconds_total", f'state="forward_backward", {RUN}', over=STEPS)
PEAK = f"sum(asyncrl_learner_peak_flops_per_second{{{RUN}}})"
COUNTED = f"and sum(asyncrl_learner_model_flops_total{{{RUN}}}) > 0"
"""Nothing is counted of some models: that is no answer, and not 0."""

ROWS = {
    "Who waits for whom": [
        lines(
            "Learner's time",
            "Seconds of the learner by state, as shares. waiting_for_groups while generators generate: add "
            "generators; while they are blocked: see there. publish: raise weights.publish_every_steps.",
            Query(state_shares("asyncrl_learner_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Generators' time",
            "Slot-seconds by state, as shares. blocked_on_staleness: add learner ranks; where the "
            "learner waits too, raise staleness.max_versions. blocked_on_capacity while the learner waits: raise "
            "buffer.capacity_groups. starved_of_prompts: add data, or raise data.epochs.",
            Query(state_shares("asyncrl_generator_state_seconds_total", REPLICA), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Waits at the buffer",
            "The buffer's time by who waits there, as shares: the learner for a step's groups, any generator for a "
            "ticket. learner_waits: too few groups; generators_wait: the learner, or a limit, holds them back.",
            Query(state_shares("asyncrl_buffer_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Busy share of each generator",
            "Share of its slots' time that a generator generates. One that stands out is slow, blocked or torn.",
            Query(
                rate("asyncrl_generator_state_seconds_total", f'state="generating", {REPLICA}', by="replica")
                + " / "
                + rate("asyncrl_generator_state_seconds_total", REPLICA, by="replica"),
                "{{replica}}",
            ),
            unit="percentunit",
            span=6,
        ),
    ],
    "Generators": [
        lines(
            "Generated tokens",
            "Tokens that the engines read (a group's prompt once) and wrote.",
            Query(rate("asyncrl_generator_tokens_total", REPLICA, by="kind"), "{{kind}}"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Samples",
            "Samples by what became of their group's commit. All but accepted are lost work.",
            Query(rate("asyncrl_generator_samples_total", REPLICA, by="outcome"), "{{outcome}}"),
            unit="suffix: samples/s",
        ),
        lines(
            "Groups under way",
            "Groups that each generator works on; at most generator.max_concurrent_groups.",
            Query(now("asyncrl_generator_inflight_groups", REPLICA, by="replica"), "{{replica}}"),
            unit="suffix: groups",
        ),
        lines(
            "Rollout",
            "Time of a group from its start to its commit. It fails beyond generator.rollout_timeout_s.",
            *quantiles("asyncrl_rollout_duration_seconds", REPLICA),
            unit="s",
        ),
        lines(
            "Scoring",
            "Time to score a group, part of its rollout. Long: more environment.score_workers.",
            *quantiles("asyncrl_reward_duration_seconds", REPLICA),
            unit="s",
        ),
        lines(
            "Failed rollouts",
            "By class and reason: infra is retried elsewhere; data is not, and too many in a row stop the run "
            "(generator.max_data_failures). Empty while none has failed.",
            Query(rate("asyncrl_rollout_failures_total", REPLICA, by="class, reason"), "{{class}}: {{reason}}"),
            unit="suffix: groups/s",
        ),
        lines(
            "Replicas",
            "Generators that the buffer knows, by what they do; silent ones are forgotten after "
            "buffer.heartbeat_timeout_s.",
            Query(now("asyncrl_replicas", RUN, by="state"), "{{state}}"),
            unit="suffix: replicas",
            span=6,
        ),
        lines(
            "Engine's requests",
            "vLLM's own count of what it decodes and what waits for room.",
            Query(f"sum(vllm:num_requests_running{{{REPLICA}}})", "running"),
            Query(f"sum(vllm:num_requests_waiting{{{REPLICA}}})", "waiting"),
            unit="suffix: requests",
            span=6,
        ),
        lines(
            "Key-value cache",
            "Share of vLLM's cache that is in use. Full: fewer generator.max_concurrent_groups, or more memory for it.",
            Query(f"max by (replica) (vllm:kv_cache_usage_perc{{{REPLICA}}})", "used, {{replica}}"),
            unit="percentunit",
            span=6,
        ),
        lines(
            "Preemptions",
            "Sequences that vLLM pushes out of its full cache and computes again: what a cache too small costs.",
            Query(rate("vllm:num_preemptions_total", REPLICA), "preempted"),
            unit="suffix: sequences/s",
            span=6,
        ),
    ],
    "Buffer": [
        lines(
            "Groups in the buffer",
            "Groups that hold a slot, and how many fit. Near the limit generators are blocked on capacity.",
            Query(now("asyncrl_buffer_groups", RUN, by="state"), "{{state}}"),
            Query(now("asyncrl_buffer_capacity_groups", RUN), "capacity"),
            unit="suffix: groups",
        ),
        lines(
            "Bytes in the buffer",
            "Bytes of rows that are booked; a ticket books the worst case, its commit refunds the rest. The limit is "
            "buffer.capacity_bytes.",
            Query(now("asyncrl_buffer_bytes", RUN), "booked"),
            Query(now("asyncrl_buffer_capacity_bytes", RUN), "capacity"),
            unit="bytes",
        ),
        lines(
            "Oldest group",
            "Age of the oldest group that holds a slot. What only grows was forgotten by somebody.",
            Query(now("asyncrl_buffer_oldest_group_age_seconds", RUN), "age"),
            unit="s",
        ),
        lines(
            "Waits at the buffer",
            "95th percentile of how long a reserve waits for tickets and the learner for a lease.",
            *quantiles("asyncrl_buffer_reserve_wait_seconds", RUN, name="reserve")[1:],
            *quantiles("asyncrl_buffer_lease_wait_seconds", RUN, name="lease", over=STEPS)[1:],
            unit="s",
        ),
        lines(
            "Fates",
            "Groups issued, and what became of them. Only trained and, by choice, filtered are as they should be.",
            Query(rate("asyncrl_ledger_issued_groups_total", RUN, over=STEPS), "issued"),
            Query(rate("asyncrl_ledger_groups_total", RUN, by="fate", over=STEPS), "{{fate}}"),
            unit="suffix: groups/s",
        ),
        lines(
            "Tokens by fate",
            "Generated tokens by what became of their group.",
            Query(rate("asyncrl_ledger_tokens_total", RUN, by="fate", over=STEPS), "{{fate}}"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Events",
            "What happened besides the regular life of groups: retries, expired tickets, refused commits.",
            Query(rate("asyncrl_buffer_events_total", f'event!="attempt", {RUN}', by="event"), "{{event}}"),
            unit="suffix: events/s",
        ),
        lines(
            "Unaccounted for",
            "Groups that the ledger cannot place, and rows in the data plane. The first is 0, or there is a bug.",
            Query(now("asyncrl_ledger_unaccounted_groups", RUN), "groups without a fate"),
            Query(now("asyncrl_rows_outstanding", RUN), "rows of finished groups"),
            unit="none",
        ),
    ],
    "Learner": [
        lines(
            "Step",
            "Time of a step from its lease to its ack.",
            *quantiles("asyncrl_learner_step_duration_seconds", RUN, over=STEPS),
            unit="s",
        ),
        lines(
            "Trained tokens",
            "Completion tokens that went into an optimizer step.",
            Query(rate("asyncrl_learner_tokens_total", RUN, over=STEPS), "trained"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Packing efficiency",
            "Share of real tokens among all that go through the model. Low: learner.batching dynamic or packed.",
            Query(now("asyncrl_learner_packing_efficiency_ratio", RUN), "real tokens"),
            unit="percentunit",
        ),
        lines(
            "Model FLOPs utilisation",
            "Share of what the devices could do that the policy's training needs (MFU, as PaLM counts): of all time, "
            "waits and log-probs included, and of the time in forward and backward passes, a critic's too. Low in "
            "these: learner.batching packed, more learner.micro_batch_tokens, no learner.activation_checkpointing. It "
            "jumps when steps are longer than the range chosen above. Empty on CPUs and where a device's peak is "
            "not known: see the panel beside it.",
            Query(f"{MODEL_FLOPS} / {PEAK} {COUNTED}", "of all time"),
            Query(f"{MODEL_FLOPS} / {TRAINING} / {PEAK} {COUNTED}", "of forward and backward"),
            unit="percentunit",
            span=12,
        ),
        lines(
            "Model FLOPs",
            "What the policy's training needs in additions and multiplications, padding and recomputation left out. "
            "Empty for a model that is not counted, such as a mixture of experts.",
            Query(f"{MODEL_FLOPS} {COUNTED}", "of all time"),
            Query(f"{MODEL_FLOPS} / {TRAINING} {COUNTED}", "of forward and backward"),
            unit="flops",
            span=12,
        ),
    ],
    "Checkpoints": [
        lines(
            "Steps since the newest",
            "Steps that a crash now would cost. Beyond checkpoint.every_steps one could not be written: see the "
            "learner's log. 0 as the limit: there is one at the run's end only.",
            Query(
                f"{now('asyncrl_learner_policy_version', RUN)} - {now('asyncrl_checkpoint_policy_version', RUN)}",
                "steps",
            ),
            Query(now("asyncrl_checkpoint_interval_versions", RUN), "checkpoint.every_steps"),
            unit="suffix: steps",
            span=6,
        ),
        lines(
            "Age of the newest",
            "Time since a checkpoint was last whole. Empty before the first one.",
            Query(f"time() - {now('asyncrl_checkpoint_last_success_timestamp_seconds', RUN)}", "age"),
            unit="s",
            span=6,
        ),
        lines(
            "Writing",
            "Mean time for a checkpoint. Nothing is trained meanwhile: raise checkpoint.every_steps where it shows "
            "among the learner's time.",
            Query(mean("asyncrl_checkpoint_duration_seconds", RUN), "time"),
            unit="s",
            span=6,
        ),
        lines(
            "Checkpoints",
            "Checkpoints written so far, by outcome. One that failed left the one before it as it was.",
            Query(now("asyncrl_checkpoints_total", RUN, by="outcome"), "{{outcome}}"),
            unit="none",
            span=6,
        ),
    ],
    "Weights": [
        lines(
            "Versions",
            "Steps trained, the newest published version, and what each generator runs.",
            Query(now("asyncrl_learner_policy_version", RUN), "learner"),
            Query(now("asyncrl_published_policy_version", RUN), "published"),
            Query(now("asyncrl_generator_policy_version", REPLICA, by="replica"), "{{replica}}"),
            unit="none",
            zero=False,
        ),
        lines(
            "Lag of each generator",
            "Versions that a generator is behind the published one; never less than 0, although the two are scraped "
            "one after the other. Beyond the limit it starts nothing.",
            Query(
                f"clamp_min({now('asyncrl_published_policy_version', RUN, by='run')} - on (run) group_right () "
                f"{now('asyncrl_generator_policy_version', REPLICA, by='run, replica')}, 0)",
                "{{replica}}",
            ),
            Query(now("asyncrl_weight_lag_limit_versions", RUN), "limit"),
            unit="suffix: versions",
        ),
        lines(
            "Updates",
            "Versions offered to the generators, by outcome. torn and failed name a replica that could not load.",
            Query(rate("asyncrl_weight_updates_total", REPLICA, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: updates/s",
        ),
        lines(
            "Publishing",
            "Mean time of a publication: the step pays for the snapshot, delivery runs beside the next one.",
            Query(mean("asyncrl_weight_publish_seconds", RUN, by="phase"), "{{phase}}"),
            unit="s",
        ),
        lines(
            "Loading",
            "Mean time of a generator for an update. It stands still from pause to resume; the limit is "
            "weights.load_timeout_s.",
            Query(mean("asyncrl_weight_load_seconds", REPLICA, by="phase"), "{{phase}}"),
            Query(now("asyncrl_weight_sync_timeout_seconds", RUN), "limit"),
            unit="s",
        ),
        lines(
            "Published bytes",
            "Bytes of weights that leave the learner.",
            Query(rate("asyncrl_weight_bytes_total", RUN, over=STEPS), "published"),
            unit="Bps",
        ),
    ],
    "Deadlines": [
        number(
            "How long a wait may last",
            "Every timeout of the learner's configuration, by its key: what waits longer than that fails, and says so.",
            Query(now("asyncrl_deadline_seconds", RUN, by="deadline"), "{{deadline}}"),
            unit="s",
            thresholds=[(None, HEALTHY)],
            span=24,
        ),
    ],
    "Ray": [
        lines(
            "Object store",
            "Bytes in Ray's object store by where they are; SPILLED went to the disk. Of the whole cluster, other runs "
            "on it included.",
            Query(f"sum by (Location) (ray_object_store_memory{{{RAY}}})", "{{Location}}"),
            unit="bytes",
            span=12,
        ),
        lines(
            "Workers ended for memory",
            "Processes that Ray has killed because a node ran out of memory. Empty until there is one.",
            Query(f"sum by (Name) (ray_memory_manager_worker_eviction_total{{{RAY}}})", "{{Name}}"),
            unit="none",
            span=12,
        ),
    ],
}
