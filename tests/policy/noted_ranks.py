"""Helpers for the tests of drivers: ranks that record their calls, and rows on a data plane in memory."""

from collections.abc import Sequence
from typing import Any

import pytest
from memory_client import MemoryClient
from tiny_groups import make_config

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.data import BatchedDataDict
from asyncrl.data_plane import KVBatchMeta
from asyncrl.errors import RowsLost
from asyncrl.policy import meta_driver
from asyncrl.policy.rank_driver import RankDriver
from asyncrl.policy.step_report import RankRecord
from asyncrl.policy.tq_policy import TQPolicy

LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
RECORD = RankRecord(plans=(), outcomes=(), staleness={}, learning_rate=0.1, weight_decay=0.0, seconds={})
COLUMNS = {
    "get_logprobs": "logprobs",
    "get_reference_policy_logprobs": "reference_logprobs",
    "get_values": "values",
}
STORED = ("input_ids", "input_lengths", "generation_logprobs", "advantages", "token_mask", "sample_mask")
"""The columns that `LOSS` reads if rows are trained in one update."""
PACKED = {"batching": "packed", "micro_batch_tokens": 32}
DYNAMIC = {"batching": "dynamic", "micro_batch_tokens": 32}


class NotedRanks:
    """Replaces a `RankGroup`. Scoring returns the rows' own ids, so that a test can see their order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[tuple[str, list[tuple[Any, ...]], dict[str, Any]]] = []
        self.lost: RowsLost | None = None
        self.begun = True

    def start(self) -> None: ...

    def setup_data_plane(self) -> None: ...

    def shutdown(self) -> bool:
        self.calls.append(("shutdown", [], {}))
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, [args], {}))
        return [()] * self.size

    def launch(self, method: str, *args: Any) -> list[Any]:
        return self.call(method, *args)

    def call_each(
        self, method: str, args: Sequence[tuple[Any, ...]], *, shared: Sequence[Any] = (), **options: Any
    ) -> list[Any]:
        assert len(args) == self.size
        args = [(*own, *shared) for own in args]
        self.calls.append((method, list(args), options))
        if self.lost is not None:
            raise self.lost
        if method == "train":
            return [RECORD] * self.size
        if method in COLUMNS:
            return [BatchedDataDict({COLUMNS[method]: shard["input_ids"].float()}) for (shard,) in args]
        return [None] * self.size


def on(driver: RankDriver, *, ranks: int) -> NotedRanks:
    noted = NotedRanks(ranks)
    driver._group = noted  # type: ignore[assignment]
    return noted


def settings(ranks: int = 2, **learner: Any) -> Config:
    return make_config(ranks=ranks, **learner)


def tq_on(ranks: int, monkeypatch: pytest.MonkeyPatch, **learner: Any) -> tuple[TQPolicy, NotedRanks, MemoryClient]:
    client = MemoryClient()
    monkeypatch.setattr(meta_driver, "open_client", lambda config: client)
    config = settings(ranks, **learner)
    policy = TQPolicy(config, model_path="nowhere", dp_cfg=config.data_plane.model_dump())
    noted = on(policy, ranks=ranks)
    policy.start()
    policy.prepare_step(12, 3)
    return policy, noted, client


def stored(client: MemoryClient, batch: BatchedDataDict) -> KVBatchMeta:
    """Writes the rows of `batch` to the data plane. The returned meta names only their ids."""
    meta = named(batch)
    client.put_samples(meta.sample_ids, "train", fields={name: batch[name] for name in STORED})
    return meta


def named(batch: BatchedDataDict) -> KVBatchMeta:
    ids = [f"{i // 3}.0_g{i % 3}" for i in range(batch.size)]
    return KVBatchMeta("train", "train", ids, ["input_ids"], batch["input_lengths"].tolist())
