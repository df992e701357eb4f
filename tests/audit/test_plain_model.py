"""The plain model computes what transformers and peft compute, and its optimizer what torch's AdamW computes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_groups import make_model
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from transformers import AutoModelForCausalLM

from asyncrl.audit.history import NotPossible
from asyncrl.audit.plain_model import Moments, OwnOptimizer, PlainModel, norm_of, sequences_of
from asyncrl.config.schema import LoraSection, OptimizerSection
from asyncrl.data.specs import BRANCH
from asyncrl.policy.adapter import with_adapter
from asyncrl.ranks.optimizer import own_optimizer
from asyncrl.ranks.shard_files import write_tensors

IDS = torch.tensor([[3, 9, 27, 5, 30]])


def saved(model: Any, path: Path) -> Path:
    tensors = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    offsets = {name: {SAVED_OFFSETS_KEY: [0] * each.ndim} for name, each in tensors.items()}
    (path / "state").mkdir(parents=True)
    write_tensors(tensors, path / "state" / "shard.safetensors", {CUSTOM_METADATA_KEY: json.dumps(offsets)})
    return path


def test_an_adapter_adds_what_peft_adds_and_can_be_left_out(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    lora = LoraSection(rank=3, alpha=12, target_modules="all-linear")
    bare: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = bare(input_ids=IDS).logits.detach()
    tuned = with_adapter(bare, lora, seed=0)
    torch.manual_seed(1)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) / 10
    plain = PlainModel(folder, lora=lora)
    for _ in range(2):  # a second load must not add the adapter a second time
        plain.load(saved(tuned, tmp_path / f"weights-{_}"))
    expected = tuned(input_ids=IDS).logits
    assert not torch.allclose(expected, base, atol=1e-2)
    assert torch.allclose(plain.network(input_ids=IDS).logits, expected, atol=1e-5)
    with plain.without_adapter():
        assert torch.allclose(plain.network(input_ids=IDS).logits, base, atol=1e-5)
    expected.sum().backward()
    plain.network(input_ids=IDS).logits.sum().backward()
    gradient = plain.gradient()
    assert {*gradient} == {name for name, each in tuned.named_parameters() if each.requires_grad}
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(gradient[name].float(), parameter.grad, atol=1e-3), name


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(NotPossible, match=r"has model\.norm\.weight with the shape \[3\]"):
        PlainModel(folder, lora=None).load(saved(model, tmp_path / "weights"))
    model.model.norm.weight.requires_grad_(False)
    with pytest.raises(NotPossible, match=r"have no tensor model\.norm\.weight"):
        PlainModel(folder, lora=None).load(saved(model, tmp_path / "others"))


def test_the_moments_step_like_adamw_also_when_a_tensor_has_no_gradient_in_a_step() -> None:
    settings = OptimizerSection(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, max_grad_norm=1.5)
    draw = torch.Generator().manual_seed(3)
    live = [torch.nn.Parameter(torch.randn(4, 3, generator=draw, dtype=torch.float64)) for _ in range(2)]
    values = {f"w{n}": each.detach().clone() for n, each in enumerate(live)}
    optimizer = torch.optim.AdamW(live, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    moments = Moments(settings)
    for step in range(6):
        gradient = {"w0": torch.randn(4, 3, generator=draw, dtype=torch.float64)}
        if step != 2:
            gradient["w1"] = torch.randn(4, 3, generator=draw, dtype=torch.float64)
        for n, parameter in enumerate(live):
            own = gradient.get(f"w{n}")
            parameter.grad = None if own is None else own.clone()
        assert float(torch.nn.utils.clip_grad_norm_(live, 1.5)) == pytest.approx(norm_of(gradient))
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
        values = moments.step(values, gradient, rate=0.1 / (step + 1))
        for n, parameter in enumerate(live):
            assert torch.allclose(values[f"w{n}"], parameter.detach(), atol=1e-12)


def test_elements_without_a_gradient_are_judged_and_those_with_a_tiny_one_are_not() -> None:
    moments = Moments(OptimizerSection())
    gradient = {"a": torch.tensor([1.0, 0.0, 1e-7]).double(), "b": torch.tensor([1e-9]).double()}
    moments.step({name: torch.zeros_like(each) for name, each in gradient.items()}, gradient, rate=0.1)
    assert moments.decided_by_rounding("a").tolist() == [False, False, True]
    assert moments.decided_by_rounding("b").tolist() == [True]


def lion(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> OptimizerSection:
    """Returns the section for the Lion of the page, as a module in `folder`."""
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
    [text] = re.findall(r"^```python\n# mine/lion\.py\n([^`]*)```", page, re.MULTILINE)
    (folder / "lion_of_the_page.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    return OptimizerSection(name="lion_of_the_page:Lion", options=options, max_grad_norm=100.0)


def test_an_element_whose_direction_rounding_decides_is_not_judged_for_an_optimizer_that_takes_the_sign_of_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step, 0.9 m + 0.1 g is nearly 0 for the first two elements, but no gradient is. The last element
    has the gradient 0 in both steps. Float32 and gradients with the noise of a real run go another way."""
    optimizer = OwnOptimizer(lion(tmp_path, monkeypatch, betas=[0.9, 0.99]))
    gradients = [[1.0, 1.0, 1.0, -2.0, 0.0], [-0.09 + 1e-6, -0.09 - 1e-6, 1.0, -2.0, 0.0]]
    values = {"a": torch.zeros(5).double(), "b": torch.zeros(400).double()}
    alone = lion(tmp_path, monkeypatch, betas=[0.9, 0.99])
    run = [torch.nn.Parameter(torch.zeros(5))]
    theirs = own_optimizer(run, alone, key="learner.optimizer")
    left_out = []
    for noise, numbers in zip((0.0, 1.5e-5), gradients, strict=True):
        ours = torch.tensor(numbers).double()
        values = optimizer.step(values, {"a": ours, "b": torch.ones(400).double()}, rate=0.1)
        run[0].grad = (ours + noise * torch.tensor([-1.0, 1.0, 1.0, 1.0, 0.0])).float()
        theirs.param_groups[0]["lr"] = 0.1
        theirs.step()
        left_out.append(optimizer.decided_by_rounding("a").tolist())
    assert left_out == [[False] * 5, [True, True, False, False, False]]
    assert optimizer.decided_by_rounding("b").sum() == 0
    apart = (run[0].detach().double() - values["a"]).abs() > 1e-6
    assert apart.tolist() == left_out[1]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_hardly_any_element_of_random_gradients_is_left_out(name: str) -> None:
    options = {"SGD": {"momentum": 0.9}, "AdamW": {"betas": [0.9, 0.95]}, "Adagrad": {}}[name]
    optimizer = OwnOptimizer(OptimizerSection(name=f"torch.optim:{name}", options=options))
    draw = torch.Generator().manual_seed(1)
    values = {"a": torch.randn(40, 50, generator=draw).double(), "small": torch.randn(128, generator=draw).double()}
    for _ in range(20):
        gradient = {key: torch.randn(each.shape, generator=draw).double() for key, each in values.items()}
        gradient["small"] /= 10
        values = optimizer.step(values, gradient, rate=0.01)
    assert sum(int(optimizer.decided_by_rounding(key).sum()) for key in values) < 20


def test_a_row_is_one_sequence_or_one_for_each_branch() -> None:
    row = {"input_lengths": torch.tensor(5), "input_ids": torch.arange(7)}
    assert sequences_of(row, branches=BRANCH) == [(0, 5)]
    row[BRANCH] = torch.tensor([0, 0, 1, 1, 1, -1, -1])
    assert sequences_of(row, branches=BRANCH) == [(0, 2), (2, 5)]
