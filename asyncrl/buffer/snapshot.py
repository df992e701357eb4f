"""The state of the replay buffer at one moment, for a checkpoint. Metadata only; the rows of ready groups are saved
beside it.

A snapshot between two calls is consistent, because the buffer is a state machine without threads. It holds no lease: a
leased group counts as ready, since its step has not been trained.
"""

from typing import Annotated

import msgspec

from asyncrl.buffer.failures import FailureState
from asyncrl.buffer.ledger import EndedGroup, LedgerState
from asyncrl.buffer.records import DuePrompt, OpenGroup
from asyncrl.common.version import Version

SCHEMA = 3
"""Version of the format. It changes when an older program could not read a snapshot, or would misread it."""


class BufferSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a `ReplayBuffer` when the learner was at `version`.

    `next_group` is the number of prompts that were issued, so it is also the position in the order of the prompts.
    `last_attempts` has the ended groups whose last attempt was not attempt 0, or was not committed. `ended` has the
    groups that reached a final fate since the last ack. Tickets and prompts have `NO_TASK` instead of their tasks,
    which are in the data of the run.
    """

    schema: Annotated[int, msgspec.Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
    version: Version
    next_group: int
    exhausted: bool
    open: tuple[OpenGroup, ...]
    waiting: tuple[DuePrompt, ...]
    last_attempts: dict[int, tuple[int, bool]]
    ledger: LedgerState
    failures: FailureState
    ended: tuple[EndedGroup, ...] = ()
