"""The work of each of four ranks, for every way of sharding and computing. It runs in spawned processes."""

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_scenarios import PROBE, moments_of, train_step
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import make_batch, make_config
from torch.distributed import FileStore
from torch.distributed.tensor import DTensor

from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.batching import token_batch
from asyncrl.weights.manifest import layout

WORLD = 4
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small passes": {"micro_batch_size": 1},
    "small passes, reduced often": {"micro_batch_size": 1, "gradient_sync": "micro_batch"},
    "two shards": {"shards": 2},
    "four shards": {"shards": 4},
    "recomputed": {"activation_checkpointing": True},
    "packed": {"batching": "packed", "micro_batch_tokens": 32},
    "packed, recomputed": {"batching": "packed", "micro_batch_tokens": 32, "activation_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "engine in bf16": {},
    "engine in bf16, no": {"mixed_precision": "no"},
    "all": {"shards": 2, "activation_checkpointing": True, "mixed_precision": "bf16"},
}


def run_rank(rank: int, folder: Path) -> None:
    results = {way: _train(way, rank, folder) for way in WAYS}
    results["handed on"] = _hand_on(rank, folder)
    (folder / f"ways-{rank}.pkl").write_bytes(pickle.dumps(results))


def _worker(name: str, way: str, rank: int, folder: Path) -> PolicyWorker:
    config = make_config(ranks=WORLD, groups_per_step=WORLD, optimizer=SMOOTH_OPTIMIZER, **WAYS[way])
    if way.startswith("engine in bf16"):
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    return PolicyWorker(
        model_path=str(folder / "model"),
        config=config,
        rank=rank,
        world_size=WORLD,
        store=FileStore(str(folder / f"store-{name}"), WORLD),
    )


def _train(way: str, rank: int, folder: Path) -> dict[str, Any]:
    policy = _worker(way, way, rank, folder)
    with _watched(policy.model) as seen:
        before = policy.probe(PROBE)
        probed = dict(seen)
        seen.clear()
        with mock.patch("torch.distributed.reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduced:
            reports = [train_step(policy, make_batch()) for _ in range(2)]
    parameter = next(p for p in policy.model.parameters() if isinstance(p, DTensor) and p.dim() == 2)
    found = {
        "reports": reports,
        "probe": before,
        "forwards probing": probed,
        "forwards training": dict(seen),
        "reductions": reduced.call_count,
        "reduced": {str(call.kwargs["input"].dtype) for call in reduced.call_args_list},
        "mesh": dict(zip(parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh.shape, strict=False)),
        "ways_cut": parameter.shape.numel() / parameter.to_local().numel(),
        "master": {str(p.dtype) for p in policy.model.parameters()},
        "moments": {str(state["exp_avg"].dtype) for state in policy.optimizer.state.values()},
        "specs": [spec.name for spec in policy.weights_metadata()],
        "weights": {name: tensor.float().numpy() for name, tensor in policy.gather_weights()},
    }
    policy.take_snapshot(layout(policy.weights_metadata()), [])
    found["snapshot"] = policy._snapshots[0]
    found["reference"] = policy.get_reference_policy_logprobs(token_batch(PROBE))["reference_logprobs"].numpy()
    policy.close()
    return found


class _watched:
    """Counts the passes through the query projections of the layers, by the precision of the computation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._counts: dict[str, int] = defaultdict(int)
        projections = [module for name, module in model.named_modules() if name.endswith("q_proj")]
        assert len(projections) == 2
        self._hooks = [module.register_forward_hook(self._count) for module in projections]

    def _count(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self._counts[str(output.dtype)] += 1

    def __enter__(self) -> dict[str, int]:
        return self._counts

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _hand_on(rank: int, folder: Path) -> dict[str, Any]:
    """Loads a checkpoint of one way of sharding into another. Returns weights and optimizer state after one more step
    with each."""
    found: dict[str, Any] = {}
    for saver, loader in (("plain", "all"), ("all", "plain")):
        first = _worker(f"save {saver}", saver, rank, folder)
        train_step(first, make_batch())
        path = folder / f"checkpoint {saver}"
        first.stage_checkpoint()
        first.write_checkpoint(path / "weights", path / "optimizer")
        saved = _state(first)
        first.close()
        second = _worker(f"load {saver}", loader, rank, folder)
        second.load_checkpoint(path / "weights", path / "optimizer")
        found[f"{saver} to {loader}"] = {"saved": saved, "loaded": _state(second)}
        second.close()
    return found


def _state(policy: PolicyWorker) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in policy.gather_weights()} | moments_of(policy)
