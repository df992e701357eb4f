"""AdamW is fused on GPUs only, and stays fused when it continues a checkpoint of an AdamW that was not. An optimizer of
the user's own is tried before a run.

torch has a fused AdamW for CPUs too, so what a rank on a GPU does is tested with tensors on the CPU.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from asyncrl.config.load import load_config, parse_yaml
from asyncrl.config.schema import OptimizerSection
from asyncrl.errors import ConfigError
from asyncrl.ranks.optimizer import adamw, make_optimizer, state_bytes, try_optimizer, weight_decay_of
from asyncrl.ranks.shard_files import SavedTensors
from asyncrl.ranks.sharded_checkpoint import ShardedState

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SECTION = OptimizerSection(learning_rate=0.05, weight_decay=0.1)


class Trained:
    """A sharded model with a frozen layer, and the optimizer of a rank on `device`. All tensors are on the CPU."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.model[0].bias.requires_grad_(False)
        fully_shard(self.model)
        self.optimizer = adamw(self.model, SECTION, device=device)
        self.state = ShardedState(self.model, self.optimizer, group=_group(), saving=_group())

    def step(self, times: int) -> None:
        x_BH = torch.linspace(-1, 1, 20).reshape(5, 4)
        for _ in range(times):
            self.model(x_BH).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().detach().clone() for parameter in self.model.parameters()]


def _group() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("device", "fused"), [(GPU, True), (CPU, None)], ids=["GPU", "CPU"])
def test_adamw_is_fused_on_gpus_also_before_the_model_is_there(device: torch.device, fused: bool | None) -> None:
    [group] = adamw(torch.nn.Linear(4, 3), SECTION, device=device).param_groups
    assert (group["fused"], group["foreach"]) == (fused, None)


def test_both_forms_of_adamw_train_alike() -> None:
    one, other = Trained(GPU), Trained(CPU)
    before = one.weights()
    for trained in (one, other):
        trained.step(5)
    torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-5, atol=1e-6)
    assert not torch.equal(before[0], one.weights()[0])


@pytest.mark.parametrize(("saved", "loaded"), [(CPU, GPU), (GPU, CPU)], ids=["CPU to GPU", "GPU to CPU"])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_device_decides_also_after_a_resume(
    saved: torch.device, loaded: torch.device, steps: int, tmp_path: Path
) -> None:
    before, after = Trained(saved), Trained(loaded)
    before.step(2)
    before.state.stage(train_calls=2, optimizer=True)
    before.state.write(weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    after.step(steps)
    after.state.load(weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    [group] = after.optimizer.param_groups
    assert group["fused"] is (True if loaded == GPU else None)
    for trained in (before, after):
        trained.step(3)
    torch.testing.assert_close(after.weights(), before.weights(), rtol=1e-5, atol=1e-6)
    counters = [float(state["step"]) for state in after.optimizer.state.values()]
    assert counters == [5.0] * 3


KEY = "learner.optimizer"


def own(name: str, **options: object) -> OptimizerSection:
    path = name if ":" in name else f"own_optimizers:{name}"
    return OptimizerSection(name=path, options=options, learning_rate=0.01)


@pytest.mark.parametrize(
    ("section", "nbytes"),
    [
        (OptimizerSection(), 8),
        (own("torch.optim:SGD"), 0),
        (own("torch.optim:SGD", momentum=0.9), 4),
        (own("torch.optim:Adagrad"), 4),
        (own("torch.optim:NAdam"), 8),
        (own("torch.optim:AdamW", betas=[0.8, 0.9], amsgrad=True), 12),
        (own("torch.optim:AdamW", fused=True), 8),
        (own("Counted", momentum=0.2), 4),
    ],
    ids=lambda value: "" if isinstance(value, int) else f"{value.name} {value.options}",
)
def test_the_state_of_an_optimizer_is_measured(section: OptimizerSection, nbytes: int) -> None:
    assert state_bytes(section, key=KEY) == nbytes


REFUSED: dict[str, tuple[OptimizerSection, str]] = {
    "no module": (own("nosuch_module:f"), "there is no module 'nosuch_module'"),
    "no attribute": (own("torch.optim:SDG"), "names 'SDG', which torch.optim lacks; did you mean 'SGD'?"),
    "Python's own": (own("json:dumps"), "is of Python's own module 'json'"),
    "no such option": (
        own("Counted", momentun=0.9),
        r"own_optimizers:Counted has no such option; .* are momentum; did",
    ),
    "the rate": (own("Counted", lr=0.1), r"options\.lr: own_optimizers:Counted has no such option"),
    "wrong type": (own("Counted", momentum="high"), "annotates it as float, but this is not one"),
    "no optimizer": (own("no_optimizer"), "gives a float, which is not a torch.optim.Optimizer"),
    "raises": (own("broken"), r"was called to make an optimizer, and it raised ValueError: no such rate \(.*own_optim"),
    "leaves parameters out": (own("first_only"), "has 1 of the 2 parameters that it was given"),
    "closure": (own("with_closure"), "made a step with a matrix and a vector, without a closure, and it raised"),
    "matrices only": (own("torch.optim:Muon"), "Muon only supports 2D parameters"),
    "rate not from the groups": (own("KeepsTheFirstRate"), "a step with the learning rate 0 changed the weights"),
    "moves nothing": (own("Still"), "a step did not change the weights"),
    "state in itself": (own("CountsInItself"), r"its steps changed self\.calls, which a checkpoint does not keep"),
    "state in its groups": (own("CountsInItsGroup"), "its steps changed 'calls' of a parameter group, which"),
    "a list in itself": (own("ListsInItself"), "a new optimizer with the state of another one makes another step"),
    "a count that acts later": (own("ActsLater"), r"its steps changed self\.calls, which"),
    "a count in its groups": (own("ActsLaterByItsGroup"), "its steps changed 'calls' of a parameter group, which"),
    "state of no parameter": (own("SharedState"), r"its state has a key that is not a parameter \('norms'\)"),
    "not initialized": (own("NotInitialized"), r"needs super\(\).__init__\(params, defaults\), and it raised Attrib"),
    "late state": (own("Late"), "its second step made another state than its first one"),
    "precision": (own("Half"), "its state has 'low', which is a tensor of torch.bfloat16"),
    "a list": (own("Listed"), "its state has 'rates_so_far', which is a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_a_run_cannot_use_is_refused_with_the_reason(name: str) -> None:
    section, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words) as caught:
        try_optimizer(section, key=KEY)
    assert str(caught.value).startswith(KEY)


def test_a_state_that_is_not_sharded_ends_the_first_step() -> None:
    trained = Trained(CPU)
    section = own("Local")
    try_optimizer(section, key=KEY)  # its parameters are not sharded
    trained.optimizer = make_optimizer(trained.model, section, key=KEY, device=CPU)
    with pytest.raises(ConfigError, match="its state has 'shard', which is a plain tensor beside a sharded parameter"):
        trained.step(1)


@pytest.mark.parametrize("name", ["torch.optim:SGD", "torch.optim:Adagrad", "Counted"])
def test_an_own_optimizer_trains_the_trained_parameters_and_goes_on_from_a_checkpoint(
    name: str, tmp_path: Path
) -> None:
    """torch.optim.Adagrad makes its state when it is made. The second one loads before its first step."""
    section = own(name, **{"momentum": 0.9} if "Adagrad" not in name else {})

    def made() -> Trained:
        trained = Trained(CPU)
        trained.optimizer = make_optimizer(trained.model, section, key=KEY, device=CPU)
        trained.state = ShardedState(trained.model, trained.optimizer, group=_group(), saving=_group())
        return trained

    before, after = made(), made()
    start = before.weights()
    before.step(2)
    before.state.stage(train_calls=2, optimizer=True)
    before.state.write(weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    after.state.load(weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer")
    for trained in (before, after):
        trained.step(3)
    moved = [not torch.equal(one, other) for one, other in zip(start, before.weights(), strict=True)]
    assert moved == [True, False, True, True], "the second parameter is frozen"
    assert all(torch.equal(one, other) for one, other in zip(before.weights(), after.weights(), strict=True))
    states = [list(trained.optimizer.state.values()) for trained in (before, after)]
    numbers = [[{k: v for k, v in each.items() if not isinstance(v, torch.Tensor)} for each in one] for one in states]
    assert numbers[0] == numbers[1]
    assert name != "Counted" or [each["steps"] for each in numbers[0]] == [5, 5, 5]


@pytest.mark.parametrize(("group", "decay"), [({"weight_decay": 0.5}, 0.5), ({"weight_decay": None}, 0.0), ({}, 0.0)])
def test_a_group_may_have_no_weight_decay(group: dict[str, float | None], decay: float) -> None:
    optimizer = torch.optim.Optimizer([torch.nn.Parameter(torch.ones(2))], {"lr": 0.1, **group})
    assert weight_decay_of(optimizer) == decay


@pytest.mark.parametrize("name", ["adamw", "MuchLater"])
def test_state_that_is_made_after_the_first_save_is_in_the_next_one(name: str, tmp_path: Path) -> None:
    """Moments of AdamW are made with the first gradient of their tensor."""
    trained = Trained(CPU)
    section = SECTION if name == "adamw" else own(name)
    if name != "adamw":
        trained.optimizer = make_optimizer(trained.model, section, key=KEY, device=CPU)
        trained.state = ShardedState(trained.model, trained.optimizer, group=_group(), saving=_group())
    late = trained.model[2].bias
    late.requires_grad_(name != "adamw")
    trained.step(1)
    late.requires_grad_(True)
    names, weights = [], {}
    for saved in ("first", "second"):
        weights[saved] = trained.weights()
        trained.state.stage(train_calls=2, optimizer=True)
        trained.state.write(weights_path=tmp_path / "weights" / saved, optimizer_path=tmp_path / "optimizer" / saved)
        names.append({*SavedTensors(tmp_path / "optimizer" / saved)})
        trained.step(3)
    added = {"state.2.bias.exp_avg", "state.2.bias.exp_avg_sq", "state.2.bias.step"}
    if name == "adamw":
        assert names[1] - names[0] == added
        for saved, steps in (("second", 3), ("first", None)):
            fresh = Trained(CPU)
            fresh.state.load(weights_path=tmp_path / "weights" / saved, optimizer_path=tmp_path / "optimizer" / saved)
            state = fresh.optimizer.state.get(fresh.model[2].bias)
            assert (None if state is None else float(state["step"])) == steps
        fresh.step(3)
        assert all(torch.equal(one, other) for one, other in zip(fresh.weights(), weights["second"], strict=True))
    else:
        assert names[1] - names[0] == {f"state.{of}.average" for of in ("0.weight", "2.weight", "2.bias")}


PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()
MODULE = re.compile(r"^```python\n# mine/(\w+)\.py\n([^`]*)```", re.MULTILINE)
BLOCKS = re.findall(r"^```yaml\n([^`]*)```", PAGE, re.MULTILINE)


def test_the_examples_of_the_page_are_optimizers_that_a_run_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, text)] = MODULE.findall(PAGE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    sections = [load_config([parse_yaml(block, source="the page")]).learner.optimizer for block in BLOCKS]
    assert [section.name for section in sections] == ["torch.optim:SGD", f"mine.{name}:Lion"]
    assert [try_optimizer(section, key=KEY) for section in sections] == [4, 4]
    trained = Trained(CPU)
    start = trained.weights()
    trained.optimizer = make_optimizer(trained.model, sections[1], key=KEY, device=CPU)
    trained.optimizer.param_groups[0]["lr"] = 0.5
    trained.step(1)
    for before, after, moves in zip(start, trained.weights(), (True, False, True, True), strict=True):
        # the first step of Lion has the size of the rate, and the decay is 0.1
        size = (after - before * (1 - 0.5 * 0.1)).abs() if moves else (after - before).abs()
        torch.testing.assert_close(size, torch.full_like(size, 0.5 if moves else 0.0))
