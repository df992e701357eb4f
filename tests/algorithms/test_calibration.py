"""Bounds that depend on a whole step: the largest that satisfy their condition, equal for every split over ranks."""

import math
import threading

import msgspec
import pytest
import torch

from asyncrl.algorithms.calibration import calibrated, needs_calibration
from asyncrl.algorithms.objective import Clamp, Gate, Inverse, Linear, Objective, Penalty, Weight, Weighted
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.step_statistics import StepTokens


def step(log_ratios: list[float], advantages: list[float] | None = None) -> StepTokens:
    proximal = torch.tensor(log_ratios, dtype=torch.float64)
    sources = {"current": proximal, "proximal": proximal, "behaviour": torch.zeros_like(proximal)}
    return StepTokens(sources=sources, advantages=torch.tensor(advantages or [1.0] * len(log_ratios)))


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def gated(**settings: float | str) -> Objective:
    return Objective(surrogate=Linear(), gates=(Gate(stat="k2", **settings),))  # type: ignore[arg-type]


def test_a_budget_leaves_out_as_few_outliers_as_needed_by_hand() -> None:
    """k2 = .005, .02, .08, .5: the first three have mean .035, all four .151; a budget of .04 keeps three."""
    tokens = step([0.1, 0.2, 0.4, 1.0])
    [gate] = calibrated(gated(budget=0.04), tokens=tokens, reduce=alone).gates
    assert 0.08 <= gate.hi < 0.5
    [gate] = calibrated(gated(budget=0.034), tokens=tokens, reduce=alone).gates
    assert 0.02 <= gate.hi < 0.08
    [gate] = calibrated(gated(budget=0.2), tokens=tokens, reduce=alone).gates
    assert gate.hi == math.inf


def test_only_tokens_that_the_gate_is_about_count() -> None:
    """moving_away applies where A > 0 and the token became more likely, or A < 0 and it became less likely. The tokens
    with large ratios here move back, so they do not count."""
    tokens = step([0.1, 0.2, -2.0, 2.0], advantages=[1.0, 1.0, 1.0, -1.0])
    [gate] = calibrated(gated(budget=0.02, when="moving_away"), tokens=tokens, reduce=alone).gates
    assert gate.hi == math.inf
    [gate] = calibrated(gated(budget=0.02), tokens=tokens, reduce=alone).gates
    assert 0.02 <= gate.hi < 2.0


def test_bad_tokens_alone_count_where_the_gate_is_about_them() -> None:
    """k2 is 2 for a good token, and .02 and .08 for bad ones. Their mean is .05, so a budget of .06 sets no bound."""
    tokens = step([2.0, 0.2, 0.4], advantages=[1.0, -1.0, -1.0])
    [gate] = calibrated(gated(budget=0.06, when="negative_advantage"), tokens=tokens, reduce=alone).gates
    assert gate.hi == math.inf


def test_a_bound_that_was_configured_is_kept_where_it_is_the_stricter_one() -> None:
    [gate] = calibrated(gated(budget=0.2, hi=0.3), tokens=step([0.1, 0.2, 0.4, 1.0]), reduce=alone).gates
    assert gate.hi == 0.3


def test_the_current_policy_is_not_the_behaviour_nor_an_interpolated_one() -> None:
    """log current/behaviour is 1 and .2. Against the interpolated policy it would be .5 and .1, whose k2 are within the
    budget."""
    tokens = StepTokens(
        sources={
            "current": torch.tensor([1.0, 0.2]),
            "proximal": torch.tensor([0.5, 0.1]),
            "behaviour": torch.zeros(2),
        },
        advantages=torch.ones(2),
    )
    [gate] = calibrated(gated(budget=0.1, p="current"), tokens=tokens, reduce=alone).gates
    assert 0.02 <= gate.hi < 0.5
    [gate] = calibrated(gated(budget=0.1, p="proximal"), tokens=tokens, reduce=alone).gates
    assert gate.hi == math.inf


def test_weights_below_the_lower_bound_count_as_clamped() -> None:
    """With lo = .5 the weights are .5, .5, 1, 8. With lo = 0 they are nearly 0, 0, 1, 8. The same share then needs
    another cap."""
    tokens = step([-9.0, -9.0, 0.0, math.log(8.0)])
    weight = calibrated(
        Objective(surrogate=Linear(), weight=Weight(lo=0.5, min_ess=0.6)), tokens=tokens, reduce=alone
    ).weight
    assert weight is not None
    assert effective_share(tokens.log_ratio("proximal", "behaviour").exp().clamp(0.5, weight.hi)) == pytest.approx(
        0.6, abs=1e-3
    )


def test_an_impossible_budget_leaves_nothing_that_moved() -> None:
    [gate] = calibrated(gated(budget=0.001), tokens=step([1.0, 2.0]), reduce=alone).gates
    assert gate.hi < 0.5


def effective_share(weights: torch.Tensor) -> float:
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


@pytest.mark.parametrize("share", [0.5, 0.6, 0.8])
def test_a_weight_is_capped_where_the_effective_share_is_what_was_asked(share: float) -> None:
    tokens = step(torch.linspace(-2, 2, 101).tolist())
    weight = calibrated(Objective(surrogate=Linear(), weight=Weight(min_ess=share)), tokens=tokens, reduce=alone).weight
    assert weight is not None
    assert weight.hi > 1
    clamped = tokens.log_ratio("proximal", "behaviour").exp().clamp(max=weight.hi)
    assert effective_share(clamped) == pytest.approx(share, abs=1e-3)


def test_no_cap_goes_below_one_whatever_was_asked() -> None:
    tokens = step(torch.linspace(-2, 2, 101).tolist())
    weight = calibrated(Objective(surrogate=Linear(), weight=Weight(min_ess=0.99)), tokens=tokens, reduce=alone).weight
    assert weight is not None
    assert weight.hi == 1.0


def test_a_healthy_step_needs_no_cap_and_the_configured_one_stays() -> None:
    objective = Objective(surrogate=Linear(), weight=Weight(hi=4.0, min_ess=0.5))
    assert calibrated(objective, tokens=step([0.0, 0.01, -0.02]), reduce=alone) == objective


def test_ranks_find_the_same_bounds_as_one_rank_with_all_tokens() -> None:
    draw = torch.Generator().manual_seed(0)
    ratios = torch.randn(60, generator=draw).tolist()
    objective = Objective(
        surrogate=Linear(),
        weight=Weight(min_ess=0.7),
        gates=(Gate(stat="k2", budget=0.05, when="moving_away"),),
        penalties=(Penalty(beta=0.5, kind="k2", q="behaviour", ess=True),),
    )
    whole = calibrated(objective, tokens=step(ratios), reduce=alone)
    parts = [step(ratios[:17]), step(ratios[17:])]
    # both ranks make the same decisions, because they see the same sums; so their calls of reduce stay in step
    barrier, slots = threading.Barrier(2), [torch.zeros(0), torch.zeros(0)]
    found: list[Objective | None] = [None, None]

    def run(rank: int) -> None:
        def reduce(values: torch.Tensor) -> torch.Tensor:
            slots[rank] = values
            barrier.wait(60)
            total = slots[0] + slots[1]
            barrier.wait(60)
            return total

        found[rank] = calibrated(objective, tokens=parts[rank], reduce=reduce)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found[0] == found[1], "the ranks see the same sums"
    # the share is summed in another order, so its last bits may differ
    for objective_of_rank in found:
        assert objective_of_rank is not None
        assert objective_of_rank.penalties[0].beta == pytest.approx(whole.penalties[0].beta, rel=1e-12)
        assert msgspec.structs.replace(objective_of_rank, penalties=()) == msgspec.structs.replace(whole, penalties=())


def test_the_effective_share_caps_the_weight_and_leaves_the_rest_to_the_penalty_by_hand() -> None:
    """ρ = 1 and 3: (1 + 3)² / (2 · (1 + 9)) = .8. The proximal policy is different and is not used."""
    tokens = StepTokens(
        sources={
            "current": torch.tensor([0.0, math.log(3.0)]),
            "proximal": torch.tensor([5.0, 0.0]),
            "behaviour": torch.zeros(2),
        },
        advantages=torch.ones(2),
    )
    found = calibrated(PRESETS["p3o"].objective, tokens=tokens, reduce=alone)
    assert isinstance(found.surrogate, Weighted)
    for kernel in (found.surrogate.positive, found.surrogate.negative):
        assert isinstance(kernel, Clamp)
        assert kernel.hi == pytest.approx(0.8)
    assert [penalty.beta for penalty in found.penalties] == [pytest.approx(0.2)]


def test_a_step_whose_tokens_all_weigh_the_same_has_a_cap_of_one_and_no_pull() -> None:
    for log_ratios in ([0.0, 0.0, 0.0], []):
        found = calibrated(PRESETS["p3o"].objective, tokens=step(log_ratios), reduce=alone)
        assert isinstance(found.surrogate, Weighted)
        assert found.surrogate.positive == Clamp(ess=True, hi=1.0)
        assert found.penalties == ()


def test_only_what_asks_for_the_effective_share_depends_on_it() -> None:
    kept = Penalty(beta=0.5, kind="k2", q="behaviour")
    objective = Objective(
        surrogate=Weighted(positive=Clamp(ess=True, hi=0.1), negative=Inverse(hi=3.0)),
        anchor="behaviour",
        penalties=(kept, Penalty(beta=4.0, kind="k3", q="behaviour", ess=True)),
    )
    found = calibrated(objective, tokens=step([0.0, math.log(3.0)]), reduce=alone)
    assert found.surrogate == Weighted(positive=Clamp(ess=True, hi=0.1), negative=Inverse(hi=3.0)), (
        "its own cap is lower than the effective share"
    )
    assert found.penalties[0] == kept
    assert found.penalties[1].beta == pytest.approx(0.8)


def test_presets_that_need_it() -> None:
    assert {name for name, preset in PRESETS.items() if needs_calibration(preset.objective)} == {
        *("m2po", "p3o", "kl_cov", "clip_cov")
    }
    assert needs_calibration(
        Objective(surrogate=Linear(), penalties=(Penalty(beta=1.0, kind="k2", q="behaviour", ess=True),))
    )
