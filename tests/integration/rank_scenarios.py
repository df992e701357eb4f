"""What each rank of a test does: every scenario on a fresh worker, results to a file. Runs in spawned processes."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tiny_groups import STEP, make_config, make_group, make_groups
from torch.distributed import FileStore

from asyncrl.algorithms.interfaces import LossInputType, LossType
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.batching import rank_batch, token_batch
from asyncrl.policy.interfaces import TrainGroup, deal_groups
from asyncrl.policy.worker import PolicyWorker

PROBE = ([1, 2, 3, 4, 5, 6, 7], [9, 8], [30, 31, 32, 33])


def with_rows(group: TrainGroup, **columns: np.ndarray) -> TrainGroup:
    return dataclasses.replace(group, rows={**group.rows, **columns})


def poisoned_groups() -> list[TrainGroup]:
    """The second of four groups, which goes to the second of two ranks, has an infinite log-prob."""
    groups = make_groups()
    logprobs = groups[1].rows["logprobs"].copy()
    logprobs[0] = np.nan
    return [groups[0], with_rows(groups[1], logprobs=logprobs), *groups[2:]]


def untrained_groups() -> list[TrainGroup]:
    return [make_group(0, sample_mask=(0.0, 0.0, 0.0)), make_group(1, lengths=(0, 0))]


class LogitLoss:
    """The default objective as a user's loss that asks for logits."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __call__(self, next_token_logits: torch.Tensor, data: Any, *counts: Any, **named: Any) -> Any:
        loss, _ = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)(next_token_logits, data, *counts, **named)
        return loss, {"longest_max": float(data["input_lengths"].max()), "rows": data.size}


TRAINING: dict[str, tuple[dict[str, Any], Any]] = {
    "micro_batch_1": ({"micro_batch_size": 1}, make_groups),
    "micro_batch_3": ({"micro_batch_size": 3}, make_groups),
    "micro_batch_all": ({}, make_groups),
    "dynamic": ({"batching": "dynamic", "micro_batch_tokens": 32}, make_groups),
    "packed": ({"batching": "packed", "micro_batch_tokens": 32}, make_groups),
    "own_loss": ({"micro_batch_size": 5}, make_groups),
    "own_loss_packed": ({"batching": "packed", "micro_batch_tokens": 64}, make_groups),
    "two_updates": ({"updates_per_step": 2}, make_groups),
    "one_group": ({"micro_batch_size": 2}, lambda: [make_group(4)]),
    "nonfinite": ({}, poisoned_groups),
    "untrained": ({}, untrained_groups),
    "reference": ({"micro_batch_size": 5}, make_groups),
    "calibrated": ({"micro_batch_size": 5}, make_groups),
    "interpolated": ({"micro_batch_size": 5, "updates_per_step": 2}, make_groups),
}
LOSSES: dict[str, Any] = {
    "own_loss": f"{__name__}:LogitLoss",
    "own_loss_packed": f"{__name__}:LogitLoss",
    "reference": {
        **msgspec.to_builtins(PRESETS["decoupled_icepop"].objective),
        "penalties": [{"kind": "k3", "beta": 10.0, "q": "reference"}],
    },
    "calibrated": "m2po",
    "interpolated": "a3po",
}


CUTS: dict[str, dict[str, Any]] = {
    "padded 1": {"micro_batch_size": 1},
    "padded 4": {"micro_batch_size": 4},
    "padded all": {},
    "dynamic": {"batching": "dynamic", "micro_batch_tokens": 32},
    "packed": {"batching": "packed", "micro_batch_tokens": 32},
}
"""Ways to cut a rank's rows into micro-batches."""
UPDATE_ROWS = 4


def shard_of(data: BatchedDataDict, *, rank: int, world_size: int, learner: dict[str, Any]) -> BatchedDataDict:
    """A rank's rows as a driver cuts them: updates of `UPDATE_ROWS` over all ranks."""
    lengths = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    tokens = {"max_tokens_per_microbatch": learner.get("micro_batch_tokens")}
    options: dict[str, Any] = {}
    if learner.get("batching") == "dynamic":
        options = {"dynamic_batching_args": {**tokens, **lengths, "sequence_length_round": 4}}
    elif learner.get("batching") == "packed":
        packing = {"algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 2}
        options = {"sequence_packing_args": {**tokens, **lengths, **packing}}
    shards = data.shard_by_batch_size(world_size, UPDATE_ROWS, **options)
    return (shards[0] if options else shards)[rank]


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    results: dict[str, Any] = {}

    def worker(name: str, **learner: Any) -> PolicyWorker:
        store = FileStore(str(folder / f"store-{world_size}-{name}"), world_size)
        return PolicyWorker(
            model_path=str(folder / "model"),
            config=make_config(loss=LOSSES.get(name, "decoupled_icepop"), **learner),
            rank=rank,
            world_size=world_size,
            store=store,
        )

    results["interface"] = _interface_scenarios(worker, rank=rank, world_size=world_size)
    if world_size > 2:
        (folder / f"results-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(results))
        return
    for name, (learner, groups) in TRAINING.items():
        policy = worker(name, **learner)
        share = deal_groups(groups(), ranks=world_size, updates=learner.get("updates_per_step", 1))[rank]
        report = policy.train_step(share, step=STEP)
        again = policy.train_step(share, step=STEP) if name == "reference" else None
        after = {key: tensor.numpy() for key, tensor in policy.gather_weights()}
        results[name] = {"report": report, "again": again, "weights": after}
        policy.close()
    results["weights"] = _weights_scenario(worker("weights"), folder / f"saved-{world_size}", rank=rank)
    (folder / f"results-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(results))


def _interface_scenarios(worker: Any, *, rank: int, world_size: int) -> dict[str, Any]:
    """`train`, `get_logprobs` and `get_reference_policy_logprobs` on rows, cut in every way."""
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    data = rank_batch(make_groups(), step=STEP)
    data["index"] = torch.arange(data.size)
    found: dict[str, Any] = {}
    for name, learner in CUTS.items():
        policy = worker(f"interface {name}", **learner)
        shard = shard_of(data, rank=rank, world_size=world_size, learner=learner)
        before = policy.get_logprobs(shard)["logprobs"]
        shard["prev_logprobs"] = before
        untouched = {key: tensor.numpy() for key, tensor in policy.gather_weights()}
        evaluated = policy.train(shard, loss, rows_per_update=UPDATE_ROWS // world_size, eval_mode=True)
        kept = all(np.array_equal(tensor.numpy(), untouched[key]) for key, tensor in policy.gather_weights())
        trained = policy.train(shard, loss, rows_per_update=UPDATE_ROWS // world_size)
        found[name] = {
            "index": shard["index"].numpy(),
            "before": before.numpy(),
            "evaluated": evaluated,
            "kept": kept,
            "trained": trained,
            "reference": policy.get_reference_policy_logprobs(shard)["reference_logprobs"].numpy(),
            "after": policy.get_logprobs(shard)["logprobs"].numpy(),
            "weights": {key: tensor.numpy() for key, tensor in policy.gather_weights()},
        }
        policy.close()
    policy = worker("interface uneven", micro_batch_size=1)
    few = data.slice(0, 5)
    shard = few.shard_by_batch_size(world_size, allow_uneven_shards=True)[rank]
    found["uneven"] = {
        "trained": policy.train(shard, loss, rows_per_update=5),
        "weights": {key: tensor.numpy() for key, tensor in policy.gather_weights()},
    }
    policy.close()
    return found


def _weights_scenario(policy: PolicyWorker, saved: Path, *, rank: int) -> dict[str, Any]:
    before = dict(policy.gather_weights())
    kept = {name: tensor.clone() for name, tensor in before.items()}
    found = {
        "specs": policy.weights_metadata(),
        "probe": policy.probe(PROBE),
        # rank 0 scores two sequences, rank 1 none: the ranks still run the same collectives
        "logprobs": policy.get_logprobs(token_batch(PROBE[:2] if rank == 0 else []))["logprobs"].numpy(),
        "gathered": {name: tensor.numpy() for name, tensor in kept.items()},
        "after_probe": all(torch.equal(tensor, kept[name]) for name, tensor in policy.gather_weights()),
        "types": {type(parameter).__name__ for parameter in policy._model.parameters()},
    }
    shares = deal_groups(make_groups(), ranks=policy.world_size, updates=1)
    found["trained"] = policy.train_step(shares[rank], step=STEP)
    found["snapshot_unchanged"] = all(torch.equal(before[name], kept[name]) for name in kept)
    found["moved"] = any(not torch.equal(tensor, kept[name]) for name, tensor in policy.gather_weights())
    policy.save_hf(saved)
    found["saved"] = {name: tensor.numpy() for name, tensor in policy.gather_weights()}
    policy.close()
    return found
