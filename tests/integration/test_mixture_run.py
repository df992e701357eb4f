"""A run of two recipes as parts of a mixture: conversations from a parquet file with two rewards, and agents that
answer questions with a tool through two client packages. Learner and generator are commands of their own, on a Ray of
two nodes. An adapter is trained, and only its bytes travel. Real Ray, vLLM, gateway and FSDP2."""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from chat_models import write_conversations
from conftest import REPOSITORY, Command, engines_of, in_this_process
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from two_clients import client_of
from two_nodes import CONTROL_ACTORS, PLACEMENT, pools_of, two_nodes

from asyncrl.config.load import load_config
from asyncrl.demo.tiny_model import ensure_model
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord, read_lines

pytest.importorskip("datasets")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AGENTS = REPOSITORY / "configs" / "agents"
STEPS = 3
GROUPS_PER_STEP, GROUP_SIZE = 8, 4
ADAPTER_RANK = 4
ROWS = torch.tensor([[20, 41, 42, 43, 30, 31, 32]])
DELIVERED = re.compile(r"weights \S+ are delivered: (\d+) of (\d+) bytes were sent")
TINY = [
    "model.tiny.layers=2",
    "model.tiny.hidden_size=64",
    "model.tiny.heads=2",
    "model.tiny.warmup_steps=300",
    "model.tiny.warmup_batch_size=8",
    "model.tiny.warmup_learning_rate=0.005",
]
"""A model of a quarter of the recipe's size. Many of its first answers to agents' questions are calls of the tool."""
SEARCH_PATH = (AGENTS, Path(__file__).parent, os.environ.get("PYTHONPATH", ""))


class MixtureRun(NamedTuple):
    """The directory of a run that has ended in order, its first model, and the pools of the nodes on which its actors
    were, by class."""

    path: Path
    model: Path
    placed: dict[str, list[str]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> MixtureRun:
    folder = tmp_path_factory.mktemp("mixture")
    pairs = [(first, second) for first in range(20) for second in range(20)]
    rows = [(f"Which is larger, {first} or {second}?", str(max(first, second))) for first, second in pairs]
    write_conversations(folder / "chat.parquet", rows)
    chat_recipe = yaml.safe_load((REPOSITORY / "configs" / "tiny_chat.yaml").read_text())
    recipe = yaml.safe_load((AGENTS / "calculator.yaml").read_text())
    of_file = {"path": str(folder / "chat.parquet"), "columns": {}, "few_shot": [{"prompt": "1 or 2?", "answer": "2"}]}
    del chat_recipe["data"]["max_prompt_tokens"]
    chat = {
        "name": "chat",
        "data": chat_recipe["data"] | of_file,
        "environment": chat_recipe["environment"],
    }
    agents = {
        "name": "agents",
        "data": recipe.pop("data"),
        "environment": recipe.pop("environment")
        # the first episode of each process imports a client package: 10 s can be too short
        | {"agent": "two_clients:run", "score_workers": 2, "score_timeout_s": 60},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    exact = {"data": chat["data"], "environment": {"reward": "exact_match"}, "prompts": 4, "samples": 1}
    ensure_model(load_config([AGENTS / "calculator.yaml"], [f"model.path={folder / 'model'}", *TINY]))
    overrides = [
        f"run.dir={folder / 'runs'}",
        "run.name=mixture",
        f"model.path={folder / 'model'}",
        "model.tiny=null",
        f"model.lora={{rank: {ADAPTER_RANK}, alpha: 8}}",
        f"data.mixture={json.dumps([chat, agents])}",
        "data.max_prompt_tokens=150",
        "generator.max_concurrent_groups=4",
        "generator.persist_every_tokens=2",
        "generator.top_k=20",
        "generator.top_p=0.95",
        "generator.engine_args={max_num_batched_tokens: 4500}",
        f"learner.total_steps={STEPS}",
        f"learner.groups_per_step={GROUPS_PER_STEP}",
        f"learner.groups_logged={GROUPS_PER_STEP}",
        f"learner.group_size={GROUP_SIZE}",
        "learner.optimizer.warmup_steps=0",
        "algorithm.zero_variance=resample",
        "algorithm.max_resamples_per_step=2",
        "staleness.max_versions=2",
        "eval.prompts=8",
        "eval.every_steps=1",
        "eval.samples=2",
        f"eval.sets.exact={json.dumps(exact)}",
        *PLACEMENT,
    ]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, SEARCH_PATH))}
    run = folder / "runs" / "mixture"
    commands: list[Command] = []
    with two_nodes(folder, modules=SEARCH_PATH[:2]) as ray:
        try:
            for side in ("generator", "learner"):
                arguments = [side, "--address", ray.address, "-c", str(folder / "recipe.yaml"), *overrides]
                commands.append(Command(arguments, log=folder / f"{side}.log", environment=environment))
            generator, learner = commands
            learner.wait_for((run / "steps.jsonl").exists, timeout_s=400, what="a first step")
            placed = {actor: pools_of(actor, ray) for actor in ("RankActor", "GeneratorActor", *CONTROL_ACTORS)}
            assert learner.wait(400) == 0, learner.output()[-4000:]
            assert generator.wait(240) == 0, generator.output()[-4000:]
            assert not engines_of(ray.session), "an engine outlived its deployment"
        finally:
            for command in commands:
                command.end()
    assert "environment.score_workers = 2: the agents of a group run in one process" in generator.output()
    return MixtureRun(run, folder / "model", placed)


@pytest.fixture
def run(mixture: MixtureRun) -> Path:
    """Returns the directory of the run."""
    return mixture.path


def test_each_part_is_on_the_node_of_its_pool(mixture: MixtureRun) -> None:
    """The buffer, the weight store and the row index, with which the run would end, are on the learner's node."""
    of_pools = {"RankActor": "learner", "GeneratorActor": "generator"} | dict.fromkeys(CONTROL_ACTORS, "learner")
    assert mixture.placed == {actor: [pool] for actor, pool in of_pools.items()}


def samples_of(run: Path, part: str) -> list[SampleRecord]:
    records = [read_lines(run / "samples" / f"step-{step}.jsonl", SampleRecord) for step in range(STEPS)]
    return [sample for of_step in records for sample in of_step if sample.part == part]


def test_no_step_is_short_and_the_ledger_closes(run: Path) -> None:
    steps = read_lines(run / "steps.jsonl", StepRecord)
    assert [step.step for step in steps] == [*range(STEPS)]
    for step in steps:
        assert step.parity_nats is None or step.parity_nats < 1e-4
        assert step.trained_samples == GROUPS_PER_STEP * GROUP_SIZE
        assert 0 <= (step.diagnostics["filtered_groups"] or 0) <= 2
        assert step.reward_components.keys() >= {"right", "number"}
        assert step.reward_parts.keys() == {"chat", "agents"}
    assert steps[-1].ledger_groups["filtered"] >= 1, "some groups have equal rewards"
    assert json.loads((run / "summary.json").read_bytes())["ledger_closed"]
    in_this_process("audit", str(run))


def test_a_conversation_is_rendered_and_its_end_is_trained(run: Path) -> None:
    samples = samples_of(run, "chat")
    assert samples
    for sample in samples:
        shown = sample.rendered_prompt
        assert shown.startswith("<|im_start|>system\nAnswer with a number only.<|im_end|>\n<|im_start|>user\n1 or 2?")
        assert shown.endswith("?<|im_end|>\n<|im_start|>assistant\n"), "the prompt ends before the model's turn"
        assert shown.count("<|im_end|>") == 4
        assert sum(count for _, count in sample.version_spans) == len(sample.tokens)
        assert sample.trained_spans == ((True, len(sample.tokens)),)
        assert sample.truncated or sample.tokens[-1] == "<|im_end|>", "the sampled end of the turn is trained"
        assert sample.reward == pytest.approx(
            (sample.components["right"] or 0) + 0.1 * (sample.components["number"] or 0)
        )


def test_agents_of_two_client_packages_call_the_tool_and_may_begin_another_branch(run: Path) -> None:
    samples = samples_of(run, "agents")
    shown = {bool(sample.forks): '"name": "calculator"' in sample.rendered_prompt for sample in samples}
    assert shown == {False: True, True: False}, "the template shows the tool, but not in the branch without it"
    assert all(len(sample.forks) == (int(sample.answer) % 3 == 1) for sample in samples), "the draft is a branch"
    turns = {client_of(sample.answer): 0 for sample in samples}
    for sample in samples:
        trained = sum(trained for trained, _ in sample.trained_spans) - len(sample.forks)
        turns[client_of(sample.answer)] = max(turns[client_of(sample.answer)], trained)
    assert set(turns) == {"openai_client", "langgraph_agent"}
    assert min(turns.values()) >= 2, "some samples of each package have several turns"


def test_each_evaluation_has_all_sets_and_agents_answer_held_out_questions_too(run: Path) -> None:
    records = read_lines(run / "evals.jsonl", EvalRecord)
    evaluations = [record for record in records if record.name == "heldout"]
    exact = [record for record in records if record.name == "exact"]
    assert [record.step for record in exact] == [record.step for record in evaluations], "all sets, each time"
    assert {(each.prompts, each.failed, each.samples) for each in exact} == {(4, 0, 1)}, "with a reward of its own"
    assert json.loads((run / "summary.json").read_bytes())["heldout_sets"].keys() == {"exact"}
    assert len(evaluations) >= 3, "one at each end, and at least one beside training"
    assert (evaluations[0].version, evaluations[-1].version) == (0, STEPS)
    for evaluation in evaluations:
        assert (evaluation.prompts, evaluation.samples, evaluation.pass_at.keys()) == (8, 2, {1, 2})
    assert {each.non_greedy_tokens for each in exact} == {0}, "one completion is greedy"
    assert {each.non_greedy_tokens for each in evaluations} == {None}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ROWS).logits
    return found


def test_only_the_adapter_travels_and_it_can_be_exported_and_merged(mixture: MixtureRun, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(mixture.model, dtype=torch.float32)
    layers = [module for module in base.modules() if isinstance(module, torch.nn.Linear)]
    head = base.get_output_embeddings()
    values = sum(ADAPTER_RANK * (layer.in_features + layer.out_features) for layer in layers if layer is not head)
    files = [mixture.path.parents[1] / "learner.log", *(mixture.path / "logs").rglob("*")]
    logged = "".join(path.read_text(errors="replace") for path in files if path.is_file())
    assert {tuple(map(int, found)) for found in DELIVERED.findall(logged)} == {(4 * values, 4 * values)}

    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    in_this_process("export", str(mixture.path), str(adapter))
    in_this_process("export", str(mixture.path), str(whole), "--merge")
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(name).numel() for name in [*file.keys()]) == values
    assert not (tmp_path / "whole.adapter").exists()
    assert len({file.stat().st_mode for file in whole.iterdir()}) == 1, "the files have different permissions"
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(adapter)))
    assert not torch.equal(adapted, plain), "the run has trained nothing"
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)), adapted, atol=1e-4)
