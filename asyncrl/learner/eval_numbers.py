"""The numbers of a held-out evaluation: the mean reward with its error, and pass@k."""

import math
import statistics
from collections.abc import Sequence


def mean_and_error(rewards: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Returns the mean reward over prompts, and its standard error over prompts, from the rewards of each prompt's
    samples. None for both without prompts. The error is None for one prompt."""
    means = [statistics.fmean(of_prompt) for of_prompt in rewards]
    if not means:
        return None, None
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return sum(means) / len(means), error


def pass_at(rewards: Sequence[Sequence[float]], *, pass_reward: float) -> dict[int, float]:
    """Returns the mean pass@k over prompts, for k = 1, 2, 4, … up to the smallest number of samples, and that number.

    A sample passes with a reward of at least `pass_reward`. With n samples of which c pass, pass@k is
    1 − C(n − c, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv:2107.03374, eq. 1).

    >>> pass_at([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], pass_reward=1.0)
    {1: 0.125, 2: 0.25, 4: 0.5}
    """
    most = min(map(len, rewards), default=0)
    ks = sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most} - {0})
    passed = [(len(of_prompt), sum(reward >= pass_reward for reward in of_prompt)) for of_prompt in rewards]
    return {k: statistics.fmean(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in passed) for k in ks}
