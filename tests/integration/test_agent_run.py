"""Runs of agents: questions that are answered with a tool through two client packages, with real Ray, vLLM, gateway
and FSDP2."""

import json
import os
from pathlib import Path

import pytest
from conftest import REPOSITORY, Command
from two_clients import client_of

from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord, read_lines

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AGENTS = REPOSITORY / "configs" / "agents"
STEPS = 3
SEARCH_PATH = (AGENTS, Path(__file__).parent, os.environ.get("PYTHONPATH", ""))


def test_agents_with_a_tool_and_two_client_packages_train(tmp_path: Path) -> None:
    overrides = [
        f"run.dir={tmp_path / 'runs'}",
        f"model.path={tmp_path / 'model'}",
        "environment.agent=two_clients:run",
        # This model is a quarter of the recipe's. Many of its first answers are calls of the tool.
        "model.tiny.layers=2",
        "model.tiny.hidden_size=64",
        "model.tiny.heads=2",
        "model.tiny.warmup_steps=300",
        "model.tiny.warmup_batch_size=8",
        "model.tiny.warmup_learning_rate=0.005",
        "environment.score_workers=2",
        "generator.max_concurrent_groups=3",
        f"learner.total_steps={STEPS}",
        "learner.groups_per_step=4",
        "learner.groups_logged=4",
        "learner.group_size=4",
        "learner.optimizer.warmup_steps=0",
        "eval.prompts=4",
        "eval.every_steps=0",
        "algorithm.zero_variance=keep",
        "generator.persist_every_tokens=2",
    ]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, SEARCH_PATH))}
    recipe = str(AGENTS / "calculator.yaml")
    command = Command(["up", "-c", recipe, *overrides], log=tmp_path / "log", environment=environment)
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
    shown = {bool(sample.forks): '"name": "calculator"' in sample.rendered_prompt for sample in samples}
    assert shown == {False: True, True: False}, "the template shows the tool, but not in the branch without it"
    assert all(len(sample.forks) == (int(sample.answer) % 3 == 0) for sample in samples), "the draft is a branch"
    turns = {client_of(sample.answer): 0 for sample in samples}
    for sample in samples:
        trained = sum(trained for trained, _ in sample.trained_spans) - len(sample.forks)
        turns[client_of(sample.answer)] = max(turns[client_of(sample.answer)], trained)
    assert set(turns) == {"openai_client", "langgraph_agent"}
    assert min(turns.values()) >= 2, "some samples of each package have several turns"
    assert sum(step.trained_samples for step in steps) == STEPS * 16
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
    assert len(read_lines(run / "evals.jsonl", EvalRecord)) >= 2, "agents answer held-out questions too"
    assert "environment.score_workers = 2: the agents of a group run in one process" in command.output()
