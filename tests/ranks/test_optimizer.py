"""AdamW is fused on GPUs only, and stays fused when it continues a checkpoint of an AdamW that was not.

torch has a fused AdamW for CPUs too, so what a rank on a GPU does is tested with tensors on the CPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from asyncrl.config.schema import OptimizerSection
from asyncrl.ranks.sharded_checkpoint import ShardedState
from asyncrl.ranks.worker import adamw

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
