"""Small messages between the ranks, and blocks of code whose error on one rank is raised on all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncrl.errors import REFUSALS, AsyncRLError, CallRefused, CheckpointError, RowsLost
from asyncrl.user_code import describe_error

T = TypeVar("T")


def gather_objects(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Returns one small object of every rank of `group`, in rank order. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def on_first_rank(action: Callable[[], Any], *, group: dist.ProcessGroup) -> None:
    """Runs `action()` on rank 0. If it fails, raises its error on all ranks: an asyncrl error as it is, any other as a
    CheckpointError. A collective."""
    on_all_ranks(lambda: action() if dist.get_rank(group) == 0 else None, group=group)


def on_all_ranks(action: Callable[[], T], *, group: dist.ProcessGroup) -> T:
    """Runs `action()` on every rank, and returns this rank's result. If it fails on any rank, raises the error of the
    first such rank on all ranks: an asyncrl error as it is, any other as a CheckpointError. A collective."""
    outcome: T | None = None
    failure: AsyncRLError | None = None
    try:
        outcome = action()
    except AsyncRLError as error:
        failure = error
    except Exception as error:
        failure = CheckpointError(f"rank {dist.get_rank(group)}: {type(error).__name__}: {error}")
    first = next((error for error in gather_objects(failure, group=group) if error is not None), None)
    if first is not None:
        raise first
    return outcome  # type: ignore[return-value]


class Collectives:
    """This process as rank `rank` of `world_size`: it exchanges small objects with the other ranks. Every method is a
    collective, which fails after `timeout`."""

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank, self.world_size = rank, world_size
        # for small objects, on the CPU and separate from the traffic of gradients
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Adds up a small tensor over the ranks, in place, and returns it."""
        dist.all_reduce(values, group=self._control)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the body fails on any rank, raises the error of the first such rank on every rank: an error of `REFUSALS`
        as it is, any other error as CallRefused. But if any rank raises RowsLost, every rank raises one RowsLost with
        the lost rows of all ranks. This is a collective, and the body must not contain another one."""
        refusal: Exception | None = None
        try:
            yield
        except REFUSALS as error:
            refusal = error
        except Exception as error:  # a wrong argument of the caller must not end the ranks
            refusal = CallRefused(describe_error(error))
        refusals: list[Exception] = [found for found in self.gather(refusal) if found is not None]
        lost = [found for found in refusals if isinstance(found, RowsLost)]
        if lost:
            raise RowsLost("; ".join(map(str, lost)), sample_ids=[name for error in lost for name in error.sample_ids])
        if refusals:
            raise refusals[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns one small object of every rank, in rank order."""
        return gather_objects(value, group=self._control)

    def gather_on_first(self, value: Any) -> list[Any]:
        """Returns one object of every rank on rank 0, in rank order, and an empty list on the other ranks."""
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, gathered, group=self._control)
        return gathered or []
