"""Answers of a replica to held-out questions. They are not counted in the ledger."""

import asyncio
import logging
from collections.abc import Sequence

from asyncrl.buffer.failure_records import Failure
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.failures import FailureReports
from asyncrl.data.prompts import Task
from asyncrl.errors import RolloutError, RunError
from asyncrl.generation.rollout import Rollouts

logger = logging.getLogger(__name__)

Answer = tuple[float, ...] | Failure
"""The rewards of the samples of a held-out question, or the failure of its rollout."""


async def evaluate(
    tasks: Sequence[Task], *, rollouts: Rollouts, coordinator: CoordinatorClient, at_once: int
) -> list[Answer]:
    """Returns the answer to each task. At most `at_once` tasks run at a time.

    If a rollout fails, its entry is the failure, and the other rollouts go on.
    """
    limit = asyncio.Semaphore(at_once)

    async def one(task: Task) -> Answer:
        async with limit:
            try:
                return await rollouts.answers(task)
            except RolloutError as error:
                logger.warning("held-out question %.40r failed (%s): %s", task.question, error.reason, error)
                return await _reported(Failure.of(error, prompt=task.prompt), coordinator)

    return list(await asyncio.gather(*[one(task) for task in tasks]))


async def _reported(failure: Failure, coordinator: CoordinatorClient) -> Failure:
    """Reports the failure at once: the evaluation may go on for minutes."""
    try:
        await coordinator.call(FailureReports.heldout_failed, failure)
    except (RunError, TimeoutError) as lost:
        logger.warning("the failure of a held-out question did not reach the buffer: %s", lost)
    return failure
