"""Small messages between the ranks, and calls that all ranks refuse together."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.errors import REFUSALS, CallRefused, RowsLost
from asyncrl.user_code import describe_error


def gather_objects(value: Any, *, group: dist.ProcessGroup) -> list[Any]:
    """Returns one small object of every rank of `group`, in rank order. A collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class Collectives:
    """Rank `rank` of `world_size`. Every method is a collective. It fails after `timeout`."""

    def __init__(self, *, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank, self.world_size = rank, world_size
        # for small objects, on the CPU and separate from the traffic of gradients
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a small tensor over the ranks."""
        dist.all_reduce(values, group=self._control)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """If the body fails on any rank, raises an error on every rank: an error of `REFUSALS` as it is, any other
        error as CallRefused. This is a collective, and the body must not contain another one."""
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
        """Returns one small object of every rank, in rank order. Fails after `learner.collective_timeout_s`."""
        return gather_objects(value, group=self._control)
