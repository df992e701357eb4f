"""What limits a run, in one sentence that names the knob: who waits for whom.

A side that waits is not at fault, the other one is; when both wait at once it is what stands between them. So the
staleness limit, room or publications are only to be changed where generators that they hold back would feed a learner
that waits: one that never waits has nothing to win from them. What a process takes to start is no part of its time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NOTABLE_SHARE = 0.2
"""A side that waits less than this share of its time is not what limits the run."""
NEGLIGIBLE_SHARE = 0.05
"""Less than this share of anybody's time is nothing that a knob could win back."""


class Bound(StrEnum):
    """What a run is limited by."""

    GENERATORS = "generators"
    LEARNER = "learner"
    STALENESS = "staleness"
    CAPACITY = "capacity"
    WEIGHTS = "weights"
    PROMPTS = "prompts"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What limits a run, and a sentence about it for whoever could change that."""

    bound: Bound
    sentence: str


OTHER_WAITS = {
    "blocked_on_capacity": (
        Bound.CAPACITY,
        "Generators wait for room in the buffer",
        "raise buffer.capacity_groups or buffer.capacity_bytes",
    ),
    "paused_for_weights": (
        Bound.WEIGHTS,
        "Generators are paused to load weights",
        "raise weights.publish_every_steps",
    ),
    "starved_of_prompts": (Bound.PROMPTS, "Generators have no prompts", "add prompts, or raise data.epochs"),
}

HELD_BACK = ("blocked_on_staleness", "blocked_on_capacity", "starved_of_prompts")
"""States in which a generator has done all that it may do for now."""


def bottleneck(learner_shares: Mapping[str, float], generator_shares: Mapping[str, float]) -> Bottleneck:
    """From both sides' time by state, as shares that add up to 1.

    >>> bottleneck({"waiting_for_groups": 0.5}, {"generating": 0.6, "blocked_on_staleness": 0.4}).bound
    <Bound.STALENESS: 'staleness'>
    >>> bottleneck({"optimizer": 1.0}, {"generating": 0.6, "blocked_on_staleness": 0.4}).bound
    <Bound.LEARNER: 'learner'>
    """
    learner_shares, generator_shares = _once_started(learner_shares), _once_started(generator_shares)
    waiting = learner_shares.get("waiting_for_groups", 0.0)
    if waiting < NOTABLE_SHARE:
        return _of_the_learner(generator_shares, waiting)
    blocked = generator_shares.get("blocked_on_staleness", 0.0)
    other = max(OTHER_WAITS, key=lambda state: generator_shares.get(state, 0.0))
    if generator_shares.get(other, 0.0) >= max(waiting, blocked):
        bound, what, mend = OTHER_WAITS[other]
        return _found(bound, what, generator_shares[other], mend)
    if blocked >= NOTABLE_SHARE:
        return _found(
            Bound.STALENESS,
            "The learner waits for groups",
            waiting,
            f"and generators for its next version {_percent(blocked)}: raise staleness.max_versions while the "
            "effective sample size is high",
            joint=" ",
        )
    idle = generator_shares.get("idle", 0.0)
    mend = "add generators, or slots (generator.max_concurrent_groups) where cores or GPUs are free"
    if idle >= NOTABLE_SHARE:
        mend = (
            f"slots stand idle {_percent(idle)}, as they do before the first weights, in evaluations and at the end; "
            "else raise generator.max_starts_per_s, or add generators"
        )
    if blocked >= NEGLIGIBLE_SHARE:
        mend += f"; the staleness limit holds them back {_percent(blocked)}"
    return _found(Bound.GENERATORS, "The learner waits for groups", waiting, mend)


def _once_started(shares: Mapping[str, float]) -> dict[str, float]:
    """Parts of the time after the start; none when there is no such time."""
    running_share = 1.0 - shares.get("starting", 0.0)
    running = {state: share for state, share in shares.items() if state != "starting"}
    return {state: share / running_share for state, share in running.items()} if running_share > 0 else {}


def _of_the_learner(generator_shares: Mapping[str, float], waiting: float) -> Bottleneck:
    """Of a learner that hardly waits: whatever holds generators back, more of their work would wait for it."""
    blocked = sum(generator_shares.get(state, 0.0) for state in HELD_BACK)
    if blocked >= NOTABLE_SHARE:
        mend = "add learner ranks"
        if waiting < NEGLIGIBLE_SHARE:
            mend += "; a lower staleness.max_versions, above 0, would train fresher data at the same speed"
        return _found(Bound.LEARNER, "Generators wait for the learner", blocked, mend)
    return Bottleneck(
        bound=Bound.NOTHING, sentence=f"Neither side waits for more than {_percent(NOTABLE_SHARE)} of the time."
    )


def _found(bound: Bound, what: str, share: float, mend: str, *, joint: str = ": ") -> Bottleneck:
    return Bottleneck(bound=bound, sentence=f"{what} {_percent(share)} of the time{joint}{mend}.")


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
