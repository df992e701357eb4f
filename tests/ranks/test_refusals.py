"""A refusal of a rank is returned as a result and raised by the driver, and the ranks stay usable."""

from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ranks import Method, rank_of, started

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import (
    CallRefused,
    CheckpointError,
    CollectiveError,
    ImpreciseColumns,
    LossFailed,
    MissingColumns,
    Offloaded,
    RowsLost,
    StalenessViolation,
    WeightError,
)
from asyncrl.ranks.actor import LOOPBACK, RankActor
from asyncrl.ranks.collectives import Collectives


class Worker:
    """Raises the errors that the test gives it."""

    section = "learner"

    def close(self) -> None: ...

    def work(self, error: Exception | None) -> str:
        if error is not None:
            raise error
        return "done"

    def score(self, rows: BatchedDataDict) -> str:
        return self.work(rows.get("error"))


@pytest.fixture(scope="module")
def rank() -> Iterator[RankActor]:
    with rank_of(lambda **_: Worker()) as actor:
        yield actor


def rows(error: Exception | None) -> BatchedDataDict:
    data = BatchedDataDict()
    if error is not None:
        data.data["error"] = error
    return data


class LostRows:
    """A rank's access to rows that cannot be fetched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fetch(self, meta: KVBatchMeta, *, step: int | None) -> BatchedDataDict:
        raise self._error


REFUSED = [
    RowsLost("gone", sample_ids=["a"]),
    MissingColumns("returns"),
    CallRefused("input_ids is wrong"),
    LossFailed("ZeroDivisionError"),
    StalenessViolation("old"),
    ImpreciseColumns("prev_logprobs is bfloat16"),
    Offloaded("away"),
    WeightError("another order"),
    CollectiveError("late"),
    CheckpointError("no space left on device"),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda error: type(error).__name__)
def test_a_refusal_is_an_answer_unless_the_caller_holds_the_reference(rank: RankActor, refusal: Exception) -> None:
    assert rank.call(Worker.work, refusal) is refusal
    assert rank.call_with_rows(Worker.score, rows(refusal), {}) is refusal
    with rank_of(lambda **_: Worker(), rows=LostRows(refusal)) as lost:
        assert lost.call_with_rows(Worker.score, KVBatchMeta("train", None, ["a"]), {}) is refusal
    with pytest.raises(type(refusal)):
        rank.attempt(Worker.work, refusal)
    assert rank.call(Worker.work, None) == rank.attempt(Worker.work, None) == "done"
    assert rank.call_with_rows(Worker.score, rows(None), {}) == "done"


@pytest.mark.parametrize("via", ["call", "attempt"])
def test_a_bug_is_no_refusal(rank: RankActor, via: str) -> None:
    with pytest.raises(KeyError):
        getattr(rank, via)(Worker.work, KeyError("a"))
    with pytest.raises(KeyError):
        rank.call_with_rows(Worker.score, rows(KeyError("a")), {})


class Remote:
    """The handle of a rank's actor that has started. Its calls run immediately."""

    def __init__(self, actor: RankActor) -> None:
        self._actor = actor
        self.begin, self.open_rendezvous, self.setup = Method(LOOPBACK), Method(1), Method("done")

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            future: Future[Any] = Future()
            future.set_result(getattr(self._actor, name)(*args))  # a refusal is an answer, too
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)


class Neighbours:
    """A rank and its neighbours: replaces what a process group would gather."""

    def __init__(self, *others: Exception | None) -> None:
        self._others = others

    def gather(self, own: Exception | None) -> list[Exception | None]:
        return [own, *self._others]

    together = Collectives.together


def test_what_one_rank_refuses_all_ranks_refuse_and_any_error_of_an_argument_is_a_refusal() -> None:
    done = []
    with Neighbours(None).together():  # type: ignore[arg-type]
        done.append(1)
    assert done
    with pytest.raises(MissingColumns, match="theirs"), Neighbours(None, MissingColumns("theirs")).together():  # type: ignore[arg-type]
        pass
    with pytest.raises(CallRefused, match=r"KeyError: 'a' \(.*test_refusals\.py:\d+\)"), Neighbours(None).together():  # type: ignore[arg-type]
        raise KeyError("a")
    with pytest.raises(StalenessViolation, match="old"), Neighbours(None).together():  # type: ignore[arg-type]
        raise StalenessViolation("old")
    theirs = RowsLost("theirs", sample_ids=["b", "c"])
    with pytest.raises(RowsLost, match="ours; theirs") as lost, Neighbours(theirs).together():  # type: ignore[arg-type]
        raise RowsLost("ours", sample_ids=["a"])
    assert lost.value.sample_ids == ("a", "b", "c")


def test_the_driver_raises_a_refusal_and_ends_no_rank(rank: RankActor) -> None:
    group, ended = started(Remote(rank), Remote(rank), worker=Worker)
    with pytest.raises(Offloaded):
        group.call_with_rows(Worker.score, [rows(None), rows(Offloaded("away"))], {})
    assert group.call(Worker.work, None) == ["done", "done"]
    assert not ended
