"""The dashboard Flow: which side waits for the other, on the path from a reserved prompt to loaded weights."""

from panels import (
    HEALTHY,
    RAY,
    REPLICA,
    RUN,
    STEPS,
    Query,
    lines,
    mean,
    now,
    number,
    of_gpus,
    quantiles,
    rate,
    state_shares,
)

TITLE = "asyncrl / Flow"
UID = "asyncrl-flow"
DESCRIPTION = "Which side waits for the other? The path of a group from its ticket to the weights that it trained."

MODEL_FLOPS = rate("asyncrl_learner_model_flops_total", RUN, over=STEPS)
TRAINING = rate("asyncrl_learner_state_seconds_total", f'state="forward_backward", {RUN}', over=STEPS)
PEAK = f"sum(asyncrl_learner_peak_flops_per_second{{{RUN}}})"
COUNTED = f"and sum(asyncrl_learner_model_flops_total{{{RUN}}}) > 0"
"""FLOPs of some models are not counted. The panels then show no value, because 0 would be wrong."""
OF_DCGM = (
    "Empty without NVIDIA's DCGM exporter. The GPUs are those of the nodes of the run's Ray, also of other programs."
)

ROWS = {
    "Which side waits for the other?": [
        lines(
            "Learner's time",
            "Share of the learner's time by state. waiting_for_groups is large: add generators if they generate all "
            "the time; if they are blocked, read the panel of their time. publish is large: raise "
            "weights.publish_every_steps.",
            Query(state_shares("asyncrl_learner_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Generators' time",
            "Share of the generator slots' time by state. blocked_on_staleness is large: add learner ranks, or raise "
            "staleness.max_versions if the learner waits too. blocked_on_capacity is large and the learner waits: "
            "raise buffer.capacity_groups. starved_of_prompts is large: add data, or raise data.epochs. "
            "waiting_for_environment is large: make rewards and tools faster, or run more groups at once.",
            Query(state_shares("asyncrl_generator_state_seconds_total", REPLICA), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Waits at the buffer",
            "Share of the time in which the learner waits for the groups of a step, or a generator for a ticket. "
            "learner_waits is large: there are too few groups. generators_wait is large: the learner or a limit blocks "
            "the generators.",
            Query(state_shares("asyncrl_buffer_state_seconds_total", RUN), "{{state}}"),
            unit="percentunit",
            span=6,
            shares=True,
        ),
        lines(
            "Busy share of each generator",
            "Share of its slots' time in which a generator generates. A generator with another share than the rest is "
            "slow, blocked, or paused after a failed weight update.",
            Query(
                rate("asyncrl_generator_state_seconds_total", f'state="generating", {REPLICA}', by="replica")
                + " / "
                + rate("asyncrl_generator_state_seconds_total", REPLICA, by="replica"),
                "{{replica}}",
            ),
            unit="percentunit",
            span=6,
        ),
        lines(
            "Device time by part",
            "Devices of each pool that start, wait and work: GPUs, or processes on CPUs. What starts and waits is paid "
            "for and does not train. The panels of the learner's and the generators' time say what they wait for.",
            Query(rate("asyncrl_device_seconds_total", RUN, by="pool, device, part", over=STEPS), "{{pool}}: {{part}}"),
            unit="none",
            span=6,
        ),
        lines(
            "Device time for each trained token",
            "GPU-seconds of each pool for each trained token; on CPUs, seconds of its processes. Lower is cheaper.",
            Query(
                rate("asyncrl_device_seconds_total", RUN, by="pool, device", over=STEPS)
                + " / on () group_left () "
                + rate("asyncrl_learner_tokens_total", RUN, over=STEPS),
                "{{pool}} ({{device}})",
            ),
            unit="s",
            span=6,
        ),
    ],
    "Generators": [
        lines(
            "Generated tokens",
            "Prompt tokens (the prompt of a group counts once) and generated completion tokens.",
            Query(rate("asyncrl_generator_tokens_total", REPLICA, by="kind"), "{{kind}}"),
            unit="suffix: tokens/s",
            span=6,
        ),
        lines(
            "Generated tokens by node",
            "Generated completion tokens of the replicas on each node. A node that makes fewer with as many replicas "
            "is slow.",
            Query(rate("asyncrl_generator_tokens_total", f'kind="completion", {REPLICA}', by="node"), "{{node}}"),
            unit="suffix: tokens/s",
            span=6,
        ),
        lines(
            "Samples",
            "Samples by the outcome of their group's commit. All outcomes but accepted are lost work.",
            Query(rate("asyncrl_generator_samples_total", REPLICA, by="outcome"), "{{outcome}}"),
            unit="suffix: samples/s",
            span=6,
        ),
        lines(
            "Groups in generation",
            "Groups that each generator generates now; at most generator.max_concurrent_groups.",
            Query(now("asyncrl_generator_inflight_groups", REPLICA, by="replica"), "{{replica}}"),
            unit="suffix: groups",
            span=6,
        ),
        lines(
            "Rollout",
            "Time of a group from its start to its commit. A group that takes longer than "
            "generator.rollout_timeout_s fails.",
            *quantiles("asyncrl_rollout_duration_seconds", REPLICA),
            unit="s",
        ),
        lines(
            "Scoring",
            "Time to score a group, which is part of its rollout. If it is long, raise environment.score_workers.",
            *quantiles("asyncrl_reward_duration_seconds", REPLICA),
            unit="s",
        ),
        lines(
            "Failed rollouts",
            "Failed rollouts by class and reason. An infra failure is retried on another replica. A data failure is "
            "not retried, and generator.max_data_failures of them in a row stop the run. Empty until a rollout fails.",
            Query(rate("asyncrl_rollout_failures_total", REPLICA, by="class, reason"), "{{class}}: {{reason}}"),
            unit="suffix: groups/s",
        ),
        lines(
            "Replicas",
            "Replicas that are registered at the buffer, by state, and how many there should be. A silent replica "
            "sends no heartbeats. One that is quarantined gets no groups; its deployment starts it again.",
            Query(now("asyncrl_replicas", RUN, by="state"), "{{state}}"),
            Query(now("asyncrl_wanted_replicas", RUN), "wanted"),
            unit="suffix: replicas",
            span=6,
        ),
        lines(
            "Failures of replicas",
            "Replicas that are quarantined and that are started again, a minute, by cause.",
            Query(f"60 * {rate('asyncrl_replica_quarantines_total', RUN, by='cause')} > 0", "quarantined: {{cause}}"),
            Query(f"60 * {rate('asyncrl_replica_restarts_total', RUN, by='cause')} > 0", "restarted: {{cause}}"),
            unit="suffix: a minute",
            span=6,
        ),
        lines(
            "Engine's requests",
            "Requests that vLLM decodes, and requests that wait for space in its cache.",
            Query(f"sum(vllm:num_requests_running{{{REPLICA}}})", "running"),
            Query(f"sum(vllm:num_requests_waiting{{{REPLICA}}})", "waiting"),
            unit="suffix: requests",
            span=6,
        ),
        lines(
            "Key-value cache",
            "Share of vLLM's key-value cache that is in use. If it is full, lower generator.max_concurrent_groups or "
            "give the cache more memory.",
            Query(f"max by (replica) (vllm:kv_cache_usage_perc{{{REPLICA}}})", "used, {{replica}}"),
            unit="percentunit",
            span=6,
        ),
        lines(
            "Preemptions",
            "Sequences that vLLM removes from its full cache and computes again later: the cost of a cache that is too "
            "small.",
            Query(rate("vllm:num_preemptions_total", REPLICA), "preempted"),
            unit="suffix: sequences/s",
            span=6,
        ),
        lines(
            "Prompt tokens from the cache",
            "Share of prompt tokens that vLLM found in its prefix cache. The samples of a group share their prompt, as "
            "far as it fills whole blocks (block_size in docs/tasks.md).",
            Query(
                f"{rate('vllm:prefix_cache_hits_total', REPLICA)} / {rate('vllm:prefix_cache_queries_total', REPLICA)}",
                "from the cache",
            ),
            unit="percentunit",
            span=6,
        ),
    ],
    "Agents": [
        lines(
            "Turns of an episode",
            "Calls of the model in an episode of an agent; at most environment.max_turns. Empty without agents.",
            *quantiles("asyncrl_agent_turns", REPLICA),
            unit="suffix: turns",
        ),
        lines(
            "Tokens of episodes",
            "Tokens by origin: sampled by the model, of the agent's first messages (environment), and of later "
            "messages with the chat template around them (template). Only sampled tokens are trained.",
            Query(rate("asyncrl_agent_tokens_total", REPLICA, by="origin"), "{{origin}}"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Open sessions",
            "Sessions of agents that are open now.",
            Query(now("asyncrl_agent_sessions", REPLICA, by="replica"), "{{replica}}"),
            unit="suffix: sessions",
        ),
        lines(
            "Tools",
            "Time from an answer with tool calls to the agent's next call. If it is long, make the tools faster, or "
            "raise generator.max_concurrent_groups and environment.score_workers.",
            *quantiles("asyncrl_agent_tool_seconds", REPLICA),
            unit="s",
        ),
        lines(
            "Tool calls",
            "Tool calls of the model.",
            Query(rate("asyncrl_agent_tool_calls_total", REPLICA), "calls"),
            unit="suffix: calls/s",
        ),
        lines(
            "Oldest session",
            "Age of the oldest open session of an agent. An episode ends after environment.score_timeout_s.",
            Query(now("asyncrl_agent_oldest_session_age_seconds", REPLICA, by="replica"), "{{replica}}"),
            unit="s",
        ),
        lines(
            "Forks",
            "Calls of agents that changed the history of their conversation, by what they changed. Such samples are "
            "not trained.",
            Query(rate("asyncrl_agent_forks_total", REPLICA, by="reason"), "{{reason}}"),
            unit="suffix: calls/s",
        ),
    ],
    "Buffer": [
        lines(
            "Groups in the buffer",
            "Groups that hold a slot, by state, and the capacity. Near the capacity, generators are blocked.",
            Query(now("asyncrl_buffer_groups", RUN, by="state"), "{{state}}"),
            Query(now("asyncrl_buffer_capacity_groups", RUN), "capacity"),
            unit="suffix: groups",
        ),
        lines(
            "Bytes in the buffer",
            "Bytes that are booked for rows. A ticket books the worst case of a group; its commit replaces this by the "
            "real size. The limit is buffer.capacity_bytes.",
            Query(now("asyncrl_buffer_bytes", RUN), "booked"),
            Query(now("asyncrl_buffer_capacity_bytes", RUN), "capacity"),
            unit="bytes",
        ),
        lines(
            "Oldest group",
            "Age of the oldest group that holds a slot. If it only grows, the group is neither finished nor given "
            "back, and its slot is lost.",
            Query(now("asyncrl_buffer_oldest_group_age_seconds", RUN), "age"),
            unit="s",
        ),
        lines(
            "Duration of waits at the buffer",
            "95th percentile of the time that a reserve call waits for tickets, and the learner for a lease.",
            *quantiles("asyncrl_buffer_reserve_wait_seconds", RUN, name="reserve")[1:],
            *quantiles("asyncrl_buffer_lease_wait_seconds", RUN, name="lease", over=STEPS)[1:],
            unit="s",
        ),
        lines(
            "Fates",
            "Issued groups, and groups by final fate. In a healthy run, all groups are trained, or filtered by a "
            "filter that you have set.",
            Query(rate("asyncrl_ledger_issued_groups_total", RUN, over=STEPS), "issued"),
            Query(rate("asyncrl_ledger_groups_total", RUN, by="fate", over=STEPS), "{{fate}}"),
            unit="suffix: groups/s",
        ),
        lines(
            "Tokens by fate",
            "Generated tokens by the final fate of their group.",
            Query(rate("asyncrl_ledger_tokens_total", RUN, by="fate", over=STEPS), "{{fate}}"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Events",
            "Events outside the normal life of a group: retries, expired tickets, refused commits.",
            Query(rate("asyncrl_buffer_events_total", f'event!="attempt", {RUN}', by="event"), "{{event}}"),
            unit="suffix: events/s",
        ),
        lines(
            "Tokens of ended attempts",
            "Tokens of attempts that ended before their group was finished. They are thrown away, or, if they were "
            "stored (generator.persist_every_tokens), continued by another replica, or dropped because they were too "
            "old, were lost, or an agent did not ask for them again.",
            Query(rate("asyncrl_buffer_attempt_tokens_total", RUN, by="event"), "{{event}}"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Unaccounted for",
            "Groups without a slot and without a fate, and rows of finished groups in the data plane. The number of "
            "groups must be 0; any other value is a bug of asyncrl.",
            Query(now("asyncrl_ledger_unaccounted_groups", RUN), "groups without a fate"),
            Query(now("asyncrl_rows_outstanding", RUN), "rows of finished groups"),
            unit="none",
        ),
    ],
    "Learner": [
        lines(
            "Step",
            "Time of a step from its lease to its ack or skip.",
            *quantiles("asyncrl_learner_step_duration_seconds", RUN, over=STEPS),
            unit="s",
        ),
        lines(
            "Trained tokens",
            "Completion tokens that were trained.",
            Query(rate("asyncrl_learner_tokens_total", RUN, over=STEPS), "trained"),
            unit="suffix: tokens/s",
        ),
        lines(
            "Packing efficiency",
            "Tokens of the rows divided by the tokens that go through the model. Padding makes it smaller than 1. If "
            "it is low, set learner.batching to dynamic or packed. Packed rows that share a prompt make it larger "
            "than 1.",
            Query(now("asyncrl_learner_packing_efficiency_ratio", RUN), "of the rows"),
            unit="percentunit",
        ),
        lines(
            "Model FLOPs utilisation",
            "Model FLOPs of the policy's training divided by the peak speed of the devices (MFU, counted as in PaLM). "
            "One line is over all time, with waits and log-prob passes; the other is over the time in forward and "
            "backward passes, with those of a critic. If the second is low: set learner.batching to packed, raise "
            "learner.micro_batch_tokens, or switch learner.activation_checkpointing off. The lines jump when steps "
            "are longer than the range that is chosen above. Empty on CPUs and on devices whose peak speed is not "
            "known; the next panel then still has values.",
            Query(f"{MODEL_FLOPS} / {PEAK} {COUNTED}", "of all time"),
            Query(f"{MODEL_FLOPS} / {TRAINING} / {PEAK} {COUNTED}", "of forward and backward"),
            unit="percentunit",
            span=12,
        ),
        lines(
            "Model FLOPs",
            "Additions and multiplications per second of the policy's training, without padding and recomputation. "
            "Empty for models that cannot be counted, such as a mixture of experts.",
            Query(f"{MODEL_FLOPS} {COUNTED}", "of all time"),
            Query(f"{MODEL_FLOPS} / {TRAINING} {COUNTED}", "of forward and backward"),
            unit="flops",
            span=12,
        ),
    ],
    "Checkpoints": [
        lines(
            "Steps since the newest",
            "Steps since the newest checkpoint, which a crash now would lose. It is above checkpoint.every_steps while "
            "a checkpoint is being written. Above twice that number, checkpoints fail or take too long: the learner's "
            "log has the cause. A limit of 0 means that checkpoints are not saved by steps.",
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
            "Time since the newest checkpoint was complete. Empty before the first one of the learner's process.",
            Query(f"min(asyncrl_checkpoint_age_seconds{{{RUN}}})", "age"),
            unit="s",
            span=6,
        ),
        lines(
            "Writing",
            "Mean time of a checkpoint until it is complete, and the part of it for which training waits. If the part "
            "is a large share of the learner's time, raise checkpoint.every_steps.",
            Query(mean("asyncrl_checkpoint_duration_seconds", RUN), "until complete"),
            Query(mean("asyncrl_checkpoint_wait_seconds", RUN), "training waits"),
            unit="s",
            span=6,
        ),
        lines(
            "Checkpoints",
            "Checkpoints so far, by outcome. A failed checkpoint does not change the previous one. A postponed one was "
            "due while the last one was being written.",
            Query(now("asyncrl_checkpoints_total", RUN, by="outcome"), "{{outcome}}"),
            unit="none",
            span=6,
        ),
        lines(
            "Mirror",
            "Time since run.mirror last had everything that was finished. It grows while a checkpoint is sent, and "
            "while the storage fails. Empty without a mirror.",
            Query(f"min(asyncrl_mirror_behind_seconds{{{RUN}}})", "behind"),
            unit="s",
            span=12,
        ),
        lines(
            "Failures of the mirror",
            "Failed tries to send something to run.mirror so far. Training goes on; the learner's log has the first "
            "error of each row.",
            Query(now("asyncrl_mirror_failures_total", RUN), "failures"),
            unit="none",
            span=12,
        ),
    ],
    "Weights": [
        lines(
            "Versions",
            "The learner's version, the newest published version, and the version of each generator.",
            Query(now("asyncrl_learner_policy_version", RUN), "learner"),
            Query(now("asyncrl_published_policy_version", RUN), "published"),
            Query(now("asyncrl_generator_policy_version", REPLICA, by="replica"), "{{replica}}"),
            unit="none",
            zero=False,
        ),
        lines(
            "Lag of each generator",
            "How many versions a generator is behind the published version. A generator beyond the limit starts no "
            "groups. The two versions are scraped at different times; a negative difference is shown as 0.",
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
            "Versions that were offered to the generators, by outcome. With torn and failed, a replica could not load "
            "a version.",
            Query(rate("asyncrl_weight_updates_total", REPLICA, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: updates/s",
        ),
        lines(
            "Publishing",
            "Mean time of a publication by phase. Training waits for the snapshot; the delivery runs at the same time "
            "as the next step.",
            Query(mean("asyncrl_weight_publish_seconds", RUN, by="phase"), "{{phase}}"),
            unit="s",
        ),
        lines(
            "Deliveries",
            "Deliveries of weights by outcome. A failed delivery is repeated. Replaced: the delivery before took so "
            "long that newer weights took the place of these. Again: bytes that a replica fetched were lost or "
            "damaged.",
            Query(rate("asyncrl_weight_deliveries_total", RUN, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: deliveries/s",
        ),
        lines(
            "Loading",
            "Mean time of a generator's weight update by phase. The generator does not generate from pause to resume. "
            "The limit is weights.load_timeout_s.",
            Query(mean("asyncrl_weight_load_seconds", REPLICA, by="phase"), "{{phase}}"),
            Query(now("asyncrl_weight_sync_timeout_seconds", RUN), "limit"),
            unit="s",
        ),
        lines(
            "Broadcasts",
            "With weights.transport collective: broadcasts by what they were for the replicas. A replica that missed "
            "one, or was absent, gets the weights through the object store.",
            Query(rate("asyncrl_weight_broadcasts_total", REPLICA, by="outcome", over=STEPS), "{{outcome}}"),
            unit="suffix: broadcasts/s",
        ),
        lines(
            "Time of a broadcast",
            "With weights.transport collective: mean time that a broadcast takes for a replica. The limit is "
            "weights.load_timeout_s.",
            Query(mean("asyncrl_weight_broadcast_seconds", REPLICA), "broadcast"),
            Query(now("asyncrl_weight_sync_timeout_seconds", RUN), "limit"),
            unit="s",
        ),
        lines(
            "Published bytes",
            "Bytes of weights that the learner sends, and that all replicas together get by broadcast.",
            Query(rate("asyncrl_weight_bytes_total", RUN, over=STEPS), "published"),
            Query(rate("asyncrl_weight_broadcast_bytes_total", REPLICA, over=STEPS), "received by broadcast"),
            unit="Bps",
        ),
        lines(
            "Sent part of the weights",
            "Bytes sent for the last version, divided by the bytes of all weights. With weights.delta, only changed "
            "weights are sent.",
            Query(now("asyncrl_weight_sent_ratio", RUN), "sent"),
            unit="percentunit",
        ),
    ],
    "Deadlines": [
        number(
            "Timeouts",
            "Every timeout of the learner's configuration, by its key. A wait that takes longer fails with an error.",
            Query(now("asyncrl_deadline_seconds", RUN, by="deadline"), "{{deadline}}"),
            unit="s",
            thresholds=[(None, HEALTHY)],
            span=24,
        ),
    ],
    "Ray": [
        lines(
            "Object store",
            "Bytes in Ray's object store by location; SPILLED bytes are on the disk. The numbers are those of the "
            "whole cluster, with all runs on it.",
            Query(f"sum by (Location) (ray_object_store_memory{{{RAY}}})", "{{Location}}"),
            unit="bytes",
            span=12,
        ),
        lines(
            "Workers ended for memory",
            "Processes that Ray has killed because a node ran out of memory. Empty until Ray kills the first one.",
            Query(f"sum by (Name) (ray_memory_manager_worker_eviction_total{{{RAY}}})", "{{Name}}"),
            unit="none",
            span=12,
        ),
    ],
    "GPUs": [
        *(
            lines(title, f"{what} {OF_DCGM}", Query(of_gpus(metric), "{{node}}: GPU {{gpu}}"), unit=unit)
            for title, what, metric, unit in (
                ("Memory of each GPU", "Used memory of each GPU of both pools.", "DCGM_FI_DEV_FB_USED", "mbytes"),
                (
                    "Busy share of each GPU",
                    "Share of the time in which any kernel runs on the GPU. It says little about how well it is used.",
                    "DCGM_FI_DEV_GPU_UTIL",
                    "percent",
                ),
                (
                    "Last XID error of each GPU",
                    "The number of the last error that the driver reported; 0 without one. NVIDIA's list explains it.",
                    "DCGM_FI_DEV_XID_ERRORS",
                    "none",
                ),
            )
        ),
    ],
}
