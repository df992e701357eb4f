"""Computes advantages a second time by plain formulas, to check the learner's: one for each sample, from the rewards of
a step, or one for each token. Those of tokens follow from the reward of the sample: without a critic after its baseline
is subtracted, and with a critic from the reward and the critic's values.

The axes of an estimator are its settings: the mapping of its row in docs/losses.md, with all defaults filled in. The
code is loops over Python's floats, one sample or token after the other.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from asyncrl.witness.objective import Axes

EQUAL = 1e-12
"""Values count as equal up to rounding if their sum of squares about their mean is at most this share of a larger sum
of squares: that of the whole group, or of the values themselves."""


class Scored(NamedTuple):
    """One sample with a reward: the id of its prompt group, its total reward, its length in tokens, and its reward by
    component."""

    group: int
    reward: float
    tokens: int
    components: Mapping[str, float] = {}


def shaped(reward: float, *, tokens: int, truncated: bool, limit_tokens: int, buffer_tokens: int) -> float:
    """Returns a reward plus the soft penalty on overlong samples (DAPO, 2503.14476, eq. 13). The penalty is −1 for a
    truncated sample. Otherwise it falls linearly from 0 to −1 over the last `buffer_tokens` tokens before the limit."""
    if truncated:
        return reward - 1
    return reward - min(max((tokens - (limit_tokens - buffer_tokens)) / buffer_tokens, 0.0), 1.0)


def of_samples(axes: Axes, samples: Sequence[Scored]) -> list[float]:
    """Returns the advantage of each sample of a step, by the estimator that `axes` describes. Groups may have different
    sizes, and their samples may be in any order."""
    found = [0.0] * len(samples)
    compared, groups = _compared(axes, samples), _groups(samples)
    for name, rewards in compared.items():
        whole_step = _scale_of_step(axes, groups, rewards)
        for group in groups:
            for n in group:
                centred = _centred(axes, samples, rewards, group, n)
                scale = _scale_of_group(axes, rewards, group, n) if whole_step is None else whole_step
                found[n] += axes["weights"].get(name, 1.0) * centred / scale
    if axes["whiten"] == "none":
        return found
    counts = [float(sample.tokens) if axes["whiten"] == "tokens" else 1.0 for sample in samples]
    equal, raw = equal_groups(axes, samples), {group[0] for group in groups if _is_raw(axes, group)}
    return [0.0 if equal[n] and n not in raw else value for n, value in enumerate(whiten(axes, found, counts))]


def equal_groups(axes: Axes, samples: Sequence[Scored]) -> list[bool]:
    """Returns True for each sample of a group whose rewards, as the estimator compares them, are all equal. It is False
    for all samples if the estimator does not compare the samples of a group."""
    groups, compared = _groups(samples), _compared(axes, samples).values()
    equal = {n for group in groups if all(_are_equal(rewards, group) for rewards in compared) for n in group}
    return [_compares_groups(axes) and n in equal for n in range(len(samples))]


def _groups(samples: Sequence[Scored]) -> list[list[int]]:
    """Returns the indices of the samples of each prompt group."""
    ids = dict.fromkeys(sample.group for sample in samples)
    return [[n for n, sample in enumerate(samples) if sample.group == group] for group in ids]


def _compares_groups(axes: Axes) -> bool:
    return axes["baseline"] in ("group_mean", "leave_one_out", "length_weighted_mean", "soft_value")


def _compared(axes: Axes, samples: Sequence[Scored]) -> dict[str, list[float]]:
    """Returns the rewards that the estimator compares, one for each sample: those of each component by its name, or
    only the total under the name "". A length penalty divides a reward by 1 + α · length / mean length of the group
    (GR3)."""
    if axes["rewards"] == "components":
        names = dict.fromkeys(name for sample in samples for name in sample.components)
        found = {name: [sample.components.get(name, 0.0) for sample in samples] for name in names}
    else:
        found = {"": [sample.reward for sample in samples]}
    if axes["length_penalty"] is not None:
        for group in _groups(samples):
            mean = fmean([float(samples[n].tokens) for n in group])
            for n in group:
                for rewards in found.values():
                    rewards[n] /= 1 + axes["length_penalty"] * samples[n].tokens / max(mean, 1e-9)
    return found


def _are_equal(rewards: Sequence[float], group: Sequence[int]) -> bool:
    return len({rewards[n] for n in group}) == 1


def _is_raw(axes: Axes, group: Sequence[int]) -> bool:
    """Returns True if a group has only one sample, and the advantage of such a sample is its reward itself."""
    return len(group) == 1 and axes["single"] == "raw"


def _squares(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _deviation(axes: Axes, squares: float, count: float) -> float:
    """Returns the standard deviation of `count` values as a divisor, with the eps of the axes. `squares` is the sum of
    their squares about their mean."""
    variance = squares / max(count - 1 if axes["divisor"] == "n-1" else count, 1)
    if axes["eps_in"] == "variance":
        return math.sqrt(variance + axes["eps"])
    return math.sqrt(variance) + float(axes["eps"])


def _centred(axes: Axes, samples: Sequence[Scored], rewards: Sequence[float], group: Sequence[int], n: int) -> float:
    """Returns reward − baseline of sample n of a step. `group` has the indices of all samples of its group. With a
    baseline that compares the samples of a group, it is the reward if the group `_is_raw`, else exactly 0 if all
    rewards of the group are equal."""
    if not _compares_groups(axes) or _is_raw(axes, group):
        return rewards[n] - (fmean(rewards) if axes["baseline"] == "batch_mean" else 0.0)
    if _are_equal(rewards, group):
        return 0.0
    own = [rewards[m] for m in group]
    match axes["baseline"]:
        case "group_mean":
            return rewards[n] - fmean(own)
        case "leave_one_out":
            return rewards[n] - fmean([rewards[m] for m in group if m != n])
        case "length_weighted_mean":
            tokens = sum(samples[m].tokens for m in group)
            weighted = math.fsum(samples[m].tokens * rewards[m] for m in group)
            return rewards[n] - (weighted / tokens if tokens else fmean(own))
    # soft_value: temperature · log of the mean of e^(r / temperature)
    tau, largest = axes["temperature"], max(own)
    return rewards[n] - largest - float(tau * math.log(fmean([math.exp((each - largest) / tau) for each in own])))


def _scale_of_step(axes: Axes, groups: Sequence[Sequence[int]], rewards: Sequence[float]) -> float | None:
    """Returns the divisor that is the same for all samples of a step; None if each group or sample has its own."""
    match axes["scale"]:
        case "none":
            return 1.0
        case "batch_std":
            return _deviation(axes, _squares(rewards), len(rewards))
        case "informative_share":
            alone = sum(_is_raw(axes, group) and rewards[group[0]] != 0 for group in groups)
            teaching = alone + sum(len(group) for group in groups if not _are_equal(rewards, group))
            return max(1, teaching) / len(rewards)
        case "nonzero_share":
            return max(1, sum(reward != 0 for reward in rewards)) / len(rewards)
    return None


def _scale_of_group(axes: Axes, rewards: Sequence[float], group: Sequence[int], n: int) -> float:
    own, others = [rewards[m] for m in group], [rewards[m] for m in group if m != n]
    if len(own) == 1:
        return 1.0
    match axes["scale"]:
        case "group_std":
            return _deviation(axes, _squares(own), len(own))
        case "leave_one_out_std":
            return 1.0 if _squares(others) <= EQUAL * _squares(own) else _deviation(axes, _squares(others), len(others))
        case "group_mean":
            return 1.0 if _are_equal(rewards, group) else fmean(own) + float(axes["eps"])
    raise ValueError(f"the witness has no formula for the scale {axes['scale']}")


def whiten(axes: Axes, values: Sequence[float], counts: Sequence[float]) -> list[float]:
    """Returns (v − mean) / deviation, where value i counts `counts[i]` times; 0 where the count is 0, or if all values
    are equal. With the axis `keep_mean`, the mean is then added to the values whose count is above 0."""
    inside = [(value, count) for value, count in zip(values, counts, strict=True) if count > 0]
    if not inside:
        return [0.0] * len(values)
    total = math.fsum(count for _, count in inside)
    mean = math.fsum(value * count for value, count in inside) / total
    divisor = _deviation(axes, math.fsum(count * (value - mean) ** 2 for value, count in inside), total)
    equal = len({value for value, _ in inside}) == 1
    back = mean if axes["keep_mean"] else 0.0
    return [
        0.0 if count == 0 else back if equal else (value - mean) / divisor + back
        for value, count in zip(values, counts, strict=True)
    ]


# --- one advantage for each trained token of a sample ---------------------------------------------------------------


def token_rewards(outcome: float, kl: Axes | None, policy: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Returns the reward of each trained token of a sample: −β · KL to the reference, or 0 if `kl` is None. The last
    token also gets `outcome`, the reward of the sample."""
    found, apart = [0.0] * len(policy), [p - q for p, q in zip(policy, reference or policy, strict=True)]
    if kl is not None:
        found = [-kl["beta"] * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[kl["kind"]] for d in apart]
    return [*found[:-1], found[-1] + outcome] if found else []


def discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    """Returns R_t = r_t + γ · R_{t+1} of each token, the sum Σ_k γ^k · r_{t+k} (REINFORCE++, 2501.03262)."""
    backward = accumulate(reversed(rewards), lambda later, reward: reward + gamma * later)
    return [*backward][::-1]


def generalised(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Returns Σ_k (γλ)^k · δ_{t+k} with δ_t = r_t + γ · V_{t+1} − V_t (GAE, 1506.02438), V = 0 after the last token."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * later - now for r, now, later in zip(rewards, values, following, strict=True)]
    return discounted(deltas, gamma * lam)


def vtrace(
    rewards: Sequence[float], values: Sequence[float], log_ratios: Sequence[float], gamma: float
) -> tuple[list[float], list[float]]:
    """Returns V-trace's advantages and targets with ρ̄ = c̄ = 1 (1802.01561, remark 1): v_t = V_t + ρ_t · δ_t +
    γ · c_t · (v_{t+1} − V_{t+1}), and the advantages r_t + γ · v_{t+1} − V_t."""
    following, targets, apart = [*values[1:], 0.0], list[float](), 0.0
    for r, now, after, log_ratio in zip(*map(reversed, (rewards, values, following, log_ratios)), strict=True):
        apart = math.exp(min(log_ratio, 0.0)) * (r + gamma * after - now + gamma * apart)
        targets.append(now + apart)
    targets.reverse()
    later = [*targets[1:], 0.0]
    return [r + gamma * v - now for r, v, now in zip(rewards, later, values, strict=True)], targets


class TokenColumns(NamedTuple):
    """The columns of one sample, with one entry for each trained token. A column that the estimator does not read is
    empty. `values` are those of the critic. The others are log-probs: `policy` under the weights at the step's start,
    `behaviour` as the sampler had them."""

    policy: Sequence[float]
    reference: Sequence[float] = ()
    behaviour: Sequence[float] = ()
    values: Sequence[float] = ()


def of_tokens(rule: Axes, outcome: float, columns: TokenColumns) -> tuple[list[float], list[float]]:
    """Returns the advantages of the trained tokens of a sample before the whitening, and their returns. `outcome` is
    the sample's reward; if there is no critic, its baseline is already subtracted. `rule` has the name of the estimator
    and its settings: γ, λ, the KL."""
    rewards = token_rewards(outcome, rule["kl"], columns.policy, columns.reference)
    match rule["name"]:
        case "discounted":
            found = discounted(rewards, rule["gamma"])
            return found, found
        case "gae":
            alpha = rule["length_alpha"]
            # λ = 1 − 1/(α · tokens), at least 0 (VAPO, 2504.05118)
            lam = rule["lam"] if alpha is None else max(0.0, 1 - 1 / (alpha * max(1, len(rewards))))
            own = generalised(rewards, columns.values, rule["gamma"], lam)
            of_value = generalised(rewards, columns.values, rule["gamma"], rule["value_lam"])
            return own, [a + v for a, v in zip(of_value, columns.values, strict=True)]
        case "vtrace":
            log_ratios = [p - b for p, b in zip(columns.policy, columns.behaviour, strict=True)]
            return vtrace(rewards, columns.values, log_ratios, rule["gamma"])
    raise ValueError(f"the witness has no formula for the estimator {rule['name']}")


def unlike(raw: Sequence[float], found: Sequence[float], *, whitened: bool) -> float:
    """Returns the largest difference of `found` from `raw`, as a share of the largest absolute number in `found`.
    `found` are the advantages with which tokens were trained, and `raw` those by the formulas, before any whitening.

    The whitening of a step shifts and scales all of its tokens in the same way. So with `whitened`, `raw` is first
    shifted and scaled as fits `found` best.
    """
    shift, scale = 0.0, 1.0
    if whitened and raw:
        mean_raw, mean_found = fmean(raw), fmean(found)
        spread = math.fsum((value - mean_raw) ** 2 for value in raw)
        together = math.fsum((a - mean_raw) * (b - mean_found) for a, b in zip(raw, found, strict=True))
        # no negative scale: advantages with the opposite sign are not those of these rewards
        scale = max(together / spread, 0.0) if spread > EQUAL * math.fsum(value**2 for value in raw) else 0.0
        shift = mean_found - scale * mean_raw
    apart = max((abs(shift + scale * value - other) for value, other in zip(raw, found, strict=True)), default=0.0)
    return apart / (max((abs(value) for value in found), default=0.0) or 1.0)
