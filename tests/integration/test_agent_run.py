"""Runs of agents: a game of several turns with a tool, with real Ray, vLLM, gateway and FSDP2."""

import json
from pathlib import Path

import pytest
from conftest import REPOSITORY, Command

from asyncrl.learner.record_lines import read_lines
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RECIPE = REPOSITORY / "configs" / "agents" / "calculator.yaml"
STEPS = 3


def test_an_agent_with_a_tool_trains(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path / 'runs'}",
        f"model.path={tmp_path / 'model'}",
        # This model is a quarter of the recipe's. Most of its first answers are calls of the tool.
        "model.tiny.layers=2",
        "model.tiny.hidden_size=64",
        "model.tiny.heads=2",
        "model.tiny.warmup_steps=120",
        "model.tiny.warmup_batch_size=8",
        "model.tiny.warmup_learning_rate=0.005",
        "environment.score_workers=2",
        "generator.max_concurrent_groups=3",
        f"learner.total_steps={STEPS}",
        "learner.groups_per_step=4",
        "learner.group_size=4",
        "learner.optimizer.warmup_steps=0",
        "eval.prompts=4",
        "eval.every_steps=0",
        "algorithm.zero_variance=keep",
        "generator.persist_every_tokens=2",
    ]
    command = Command(["up", "-c", str(RECIPE), *overrides], log=tmp_path / "log", environment={})
    assert command.wait(500) == 0, command.output()[-4000:]
    run = tmp_path / "runs" / "calculator"
    steps = read_lines(run / "steps.jsonl", StepRecord)
    assert [step.step for step in steps] == [*range(STEPS)]
    assert all(step.parity_nats is None or step.parity_nats < 1e-4 for step in steps)
    samples = [
        sample
        for number in range(STEPS)
        for sample in read_lines(run / "samples" / f"step-{number}.jsonl", SampleRecord)
    ]
    assert all('"name": "calculator"' in sample.rendered_prompt for sample in samples), "the template shows the tool"
    turns = [sum(trained for trained, _ in sample.trained_spans) for sample in samples]
    assert max(turns) >= 2, "some samples have several turns"
    assert sum(step.trained_samples for step in steps) == STEPS * 16
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
    assert len(read_lines(run / "evals.jsonl", EvalRecord)) >= 2, "agents answer held-out questions too"
    assert "environment.score_workers = 2: the agents of a group run in one process" in command.output()
