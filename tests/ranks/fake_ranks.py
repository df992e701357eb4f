"""Groups of ranks without Ray: actors in this process, and handles of actors whose answers are known in advance."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from asyncrl.config.schema import Config
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import LOOPBACK, SAVING, RankActor
from asyncrl.ranks.group import PlacedRanks, RankGroup


class Call:
    """Replaces one Ray call whose result is known in advance. With None, the call never ends."""

    def __init__(self, outcome: Any) -> None:
        self._future: Future[Any] = Future()
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        elif outcome is not None:
            self._future.set_result(outcome)

    def future(self) -> "Future[Any]":
        return self._future


class Method:
    """Replaces a method of an actor's handle. Its calls may run in the thread `lane` only."""

    def __init__(self, outcome: Any, *, lane: str | None = None) -> None:
        self._outcome, self._lane = outcome, lane
        self.calls: list[tuple[Any, ...]] = []
        self.named: list[dict[str, Any]] = []

    def options(self, *, concurrency_group: str) -> "Method":
        assert concurrency_group == self._lane
        return self

    def remote(self, *call: Any, **named: Any) -> Call:
        self.calls.append(call)
        self.named.append(named)
        return Call(self._outcome)


class Rank:
    """Replaces the handle of a rank that has started, and whose calls all have the same outcome."""

    def __init__(self, outcome: Any, *, lane: str = SAVING) -> None:
        self.begin, self.open_rendezvous, self.setup = Method(LOOPBACK), Method(1), Method("done")
        self.node_address, self.close, self.rest = Method(LOOPBACK), Method("done"), Method("done")
        self.call, self.attempt = Method(outcome), Method(outcome, lane=lane)


def started(*ranks: Any, config: Config | None = None, worker: Any = PolicyWorker) -> tuple[RankGroup[Any], list[Any]]:
    """Returns a group with these ranks, and a list of the ranks that it has ended."""
    ended: list[Any] = []

    class Placed(PlacedRanks):
        def kill(self) -> None:
            ended.extend(self.actors)

        def release(self) -> None: ...

    group = RankGroup(
        worker, config or Config(), model_path="nowhere", place=lambda *_: Placed(ranks, None), grace_s=0.01
    )
    group.start()
    return group, ended


@contextmanager
def rank_of(
    worker: Callable[..., Any], config: Config | None = None, *, rows: Any = None, model: str = "model"
) -> Iterator[RankActor]:
    """Yields the only rank of a model, with the worker that `worker` makes and this access to named rows."""
    kind: Any = worker
    kind.section = getattr(worker, "section", "learner")
    actor = RankActor(worker=kind, rank=0, world_size=1, rows=lambda *_: rows)
    with patch.dict(os.environ):
        actor.begin(config or Config())
        port = actor.open_rendezvous(LOOPBACK)
        actor.setup(model_path=model, host=LOOPBACK, port=port, named_rows=rows is not None)
    try:
        yield actor
    finally:
        actor.close()
