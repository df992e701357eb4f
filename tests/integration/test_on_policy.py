"""η = 0 is synchronous on-policy training: it trains the batches of a sequential loop, with importance ratios of 1."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Run, small_config
from onlookers import expect_advice, reported
from test_up import DENSE, ENDLESS, run_up, steps_of, summary_of

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import baseline_of
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import PromptSource
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.environments.interfaces import build_reward, build_tasks
from asyncrl.generation.rollout import sample_rows
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.policy.worker import PolicyWorker
from asyncrl.views.headline import Bound
from asyncrl.weights.manifest import Manifest, Probe, layout

pytestmark = pytest.mark.integration

STEPS = 3
"""Number of steps that are compared."""
ADVICE = "raise staleness.max_versions while the effective sample size is high"
OVERRIDES = [
    ENDLESS,
    DENSE,
    "staleness.max_versions=0",
    "weights.publish_every_steps=1",
    "learner.groups_logged=1000",
]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_synchronous_run_equals_a_sequential_loop(
    run_command: Run, model_path: str, tmp_path: Path, engine: VLLMEngine
) -> None:
    look = partial(expect_advice, bound=Bound.STALENESS, advice=ADVICE, steps=STEPS)
    run = run_up(run_command, model_path, tmp_path, *OVERRIDES, while_it_runs=look)
    summary = summary_of(run)
    assert summary["max_token_staleness"] == 0
    assert summary["parity_max_nats"] <= 1e-4, "importance ratios are not 1"
    found = reported(run)
    assert found.bound is Bound.STALENESS, "the two sides wait for each other in turn"
    assert ADVICE in found.sentence
    steps = steps_of(run)
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
    """A sequential loop: generates B groups, trains on them, loads the new weights, and repeats."""
    learner = config.learner
    tokenizer = load_tokenizer(model_path, chat="auto")
    train, _ = build_tasks(config)
    prompts = PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle)
    reward = build_reward(config.environment).function
    policy = PolicyWorker(model_path=model_path, config=config, rank=0, world_size=1, store=dist.HashStore())
    entries = layout(policy.weights_metadata(), 2**30)
    estimator, loss_fn = resolve_estimator(baseline_of(config.algorithm)), build_loss(config)
    seen = []
    try:
        for step in range(STEPS):
            policy.take_snapshot(entries, [])
            manifest = Manifest(
                version=Version(1, step),
                previous=None,
                tensors=entries,
                buckets=(),
                probe=Probe(tokens=(), logprobs=()),
            )
            assert policy.snapshot is not None
            await engine.load(manifest, [policy.snapshot.buckets[0].data])
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
            policy.train(step_rows(groups, estimator), loss_fn, rows_per_update=len(batch), step=step)
    finally:
        policy.close()
    return seen


def step_rows(groups, estimator) -> BatchedDataDict:  # type: ignore[no-untyped-def]
    rewards = torch.tensor([reward for *_, rewards in groups for reward in rewards])
    ids = torch.tensor([index for index, *_, rewards in groups for _ in rewards])
    rows = BatchedDataDict.from_batches(
        [sample_rows(prompt, completions) for _, prompt, completions, _ in groups],
        pad_value_dict={"weight_versions": -1},
    )
    rows["advantages"] = compute_advantages(estimator, Samples(rewards_N=rewards, group_ids_N=ids))
    rows["sample_mask"] = torch.ones(rows.size)
    return rows
