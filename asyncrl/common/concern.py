"""The subjects of the headline and of the health notes of a run."""

from enum import StrEnum


class Concern(StrEnum):
    """The subject of a run's headline (its most urgent problem in one sentence, `asyncrl.views.headline`), the most
    urgent subject first. All but the last are subjects of health notes too, whose rules are in
    `asyncrl.views.health`."""

    NOTHING_TRAINED = "nothing_trained"
    NOT_VERIFIED = "not_verified"
    CUT = "cut"
    NO_TOOL_CALLS = "no_tool_calls"
    ONE_TURN = "one_turn"
    ZERO_REWARDS = "zero_rewards"
    NO_GRADIENT = "no_gradient"
    FAILURES = "failures"
    PARITY = "parity"
    UNCHANGED = "unchanged"
    COMPONENTS = "components"
    ENTROPY = "entropy"
    LENGTH = "length"
    STALE_DATA = "stale_data"
    HIGH_KL = "high_kl"
    HELDOUT = "heldout"
    BOTTLENECK = "bottleneck"
