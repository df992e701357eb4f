"""The check of a commit's metadata: a contradiction to its ticket is a bug of asyncrl. Pure."""

import math

from asyncrl.buffer.records import GroupMeta, Ticket
from asyncrl.buffer.staleness import Limits
from asyncrl.errors import StalenessViolation


def check_commit(meta: GroupMeta, ticket: Ticket, *, limits: Limits, step: int) -> None:
    """Raises an error if the metadata of a commit contradicts its ticket, or the learner's present `step`.

    StalenessViolation for a token that is older than the ticket, ValueError for anything else.
    """
    if meta.oldest < ticket.oldest:
        raise StalenessViolation(
            f"group {meta.key} has a token of step {meta.oldest}, which is older than step {ticket.oldest} of its "
            "ticket's version and prefix; this is a bug in asyncrl"
        )
    if not meta.oldest <= meta.newest <= step:
        raise ValueError(
            f"group {meta.key} has tokens of steps {meta.oldest} to {meta.newest}, but the learner is at step {step}"
        )
    size = limits.group_size
    columns = [meta.completion_tokens, meta.rewards, meta.truncated, *meta.components.values()]
    lengths = {len(column) for column in (*columns, *filter(None, [meta.read_tokens]))}
    if lengths != {size}:
        raise ValueError(f"group {meta.key} has {sorted(lengths)} samples, but learner.group_size is {size}")
    if not meta.known_rewards or not all(map(math.isfinite, meta.known_rewards)):
        raise ValueError(
            f"group {meta.key} has rewards {meta.rewards}; a sample must have a reward, and all rewards must be finite"
        )
    if not 0 <= meta.row_bytes <= limits.worst_group_bytes:
        raise ValueError(
            f"group {meta.key} takes {meta.row_bytes} bytes, but its reserve booked at most {limits.worst_group_bytes}"
        )
