"""`asyncrl.run` with real Ray, vLLM and FSDP2, two runs in one process. The first one is the example of docs/python.md
with η = 0: synchronous on-policy training, with the batches of a sequential loop and importance ratios of 1. The second
one has stragglers and is interrupted. Its engine computes in bfloat16, and only changed weights are sent."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import QUICKSTART, REPOSITORY, in_this_process
from local_weights import staged

from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
from asyncrl.algorithms.loss import build_loss
from asyncrl.algorithms.presets import baseline_of
from asyncrl.audit.history import read_history
from asyncrl.buffer.groups import seed_of_group
from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import PromptSource
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
from asyncrl.environments.interfaces import build_reward, build_tasks
from asyncrl.generation.episodes import episode_rows, single_turn
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.learner.records import SampleRecord, StepRecord, read_lines
from asyncrl.policy.worker import PolicyWorker
from asyncrl.weights.manifest import layout

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EXAMPLE = REPOSITORY / "examples" / "01_train_in_python.py"
STEPS = 3
INTERRUPTED_AT = 8
"""The fewest steps of the second run. It goes on until a straggler was trained late."""
STRAGGLERS = {
    "run.name": "second",
    "model.dtype": "bfloat16",
    "weights.delta": True,
    "learner.total_steps": 100000,
    "learner.group_size": 2,
    "staleness.on_deadline": "mask",
    "staleness.max_versions": 1,
    "buffer.max_attempts": 3,
    "eval.prompts": 0,
    "environment.reward": "dense_reward:late_for_some_prompts",
    "environment.score_workers": 16,
    "weights.transport": "filesystem",
}
"""Every fifth prompt is scored late. With η = 1, its group would make the learner wait at every second step."""

NOTEBOOK = """
import asyncio, json, signal, sys
import psutil, ray
import asyncrl

masked, interrupted = 0, False

def interrupt(step):
    global masked, interrupted
    masked += step.diagnostics["stale_tokens"] or 0
    late = masked or step.step == 99  # a fast learner makes many steps before the first straggler has its reward
    if step.step + 1 >= int(sys.argv[4]) and late and not interrupted:
        interrupted = True
        signal.raise_signal(signal.SIGINT)

def second_cell():
    try:
        asyncrl.run(sys.argv[2], OVERRIDES | json.loads(sys.argv[3]), on_step=interrupt, progress=False)
    except KeyboardInterrupt:
        print("interrupted")

async def cells():
    exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), globals())
    second_cell()

asyncio.new_event_loop().run_until_complete(cells())  # as a notebook, which has a running event loop
print("Ray is up:", ray.is_initialized(), "children:", [child.name() for child in psutil.Process().children()])
"""


@pytest.fixture(scope="module")
def runs(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Returns the folder of the runs `first` and `second`, and the process that made both, beside an event loop."""
    tmp_path = tmp_path_factory.mktemp("from-python")
    overrides = {
        "run": {"name": "first", "dir": str(tmp_path), "shutdown_grace_s": 60.0},
        "model": {"path": model_path, "max_length": 64, "tiny": None},
        "learner": {"total_steps": STEPS, "groups_per_step": 4, "group_size": 4, "optimizer": {"warmup_steps": 0}},
        "generator": {"max_concurrent_groups": 4, "max_completion_tokens": 10},
        "eval.prompts": 16,
        "environment.options.size": 4000,  # fewer questions take less time to make
        "environment.reward": "dense_reward:by_checksum",
        "learner.groups_logged": 4,
        "staleness.max_versions": 0,
        "weights.transport": "ipc",
    }
    text, changed = re.subn(r"^OVERRIDES = .*$", f"OVERRIDES = {overrides!r}", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert changed == 1
    example, notebook = tmp_path / "example.py", tmp_path / "notebook.py"
    example.write_text(text)
    notebook.write_text(NOTEBOOK)
    done = subprocess.run(
        [sys.executable, str(notebook), str(example), str(QUICKSTART), json.dumps(STRAGGLERS), str(INTERRUPTED_AT)],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return tmp_path, done


def test_the_example_trains_and_a_second_run_ends_in_order_when_it_is_interrupted(
    runs: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    tmp_path, done = runs
    lines = done.stdout.splitlines()
    reported = [line for line in lines if re.match(r"step \d+: \d+ samples, mean reward \d\.\d{3}$", line)]
    plotted = [line for line in lines if re.match(r" +\d+ █* \d\.\d{3}$", line)]
    assert [len(reported), len(plotted)] == [STEPS, STEPS], done.stdout
    assert f"weights: {tmp_path}/first/checkpoints/step-{STEPS}/hf" in lines
    assert "interrupted" in lines
    assert lines[-1] == "Ray is up: False children: []"
    assert "SIGTERM" not in done.stderr, "Ray's warning about the thread is not for the user"
    first, second = [json.loads((tmp_path / name / "run.json").read_bytes()) for name in ("first", "second")]
    assert (first["state"], second["state"]) == ("finished", "stopped")
    summary = json.loads((tmp_path / "second" / "summary.json").read_bytes())
    assert 1e-4 < summary["parity_max_nats"] < 1, "engine and learner round differently in bfloat16"
    assert re.search(r"after step \d+ of 100000", second["exit_reason"])
    assert list((tmp_path / "second" / "checkpoints").glob("step-*/hf")), "the weights must be saved"
    assert (tmp_path / "first" / "report.html").exists()


@pytest.mark.asyncio(loop_scope="session")
async def test_the_example_trains_the_batches_of_a_sequential_loop(
    runs: tuple[Path, subprocess.CompletedProcess[str]], model_path: str, engine: VLLMEngine
) -> None:
    run = runs[0] / "first"
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["max_token_staleness"] == 0
    assert summary["parity_max_nats"] <= 1e-4, "importance ratios are not 1"
    config = load_config([run / "config.yaml"], [])
    for record in read_lines(run / "steps.jsonl", StepRecord):
        assert record.ess_ratio == pytest.approx(1.0, abs=1e-4)
        held = sum(record.buffer_groups.values())
        assert held <= config.learner.groups_per_step, "more groups in flight than a step"
    expected = await sequential_loop(config, model_path, engine)
    for step in range(STEPS):
        samples = read_lines(run / "samples" / f"step-{step}.jsonl", SampleRecord)
        got = sorted((sample.group, sample.prompt, sample.completion) for sample in samples)
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
        for step in range(STEPS):
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


def test_stragglers_do_not_stop_the_learner_and_the_audit_passes(
    runs: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run = runs[0] / "second"
    steps, summary = read_lines(run / "steps.jsonl", StepRecord), json.loads((run / "summary.json").read_bytes())
    assert len(steps) >= INTERRUPTED_AT
    assert (summary["ledger_closed"], summary["groups_discarded"], summary["groups_failed"]) == (True, 0, {})
    assert summary["max_token_staleness"] <= 1
    assert not (run / "weights").exists(), "the files of the weights are left"
    attempts = [group.attempt for step in read_history(run).steps for group in step.groups]
    assert max(attempts) == 0, "no attempt is ended"
    masked = sum(step.diagnostics["stale_tokens"] or 0 for step in steps)
    assert masked > 0, "the tokens of the stragglers that were trained late"
    audit = in_this_process("audit", str(run))
    assert audit.count("passed") == 4, audit
    assert "were masked (staleness.on_deadline: mask)" in audit, audit
