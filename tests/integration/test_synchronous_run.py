"""With η = 0, a run is synchronous on-policy training: it trains the batches of a sequential loop, with importance
ratios of 1. A run whose processes are killed goes on from its newest checkpoint and trains the same."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import QUICKSTART, Command, Run, small_config, small_overrides
from kills import EVERYTHING, kill
from local_weights import staged
from onlookers import reported

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import baseline_of
from asyncrl.buffer.attempts import seed_of_group
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import PromptSource
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.environments.interfaces import build_reward, build_tasks
from asyncrl.generation.episodes import episode_rows, single_turn
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.policy.worker import PolicyWorker
from asyncrl.views.headline import Bound
from asyncrl.weights.manifest import layout

pytestmark = pytest.mark.integration

STEPS = 14
COMPARED_STEPS = 3
"""Steps whose batches are compared with those of a sequential loop."""
ADVICE = "raise staleness.max_versions while the effective sample size is high"
SYNCHRONOUS = [
    "staleness.max_versions=0",
    "generator.max_concurrent_groups=4",
    f"learner.total_steps={STEPS}",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "run.max_restarts=9",
    "learner.groups_logged=1000",
    "environment.reward=dense_reward:by_checksum",
]
IMPORTS = {"PYTHONPATH": os.pathsep.join(sys.path)}


def up(model_path: str, run: Path) -> list[str]:
    """Returns the arguments of a command that starts the run."""
    directory = [f"run.dir={run.parent}", f"run.name={run.name}"]
    return ["up", "-c", str(QUICKSTART), *directory, *small_overrides(model_path), *SYNCHRONOUS]


@pytest.fixture(scope="module")
def whole(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that was not interrupted."""
    run = tmp_path_factory.mktemp("synchronous") / "whole"
    command = Command(up(model_path, run), log=run.with_suffix(".log"), environment=IMPORTS)
    try:
        assert command.wait(600) == 0, command.output()[-4000:]
    finally:
        command.end()
    return run


def records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def resumptions(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((run / "run.json").read_bytes()).get("resumed", [])
    return found


def trained(run: Path) -> list[tuple[float, float, float]]:
    return [(step["loss"], step["grad_norm"], step["reward_mean"]) for step in records(run, "steps")]


@pytest.mark.asyncio(loop_scope="session")
async def test_it_equals_a_sequential_loop(whole: Path, model_path: str, engine: VLLMEngine) -> None:
    summary = json.loads((whole / "summary.json").read_bytes())
    assert summary["max_token_staleness"] == 0
    assert summary["parity_max_nats"] <= 1e-4, "importance ratios are not 1"
    found = reported(whole)
    assert found.bound is Bound.STALENESS, "the two sides wait for each other in turn"
    assert ADVICE in found.sentence
    config = small_config(model_path, *SYNCHRONOUS)
    for record in records(whole, "steps"):
        assert record["ess_ratio"] == pytest.approx(1.0, abs=1e-4)
        held = sum(record["buffer_groups"].values())
        assert held <= config.learner.groups_per_step, "more groups in flight than a step"
    expected = await sequential_loop(config, model_path, engine)
    for step in range(COMPARED_STEPS):
        samples = records(whole, f"samples/step-{step}")
        got = sorted((sample["group"], sample["prompt"], sample["completion"]) for sample in samples)
        assert got == sorted(expected[step])


async def sequential_loop(config, model_path: str, engine: VLLMEngine):  # type: ignore[no-untyped-def]
    """A sequential loop: generates B groups, trains on them, loads the new weights, and repeats."""
    learner = config.learner
    tokenizer = load_tokenizer(model_path, chat="auto")
    train, _ = build_tasks(config)
    prompts = PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle)
    reward = build_reward(config.environment).function
    policy = PolicyWorker(model_path=model_path, config=config, rank=0, world_size=1, store=dist.HashStore())
    entries = layout(policy.weights_metadata())
    estimator, loss_fn = resolve_estimator(baseline_of(config.algorithm)), build_loss(config)
    seen = []
    try:
        for step in range(COMPARED_STEPS):
            policy.take_snapshot(entries, [])
            await engine.load(*staged(policy._snapshots[0], Version(1, step)))
            groups, batch = [], []
            for index in range(step * learner.groups_per_step, (step + 1) * learner.groups_per_step):
                task = prompts.next()
                assert task is not None
                ids = encode_prompt(tokenizer, task.prompt)
                completions = await engine.generate(
                    ids,
                    n=learner.group_size,
                    seed=seed_of_group(config.run.seed, index, group_size=learner.group_size),
                    temperature=config.generator.temperature,
                    max_tokens=config.generator.max_completion_tokens,
                )
                rewards = [reward(task, completion.text) for completion in completions]
                batch += [(index, task.prompt, completion.text) for completion in completions]
                groups.append((index, ids, completions, rewards))
            seen.append(batch)
            policy.train(step_rows(groups, estimator), loss_fn, rows_per_update=len(batch), step=step)
    finally:
        policy.close()
    return seen


def step_rows(groups, estimator) -> BatchedDataDict:  # type: ignore[no-untyped-def]
    rewards = torch.tensor([reward for *_, rewards in groups for reward in rewards])
    ids = torch.tensor([index for index, *_, rewards in groups for _ in rewards])
    rows = BatchedDataDict.from_batches(
        [episode_rows([single_turn(prompt, each) for each in completions]) for _, prompt, completions, _ in groups],
        pad_value_dict={"weight_versions": -1},
    )
    rows["advantages"] = compute_advantages(estimator, Samples(rewards_N=rewards, group_ids_N=ids))
    rows["sample_mask"] = torch.ones(rows.size)
    return rows


@pytest.mark.fault("F6", "F7", "F8", "F34", "F36", "F37", "F38")
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_again_and_again_trains_what_an_uninterrupted_run_trains(
    whole: Path, run_command: Run, model_path: str, tmp_path: Path
) -> None:
    """Losses and weights are equal, bit by bit. At last, the run goes back to an earlier checkpoint than its newest."""
    run = tmp_path / "killed"
    command = run_command(*up(model_path, run), **IMPORTS)

    def has_trained(steps: int) -> bool:
        return len(records(run, "steps")) >= steps and any((run / "checkpoints").glob(f"step-*/{COMPLETE}"))

    def has_restarted(times: int) -> bool:
        return len(resumptions(run)) == times

    reached = 3
    for restart, targets in enumerate([[EVERYTHING], ["rank", "buffer", "weight store", "generator"]], start=1):
        command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached} before {targets} die")
        for target in targets:
            kill(run, target)
        command.wait_for(partial(has_restarted, restart), timeout_s=400, what=f"restart {restart}")
        reached = resumptions(run)[-1]["step"] + 2
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}")
    kill(run, "row store")  # the learner makes another one, and the lost groups are generated again
    command.wait_for(partial(has_trained, reached + 1), timeout_s=400, what="a step after the row store died")
    command.process.send_signal(signal.SIGINT)
    assert command.wait(400) == 0, command.output()[-4000:]
    assert json.loads((run / "run.json").read_bytes())["state"] in ("stopped", "finished")
    folders = {path.name for path in (run / "checkpoints").iterdir()}
    assert f"step-{len(records(run, 'steps'))}" in folders, "the end of the run waits for the save of its last step"
    assert all((run / "checkpoints" / name / COMPLETE).exists() for name in folders), folders

    *_, earlier, newest = sorted(int(name.removeprefix("step-")) for name in folders)
    assert len(trained(run)) == newest
    again = run_command("resume", str(run), "--at", f"step-{earlier}", **IMPORTS)
    assert again.wait(600) == 0, again.output()[-4000:]
    assert f"resuming run killed from step {earlier}:" in again.output()
    aside = run / "checkpoints" / f"lost-{len(resumptions(run)) + 1}"
    assert [path.name for path in aside.iterdir()] == [f"step-{newest}"]
    assert (aside / f"step-{newest}" / COMPLETE).exists()

    assert trained(run) == trained(whole)
    assert [step["step"] for step in records(run, "steps")] == list(range(STEPS))
    assert json.loads((run / "summary.json").read_bytes())["ledger_closed"] is True
    weights = [path / "checkpoints" / f"step-{STEPS}" / "hf" / "model.safetensors" for path in (whole, run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [evaluation["version"] for evaluation in records(run, "evals")] == [0, STEPS]
    lost = [step["step"] for step in records(run, "lost-steps")]
    assert resumptions(run)[0]["step"] in lost, "the first kill came after the step that follows the checkpoint"

    audit = run_command("audit", str(run), **IMPORTS)
    assert audit.wait(200) == 0, audit.output()
    checks = [line for line in audit.output().splitlines() if "passed" in line]
    assert len(checks) == 4, audit.output()
