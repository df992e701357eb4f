"""The witness's derivatives of an objective are those of the tensors: every preset, and every value of every axis, on
random rows, masks, ages and groups."""

import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from asyncrl.algorithms.calibration import calibrated
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import (
    Aggregation,
    ByCovariance,
    Clamp,
    Clipped,
    Gamma,
    Gate,
    Inverse,
    Linear,
    Objective,
    Penalty,
    PreClip,
    Quadratic,
    Regression,
    Reinforce,
    SoftGate,
    Weight,
    Weighted,
)
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.shares import with_shares
from asyncrl.algorithms.step_statistics import StepTokens
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.witness.objective import Counts, Sample, derivatives

ROWS, TOKENS = 6, 9
POOLS = ("token", "mean", "sum", "min", "max")


def objectives() -> Iterator[tuple[str, Objective]]:
    """Yields every preset, and objectives that take each value of each axis."""
    for name, preset in PRESETS.items():
        constant = 17.0 if preset.objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT else None
        yield name, msgspec.structs.replace(preset.objective, constant=constant)
    linear = Objective(surrogate=Linear(), anchor="behaviour")

    def changed(**axes: object) -> Objective:
        return msgspec.structs.replace(linear, **axes)

    for aggregation in Aggregation:
        constant = 17.0 if aggregation is Aggregation.SEQUENCE_SUM_CONSTANT else None
        yield f"aggregation {aggregation}", changed(aggregation=aggregation, constant=constant)
    for kind in ("k1", "k2", "k3", "k3+", "abs"):
        for corrected in ("none", "current", "proximal", "behaviour"):
            penalty = Penalty(beta=0.3, kind=kind, corrected_by=corrected)
            yield f"penalty {kind} corrected by {corrected}", changed(penalties=(penalty,))
    yield "penalty entropy", changed(penalties=(Penalty(beta=0.3, kind="entropy"),))
    for stat in ("ratio", "log_ratio", "k1", "k2", "k3", "probability", "binary_kl"):
        lo, hi = (0.8, 1.2) if stat == "ratio" else (-0.2, 0.1)
        for pool in POOLS:
            yield f"gate {stat} {pool}", changed(gates=(Gate(stat=stat, pool=pool, lo=lo, hi=hi, p="current"),))
        for when in ("negative_advantage", "moving_away"):
            yield f"gate {stat} {when}", changed(gates=(Gate(stat=stat, when=when, lo=lo, hi=hi),))
    for pool in POOLS:
        for outside in ("clamp", "zero"):
            weight = Weight(pool=pool, lo=0.5, hi=1.5, outside=outside)
            yield f"weight {pool} {outside}", Objective(surrogate=Reinforce(), weight=weight)
    surrogates = (Linear(), Clipped(dual=3.0), SoftGate(), Quadratic(), Regression(beta=0.5))
    for level in ("token", "sequence_mean", "sequence_sum", "sequence_mean_token"):
        for surrogate in surrogates:
            kind = type(surrogate).__name__
            yield f"level {level} {kind}", changed(surrogate=surrogate, level=level, pre_clip=PreClip(lo=0.7, hi=1.3))
    for kernel in (Clamp(lo=0.9, hi=1.1), Inverse(hi=1.2), Gamma(shape=2.0, rate=3.0)):
        yield f"kernel {type(kernel).__name__}", changed(surrogate=Weighted(positive=kernel, negative=kernel))
    for choice in (ByCovariance(share=0.3, lo=-0.5), ByCovariance(share=0.3, order="random", lo=-1.0, hi=2.0)):
        yield f"dropped {choice.order}", changed(dropped=choice)
        for kind in ("k2", "abs", "entropy"):
            penalty = Penalty(beta=0.3, kind=kind, tokens=choice)
            yield f"penalty {kind} of {choice.order} tokens", changed(penalties=(penalty,))
    yield (
        "centered without a ratio",
        Objective(surrogate=Reinforce(), centering="score", aggregation=Aggregation.SEQUENCE_MEAN),
    )
    yield "interpolated", Objective(surrogate=Clipped(), weight=Weight(hi=1.2), proximal="interpolated")


def rows(seed: int) -> BatchedDataDict:
    draw = torch.Generator().manual_seed(seed)
    apart = random.Random(seed).choice([1e-3, 0.1, 0.5, 1.0])
    # in float64, so that no rounding puts a token on the other side of a clip or a gate
    current = -torch.rand(ROWS, TOKENS, generator=draw, dtype=torch.float64) * 3

    def policy() -> torch.Tensor:
        return (current + apart * torch.randn(ROWS, TOKENS, generator=draw, dtype=torch.float64)).clamp(max=-1e-3)

    advantages = torch.randn(ROWS, TOKENS, generator=draw) * (torch.rand(ROWS, TOKENS, generator=draw) < 0.9)
    data = BatchedDataDict(
        current=current,
        token_mask=(torch.rand(ROWS, TOKENS, generator=draw) < 0.7).float(),
        sample_mask=torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
        advantages=advantages,
        generation_logprobs=policy(),
        prev_logprobs=policy(),
        reference_policy_logprobs=policy(),
        staleness=torch.randint(0, 4, (ROWS, TOKENS), generator=draw),
        group_ids=torch.tensor([0, 0, 0, 1, 1, 1]),
        rewards=torch.randn(ROWS, generator=draw),
        **dict.fromkeys(("top_ids", "top_logprobs"), torch.zeros(ROWS, TOKENS, 1)),
    )
    return with_shares(data)


def by_autograd(objective: Objective, data: BatchedDataDict) -> list[torch.Tensor]:
    logprobs_BT = data["current"][:, 1:].clone().requires_grad_()
    entropy_BT, centering_BT = (torch.ones_like(logprobs_BT).requires_grad_() for _ in range(2))
    loss, _ = ObjectiveLoss(objective)(
        data=data,
        global_valid_seqs=data["sample_mask"].sum(),
        global_valid_toks=(data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).sum(),
        next_token_logprobs=logprobs_BT,
        next_token_entropies=entropy_BT,
        next_token_centering=centering_BT,
    )
    outputs = (logprobs_BT, entropy_BT, centering_BT)
    slopes = torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)
    return [each.double() for each in slopes]


def with_choices(objective: Objective, data: BatchedDataDict) -> Objective:
    """Returns the objective with the numbers of the step if it chooses tokens by covariance."""
    if not objective.chosen():
        return objective
    mask_BS = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    mask_BS[:, 0] = False
    columns = {"proximal": "prev_logprobs", "behaviour": "generation_logprobs", "current": "current"}
    tokens = StepTokens(
        sources={name: data[column][mask_BS] for name, column in columns.items()},
        advantages=data["advantages"][mask_BS],
    )
    return calibrated(objective, tokens=tokens, reduce=lambda sums: sums)


def counts_of(data: BatchedDataDict) -> Counts:
    weight_BS = data["token_mask"] * data["sample_mask"].unsqueeze(1)
    weight_BS[:, 0] = 0.0
    return Counts(
        tokens=float(weight_BS.sum()),
        sequences=float(data["sample_mask"].sum()),
        tokens_by_group={group: float(weight_BS[data["group_ids"] == group].sum()) for group in (0, 1)},
        positive_tokens=float(weight_BS[data["rewards"] > 0].sum()),
    )


def sample_of(data: BatchedDataDict, row: int, mask_T: torch.Tensor) -> Sample:
    def column(name: str) -> list[float]:
        found: list[float] = data[name][row, 1:][mask_T].double().tolist()
        return found

    return Sample(
        group=int(data["group_ids"][row]),
        reward=float(data["rewards"][row]),
        weight=float(data["sample_mask"][row]),
        token_weights=column("token_mask"),
        advantages=column("advantages"),
        current=column("current"),
        proximal=column("prev_logprobs"),
        behaviour=column("generation_logprobs"),
        reference=column("reference_policy_logprobs"),
        staleness=column("staleness"),
    )


@pytest.mark.parametrize("objective", [pytest.param(objective, id=name) for name, objective in objectives()])
def test_the_derivatives_are_those_of_the_tensors(objective: Objective) -> None:
    acts = False
    for seed in range(4):
        data = rows(seed)
        used = with_choices(objective, data)
        axes = msgspec.to_builtins(used)
        by_logprob_BT, by_entropy_BT, by_centering_BT = by_autograd(used, data)
        scale, counts = float(by_logprob_BT.abs().max()), counts_of(data)
        acts = acts or scale > 0
        for row in range(ROWS):
            mask_T = (data["token_mask"][row, 1:] * data["sample_mask"][row]) > 0
            if not mask_T.any():
                continue
            found = derivatives(axes, sample_of(data, row, mask_T), counts)
            assert found.logprobs == pytest.approx(by_logprob_BT[row][mask_T].tolist(), abs=1e-6 * scale), (seed, row)
            assert found.centering == pytest.approx(by_centering_BT[row][mask_T].tolist(), rel=1e-6), (seed, row)
            assert found.entropies == pytest.approx(by_entropy_BT[row][mask_T].tolist(), rel=1e-6), (seed, row)
    assert acts, "the objective has no gradient in any batch"
