"""The work of each rank in the critic's tests: every scenario runs on a fresh worker. It runs in spawned processes and
writes its results to a file."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank_scenarios import SOME_CUTS, UPDATE_ROWS, matrix_batch, on_fresh_workers, shard_of
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import make_config
from torch.distributed import FileStore

from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import MissingColumns
from asyncrl.ranks.gather import gather_weights
from asyncrl.value.worker import ValueWorker

OPTIMIZER = {**SMOOTH_OPTIMIZER, "betas": (0.9, 0.95)}
VALUE_LOSS = ClippedValueLoss(clip=0.2)
BY_SEQUENCE = ClippedValueLoss(clip=0.2, aggregation="sequence_mean")


def value_batch() -> BatchedDataDict:
    """Returns a batch whose old values are near the values of a new critic, so that some tokens are clipped. Masked
    entries are NaN."""
    data, draw = matrix_batch(), np.random.default_rng(7)
    shape = data["input_ids"].shape
    for name, mean, spread in (("returns", 0.5, 1.0), ("values", 0.0, 0.3)):
        column_BS = torch.from_numpy(draw.normal(mean, spread, shape).astype(np.float32))
        data[name] = torch.where(data["token_mask"] > 0, column_BS, torch.nan)
    data["index"] = torch.arange(data.size)
    return data


def poisoned_batch() -> BatchedDataDict:
    """Returns a batch in which the return of a trained token in the last rows is NaN."""
    data = value_batch()
    row = data.size - 3
    data["returns"][row, int(data["input_lengths"][row]) - 1] = torch.nan
    return data


def untrained_batch() -> BatchedDataDict:
    data = value_batch()
    data["sample_mask"] = torch.zeros(data.size)
    return data


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    def worker(name: str, **learner: Any) -> ValueWorker:
        return ValueWorker(
            model_path=str(folder / "model"),
            config=make_config(optimizer=OPTIMIZER, **learner),
            rank=rank,
            world_size=world_size,
            store=FileStore(str(folder / f"store-{world_size}-{name}"), world_size),
        )

    found = {name: _cut(critic, learner) for critic, name, learner in on_fresh_workers(worker, SOME_CUTS)}
    few = value_batch().slice(0, 5).shard_by_batch_size(world_size, allow_uneven_shards=True)[rank]
    found["uneven"] = _trained(worker("uneven", micro_batch_size=1), few, rows=5)
    found["without returns"] = _refused(worker("without returns"), few)
    for name, batch in (("poisoned", poisoned_batch()), ("untrained", untrained_batch())):
        shard = batch.shard_by_batch_size(world_size)[rank]
        found[name] = _trained(worker(name), shard, rows=shard.size)
    (folder / f"values-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(found))


def _cut(critic: ValueWorker, learner: dict[str, Any]) -> dict[str, Any]:
    """Trains two updates on rows that are cut as a driver cuts them. Returns the values before and after."""
    shard = shard_of(value_batch(), rank=critic.rank, world_size=critic.world_size, learner=learner)
    rows, size = UPDATE_ROWS // critic.world_size, {"micro_batch_size": learner.get("micro_batch_size")}
    before = critic.get_values(shard, **size)["values"].numpy()
    untouched = _weights(critic)
    evaluated = critic.train(shard, VALUE_LOSS, rows_per_update=rows, eval_mode=True, **size)
    by_sequence = critic.train(shard, BY_SEQUENCE, rows_per_update=rows, eval_mode=True, **size)
    kept = all(np.array_equal(weight, untouched[name]) for name, weight in _weights(critic).items())
    trained = critic.train(shard, VALUE_LOSS, rows_per_update=rows, **size)
    return {
        "index": shard["index"].numpy(),
        "before": before,
        "evaluated": evaluated,
        "by sequence": by_sequence,
        "kept": kept,
        "trained": trained,
        "schedule": critic.train_calls,
        "after": critic.get_values(shard, **size)["values"].numpy(),
        "again": critic.train(shard, VALUE_LOSS, rows_per_update=rows, eval_mode=True, **size),
        "weights": _weights(critic),
        "types": {type(parameter).__name__ for parameter in critic.model.parameters()},
    }


def _trained(critic: ValueWorker, shard: BatchedDataDict, *, rows: int) -> dict[str, Any]:
    found = {"first": _weights(critic), "trained": critic.train(shard, VALUE_LOSS, rows_per_update=rows)}
    found["weights"] = _weights(critic)
    critic.close()
    return found


def _refused(critic: ValueWorker, shard: BatchedDataDict) -> str:
    bare = BatchedDataDict({name: column for name, column in shard.items() if name != "returns"})
    try:
        critic.train(bare, VALUE_LOSS, rows_per_update=5)
    except MissingColumns as error:
        return str(error)
    finally:
        critic.close()
    return "nothing"


def _weights(critic: ValueWorker) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in gather_weights(critic.model, dtype=torch.float32)}
