"""A run of a tiny chat model on a parquet file of conversations, with two rewards: real Ray, vLLM and FSDP2."""

import json
from pathlib import Path

import pytest
from chat_models import tiny_llama, write_conversations
from conftest import REPOSITORY, Command, in_this_process

from asyncrl.config.load import load_config
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord, read_lines

pytest.importorskip("datasets")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RECIPE = REPOSITORY / "configs" / "tiny_chat.yaml"
STEPS = 3


def test_a_chat_model_trains_on_conversations_with_two_rewards(tmp_path: Path) -> None:
    pairs = [(first, second) for first in range(20) for second in range(20)]
    rows = [(f"Which is larger, {first} or {second}?", str(max(first, second))) for first, second in pairs]
    write_conversations(tmp_path / "chat.parquet", rows)
    for part in tiny_llama(max_length=64, hidden_size=64, layers=2):
        part.save_pretrained(tmp_path / "llama")
    overrides = [
        f"run.dir={tmp_path}",
        f"model.path={tmp_path / 'llama'}",
        "model.tiny=null",
        f"data.path={tmp_path / 'chat.parquet'}",
        "data.columns={}",
        "data.few_shot=[{prompt: '1 or 2?', answer: '2'}]",
        "data.max_prompt_tokens=58",
        "generator.max_completion_tokens=4",
        "generator.top_k=20",
        "generator.top_p=0.95",
        "generator.engine_args={max_num_batched_tokens: 4500}",
        "generator.max_concurrent_groups=8",
        "algorithm.zero_variance=resample",
        "algorithm.max_resamples_per_step=2",
        "algorithm.advantage={name: group_norm, rewards: components}",
        "staleness.max_versions=2",
        f"learner.total_steps={STEPS}",
        "learner.groups_per_step=4",
        "learner.group_size=4",
        "learner.optimizer.warmup_steps=0",
        "eval.prompts=8",
        "eval.every_steps=1",
        "eval.samples=2",
        "eval.sets.exact={environment: {reward: exact_match}, prompts: 4, samples: 1}",
        "weights.transport=ipc",
    ]
    load_config([RECIPE], overrides)
    command = Command(["up", "-c", str(RECIPE), *overrides], log=tmp_path / "log", environment={})
    assert command.wait(500) == 0, command.output()[-4000:]
    run = tmp_path / "tiny-chat"
    steps = read_lines(run / "steps.jsonl", StepRecord)
    assert [step.step for step in steps] == [*range(STEPS)]
    for step in steps:
        assert step.reward_components.keys() == {"right", "number"}
        assert step.parity_nats is None or step.parity_nats < 1e-4
        assert 0 <= (step.diagnostics["filtered_groups"] or 0) <= 2
        assert step.trained_samples == 16, "no step is short"
    for number in range(STEPS):
        for sample in read_lines(run / "samples" / f"step-{number}.jsonl", SampleRecord):
            shown = sample.rendered_prompt
            assert shown.startswith(
                "<|im_start|>system\nAnswer with a number only.<|im_end|>\n<|im_start|>user\n1 or 2?"
            )
            assert shown.endswith("?<|im_end|>\n<|im_start|>assistant\n"), "the prompt ends before the model's turn"
            assert shown.count("<|im_end|>") == 4
            assert sum(count for _, count in sample.version_spans) == len(sample.tokens)
            assert sample.trained_spans == ((True, len(sample.tokens)),)
            assert sample.truncated or sample.tokens[-1] == "<|im_end|>", "the sampled end of the turn is trained"
            assert sample.reward == pytest.approx(
                (sample.components["right"] or 0) + 0.1 * (sample.components["number"] or 0)
            )
    ledger = steps[-1].ledger_groups
    assert ledger["filtered"] >= 1, "a random model gives most groups equal rewards"
    summary = json.loads((run / "summary.json").read_bytes())
    assert summary["ledger_closed"]
    records = read_lines(run / "evals.jsonl", EvalRecord)
    evaluations = [record for record in records if record.name == "heldout"]
    exact = [record for record in records if record.name == "exact"]
    assert [record.step for record in exact] == [record.step for record in evaluations], "all sets, each time"
    assert {(each.prompts, each.failed, each.samples) for each in exact} == {(4, 0, 1)}, "with a reward of its own"
    assert summary["heldout_sets"].keys() == {"exact"}
    assert len(evaluations) >= 3, "one at each end, and at least one beside training"
    assert (evaluations[0].version, evaluations[-1].version) == (0, STEPS)
    for evaluation in evaluations:
        assert (evaluation.prompts, evaluation.samples, evaluation.pass_at.keys()) == (8, 2, {1, 2})
    in_this_process("audit", str(run))
