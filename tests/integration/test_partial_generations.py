"""A replica is killed in the middle of long answers, and the other one continues them by tokens, with real Ray and
vLLM. The audit scores every continued token again under the weights of its version."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICKSTART, Run, small_overrides
from kills import kill

from asyncrl.buffer.records import LeasedGroup
from asyncrl.common.version import Version
from asyncrl.learner.kept_steps import KeptSteps

pytestmark = pytest.mark.integration

LIMIT = 5
"""staleness.max_versions. When the tickets of the killed replica expire, the learner is a few versions further, and
their tokens can still be trained."""
STEPS = 12
"""Enough for all groups that were in flight at the kill."""
LONG_ANSWERS = [
    "model.max_length=264",
    "model.tiny.warmup_steps=1",
    "generator.max_completion_tokens=256",
    "generator.temperature=2",  # almost uniform, so the end of the sequence is rare
    "generator.persist_every_tokens=4",
    "generator.replicas=2",
    "generator.max_concurrent_groups=6",
    "learner.groups_per_step=8",
    "learner.group_size=4",
    "learner.batching=padded",
    "learner.micro_batch_size=1",  # slow steps, so that the tickets expire within a few of them
    f"learner.total_steps={STEPS}",
    f"staleness.max_versions={LIMIT}",
    "buffer.heartbeat_timeout_s=2",
    "environment.reward=dense_reward:by_checksum",
    "eval.prompts=0",
    "checkpoint.every_steps=100",
    "run.max_restarts=0",
    "audit.keep_weights=all",
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.fault("F2")
@pytest.mark.timeout(600)
def test_another_replica_continues_the_answers_of_a_killed_one(
    run_command: Run, model_path: str, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "long"
    command = run_command(
        "up", "-c", str(QUICKSTART), f"run.dir={run.parent}", f"run.name={run.name}",
        *small_overrides(model_path), f"model.path={tmp_path / 'model'}", *LONG_ANSWERS, **IMPORTS,
    )  # fmt: skip
    command.wait_for(lambda: len(steps_of(run)) >= 2, timeout_s=300, what="a second step")
    kill(run, "generator")
    assert command.wait(400) == 0, command.output()[-4000:]
    summary = json.loads((run / "summary.json").read_bytes())
    assert (summary["steps"], summary["ledger_closed"], summary["rows_outstanding"]) == (STEPS, True, 0)

    kept = KeptSteps(run)
    batches = [kept.batch(Version(1, step)) for step in range(STEPS)]
    groups: list[LeasedGroup] = [group for batch in batches if batch is not None for group in batch[0].groups]
    continued = [group for group in groups if group.meta.continued_tokens]
    assert continued, "no trained group was continued"
    for group in continued:
        assert group.meta.attempt > 0
        assert group.deadline <= group.meta.oldest + LIMIT
        assert 0 < group.meta.continued_tokens <= group.meta.generated_tokens
    assert summary["tokens_continued"] >= sum(group.meta.continued_tokens for group in continued)
    assert f"{summary['tokens_continued']} stored tokens" in command.output()

    audit = run_command("audit", str(run), **IMPORTS)
    assert audit.wait(300) == 0, audit.output()[-4000:]
    assert "tokens were scored again under the weights of their versions" in audit.output()


def steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
