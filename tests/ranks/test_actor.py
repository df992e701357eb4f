"""A rank that gets the names of its rows: it fetches them, runs the worker's method, and writes the columns back."""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import ray
from fake_ranks import rank_of

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import LOOPBACK, RankActor, socket_interfaces
from asyncrl.shown_text import JsonLogFormatter

NAMED = KVBatchMeta("train", None, ["a"])
NONE = KVBatchMeta("train", None, [])
WRITES = {"logprobs": "prev_logprobs"}


class Worker:
    """Returns one column, which has the values of the rows. Records the arguments of its calls."""

    section = "learner"

    def __init__(self, **_: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def score(self, rows: BatchedDataDict, *args: Any, **options: Any) -> BatchedDataDict:
        self.calls.append((*args, options))
        return BatchedDataDict(logprobs=rows["x"], other=rows["x"]) if rows else BatchedDataDict()

    def close(self) -> None: ...

    @contextmanager
    def together(self) -> Iterator[None]:
        yield


class Rows:
    """Replaces the data plane of a rank."""

    def __init__(self) -> None:
        self.fetched: list[tuple[KVBatchMeta, int | None]] = []
        self.written: list[tuple[KVBatchMeta, Mapping[str, Any]]] = []

    def fetch(self, meta: KVBatchMeta, *, step: int | None = None) -> BatchedDataDict:
        self.fetched.append((meta, step))
        return BatchedDataDict(x=[1.0]) if meta.size else BatchedDataDict()

    def write(self, meta: KVBatchMeta, columns: Mapping[str, Any]) -> None:
        self.written.append((meta, columns))


@pytest.fixture
def rank() -> Iterator[tuple[RankActor, Worker, Rows]]:
    worker, rows = Worker(), Rows()
    with rank_of(lambda **_: worker, rows=rows) as actor:
        yield actor, worker, rows


def test_named_rows_are_fetched_and_only_the_named_columns_of_the_result_are_written(
    rank: tuple[RankActor, Worker, Rows],
) -> None:
    actor, worker, rows = rank
    assert actor.call_with_rows(Worker.score, NAMED, WRITES, micro_batch_size=2) is None
    assert rows.fetched == [(NAMED, None)], "only training checks the age of tokens"
    assert rows.written == [(NAMED, {"prev_logprobs": [1.0]})]
    assert worker.calls == [({"micro_batch_size": 2},)]


def test_a_rank_without_rows_takes_part_and_writes_nothing(rank: tuple[RankActor, Worker, Rows]) -> None:
    actor, worker, rows = rank
    assert actor.call_with_rows(Worker.score, NONE, WRITES) is None
    assert len(worker.calls) == 1, "all ranks must run the worker's collectives"
    assert rows.written == [(NONE, {})], "the write is a collective, too"


def test_the_result_is_returned_if_no_column_is_to_be_written_and_the_step_checks_the_rows(
    rank: tuple[RankActor, Worker, Rows],
) -> None:
    actor, worker, rows = rank
    assert actor.call_with_rows(Worker.score, NAMED, {}, step=5)["logprobs"] == [1.0]
    assert (rows.fetched, rows.written) == ([(NAMED, 5)], [])
    assert worker.calls == [({"step": 5},)]


def test_rows_in_hand_are_passed_on_with_the_objects_that_the_ranks_share(
    rank: tuple[RankActor, Worker, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, worker, rows = rank
    monkeypatch.setattr(ray, "get", lambda ref, timeout: f"opened {ref}")
    shared: Any = ["loss"]
    assert actor.call_with_rows(Worker.score, BatchedDataDict(x=[2.0]), {}, shared)["logprobs"] == [2.0]
    assert worker.calls == [("opened loss", {})]
    assert not rows.fetched


def test_a_line_of_a_json_log_has_the_rank_and_the_step_that_it_trains(rank: tuple[RankActor, Worker, Rows]) -> None:
    def facts() -> tuple[object, ...]:
        record = logging.LogRecord("asyncrl", logging.INFO, __file__, 1, "slow", (), None)
        line = json.loads(JsonLogFormatter().format(record))
        return line["run"], line["role"], line["rank"], line.get("step")

    assert facts() == ("quickstart", "learner", 0, None)
    for step in (5, None):
        rank[0].call_with_rows(Worker.score, NONE, {}, **({} if step is None else {"step": step}))
        assert facts() == ("quickstart", "learner", 0, 5), "the last step, also in calls that are of no step"


def test_ray_names_the_rank_in_its_log() -> None:
    assert repr(RankActor(worker=PolicyWorker, rank=0, world_size=1)) == "learner rank 0"
    assert repr(RankActor.__new__(RankActor)) == "RankActor", "Ray asks before __init__ is called"


class OnLoopback(RankActor):
    def node_address(self) -> str:
        return LOOPBACK


def test_a_rank_connects_through_the_interface_of_its_node_unless_the_user_has_set_another() -> None:
    """The host's name may lead to 127.0.1.1, and the first interface may be one of Docker."""
    interfaces = {name: {each.address for each in found} for name, found in psutil.net_if_addrs().items()}
    expected = socket_interfaces(node=LOOPBACK, rendezvous=LOOPBACK, interfaces=interfaces)
    actor = OnLoopback(worker=Worker, rank=0, world_size=1)  # type: ignore[arg-type]
    actor.begin(Config())
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth3"}):
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
        actor.setup(model_path="model", host=LOOPBACK, port=actor.open_rendezvous(LOOPBACK), named_rows=False)
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth3"
        assert os.environ["NCCL_SOCKET_IFNAME"] == expected["NCCL_SOCKET_IFNAME"]
