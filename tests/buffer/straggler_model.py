"""`staleness.on_deadline` by its definition, one group after the other. The buffer treats several at once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from asyncrl.config.schema import OnDeadline


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A reserved group. `extended` is the deadline that `mask` would give it; `last_attempt` as in `requeue`."""

    group: int
    deadline: int
    tokens: int
    extended: int
    last_attempt: bool


def treated(
    policy: OnDeadline, stragglers: Mapping[str, Straggler], *, ready: Collection[int], step: int, per_step: int
) -> list[str] | None:
    """Returns the stragglers that the policy treats so that rule (2) holds at `step`; None if that is not possible.

    `ready` has the deadlines of the ready groups that the lease leaves behind.
    """
    left = {key: straggler.deadline for key, straggler in stragglers.items()}
    chosen: list[str] = []
    while (deadline := _first_violation([*left.values(), *ready], step=step, per_step=per_step)) is not None:
        able = [key for key in left if key not in chosen and _able(policy, stragglers[key], deadline)]
        if not able:
            return None
        key = min(able, key=lambda key: (stragglers[key].tokens, stragglers[key].group))
        chosen.append(key)
        if policy == "mask":
            left[key] = stragglers[key].extended
        else:
            del left[key]
    return chosen


def _able(policy: OnDeadline, straggler: Straggler, deadline: int) -> bool:
    can = {
        "wait": False,
        "requeue": not straggler.last_attempt,
        "drop": True,
        "mask": straggler.extended > deadline,
    }
    return can[policy] and straggler.deadline <= deadline


def _first_violation(deadlines: Collection[int], *, step: int, per_step: int) -> int | None:
    for deadline in sorted(deadlines):
        if sum(each <= deadline for each in deadlines) > (deadline - step) * per_step:
            return deadline
    return None
