"""η = 0 is synchronous on-policy training: the same batches as a sequential loop, importance ratios of 1."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from conftest import Run, small_config
from test_up import run_up, summary_of

from asyncrl.algorithms.advantages import compute_advantages, resolve_estimator
from asyncrl.algorithms.presets import baseline_of
from asyncrl.buffer.records import Version
from asyncrl.data.prompts import PromptSource
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.environments.interfaces import build_reward, build_tasks
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.policy.interfaces import TrainGroup
from asyncrl.policy.worker import PolicyWorker
from asyncrl.weights.manifest import Manifest, Probe, layout
from asyncrl.weights.publisher import take_snapshot

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

STEPS = 3
OVERRIDES = [
    f"learner.total_steps={STEPS}",
    "staleness.max_versions=0",
    "weights.publish_every_steps=1",
    "learner.samples_logged=1000",
]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_synchronous_run_equals_a_sequential_loop(
    run_command: Run, model_path: str, tmp_path: Path, engine: VLLMEngine
) -> None:
    run = run_up(run_command, model_path, tmp_path, *OVERRIDES)
    summary = summary_of(run)
    assert summary["max_token_staleness"] == 0
    assert summary["parity_max_nats"] <= 1e-4, "importance ratios are not 1"
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    config = small_config(model_path, *OVERRIDES)
    for record in steps:
        assert record["ess_ratio"] == pytest.approx(1.0, abs=1e-4)
        held = sum(record["buffer_groups"].values())
        assert held <= config.learner.groups_per_step, "more groups in flight than a step"
    expected = await sequential_loop(config, model_path, engine)
    for step in range(STEPS):
        lines = (run / "samples" / f"step-{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        got = sorted((sample["group"], sample["prompt"], sample["completion"]) for sample in samples)
        assert got == sorted(expected[step])


async def sequential_loop(config, model_path: str, engine: VLLMEngine):  # type: ignore[no-untyped-def]
    """Generate B groups, train on them, load the result, again: what a textbook does."""
    learner = config.learner
    tokenizer = load_tokenizer(model_path)
    train, _ = build_tasks(config)
    prompts = PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle)
    reward = build_reward(config.environment)
    policy = PolicyWorker(model_path=model_path, config=config, rank=0, world_size=1, store=dist.HashStore())
    entries = layout(policy.weights_metadata(), 2**30)
    estimator = resolve_estimator(baseline_of(config.algorithm))
    seen = []
    try:
        for step in range(STEPS):
            take_snapshot(policy, entries, [])
            manifest = Manifest(
                version=Version(1, step),
                previous=None,
                tensors=entries,
                buckets=(),
                probe=Probe(tokens=(), logprobs=()),
            )
            await engine.load(manifest, [policy.snapshot[0].data])
            groups, batch = [], []
            for index in range(step * learner.groups_per_step, (step + 1) * learner.groups_per_step):
                task = prompts.next()
                assert task is not None
                ids = encode_prompt(tokenizer, task.prompt)
                completions = await engine.generate(
                    ids,
                    n=learner.group_size,
                    seed=(config.run.seed * 2**20 + index) * learner.group_size,
                    temperature=config.generator.temperature,
                    max_tokens=config.generator.max_completion_tokens,
                )
                rewards = [reward(task, completion.text) for completion in completions]
                batch += [(index, task.prompt, completion.text) for completion in completions]
                groups.append((index, ids, completions, rewards))
            seen.append(batch)
            policy.train_step([train_groups(groups, estimator, step=step)], step=step)
    finally:
        policy.close()
    return seen


def train_groups(groups, estimator, *, step: int):  # type: ignore[no-untyped-def]
    import torch

    rewards = torch.tensor([reward for *_, rewards in groups for reward in rewards])
    ids = torch.tensor([index for index, *_, rewards in groups for _ in rewards])
    advantages = compute_advantages(estimator, rewards=rewards, group_ids=ids).split(len(groups[0][3]))
    return [
        TrainGroup(
            key=str(index),
            rows={
                "prompt_ids": np.asarray(prompt, dtype=np.int32),
                "output_ids": np.asarray([t for c in completions for t in c.token_ids], dtype=np.int32),
                "output_lengths": np.asarray([len(c.token_ids) for c in completions], dtype=np.int32),
                "logprobs": np.asarray([lp for c in completions for lp in c.logprobs], dtype=np.float32),
                "weight_versions": np.full(sum(len(c.token_ids) for c in completions), step, dtype=np.int64),
            },
            advantages_G=advantage.numpy(),
            sample_mask_G=np.ones(len(completions), dtype=np.float32),
            max_staleness_versions=0,
        )
        for (index, prompt, completions, _), advantage in zip(groups, advantages, strict=True)
    ]
