"""With η = 0, a run is synchronous on-policy training: it trains the batches of a sequential loop, with importance
ratios of 1. It is stopped and goes back to an early checkpoint. Its processes are killed, and it trains the same."""

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import QUICKSTART, Command, Run, in_this_process, small_config, small_overrides
from kills import kill
from local_weights import staged
from onlookers import reported

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import baseline_of
from asyncrl.buffer.groups import seed_of_group
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

STEPS = 16
STOPPED_AT = 12
"""The uninterrupted run is stopped when it has so many steps. It then may train a few more."""
EARLY = 2
"""The step of the checkpoint to which the run goes back."""
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
def stopped(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that was stopped before its end."""
    run = tmp_path_factory.mktemp("synchronous") / "run"
    command = Command(up(model_path, run), log=run.with_suffix(".log"), environment=IMPORTS)
    try:
        command.wait_for(lambda: len(records(run, "steps")) >= STOPPED_AT, timeout_s=400, what=f"step {STOPPED_AT}")
        command.process.send_signal(signal.SIGINT)
        assert command.wait(400) == 0, command.output()[-4000:]
    finally:
        command.end()
    return run


@pytest.fixture(scope="module")
def whole(stopped: Path) -> Path:
    """Returns a copy of that directory, for comparisons with what the run trains when it goes on."""
    return Path(shutil.copytree(stopped, stopped.with_name("whole")))


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
def test_a_run_whose_processes_are_killed_trains_what_an_uninterrupted_run_trains(
    stopped: Path, whole: Path, run_command: Run
) -> None:
    """Losses and weights are equal, bit by bit. The run goes back to an earlier checkpoint than its newest. While it
    trains the steps again, it is killed."""
    run = stopped
    assert json.loads((run / "run.json").read_bytes())["state"] in ("stopped", "finished")
    folders = {path.name for path in (run / "checkpoints").iterdir()}
    assert f"step-{len(trained(whole))}" in folders, "the end of the run waits for the save of its last step"
    assert all((run / "checkpoints" / name / COMPLETE).exists() for name in folders), folders
    command = run_command("resume", str(run), "--trust", "--at", f"step-{EARLY}", **IMPORTS)

    def has_trained(steps: int) -> bool:
        return len(records(run, "steps")) >= steps

    def has_restarted(times: int) -> bool:
        return len(resumptions(run)) == times

    command.wait_for(partial(has_restarted, 1), timeout_s=400, what="the start of the resumed run")
    assert f"resuming run {run.name} from step {EARLY}:" in command.output()
    aside = run / "checkpoints" / "lost-2"
    assert {path.name for path in aside.iterdir()} == {name for name in folders if int(name[5:]) > EARLY}
    assert all((aside / path.name / COMPLETE).exists() for path in aside.iterdir())

    reached = EARLY + 3
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}, after which its parts die")
    for target in ("rank", "buffer", "weight store", "generator"):
        kill(run, target)
    command.wait_for(partial(has_restarted, 2), timeout_s=400, what="a restart")
    reached = resumptions(run)[-1]["step"] + 2
    command.wait_for(partial(has_trained, reached), timeout_s=400, what=f"step {reached}")
    kill(run, "row store")  # the learner makes another one, and the lost groups are generated again
    assert command.wait(600) == 0, command.output()[-4000:]

    expected = trained(whole)
    assert trained(run)[: len(expected)] == expected
    assert [step["step"] for step in records(run, "steps")] == list(range(STEPS))
    assert json.loads((run / "summary.json").read_bytes())["ledger_closed"] is True
    again = [path for path in aside.iterdir() if (run / "checkpoints" / path.name).exists()]
    assert len(again) > 2, "no checkpoints to compare"
    for path in again:
        weights = [folder / path.name / "hf" / "model.safetensors" for folder in (aside, run / "checkpoints")]
        assert weights[0].read_bytes() == weights[1].read_bytes(), path.name
    assert [evaluation["version"] for evaluation in records(run, "evals")] == [0, STEPS]
    lost = [step["step"] for step in records(run, "lost-steps")]
    assert sorted(set(lost)) == list(range(EARLY, len(expected))), "the steps that it trained before it went back"
    assert lost.count(resumptions(run)[1]["step"]) > 1, "the first kill came after the step that follows the checkpoint"

    audit = in_this_process("audit", str(run))
    assert len([line for line in audit.splitlines() if "passed" in line]) == 4, audit
