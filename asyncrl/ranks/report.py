"""Combines what each rank planned and did in a step, over ranks and updates. Needs no model and no process group.

Invariants: sums are added before any division, so that micro-batches, updates and ranks are weighted by their tokens. A
step without a trained token causes no division by zero (F24).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from asyncrl.algorithms.diagnostics import MetricSums, adds_up, merge_metrics
from asyncrl.ranks.digest import XXH3, combined
from asyncrl.weights.parity import Differences
from asyncrl.witness.judge import Finding, worst

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The results of one step, over all ranks.

    `skipped` is true if no update was applied, because the loss or the gradient norm of every update was not finite on
    some rank (F21 in docs/faults.md). A step without a trained token has no update, and does not count as skipped. Eval
    mode applies no update: `updates_applied` then counts the updates with a finite loss, and `grad_norm` is 0. `loss`
    and `grad_norm` are means over the updates that have a trained token.
    """

    skipped: bool = False
    updates_applied: int = 0
    updates_nonfinite: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    trained_tokens: int = 0
    trained_samples: int = 0
    entropy_nats: float = 0.0
    ess: float = 1.0
    importance_weight_mean: float = 1.0
    importance_weight_max: float = 1.0
    kl_behaviour_k1_nats: float = 0.0
    kl_behaviour_k3_nats: float = 0.0
    on_policy_tokens: int = 0
    on_policy_parity_max_nats: float = 0.0
    on_policy_parity_mean_nats: float = 0.0
    on_policy_parity_mean_square: float = 0.0
    on_policy_weight_excess: float = 0.0
    on_policy_weight_excess_mean_square: float = 0.0
    token_staleness: tuple[int, ...] = ()
    """Trained tokens by staleness: entry s is the number of tokens that are s versions old."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name: the measures of `asyncrl.algorithms.kernel`, except for a user's loss that takes logits;
    with ρ the importance weight of a token, the mean e^|log ρ| and the largest |log ρ|; the KL to the reference; the
    tokens of the rows divided by the tokens that went through the model; the number of tokens that were left out
    because a log-prob or advantage was not finite; the memory of the fullest GPU; and the β of a penalty whose β
    follows the KL (`control`). A measurement that was not made has no entry."""
    loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss's own metrics, added over micro-batches and ranks and averaged over updates (`merge_metrics` says how
    extremes and averages are combined). The presets have `clipped_ratio` and `gated_ratio`."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds of rank 0 in the stages `log_probs`, `forward_backward`, `optimizer`, and if the step is
    witnessed `witness`."""
    model_flops: int | None = None
    """FLOPs of the training passes of all ranks (in eval mode only forward), as `asyncrl.policy.flops` counts them.
    None if they are not counted, as for a critic."""
    peak_flops_per_s: float | None = None
    """Peak rate of the ranks' devices together, in the precision of the passes. None if it is not known."""
    weights_before: int = 0
    """Digest of the weights at the start of the step (`asyncrl.ranks.digest`)."""
    weights_after: int = 0
    """Digest of the weights after the step."""
    weights_before_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Digests of the same weights as `weights_before`, by kind, for all kinds but `digest_kind`. Only the steps after a
    checkpoint was loaded have them, up to the first one that applies an update; else empty."""
    digest_kind: str = XXH3
    """Kind of the digests `weights_before` and `weights_after`, one of `asyncrl.ranks.digest.KINDS`."""
    findings: Mapping[str, Finding] = field(default_factory=dict)
    """The worst finding of the witness (`asyncrl.witness`) for each check, by the check's name."""

    @property
    def kl_nats(self) -> dict[str, float]:
        """The KL of the policy to another one, by the name of the other (`reference`, `behaviour`). The β of a penalty
        may follow it. A KL that is not finite has no entry. Empty if the step was skipped or trained no token."""
        found = {"reference": self.diagnostics.get("kl_to_reference_nats"), "behaviour": self.kl_behaviour_k3_nats}
        if self.skipped or not self.trained_tokens:
            return {}
        return {policy: value for policy, value in found.items() if value is not None and math.isfinite(value)}

    @property
    def on_policy_differences(self) -> Differences:
        """The differences between the engine's and the learner's log-probs of the on-policy tokens."""
        tokens = self.on_policy_tokens
        return Differences(
            tokens=tokens,
            sum_nats=self.on_policy_parity_mean_nats * tokens,
            sum_squares=self.on_policy_parity_mean_square * tokens,
            max_nats=self.on_policy_parity_max_nats,
            weight_excess=self.on_policy_weight_excess * tokens,
            weight_excess_squares=self.on_policy_weight_excess_mean_square * tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """How much is trained in one optimizer update: by one micro-batch, one rank, or all ranks together.

    `tokens` and `samples` are the numbers of tokens and samples whose mask is above 0. `valid_toks` and `valid_seqs`
    are the sums of the masks, by which a loss is divided. They differ from `tokens` and `samples` if a mask has
    fractions.
    """

    tokens: int
    samples: int
    valid_toks: float
    valid_seqs: float
    micro_batches: int

    def counts(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the sums of the masks, as float32, under the names that a loss expects."""
        return {
            "global_valid_seqs": torch.tensor(self.valid_seqs, dtype=torch.float32, device=device),
            "global_valid_toks": torch.tensor(self.valid_toks, dtype=torch.float32, device=device),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """The result of one update on one rank. `loss` is the rank's part of the global loss. `finite` and `grad_norm` are
    equal on all ranks."""

    loss: float
    grad_norm: float
    finite: bool
    sums: MetricSums
    micro_batch_metrics: tuple[Mapping[str, float], ...]
    """The loss's own metrics, for every micro-batch that has some. One without a trained token has none."""
    findings: tuple[Finding, ...] = ()
    """The worst finding of the witness (`asyncrl.witness`) on this rank for each check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The results of one rank in a step.

    All ranks have the same plans and learning rate, and outcomes for the same updates, which are those with a trained
    token. `staleness` counts the rank's own trained tokens by staleness. `nonfinite_tokens` were left out of training.
    `real_tokens` is the number of tokens of the rows. `passed_tokens` went through the rank's model: more with padding,
    fewer where packed rows share a prefix. `seconds` are by stage.
    `model_flops` and `peak_flops_per_s` are as in `StepReport`, for this rank. `gpu_memory_bytes` is the most memory
    that its tensors took on its GPU since the step before; None on a CPU. `weights_before`, `weights_after` and
    `weights_before_by_kind` are the rank's parts of the digests. `findings` are those of the witness
    (`asyncrl.witness`) on this rank. `penalty_beta` is the β of the loss's penalty whose β follows the KL (`control`);
    None without one.
    """

    plans: tuple[UpdatePlan, ...]
    outcomes: tuple[UpdateOutcome, ...]
    staleness: Mapping[int, int]
    learning_rate: float
    weight_decay: float
    seconds: Mapping[str, float]
    nonfinite_tokens: int = 0
    real_tokens: int = 0
    passed_tokens: int = 0
    model_flops: int | None = None
    peak_flops_per_s: float | None = None
    gpu_memory_bytes: int | None = None
    weights_before: int = 0
    weights_after: int = 0
    weights_before_by_kind: Mapping[str, int] = field(default_factory=dict)
    digest_kind: str = XXH3
    findings: tuple[Finding, ...] = ()
    penalty_beta: float | None = None


def global_plan(plans: Sequence[UpdatePlan]) -> UpdatePlan:
    """Combines the plans of all ranks for one update, or those of one rank's micro-batches. Counts are added up. The
    number of micro-batches is the largest of any plan."""
    return UpdatePlan(
        tokens=sum(plan.tokens for plan in plans),
        samples=sum(plan.samples for plan in plans),
        valid_toks=sum(plan.valid_toks for plan in plans),
        valid_seqs=sum(plan.valid_seqs for plan in plans),
        micro_batches=max((plan.micro_batches for plan in plans), default=0),
    )


def step_report(ranks: Sequence[RankRecord]) -> StepReport:
    """Returns the report of a step from the records of its ranks."""
    plans, updates = ranks[0].plans, ranks[0].outcomes
    everywhere = [outcome for rank in ranks for outcome in rank.outcomes]
    sums = sum((outcome.sums for outcome in everywhere), MetricSums())
    means = defaultdict(float, sums.means())  # a mean is 0 if there is no trained token
    applied = sum(update.finite for update in updates)
    tokens, samples = sum(plan.tokens for plan in plans), sum(plan.samples for plan in plans)
    loss_metrics = merge_metrics(
        (part for outcome in everywhere for part in outcome.micro_batch_metrics), updates=len(updates)
    )
    return StepReport(
        skipped=bool(updates) and applied == 0,
        updates_applied=applied,
        updates_nonfinite=len(updates) - applied,
        loss=sum(outcome.loss for outcome in everywhere) / max(len(updates), 1),
        grad_norm=sum(update.grad_norm for update in updates) / max(len(updates), 1),
        learning_rate=ranks[0].learning_rate,
        trained_tokens=tokens,
        trained_samples=samples,
        ess=sums.ess,
        on_policy_tokens=int(sums.pairs.get("on_policy_parity_max_nats", (0.0, 0.0))[1]),
        entropy_nats=means["entropy_nats"],
        importance_weight_mean=means["importance_weight_mean"],
        importance_weight_max=means["importance_weight_max"],
        kl_behaviour_k1_nats=means["kl_behaviour_k1_nats"],
        kl_behaviour_k3_nats=means["kl_behaviour_k3_nats"],
        on_policy_parity_max_nats=means["on_policy_parity_max_nats"],
        on_policy_parity_mean_nats=means["on_policy_parity_mean_nats"],
        on_policy_parity_mean_square=means["on_policy_parity_mean_square"],
        on_policy_weight_excess=means["on_policy_weight_excess"],
        on_policy_weight_excess_mean_square=means["on_policy_weight_excess_mean_square"],
        diagnostics={
            **{name: mean for name, mean in means.items() if name not in StepReport.__dataclass_fields__},
            **_packing(ranks),
            **_gpu_memory(ranks),
            "nonfinite_tokens": float(sum(rank.nonfinite_tokens for rank in ranks)),
            **({} if ranks[0].penalty_beta is None else {"penalty_beta": ranks[0].penalty_beta}),
        },
        token_staleness=_histogram([rank.staleness for rank in ranks]),
        loss_metrics=loss_metrics,
        seconds=dict(ranks[0].seconds),
        model_flops=_total([rank.model_flops for rank in ranks]),
        peak_flops_per_s=_total([rank.peak_flops_per_s for rank in ranks]),
        weights_before=combined(rank.weights_before for rank in ranks),
        weights_after=combined(rank.weights_after for rank in ranks),
        weights_before_by_kind={
            kind: combined(rank.weights_before_by_kind[kind] for rank in ranks)
            for kind in ranks[0].weights_before_by_kind
        },
        digest_kind=ranks[0].digest_kind,
        findings=worst([finding for rank in ranks for finding in rank.findings]),
    )


def train_result(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """Returns the result of `TrainedModelInterface.train`, without the report, from the records in rank order.

    Besides the loss's own metrics, every micro-batch that has some gets its step's `lr` and `wd`, and its update's
    `global_valid_seqs` and `global_valid_toks`. An update for which a rank has no metrics of the loss gets these four
    once for this rank. Metrics that are summed are divided by the number of updates with a trained token, so that their
    sum is the mean over the updates.
    """
    updates = list(zip(*[rank.outcomes for rank in ranks], strict=True))
    metrics: dict[str, list[float]] = defaultdict(list)
    for rank in ranks:
        plans = [plan for plan in rank.plans if plan.tokens > 0]
        for plan, outcome in zip(plans, rank.outcomes, strict=True):
            of_update = {
                "lr": rank.learning_rate,
                "wd": rank.weight_decay,
                "global_valid_seqs": plan.valid_seqs,
                "global_valid_toks": plan.valid_toks,
            }
            for part in outcome.micro_batch_metrics or ({},):  # a loss may have no metrics
                for name, value in {**of_update, **part}.items():
                    metrics[name].append(value / len(updates) if adds_up(name) else value)
    return {
        "loss": torch.tensor([sum(outcome.loss for outcome in update) for update in updates]),
        "grad_norm": torch.tensor([update[0].grad_norm for update in updates]),
        "all_mb_metrics": dict(metrics),
        "timing": dict(ranks[0].seconds),
    }


def _packing(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Returns the tokens of the rows divided by the tokens that went through the ranks' models; empty if there were
    none."""
    passed = sum(rank.passed_tokens for rank in ranks)
    return {"packing_efficiency_ratio": sum(rank.real_tokens for rank in ranks) / passed} if passed else {}


def _gpu_memory(ranks: Sequence[RankRecord]) -> dict[str, float]:
    """Returns the memory of the fullest GPU, in GiB: the rank on this GPU runs out of memory first. Empty on CPUs."""
    known = [rank.gpu_memory_bytes for rank in ranks if rank.gpu_memory_bytes is not None]
    return {"gpu_memory_allocated_max_gib": max(known) / 2**30} if known else {}


def _total(parts: Sequence[Number | None]) -> Number | None:
    """Returns the sum of the parts, or None if a rank does not know its part."""
    known = [part for part in parts if part is not None]
    return sum(known[1:], known[0]) if len(known) == len(parts) else None


def _histogram(counts: Sequence[Mapping[int, int]]) -> tuple[int, ...]:
    total = sum(map(Counter, counts), Counter[int]())
    return tuple(total[staleness] for staleness in range(max(total, default=-1) + 1))
