"""A short run's records and its buffer's answer, made up, for the tests of what is written and drawn."""

from collections.abc import Callable
from typing import Any

import pytest
from written_runs import make_step

from asyncrl.buffer.actor import ReplicaReport, RunStatus
from asyncrl.buffer.ledger import Account, Amount, Fate
from asyncrl.buffer.membership import Deployment, Role, RunState
from asyncrl.buffer.records import Counts, ReplicaView, Version
from asyncrl.learner.records import StepRecord


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    return make_step


def make_status(**changed: Any) -> RunStatus:
    """A run at step 3 with a learner and one generator deployment of one replica, which is busy."""
    fields: dict[str, Any] = {
        "run": "quick",
        "state": RunState.RUNNING,
        "message": "",
        "nonce": "n",
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
            data_failures_in_a_row=0,
        ),
        "account": Account(issued=Amount(), fates=dict.fromkeys(Fate, Amount()), events={}, failures={}),
        "replicas": (
            ReplicaView(
                replica="generator-a",
                version=Version(1, 3),
                free_slots=2,
                busy_slots=2,
                live=True,
                silent_s=0.0,
                refused_for=None,
            ),
        ),
        "reports": {
            "generator-a": ReplicaReport(
                actor="generator-a",
                deployment="generator-d",
                metrics_address="",
                state_seconds={"generating": 9.0, "idle": 1.0},
                samples=1234,
                completion_tokens=1,
                weight_updates=3,
                parity_max_nats=0.0,
            )
        },
        "deployments": (
            Deployment(id="learner-d", role=Role.LEARNER, host="h", pid=1),
            Deployment(id="generator-d", role=Role.GENERATOR, host="h", pid=2),
        ),
        "quiet_s": 0.0,
        "targets": {},
    }
    return RunStatus(**(fields | changed))


@pytest.fixture
def run_status() -> Callable[..., RunStatus]:
    return make_status
