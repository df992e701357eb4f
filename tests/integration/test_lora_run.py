"""A whole run with an adapter: only adapter bytes travel, it resumes, its audit computes every step again, and its
result can be exported and merged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import QUICKSTART, Run, small_overrides
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.integration

NAME = "lora"
RANK = 4
ROWS = torch.tensor([[20, 41, 42, 43, 30, 31, 32]])
DELIVERED = re.compile(r"weights \S+ are delivered: (\d+) of (\d+) bytes were sent")


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ROWS).logits
    return found


@pytest.mark.timeout(900)
def test_a_run_with_an_adapter(run_command: Run, model_path: str, tmp_path: Path) -> None:
    run = tmp_path / NAME
    overrides = [
        *small_overrides(model_path),
        f"run.name={NAME}",
        f"run.dir={tmp_path}",
        f"model.lora={{rank: {RANK}, alpha: 8}}",
        "learner.ranks=2",
        "learner.batching=packed",
        "generator.top_k=8",
        "learner.optimizer.learning_rate=1e-3",
        "learner.total_steps=4",
        "checkpoint.every_steps=2",
        "audit.keep_weights=all",
        "algorithm.overrides={penalties: [{kind: k3, beta: 0.01, q: reference}]}",
    ]
    first = run_command("up", "-c", str(QUICKSTART), *overrides)
    assert first.wait(300) == 0, first.output()[-4000:]
    assert len(steps_of(run)) == 4
    replayed = run_command("audit", str(run))
    assert replayed.wait(300) == 0, replayed.output()
    assert "4 steps computed again" in replayed.output()
    resumed = run_command("resume", str(run), "learner.total_steps=6")
    assert resumed.wait(300) == 0, resumed.output()[-4000:]
    steps = steps_of(run)
    assert [step["step"] for step in steps] == list(range(6))
    assert all(0 <= step["staleness_max"] <= 2 for step in steps if "staleness_max" in step)

    base = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    layers = [module for module in base.modules() if isinstance(module, torch.nn.Linear)]
    head = base.get_output_embeddings()
    values = sum(RANK * (layer.in_features + layer.out_features) for layer in layers if layer is not head)
    logged = "".join(path.read_text(errors="replace") for path in (run / "logs").rglob("*") if path.is_file())
    delivered = {tuple(map(int, found)) for found in DELIVERED.findall(logged + first.output() + resumed.output())}
    assert delivered == {(4 * values, 4 * values)}, "the bytes that travel are not those of the adapter"

    audit = run_command("audit", str(run))
    assert audit.wait(300) == 0, audit.output()
    assert "6 steps follow each other" in audit.output()

    refused = run_command("resume", str(run), "learner.total_steps=8", "model.lora.alpha=16")
    assert refused.wait(120) == 2
    assert "model.lora.alpha" in refused.output()

    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    assert run_command("export", str(run), str(adapter)).wait(120) == 0
    merging = run_command("export", str(run), str(whole), "--merge")
    assert merging.wait(120) == 0, merging.output()
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        names = [*file.keys()]
        assert sum(file.get_tensor(name).numel() for name in names) == values
    assert not (tmp_path / "whole.adapter").exists()
    assert len({file.stat().st_mode for file in whole.iterdir()}) == 1, "the files have different permissions"
    plain = logits(base)
    adapted = logits(PeftModel.from_pretrained(base, str(adapter)))
    assert not torch.equal(adapted, plain), "the run has trained nothing"
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)), adapted, atol=1e-4)
