"""A rank computes the digest of its weights once a step, and twice if something may have written them in between."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import rank_of
from tiny_groups import make_batch, make_config, make_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.schema import OptimizerSection
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks import digest
from asyncrl.ranks.digest import MULTILINEAR, XXH3, StepDigests, model_digest
from asyncrl.ranks.optimizer import adamw
from asyncrl.ranks.report import RankRecord
from asyncrl.weights.manifest import layout
from asyncrl.witness.judge import Request
from asyncrl.witness.objective import Counts

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Counted:
    """Counts how often the digests of a model are computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        compute = digest.digests_by_tensor

        def counted(*args: Any, **named: Any) -> dict[str, int]:
            self.number += 1
            return compute(*args, **named)

        monkeypatch.setattr(digest, "digests_by_tensor", counted)

    def during(self, call: Callable[[], object]) -> int:
        before = self.number
        call()
        return self.number - before


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


class Trained:
    """A sharded model with a buffer, and the optimizer of a rank on `device`. All tensors are on the CPU."""

    def __init__(self, device: torch.device = CPU) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        fully_shard(self.model)
        self.optimizer = adamw(self.model, OptimizerSection(learning_rate=0.05), device=device)
        self.digests = StepDigests(self.model, self.optimizer, rank=0, kind=XXH3)
        self.digests.now(anew=True)

    @property
    def weight(self) -> Any:
        return self.model[0].weight

    def passes(self) -> None:
        self.model.train(False)
        self.model(torch.ones(2, 4)).square().sum().backward()
        with torch.no_grad():
            self.model(torch.ones(2, 4))

    def steps(self) -> None:
        self.passes()
        self.optimizer.step()

    def copies(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in get_model_state_dict(self.model).items()}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRITES: dict[str, Callable[[Trained], object]] = {
    "a step of the optimizer": Trained.steps,
    "a checkpoint": lambda model: set_model_state_dict(model.model, model.copies()),
    "a state dict": lambda model: model.model.load_state_dict(model.copies()),
    "tensors of a state dict": lambda model: model.model.load_state_dict(model.copies(), assign=True),
    "a write": lambda model: model.weight.mul_(2),
    "a write to a detached tensor": lambda model: model.weight.detach().mul_(2),
    "a write to the shard": lambda model: model.weight.to_local().mul_(2),
    "other memory of the shard": lambda model: setattr(model.weight._local_tensor, "data", torch.zeros(8, 4)),
    "a write to a buffer": lambda model: model.model[1].running_mean.add_(1),
    "another buffer": lambda model: model.model[1].register_buffer("running_mean", torch.zeros(8)),
}
UNSEEN: dict[str, Callable[[Trained], object]] = {
    "data": lambda model: model.weight.data.mul_(2),
    "numpy": lambda model: model.weight.to_local().numpy().__imul__(2),
    "foreach": lambda model: torch._foreach_mul_([model.weight], 2),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("device", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_two_steps_lets_the_digests_be_computed(
    name: str, device: torch.device, counted: Counted
) -> None:
    """On a GPU the optimizer is fused, and increments no counter of a sharded tensor."""
    model = Trained(device)
    before = model.digests.now(anew=False)
    with torch.no_grad() if name != "a step of the optimizer" else torch.enable_grad():
        WRITES[name](model)
    found: dict[str, int] = {}
    assert counted.during(lambda: found.update(model.digests.now(anew=False))) == 1
    same_bits = name in ("a checkpoint", "a state dict", "tensors of a state dict", "another buffer")
    assert (found == before) == same_bits
    assert counted.during(lambda: model.digests.now(anew=False)) == 0


@pytest.mark.usefixtures("one_rank")
def test_passes_and_reads_need_no_second_computation(counted: Counted) -> None:
    model = Trained()
    model.passes()
    model.optimizer.zero_grad()
    get_model_state_dict(model.model)
    model.model.to("cpu")
    assert counted.during(lambda: model.digests.now(anew=False)) == 0


@pytest.mark.usefixtures("one_rank")
def test_memory_that_was_freed_and_given_again_is_other_memory() -> None:
    """A comparison of addresses alone would take the new memory for the old one."""
    model = Trained()
    [stamp, *_] = digest._stamps(model.model)
    other = torch.zeros(8, 4)
    again = stamp._replace(storage=weakref.ref(other.untyped_storage()))
    assert again != stamp
    del other
    assert again.storage() is None
    assert again != stamp._replace(storage=weakref.ref(torch.zeros(8, 4).untyped_storage()))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", UNSEEN)
def test_a_write_that_torch_does_not_count_is_found_when_the_digests_are_computed_anew(name: str) -> None:
    model = Trained()
    before = model.digests.now(anew=False)
    with torch.no_grad():
        UNSEEN[name](model)
    assert model.digests.now(anew=False) == before, f"{name}: the docstring of StepDigests says that it is not seen"
    assert model.digests.now(anew=True) != before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("model") / "model"))


@pytest.fixture
def worker(model: str) -> Iterator[PolicyWorker]:
    with started(model) as worker:
        yield worker


@contextmanager
def started(model: str, *, every_steps: int = 50) -> Iterator[PolicyWorker]:
    sections = {"witness": make_config().witness.model_copy(update={"every_steps": every_steps})}
    config = make_config().model_copy(update=sections)
    with rank_of(PolicyWorker, config, model=model) as actor:
        yield actor.call(lambda worker: worker)


def trained(worker: PolicyWorker, *, witnessed: bool = False, **options: Any) -> RankRecord:
    rows = make_batch()
    rows["prev_logprobs"] = rows["generation_logprobs"]
    witness = Request(counts=(Counts(tokens=1, sequences=1),)) if witnessed else None
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    return worker.train(rows, loss, rows_per_update=rows.size, witness=witness, **options)


def test_a_step_computes_the_digests_at_its_end_and_a_witnessed_one_also_at_its_start(
    worker: PolicyWorker, counted: Counted
) -> None:
    records = [trained(worker)]  # the first step computes both
    assert counted.number == 2
    for witnessed, evaluated, computed in [(False, False, 1), (True, False, 2), (False, True, 0), (False, False, 1)]:
        assert (
            counted.during(
                lambda: records.append(trained(worker, witnessed=witnessed, eval_mode=evaluated))  # noqa: B023
            )
            == computed
        )
    assert [record.weights_before for record in records[1:]] == [record.weights_after for record in records[:-1]]
    assert records[-1].weights_after == model_digest(worker.model, rank=0, kind=XXH3)
    assert len({record.weights_after for record in records}) == 4, "the step in eval mode changes nothing"


def test_all_steps_of_a_run_without_witnessed_ones_compute_the_digests_twice(model: str, counted: Counted) -> None:
    with started(model, every_steps=0) as worker:
        assert [counted.during(lambda: trained(worker)) for _ in range(2)] == [2, 2]


def test_a_published_step_computes_the_digests_once(worker: PolicyWorker, counted: Counted) -> None:
    trained(worker)
    worker.take_snapshot(layout(worker.weights_metadata()), [[1, 2, 3]])
    worker.get_reference_policy_logprobs(make_batch())
    counted.number = 0
    trained(worker)
    assert counted.number == 1


@pytest.mark.parametrize("write", ["a write", "data", "a load", "back from the host"])
def test_a_write_between_two_steps_breaks_the_chain_of_digests(
    write: str, worker: PolicyWorker, tmp_path: Path
) -> None:
    """One that torch does not count is found if the next step is witnessed."""
    worker.stage_checkpoint()
    worker.write_checkpoint(tmp_path / "weights")
    first = trained(worker)
    weight: Any = worker.model.model.layers[0].mlp.up_proj.weight
    if write == "a write":
        with torch.no_grad():
            weight.mul_(2)
    elif write == "a load":
        worker.load_checkpoint(tmp_path / "weights")
    else:
        weight.data.mul_(2)
    if write == "back from the host":
        worker.offload_after_refit()
        worker.prepare_for_training()
    second = trained(worker, witnessed=write == "data")
    assert second.weights_before != first.weights_after
    if write == "a load":
        assert second.weights_before == first.weights_before


def test_a_tensor_that_never_changes_is_found_in_a_step_that_computes_the_digests_once(
    worker: PolicyWorker, counted: Counted
) -> None:
    """`half_of_parameters_not_trained.patch` does the same in a whole run."""
    weight: Any = worker.model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    optimizer = worker.optimizer.optimizer
    optimizer.register_step_post_hook(lambda *_: weight.data.copy_(kept))
    records = []
    assert [counted.during(lambda: records.append(trained(worker))) for _ in range(2)] == [2, 1]
    for record in records:
        failed = [finding.words for finding in record.findings if finding.check == "frozen" and finding.failed]
        assert len(failed) == 1
        assert failed[0].startswith("no bit of model.layers.0.mlp.up_proj.weight changed")


def test_a_write_within_a_step_without_an_update_is_in_the_digest_at_its_end(
    worker: PolicyWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(worker)
    weight: Any = worker.model.model.layers[0].mlp.up_proj.weight

    def written(*_: Any, **__: Any) -> tuple[()]:
        weight.data.mul_(2)
        return ()

    monkeypatch.setattr(worker, "_run_updates", written)
    record = trained(worker)
    assert record.weights_after == worker.weights_digest() != record.weights_before


def test_a_step_of_the_optimizer_outside_of_train_is_seen(worker: PolicyWorker, counted: Counted) -> None:
    trained(worker)
    worker.optimizer.step()
    assert counted.during(lambda: trained(worker)) == 2


def test_the_first_step_after_a_load_has_the_digest_of_each_kind(worker: PolicyWorker, tmp_path: Path) -> None:
    """So the chain of digests holds if a run is resumed on another kind of device."""
    assert trained(worker).weights_before_by_kind == {}
    worker.stage_checkpoint()
    worker.write_checkpoint(tmp_path / "weights")
    kinds = {XXH3: worker.weights_digest(XXH3), MULTILINEAR: worker.weights_digest(MULTILINEAR)}
    for own, other in ((XXH3, MULTILINEAR), (MULTILINEAR, XXH3)):
        worker.load_checkpoint(tmp_path / "weights")
        worker.use_digest(own)
        assert trained(worker, eval_mode=True).weights_before_by_kind == {other: kinds[other]}
        first = trained(worker)
        assert (first.digest_kind, first.weights_before) == (own, kinds[own])
        assert first.weights_before_by_kind == {other: kinds[other]}
        assert first.weights_after == worker.weights_digest() == worker.weights_digest(own)
        assert trained(worker).weights_before_by_kind == {}
