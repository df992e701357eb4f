"""Measures how far the training data is from the policy that is trained. The measures are sums over tokens, except for
the measures with `max` in their names, which are maxima. `MetricSums` combines micro-batches and ranks: it adds sums,
and takes the maximum of maxima.

They work for every objective. Legend: B rows, T next tokens. beh: the sampler's log-probs. prox: log-probs under the
weights at the start of the step. ρ = e^(prox − beh). ρ is not truncated here: with a truncated ρ, the effective share
of samples would always look healthy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

MAX_FLOAT64_LOG_RATIO = 300.0
"""Limit of the size of a log-ratio in nats, for sums in float64: e^600 still fits, so the square of every ratio up to
this limit can be summed (F22 in docs/faults.md). The loss itself is computed in float32 and has the limit
`token_terms.MAX_FLOAT32_LOG_RATIO`."""

_WEIGHT_SQUARED = "importance_weight_squared"

AVERAGED_METRICS = frozenset({"lr", "wd", "reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length"})
"""Metrics of a loss that are averaged over the micro-batches, because every micro-batch reports a value of the whole
batch and not its part of a sum."""


@dataclass(frozen=True, slots=True)
class MetricSums:
    """(sum, count) of each measure of one micro-batch, rank or step, by name. `+` adds two of them.

    A measure with `max` in its name is at least 0, and `+` takes the larger value instead of the sum. A measure that is
    not in `pairs` was not measured.
    """

    pairs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: "MetricSums") -> "MetricSums":
        total = dict(self.pairs)
        for name, (value, count) in other.pairs.items():
            before, counted = total.get(name, (0.0, 0.0))
            total[name] = (max(before, value) if _extreme(name) else before + value, counted + count)
        return MetricSums(total)

    @property
    def ess(self) -> float:
        """Effective share of the N tokens, (Σρ)² / (N · Σρ²), from 1/N to 1, where ρ is the importance weight of a
        token. It is NaN if there are no tokens."""
        if "importance_weight_mean" not in self.pairs:
            return math.nan
        (first, count), (second, _) = (self.pairs[name] for name in ("importance_weight_mean", _WEIGHT_SQUARED))
        return first / count * (first / second)

    def means(self) -> dict[str, float]:
        """Returns sum / count of each measure that has tokens, and maxima as they are. `importance_weight_squared` is
        left out. `kernel_ess_ratio` replaces `kernel` and `kernel_squared`. It is (Σκ)² / (N · Σκ²) over the N tokens
        whose advantage is not 0, where κ is the weight with which the advantage pushes the token (`kernel_sums`). It is
        0 if κ is 0 for all of them."""
        means = {
            name: value if _extreme(name) else value / count
            for name, (value, count) in self.pairs.items()
            if count > 0 and name != _WEIGHT_SQUARED
        }
        if "kernel" not in means:
            return means
        first, second = means.pop("kernel"), means.pop("kernel_squared")
        return means | {"kernel_ess_ratio": first**2 / second if second > 0 else 0.0}


@torch.no_grad()
def off_policy_sums(
    *,
    proximal_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    on_policy_BT: torch.Tensor,
    reference_BT: torch.Tensor | None = None,
) -> MetricSums:
    """Returns the sums of all measures over the trained tokens of one micro-batch; empty if it has no trained token.
    `StepReport` has the measures under the same names, as fields or in `diagnostics`, except the sum of squares
    `importance_weight_squared`, which only its `ess` uses.

    The measures `on_policy_*` cover only tokens that were sampled with the weight version of the step. For these tokens
    sampler and trainer are the same policy, so their log-probs must agree. A difference shows an error in a cache, a
    temperature or a tokenizer between the two. `on_policy_weight_excess` is ρ − 1, with ρ = e^(proximal − behaviour).

    k1 and k3 estimate KL(behaviour ‖ proximal), http://joschu.net/blog/kl-approx.html. `kl_to_reference_nats` is the
    estimator k3 of KL(proximal ‖ reference) at the sampled tokens; it is measured only with `reference_BT`.
    """
    log_rho = (proximal_BT.double() - behaviour_BT.double())[mask_BT]
    if log_rho.numel() == 0:
        return MetricSums()
    bounded = log_rho.clamp(-MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO)
    rho = bounded.exp()
    totals = {
        "entropy_nats": entropy_BT.double()[mask_BT].sum(),
        "importance_weight_mean": rho.sum(),
        _WEIGHT_SQUARED: rho.square().sum(),
        "importance_weight_max": rho.max(),
        "kl_behaviour_k1_nats": -log_rho.sum(),
        "kl_behaviour_k3_nats": (rho - 1 - bounded).sum(),
        "exp_abs_log_rho_mean": bounded.abs().exp().sum(),
        "abs_log_rho_max_nats": log_rho.abs().max(),
    }
    if reference_BT is not None:
        log_ratio = (reference_BT.double() - proximal_BT.double())[mask_BT].clamp(
            -MAX_FLOAT64_LOG_RATIO, MAX_FLOAT64_LOG_RATIO
        )
        totals["kl_to_reference_nats"] = (log_ratio.exp() - 1 - log_ratio).sum()
    pairs = {name: (float(total), float(log_rho.numel())) for name, total in totals.items()}
    same = on_policy_BT[mask_BT]
    # a NaN is replaced by inf, because Python's max(), by which `MetricSums` combines micro-batches, may ignore a NaN
    parity, excess = log_rho[same].abs().nan_to_num(nan=torch.inf), rho[same] - 1
    if parity.numel():
        number = float(parity.numel())
        pairs["on_policy_parity_max_nats"] = (float(parity.max()), number)
        pairs["on_policy_parity_mean_nats"] = (float(parity.sum()), number)
        pairs["on_policy_parity_mean_square"] = (float(parity.square().sum()), number)
        pairs["on_policy_weight_excess"] = (float(excess.sum()), number)
        pairs["on_policy_weight_excess_mean_square"] = (float(excess.square().sum()), number)
    return MetricSums(pairs)


def adds_up(name: str) -> bool:
    """Returns True if a metric's values of the micro-batches are parts of a sum: it is neither a maximum, nor a
    minimum, nor averaged."""
    return _extreme(name) is None and name not in AVERAGED_METRICS


def merge_metrics(parts: Iterable[Mapping[str, float]], *, updates: int) -> dict[str, float]:
    """Combines the loss metrics of all micro-batches and ranks of a `train` call into one value for each metric.
    `updates` is the number of optimizer updates of the call.

    If `max` or `min` is a word of the name after an underscore, the result is the maximum or minimum.
    `AVERAGED_METRICS` are averaged over the micro-batches. All other metrics are summed over an update's micro-batches
    and averaged over the updates.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(float(value))
    return {name: _merged(name, found, updates=updates) for name, found in values.items()}


def _merged(name: str, values: Sequence[float], *, updates: int) -> float:
    extreme = _extreme(name)
    if extreme is not None:
        return extreme(values)
    return sum(values) / (updates if adds_up(name) else len(values))


def _extreme(name: str) -> Callable[[Sequence[float]], float] | None:
    words = name.split("_")[1:]
    if "max" in words:
        return max
    return min if "min" in words else None
