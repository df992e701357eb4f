"""The work of each rank that trains an adapter, for several ways of cutting and computing. It runs in spawned
processes."""

import pickle
from pathlib import Path
from typing import Any

import torch
from rank_scenarios import PROBE, moments_of, train_step
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import make_batch, make_config
from torch.distributed import FileStore

from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.digest import combined
from asyncrl.ranks.gather import reshard
from asyncrl.weights.manifest import layout

WORLDS = (1, 2)
LORA = {"rank": 4, "alpha": 16, "target_modules": "all-linear"}
REFERENCE = {
    "surrogate": {"kind": "reinforce"},
    "penalties": [{"kind": "k3", "beta": 0.5, "q": "reference"}],
}
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "small passes": {"micro_batch_size": 1},
    "packed": {"batching": "packed", "micro_batch_tokens": 32},
    "recomputed": {"activation_checkpointing": True},
    "clipped": {"optimizer": SMOOTH_OPTIMIZER | {"max_grad_norm": 1e-3}},
    "bf16": {"batching": "packed", "micro_batch_tokens": 64},
}
STEPS = 3


def worker(name: str, way: str, rank: int, world: int, folder: Path, **lora: Any) -> PolicyWorker:
    config = make_config(loss=REFERENCE, **{"optimizer": SMOOTH_OPTIMIZER, **WAYS[way]})
    values = config.model_dump()
    values["model"] |= {"lora": LORA | lora, "dtype": "bfloat16" if way == "bf16" else "float32"}
    store = FileStore(str(folder / f"store-{world}-{name}"), world)
    return PolicyWorker(
        model_path=str(folder / "model"),
        config=type(config).model_validate(values),
        rank=rank,
        world_size=world,
        store=store,
    )


def frozen_digest(policy: PolicyWorker) -> int:
    """Returns a number that changes if this rank's shard of a frozen weight does."""
    reshard(policy.model)
    frozen = [p.detach().to_local() for p in policy.model.parameters() if not p.requires_grad]
    return sum(int(shard.float().view(torch.int32).sum()) for shard in frozen)


def run_rank(rank: int, world: int, folder: Path) -> None:
    results = {way: _train(way, rank, world, folder) for way in WAYS}
    results["resumed"] = _resumed(rank, world, folder)
    (folder / f"lora-{world}-{rank}.pkl").write_bytes(pickle.dumps(results))


def _train(way: str, rank: int, world: int, folder: Path) -> dict[str, Any]:
    policy = worker(way, way, rank, world, folder)
    shard = make_batch().shard_by_batch_size(world)[rank]
    frozen, first = frozen_digest(policy), policy.probe(PROBE)
    reference = policy.get_reference_policy_logprobs(shard)["reference_logprobs"]
    before = policy.get_logprobs(shard)["logprobs"]
    reports = [train_step(policy, make_batch(), **WAYS[way]) for _ in range(STEPS)]
    found = {
        "reports": reports,
        "first": first,
        "after": policy.probe(PROBE),
        "frozen_changed": frozen_digest(policy) != frozen,
        "reference": (reference.numpy(), before.numpy()),
        "reference_after": policy.get_reference_policy_logprobs(shard)["reference_logprobs"].numpy(),
        "trained_after": policy.get_logprobs(shard)["logprobs"].numpy(),
        "weights": {name: tensor.float().numpy() for name, tensor in policy.gather_weights()},
        "specs": policy.weights_metadata(),
        "digest": combined(policy.gather(policy.weights_digest())),
        "moments": moments_of(policy),
        "adapters": sorted({str(p.dtype) for p in policy.model.parameters() if p.requires_grad}),
        "bases": sorted({str(p.dtype) for p in policy.model.parameters() if not p.requires_grad}),
    }
    policy.take_snapshot(layout(policy.weights_metadata()), PROBE)
    found["sent_bytes"] = sum(policy.gather(policy._snapshots[0].memory.nbytes))
    if way == "padded":
        path = folder / f"saved-{world}"
        policy.stage_checkpoint(optimizer=True)
        policy.write_checkpoint(path / "weights", path / "optimizer")
        policy.write_hf(None, path / "gathered")
        more = [train_step(policy, make_batch()) for _ in range(2)]
        policy.write_hf(path / "weights", path / "converted")
        found["more"] = more, {name: tensor.numpy() for name, tensor in policy.gather_weights()}
    policy.close()
    return found


def _resumed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Goes on from the checkpoint of one rank, in another process group."""
    path = folder / "saved-1"
    policy = worker("resumed", "padded", rank, world, folder)
    while not all(policy.gather((path / "converted" / "COMPLETE").exists())):  # another process is about to write it
        pass
    policy.load_checkpoint(path / "weights", path / "optimizer")
    reports = [train_step(policy, make_batch()) for _ in range(2)]
    found = {
        "reports": reports,
        "weights": {name: tensor.numpy() for name, tensor in policy.gather_weights()},
    }
    policy.close()
    return found
