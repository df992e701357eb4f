"""The work of each rank in the checkpoint tests. It runs in spawned processes and writes its results to a file.

First every group of ranks saves checkpoints. Then every group loads the checkpoints of all groups.
"""

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_scenarios import moments_of, shard_of
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import make_batch, make_config
from torch.distributed import FileStore
from torch.distributed.fsdp import fully_shard

from asyncrl import complete_directory
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.schema import OptimizerSection
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.optimizer import make_optimizer
from asyncrl.ranks.shard_files import HostCopies
from asyncrl.ranks.sharded_checkpoint import ShardedState

WORLDS = (1, 2, 4)
OWN = ("own_optimizers:Counted", "torch.optim:Adagrad")
"""Optimizers by import path: the state of one also has numbers of Python, and the other makes its state at once."""
UPDATE_ROWS = 4
LEARNER = {"optimizer": {**SMOOTH_OPTIMIZER, "schedule": "linear", "final_fraction": 0.1}}


def run_saver(rank: int, world_size: int, folder: Path) -> None:
    results = {"policy": _save_policy(rank, world_size, folder)}
    with group_of(rank, world_size, folder / f"toy-store-{world_size}") as group:
        results["toy"] = _save_toy(folder / f"toy-{world_size}", group=group)
        results["beside"] = _save_beside(folder / f"beside-{world_size}", group=group)
        if world_size == 2:
            results["faults"] = _faults(folder / "faults", group=group)
    _write(folder / f"saved-{world_size}-{rank}.pkl", results)


def run_loader(rank: int, world_size: int, folder: Path) -> None:
    results: dict[str, Any] = {"policy": {}, "toy": {}}
    for saved_by in WORLDS:
        policy = _worker(rank, world_size, folder, name=f"load-{saved_by}")
        policy.load_checkpoint(folder / f"policy-{saved_by}/weights", folder / f"policy-{saved_by}/optimizer")
        results["policy"][saved_by] = _train(policy, rank, world_size, steps=2)
        policy.close()
    with group_of(rank, world_size, folder / f"toy-load-{world_size}") as group:
        for saved_by in WORLDS:
            results["toy"][saved_by] = _load_toy(folder / f"toy-{saved_by}", group=group)
    _write(folder / f"loaded-{world_size}-{rank}.pkl", results)


# -- the policy ------------------------------------------------------------------------------------------------------


def _worker(rank: int, world_size: int, folder: Path, *, name: str) -> PolicyWorker:
    return PolicyWorker(
        model_path=str(folder / "model"),
        config=make_config(**LEARNER),
        rank=rank,
        world_size=world_size,
        store=FileStore(str(folder / f"store-{world_size}-{name}"), world_size),
    )


def _save_policy(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    policy = _worker(rank, world_size, folder, name="save")
    path = folder / f"policy-{world_size}"
    before = _train(policy, rank, world_size, steps=2)
    policy.stage_checkpoint()
    policy.write_checkpoint(path / "weights", path / "optimizer", path / "tokenizer")
    policy.write_hf(None, path / "live")
    found = {"before": before, "after": _train(policy, rank, world_size, steps=2)}
    policy.write_hf(path / "weights", path / "converted")
    dist.barrier()
    policy.load_checkpoint(path / "weights")
    found["weights_only"] = {
        "weights": {name: tensor.numpy() for name, tensor in policy.gather_weights()},
        "calls": policy.train_calls,
        "moments": len(policy.optimizer.state),
    }
    policy.close()
    return found


def _train(policy: PolicyWorker, rank: int, world_size: int, *, steps: int) -> dict[str, Any]:
    """Calls `train` `steps` times. Returns this rank's losses, the learning rates, and the weights afterwards."""
    shard = shard_of(make_batch(), rank=rank, world_size=world_size, learner={}, update_rows=UPDATE_ROWS)
    shard["prev_logprobs"] = policy.get_logprobs(shard)["logprobs"]
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    records, rates = [], []
    for _ in range(steps):
        records.append(policy.train(shard, loss, rows_per_update=UPDATE_ROWS // world_size))
        rates.append(records[-1].learning_rate)
    return {
        "records": records,
        "rates": rates,
        "weights": {name: tensor.numpy() for name, tensor in policy.gather_weights()},
        "moments": moments_of(policy),
    }


# -- a model whose parameters do not divide by the ranks -------------------------------------------------------------


class Toy(torch.nn.Module):
    """A model with a parameter of five rows, a tied parameter, one with fewer rows than ranks, and a buffer."""

    def __init__(self, *, columns: int = 3, extra: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(columns, 5, bias=False)
        self.head = torch.nn.Linear(columns, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
        self.register_buffer("scale", torch.tensor(3.0))
        if extra:
            self.more = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.embed(x) * self.head(x)).sum() * self.norm.pow(2).sum() * self.scale


class group_of:
    """Creates the process group of the ranks, without accelerate."""

    def __init__(self, rank: int, world_size: int, store: Path) -> None:
        dist.init_process_group("gloo", store=FileStore(str(store), world_size), rank=rank, world_size=world_size)

    def __enter__(self) -> dist.ProcessGroup:
        return dist.new_group(backend="gloo")

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


class Sharded:
    """Returns a sharded Toy and its optimizer: AdamW, or one that `own` names by import path."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        own: str = "adamw",
        **shape: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = fully_shard(Toy(**shape).to(dtype or torch.float32))
        section = OptimizerSection(name=own, learning_rate=0.1, betas=(0.9, 0.999), weight_decay=0.01)
        self.optimizer = make_optimizer(self.model, section, key="learner.optimizer", device=torch.device("cpu"))
        self.checkpoint = ShardedState(self.model, self.optimizer, group=group, saving=dist.new_group(backend="gloo"))

    def step(self, times: int = 1) -> "Sharded":
        for _ in range(times):
            self.model(torch.tensor([0.1, -0.2, 0.3])).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def save(self, path: Path) -> None:
        self.checkpoint.stage(train_calls=7, optimizer=True)
        self.checkpoint.write(weights_path=path / "weights", optimizer_path=path / "optimizer")

    def load(self, path: Path, *, optimizer: Path | None = None) -> int | None:
        return self.checkpoint.load(weights_path=path / "weights", optimizer_path=(optimizer or path) / "optimizer")

    def state(self) -> dict[str, Any]:
        """Returns all tensors of a checkpoint, unsharded."""

        def full(tensor: Any) -> Any:
            return torch.as_tensor(getattr(tensor, "full_tensor", lambda: tensor)()).detach().double().numpy().copy()

        found = {name: full(tensor) for name, tensor in self.model.state_dict().items()}
        for parameter, name in [(self.model.embed.weight, "embed"), (self.model.norm, "norm")]:
            for key, tensor in self.optimizer.state.get(parameter, {}).items():
                found[f"{name} {key}"] = full(tensor)
        return found


def _save_toy(path: Path, *, group: dist.ProcessGroup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for steps in (0, 2):
        toy = Sharded(group=group, seed=3).step(steps)
        with torch.no_grad():
            toy.model.scale.fill_(1.5)
        torch.manual_seed(100 + dist.get_rank())
        toy.save(path / str(steps))
        drawn = torch.rand(3).numpy()
        found[str(steps)] = {"saved": toy.state(), "drawn": drawn, "after": toy.step(2).state()}
    for own in OWN:
        toy = Sharded(group=group, seed=3, own=own).step(2)
        toy.save(path / own)
        found[own] = {"saved": toy.state(), "after": toy.step(2).state()}
    return found


def _load_toy(path: Path, *, group: dist.ProcessGroup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for steps in (0, 2):
        for start in (0, 1):
            toy = Sharded(group=group, seed=9).step(start)
            train_calls = toy.load(path / str(steps))
            found[f"{steps} into {start}"] = {
                "train_calls": train_calls,
                "drawn": torch.rand(3).numpy(),
                "loaded": toy.state(),
                "tied": toy.model.head.weight is toy.model.embed.weight,
                "after": toy.step(2).state(),
            }
    for own in OWN:
        toy = Sharded(group=group, seed=9, own=own)
        toy.load(path / own)
        found[own] = {"loaded": toy.state(), "after": toy.step(2).state()}
    toy = Sharded(group=group, seed=9, own=OWN[0])
    found["refused"] = _raised(lambda: toy.load(path / "2"))
    return found


def _save_beside(path: Path, *, group: dist.ProcessGroup) -> dict[str, Any]:
    """Trains two steps while a write is held up by a full stop before its first file."""
    toy = Sharded(group=group, seed=3).step(2)
    toy.checkpoint.stage(train_calls=7, optimizer=True)
    found: dict[str, Any] = {"staged": toy.state()}
    go_on, write = threading.Event(), HostCopies.write

    def held_up(copies: HostCopies, folder: Path, *, shard: int) -> None:
        go_on.wait()
        write(copies, folder, shard=shard)

    with mock.patch.object(HostCopies, "write", held_up), ThreadPoolExecutor(1) as saving:
        begun = saving.submit(toy.checkpoint.write, weights_path=path / "weights", optimizer_path=path / "optimizer")
        dist.barrier()
        found["trained"] = toy.step(2).state()
        found["refused"] = _raised(lambda: toy.checkpoint.stage(train_calls=7, optimizer=True))
        found["before"] = (path / "weights").exists()
        dist.barrier()
        go_on.set()
        begun.result()
    loaded = Sharded(group=group, seed=9)
    loaded.load(path)
    found["loaded"] = loaded.state()
    weights, moments = _copies(toy.checkpoint)
    held = {name: copy.data_ptr() for name, copy in weights.items()}
    toy.save(path)
    found["reused"] = held == {name: copy.data_ptr() for name, copy in weights.items()}
    loaded.load(path)
    found["second"] = loaded.state()
    found["nbytes"] = [sum(copy.nbytes for copy in each.values()) for each in (weights, moments)]
    return found


def _copies(checkpoint: ShardedState) -> list[Mapping[str, torch.Tensor]]:
    """Returns the memory for the copies of the weights and of the moments."""
    return [each._copies for each in (checkpoint._weight_copies, checkpoint._moment_copies)]


# -- faults ----------------------------------------------------------------------------------------------------------


def _faults(folder: Path, *, group: dist.ProcessGroup) -> dict[str, Any]:
    rank = dist.get_rank()
    first = Sharded(group=group, seed=1).step()
    found: dict[str, Any] = {"first": first.state()}

    def on_first(action: Callable[[], Any]) -> None:
        if rank == 0:
            action()
        dist.barrier()

    def saved(name: str) -> Path:
        first.save(folder / name)
        return folder / name

    def refused(name: str, path: Path, *, steps: int = 1, optimizer: Path | None = None, **other: Any) -> None:
        toy = Sharded(group=group, seed=5, **other).step(steps)
        before, rng = toy.state(), torch.get_rng_state()
        error = _raised(lambda: toy.load(path, optimizer=optimizer))
        untouched = _same(toy.state(), before) and torch.equal(torch.get_rng_state(), rng)
        found[name] = {"error": error, "untouched": untouched}

    good = saved("good")
    refused("no directory", folder / "nothing")
    refused("another shape", good, columns=2, steps=0)
    refused("another dtype", good, dtype=torch.bfloat16, steps=0)
    refused("missing", good, extra=True, steps=0)
    Sharded(group=group, extra=True).save(folder / "more")
    refused("unknown", folder / "more")

    path = saved("no marker")
    on_first(lambda: (path / "optimizer/COMPLETE").unlink())
    refused("no marker", path)
    path = saved("short")
    on_first(lambda: os.truncate(_shards(path / "weights")[1], 40))
    refused("short", path)
    path = saved("gone")
    on_first(lambda: _shards(path / "weights")[0].unlink())
    refused("gone", path)
    # The file that is read last has the right size, but its contents are unreadable.
    path = saved("garbled")
    on_first(
        lambda: _shards(path / "optimizer")[1].write_bytes(b"\xff" * _shards(path / "optimizer")[1].stat().st_size)
    )
    refused("garbled", path, steps=0)
    other = saved("other")
    refused("of two saves", good, optimizer=other)

    second = Sharded(group=group, seed=2).step()
    found["second"] = second.state()

    def interrupted(name: str, *patch: Any) -> None:
        """Interrupts a save over a complete checkpoint. Returns the state of the folder then, and after another
        save."""
        path = saved(name)
        with mock.patch.object(*patch):
            error = _raised(lambda: second.save(path))
        toy = Sharded(group=group, seed=5)
        toy.load(path)
        left = toy.state()
        second.save(path)
        toy.load(path)
        files = sorted(entry.name for entry in path.iterdir())
        found[name] = {"error": error, "left": left, "then": toy.state(), "files": files}
        dist.barrier()

    def out_of_disk(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    write, rename = HostCopies.write, Path.rename

    def full_on_rank_1(copies: HostCopies, folder: Path, *, shard: int) -> None:
        out_of_disk() if rank == 1 else write(copies, folder, shard=shard)

    def all_but_the_new_weights(path: Path, target: Path) -> Path:
        return out_of_disk() if path.name == "weights.tmp" else rename(path, target)

    interrupted("before the marker", complete_directory, "finish", out_of_disk)
    interrupted("disk full on rank 1", HostCopies, "write", full_on_rank_1)
    interrupted("between the renames", Path, "rename", all_but_the_new_weights)

    local = Sharded(group=group, own="own_optimizers:LocalNorm").step()
    found["numbers apart"] = _raised(lambda: local.save(folder / "numbers"))
    if rank == 1:
        del second.optimizer.state[second.model.norm]
    found["names apart"] = _raised(lambda: second.save(folder / "names"))
    second = Sharded(group=group, seed=2).step()

    path, errors = saved("one in the other"), []
    for weights, optimizer in (
        ("weights", "weights"),
        ("weights", "weights/optimizer"),
        ("optimizer/weights", "optimizer"),
        ("weights", "optimizer/../weights"),
    ):
        second.checkpoint.stage(train_calls=7, optimizer=True)
        write_to = partial(second.checkpoint.write, weights_path=path / weights, optimizer_path=path / optimizer)
        errors.append(_raised(write_to))
    toy = Sharded(group=group, seed=5)
    toy.load(path)
    found["one in the other"] = {"errors": errors, "left": toy.state()}
    dist.barrier()

    foreign = folder / "foreign"
    on_first(lambda: (foreign / "weights").mkdir(parents=True))
    on_first(lambda: (foreign / "weights/thesis.txt").write_text("years of work"))
    found["foreign"] = {
        "error": _raised(lambda: first.save(foreign)),
        "kept": (foreign / "weights/thesis.txt").exists(),
    }
    dist.barrier()

    with mock.patch.object(complete_directory, "unfinished", lambda path: path.with_name(f"{path.name}.{rank}")):
        if rank == 1:
            (folder / "apart").mkdir()
            for name in ("weights", "optimizer"):
                (folder / f"apart/{name}.1").mkdir()
        dist.barrier()
        found["apart"] = {"error": _raised(lambda: first.save(folder / "apart"))}
    dist.barrier()
    on_first(lambda: shutil.rmtree(folder / "apart"))
    return found


def _raised(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


def _shards(path: Path) -> list[Path]:
    return sorted((path / "state").iterdir())


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all((one[name] == two[name]).all() for name in one)


def _write(path: Path, results: dict[str, Any]) -> None:
    path.write_bytes(pickle.dumps(results))
