"""A short run's records, made up, for the tests of what is written and drawn."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.learner.records import StepRecord


def make_step(step: int, **changed: Any) -> StepRecord:
    """Step `step` of a run that trains a step a second from second 10 on; the learner waits a quarter of its time."""
    fields: dict[str, Any] = {
        "step": step,
        "wall_s": 10.0 + step,
        "duration_s": 0.9,
        "trained": True,
        "reward_mean": 0.5 + step / 200,
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


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    return make_step
