"""Helpers for the tests of drivers: ranks that record their calls, and rows on a data plane in memory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from memory_client import MemoryClient
from tiny_groups import make_config

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.data import BatchedDataDict
from asyncrl.data_plane import KVBatchMeta
from asyncrl.errors import RowsLost
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.ranks.driver import RankDriver
from asyncrl.ranks.report import RankRecord

LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
RECORD = RankRecord(plans=(), outcomes=(), staleness={}, learning_rate=0.1, weight_decay=0.0, seconds={})
COLUMNS = {
    "get_logprobs": "logprobs",
    "get_reference_policy_logprobs": "reference_logprobs",
    "get_values": "values",
}
STORED = ("input_ids", "input_lengths", "generation_logprobs", "advantages", "token_mask", "sample_mask")
"""The columns that `LOSS` reads if rows are trained in one update."""
Driver = TypeVar("Driver", bound=RankDriver[Any])
PACKED = {"batching": "packed", "micro_batch_tokens": 32}
DYNAMIC = {"batching": "dynamic", "micro_batch_tokens": 32}


class NotedRanks:
    """Replaces a `RankGroup`. Scoring returns the rows' own ids, so that a test can see their order."""

    def __init__(self, worker: type[Any], config: Config, *, model_path: str, named_rows: bool) -> None:
        self.size = config.learner.ranks
        self.model_path = model_path
        self.named_rows = named_rows
        self.calls: list[tuple[str, list[tuple[Any, ...]], dict[str, Any]]] = []
        self.lost: RowsLost | None = None
        self.begun = False
        self.starts = 0
        self.writes: dict[str, str] = {}

    def start(self) -> None:
        self.begun = True
        self.starts += 1

    def shutdown(self, *, keep: bool = False) -> bool:
        self.calls.append(("shutdown", [], {}))
        return True

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.calls.append((method.__name__, [args], {}))
        return [()] * self.size

    def beside(self, lane: str, method: Callable[..., Any], *args: Any) -> list[Any]:
        self.calls.append((method.__name__, [args], {"lane": lane}))
        return [()] * self.size

    def launch(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self.call(method, *args)

    def call_with_rows(
        self,
        method: Callable[..., Any],
        shards: Sequence[Any],
        writes: Mapping[str, str],
        *shared: Any,
        **options: Any,
    ) -> list[Any]:
        assert len(shards) == self.size
        name = method.__name__
        self.calls.append((name, [(shard, *shared) for shard in shards], options))
        self.writes = dict(writes)
        if self.lost is not None:
            raise self.lost
        if name == "train":
            return [RECORD] * self.size
        if writes:
            return [None] * self.size
        return [BatchedDataDict({COLUMNS[name]: shard["input_ids"].float()}) for shard in shards]


def noted(
    kind: Callable[..., Driver],
    config: Config,
    *args: Any,
    ranks: Callable[..., NotedRanks] = NotedRanks,
    **options: Any,
) -> tuple[Driver, NotedRanks]:
    """Returns a driver of this kind, and the ranks that it calls."""
    made: list[NotedRanks] = []

    def make_ranks(*arguments: Any, **of_ranks: Any) -> NotedRanks:
        made.append(ranks(*arguments, **of_ranks))
        return made[0]

    return kind(config, *args, make_ranks=make_ranks, **options), made[0]


def settings(ranks: int = 2, **learner: Any) -> Config:
    return make_config(ranks=ranks, **learner)


def tq_noted(config: Config, *, client: MemoryClient | None = None) -> tuple[TQPolicy, NotedRanks, MemoryClient]:
    """Returns a policy with rows in memory (`client`), whose ranks are started and whose step is prepared."""
    client = client or MemoryClient()
    section = config.data_plane.model_dump()
    policy, ranks = noted(TQPolicy, config, model_path="nowhere", dp_cfg=section, dp_client=client)
    policy.start()
    policy.prepare_step(12, 3)
    return policy, ranks, client


def stored(client: MemoryClient, batch: BatchedDataDict) -> KVBatchMeta:
    """Writes the rows of `batch` to the data plane. The returned meta names only their ids."""
    meta = named(batch)
    client.put_samples(meta.sample_ids, "train", fields={name: batch[name] for name in STORED})
    return meta


def named(batch: BatchedDataDict) -> KVBatchMeta:
    ids = [f"{i // 3}.0_g{i % 3}" for i in range(batch.size)]
    return KVBatchMeta("train", "train", ids, ["input_ids"], batch["input_lengths"].tolist())
