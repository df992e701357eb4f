"""Diagnostics: the sums of any split add up to the whole, and harmful values show in the metrics."""

import math

import pytest
import torch

from asyncrl.algorithms.diagnostics import MetricSums, merge_metrics, off_policy_sums
from asyncrl.algorithms.loss import entropy


def sums(log_rho: list[float], *, on_policy: list[bool] | None = None, mask: list[bool] | None = None) -> MetricSums:
    row = torch.tensor([log_rho])
    return off_policy_sums(
        proximal_BT=row - 2.0,
        behaviour_BT=torch.full_like(row, -2.0),
        entropy_BT=torch.ones_like(row),
        mask_BT=torch.tensor([mask or [True] * len(log_rho)]),
        on_policy_BT=torch.tensor([on_policy or [False] * len(log_rho)]),
    )


def test_on_policy_data_has_full_ess_and_no_divergence() -> None:
    found = sums([0.0] * 6)
    means = found.means()
    assert (found.ess, means["importance_weight_mean"], means["kl_behaviour_k1_nats"]) == (1.0, 1.0, 0.0)
    assert means["kl_behaviour_k3_nats"] == 0.0


def test_ess_by_hand_on_untruncated_weights() -> None:
    found = sums([math.log(1.0), math.log(9.0)])
    assert found.ess == pytest.approx((1 + 9) ** 2 / (2 * (1 + 81)))
    assert found.means()["importance_weight_max"] == pytest.approx(9.0)


@pytest.mark.fault("F22")
def test_one_log_ratio_of_80_shows_as_an_ess_of_one_token() -> None:
    found = sums([80.0] + [0.0] * 9)
    assert found.ess == pytest.approx(0.1)
    assert found.means()["importance_weight_max"] == pytest.approx(math.exp(80), rel=1e-5)
    assert math.isfinite(found.pairs["importance_weight_squared"][0])


def test_k1_and_k3_estimate_the_divergence_of_the_behaviour_from_the_proximal_policy() -> None:
    found = sums([math.log(2.0)]).means()
    assert found["kl_behaviour_k1_nats"] == pytest.approx(-math.log(2.0))
    assert found["kl_behaviour_k3_nats"] == pytest.approx(2 - 1 - math.log(2.0))


def test_k3_over_the_sampler_s_tokens_is_the_divergence() -> None:
    """E_beh[k3] = KL(beh ‖ prox) exactly: the expectation is a sum over a vocabulary of three."""
    beh, prox = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    pairs = zip(beh.tolist(), prox.tolist(), strict=True)
    total = sum(p * sums([math.log(q / p)]).means()["kl_behaviour_k3_nats"] for p, q in pairs)
    assert total == pytest.approx(float((beh * (beh / prox).log()).sum()), rel=1e-5)


def test_parity_is_the_largest_difference_over_on_policy_tokens_alone() -> None:
    found = sums([0.1, -0.7, 5.0], on_policy=[True, True, False])
    assert found.pairs["on_policy_parity_max_nats"] == (pytest.approx(0.7, rel=1e-5), 2)


def test_a_nan_log_prob_breaks_parity_loudly() -> None:
    assert sums([0.0, math.nan], on_policy=[True, True]).means()["on_policy_parity_max_nats"] == math.inf


def test_extremes_look_at_both_signs_of_the_log_ratio() -> None:
    found = (sums([math.log(2), -math.log(4)]) + sums([0.0])).means()
    assert found["exp_abs_log_rho_mean"] == pytest.approx((2 + 4 + 1) / 3)
    assert found["abs_log_rho_max_nats"] == pytest.approx(math.log(4), rel=1e-5)
    assert sums([0.5], mask=[False]).means() == {}


def test_kl_to_the_reference_is_k3_by_hand_and_missing_where_nobody_looked_at_it() -> None:
    row = torch.tensor([[-1.0, -2.0, -3.0]])
    found = off_policy_sums(
        proximal_BT=row,
        behaviour_BT=row,
        entropy_BT=torch.ones_like(row),
        mask_BT=torch.tensor([[True, True, False]]),
        on_policy_BT=torch.zeros_like(row, dtype=torch.bool),
        reference_BT=row + torch.tensor([[math.log(2), 0.0, 5.0]]),
    )
    both = found + sums([0.0] * 5)
    assert both.means()["kl_to_reference_nats"] == pytest.approx((2 - 1 - math.log(2)) / 2), "mean over its own tokens"
    assert "kl_to_reference_nats" not in sums([0.0]).means()


def test_parity_is_of_the_on_policy_tokens_and_adds_up() -> None:
    found = sums([0.3, -0.1, 9.0, 0.2], on_policy=[True, True, False, True]) + sums([-0.5], on_policy=[True])
    means = found.means()
    assert means["on_policy_parity_max_nats"] == pytest.approx(0.5)
    assert means["on_policy_parity_mean_nats"] == pytest.approx((0.3 + 0.1 + 0.2 + 0.5) / 4)
    assert means["on_policy_parity_mean_square"] == pytest.approx((0.3**2 + 0.1**2 + 0.2**2 + 0.5**2) / 4)
    excess = [math.expm1(each) for each in (0.3, -0.1, 0.2, -0.5)]
    assert means["on_policy_weight_excess"] == pytest.approx(sum(excess) / 4)
    assert means["on_policy_weight_excess_mean_square"] == pytest.approx(sum(each**2 for each in excess) / 4)


def test_masked_tokens_count_nowhere() -> None:
    assert sums([0.3, math.nan], mask=[True, False], on_policy=[True, True]) == sums([0.3], on_policy=[True])


@pytest.mark.fault("F24")
def test_no_token_at_all_divides_by_nothing() -> None:
    found = sums([0.5], mask=[False])
    assert math.isnan(found.ess)
    assert found.means() == {}


def test_micro_batches_add_up() -> None:
    values = [0.1, -0.4, 1.2, 0.0]
    flags = [True, False, True, True]
    whole = sums(values, on_policy=flags)
    added = sums(values[:1], on_policy=flags[:1]) + sums(values[1:], on_policy=flags[1:])
    assert added.pairs.keys() == whole.pairs.keys()
    for name, pair in whole.pairs.items():
        assert added.pairs[name] == pytest.approx(pair), name


def test_entropy_of_a_uniform_and_of_a_certain_distribution() -> None:
    logits = torch.zeros(1, 3, 8)
    logits[0, 1, 4] = 1e4
    assert entropy(logits)[0].tolist() == pytest.approx([math.log(8), 0.0])


def test_what_belongs_to_no_micro_batch_is_averaged() -> None:
    names = ("lr", "wd", "reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length")
    parts = [dict.fromkeys(names, value) for value in (1.0, 2.0, 6.0)]
    assert merge_metrics([*parts, {"reward": 7.0}], updates=2) == {**dict.fromkeys(names, 3.0), "reward": 4.0}


def test_metrics_add_over_micro_batches_and_are_averaged_over_updates_but_for_extremes() -> None:
    parts = [{"a": 1.0, "b_max": 2.0, "c_min": 3.0}, {"a": 4.0, "b_max": 1.0, "c_min": 1.0, "d": 7.0}]
    assert merge_metrics(parts, updates=1) == {"a": 5.0, "b_max": 2.0, "c_min": 1.0, "d": 7.0}
    assert merge_metrics(parts, updates=2) == {"a": 2.5, "b_max": 2.0, "c_min": 1.0, "d": 3.5}


def test_an_extreme_is_a_word_of_a_name_and_no_part_of_one() -> None:
    parts = [{"max_x": 1.0, "x_max_clipped": 1.0, "x_minus": 1.0}, {"max_x": 2.0, "x_max_clipped": 2.0, "x_minus": 2.0}]
    assert merge_metrics(parts, updates=1) == {"max_x": 3.0, "x_max_clipped": 2.0, "x_minus": 3.0}
