"""Makes the parts of an invented short run: its steps, its totals and its buffer's status."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.buffer.ledger import Account, Amount, Fate
from asyncrl.buffer.records import Counts
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.registry import AbleReplicas, Deployment, ReplicaReport, ReplicaView
from asyncrl.coordinator.status import RunStatus
from asyncrl.learner.records import RunInfo, RunTotals, StepRecord

TOTALS = RunTotals(
    wall_s=50.0,
    generated_tokens=9000,
    groups_discarded=0,
    groups_failed={},
    ledger_closed=True,
    rows_outstanding=0,
    weight_updates=12,
    mid_sequence_updates=7,
    parity_max_nats=2e-6,
)


def make_step(step: int, **changed: Any) -> StepRecord:
    """Returns the record of step `step`.

    The run trains one step per second from second 10 on. The learner waits for a quarter of its time.
    """
    fields: dict[str, Any] = {
        "step": step,
        "wall_s": 10.0 + step,
        "duration_s": 0.9,
        "trained": True,
        "reward_mean": 0.5 + step / 200,
        "reward_std": 0.4,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "zero_variance_ratio": 0.25,
        "completion_tokens_mean": 5.5,
        "completion_tokens_max": 16,
        "truncated_ratio": 0.125,
        "loss": 0.01,
        "grad_norm": 0.5,
        "entropy_nats": 0.8,
        "ess_ratio": 0.95,
        "learning_rate": 1e-3,
        "parity_nats": 1e-6,
        "group_staleness": {0: 12, 1: 4},
        "token_staleness": {0: 500, 1: 100},
        "trained_samples": 128,
        "trained_tokens": 600,
        "model_flops": 6_000_000_000,
        "mfu_ratio": None,
        "generated_samples": 128 * (step + 2),
        "generated_tokens": 600 * (step + 2),
        "learner_state_s": {
            "waiting_for_groups": 1 + 0.25 * step,
            "forward_backward": 0.5 * step,
            "other": 9 + 0.25 * step,
        },
        "generator_state_s": {"generating": 2 + 0.75 * step, "idle": 8 + 0.25 * step},
        "buffer_groups": {"reserved": 16, "ready": 5, "leased": 0},
        "ledger_groups": {"trained": 16 * (step + 1), "reserved": 16, "ready": 5},
        "published_version": step + 1,
        "oldest_replica_version": step,
        "weight_updates": step,
        "mid_sequence_updates": step // 2,
        "diagnostics": {"kernel_ess_ratio": 0.9, "clipped_ratio": 0.0},
    }
    return StepRecord(**(fields | changed))


def make_process(
    steps: Sequence[int], *, start_s: float, before: StepRecord | None = None, skipped: int | None = None
) -> list[StepRecord]:
    """Returns the records of the `steps` of a process whose first lease came after `start_s`, as a learner writes them:
    the totals continue from the record `before`. A step waits 2 s for its groups, and is then trained for 8 s. The
    record at the index `skipped` is that of a skipped step."""
    wall_s = start_s - 2.0 + (before.wall_s if before else 0.0)
    # the first weights, the first evaluation and the wait for the first groups are not in the state `starting`
    starting_s = 0.75 * start_s + (before.learner_state_s["starting"] if before else 0.0)
    records = []
    for index, step in enumerate(steps):
        wall_s += 10.0
        states = {"starting": starting_s, "other": wall_s - starting_s}
        records.append(make_step(step, wall_s=wall_s, duration_s=8.0, learner_state_s=states, trained=index != skipped))
    return records


def make_status(**changed: Any) -> RunStatus:
    """Returns the status of a run at step 3, with a learner and a generator deployment of one busy replica."""
    report = ReplicaReport(
        actor="generator-a",
        deployment="generator-d",
        metrics_address="",
        state_seconds={"generating": 9.0, "idle": 1.0},
        slots=4,
        running_groups=2,
        samples=1234,
        completion_tokens=1,
        weight_updates=3,
        parity_max_nats=0.0,
    )
    fields: dict[str, Any] = {
        "run": "quick",
        "state": RunState.RUNNING,
        "message": "",
        "version": Version(1, 3),
        "published": Version(1, 3),
        "total_steps": 9,
        "max_staleness_versions": 2,
        "capacity_groups": 12,
        "counts": Counts(
            reserved=2,
            ready=1,
            leased=0,
            waiting=0,
            booked_bytes=0,
            oldest_group_age_s=0.0,
            lease_wait=None,
        ),
        "account": Account(issued=Amount(), fates=dict.fromkeys(Fate, Amount()), events={}),
        "failures": (),
        "failure_streak": None,
        "replicas": (
            ReplicaView(
                replica="generator-a",
                version=Version(1, 3),
                free_slots=2,
                reserved_groups=3,
                live=True,
                silent_s=0.0,
                refused_for=None,
            ),
        ),
        "reports": {"generator-a": report},
        "deployments": (
            Deployment(id="learner-d", role=Role.LEARNER, host="h", pid=1),
            Deployment(id="generator-d", role=Role.GENERATOR, host="h", pid=2),
        ),
        "learner_state_seconds": {},
        "quiet_s": 0.0,
        "learner_attached": True,
        "totals": report,
        "able": (AbleReplicas(version=Version(1, 3), replicas=1, stale=0),),
        "oldest_replica_step": 3,
        "targets": {},
    }
    return RunStatus(**(fields | changed))


def status_of(run: Path, **changed: Any) -> RunStatus:
    """Returns the status of the run that wrote this directory: its learner is the process of run.json."""
    info = msgspec.json.decode((run / "run.json").read_bytes(), type=RunInfo)
    learner = Deployment(id="learner-d", role=Role.LEARNER, host=info.host, pid=info.pid)
    generator = Deployment(id="generator-d", role=Role.GENERATOR, host="h", pid=2)
    return make_status(**({"deployments": (learner, generator)} | changed))
