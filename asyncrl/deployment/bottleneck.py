"""Who waits for whom, in one sentence that names the knob."""

from collections.abc import Mapping

NOTABLE_SHARE = 0.2
"""A side that waits less than this share of its time is not what limits the run."""
NEGLIGIBLE_SHARE = 0.05
"""Generators that are refused less than this share of their time would not generate more under a higher limit."""

MENDS = {
    "waiting_for_groups": (
        "The learner waits for groups",
        "add generators or slots (generator.max_concurrent_groups) where cores or GPUs are free",
    ),
    "blocked_on_staleness": (
        "Generators wait for the learner",
        "add learner ranks, or raise staleness.max_versions if the effective sample size is high",
    ),
    "blocked_on_capacity": (
        "Generators wait for room in the buffer",
        "raise buffer.capacity_groups or buffer.capacity_bytes",
    ),
    "paused_for_weights": ("Generators are paused to load weights", "raise weights.publish_every_steps"),
    "starved_of_prompts": ("Generators have no prompts", "add prompts, or raise data.epochs"),
}


def who_waits(learner_shares: Mapping[str, float], generator_shares: Mapping[str, float]) -> str:
    """The longest wait of either side, with what to do about it.

    >>> who_waits({"waiting_for_groups": 0.5, "optimizer": 0.5}, {"generating": 0.8, "blocked_on_staleness": 0.2})
    'The learner waits for groups 50 % of the time: add generators, or raise staleness.max_versions.'
    """
    waits = {state: share for state, share in {**learner_shares, **generator_shares}.items() if state in MENDS}
    worst = max(waits, key=lambda state: waits[state], default="")
    if not worst or waits[worst] < NOTABLE_SHARE:
        return f"Neither side waits for more than {NOTABLE_SHARE * 100:.0f} % of the time."
    what, mend = MENDS[worst]
    if worst == "waiting_for_groups" and generator_shares.get("blocked_on_staleness", 0.0) >= NEGLIGIBLE_SHARE:
        mend = "add generators, or raise staleness.max_versions"
    return f"{what} {waits[worst] * 100:.0f} % of the time: {mend}."
