"""κ and the measures from it: computed only from a loss's slopes, as sums that add up over any split."""

import pytest
import torch

from asyncrl.algorithms.diagnostics import MetricSums
from asyncrl.algorithms.kernel import kernel_sums


def sums(
    slopes: list[float],
    advantages: list[float],
    *,
    staleness: list[int] | None = None,
    shares: dict[str, list[bool]] | None = None,
    log_rho: list[float] | None = None,
    mask: list[bool] | None = None,
) -> MetricSums:
    count = len(slopes)
    return kernel_sums(
        slopes_BT=torch.tensor([slopes]),
        advantages_BT=torch.tensor([advantages]),
        staleness_BT=torch.tensor([staleness or [0] * count], dtype=torch.float32),
        log_rho_BT=torch.tensor([log_rho or [0.0] * count]),
        mask_BT=torch.tensor([mask or [True] * count]),
        shares_BT={name: torch.tensor([where]) for name, where in (shares or {}).items()},
    )


def test_reinforce_has_an_effective_share_of_one_whatever_its_scale() -> None:
    """κ = −slope/A is .25 everywhere."""
    means = sums([-0.25, 0.5, -0.75], [1.0, -2.0, 3.0]).means()
    assert means["kernel_ess_ratio"] == pytest.approx(1.0)
    assert means["silent_ratio"] == 0.0


def test_kernel_shares_by_hand() -> None:
    """κ = 1, 3, 0, and a fourth token with A = 0 that is not counted: (1 + 3)² / (3 · (1 + 9)). One of three has κ =
    0."""
    means = sums([-1.0, 6.0, 0.0, 0.0], [1.0, -2.0, 4.0, 0.0]).means()
    assert means["kernel_ess_ratio"] == pytest.approx(16 / 30)
    assert means["silent_ratio"] == pytest.approx(1 / 3)
    assert means["silent_positive_ratio"] == pytest.approx(1 / 2)
    assert means["silent_negative_ratio"] == 0.0


def test_masked_tokens_do_not_count() -> None:
    assert sums([-1.0, 5.0], [1.0, 7.0], mask=[True, False]) == sums([-1.0], [1.0])
    assert sums([1.0], [1.0], mask=[False]).means() == {}


def test_tokens_that_are_all_silent_have_no_effective_share() -> None:
    means = sums([0.0, 0.0], [1.0, -1.0]).means()
    assert (means["kernel_ess_ratio"], means["silent_ratio"]) == (0.0, 1.0)


def test_where_nothing_is_to_be_pushed_nothing_is_measured() -> None:
    means = sums([0.5, 0.0], [0.0, 0.0]).means()
    assert not {"kernel_ess_ratio", "silent_ratio", "silent_positive_ratio"} & set(means)


def test_shares_by_sign_are_of_the_tokens_of_that_sign() -> None:
    means = sums(
        [-1.0, 0.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, -1.0, 0.0], shares={"clipped": [False, True, True, False, True]}
    ).means()
    assert means["clipped_positive_ratio"] == pytest.approx(2 / 3)
    assert means["clipped_negative_ratio"] == 0.0


def test_without_versions_there_are_no_buckets() -> None:
    column = torch.ones(1, 2)
    found = kernel_sums(
        slopes_BT=column,
        advantages_BT=column,
        staleness_BT=None,
        log_rho_BT=column,
        mask_BT=torch.ones(1, 2, dtype=torch.bool),
    ).means()
    assert found["silent_ratio"] == 0.0
    assert not [name for name in found if "staleness" in name]


def test_tokens_without_an_advantage_are_silent_in_no_bucket() -> None:
    means = sums([0.0, -1.0], [0.0, 1.0], staleness=[0, 0]).means()
    assert means["silent_ratio_staleness_0"] == 0.0


def test_buckets_of_staleness_by_hand() -> None:
    means = sums(
        [0.0, -1.0, -1.0, -1.0, 0.0],
        [1.0, 2.0, 3.0, 5.0, 7.0],
        staleness=[0, 2, 3, 20, 2],
        log_rho=[0.0, 0.1, -0.3, 1.0, 0.2],
    ).means()
    assert means["silent_ratio_staleness_0"] == 1.0
    assert means["silent_ratio_staleness_2_to_3"] == pytest.approx(1 / 3)
    assert means["abs_log_rho_nats_staleness_2_to_3"] == pytest.approx(0.2)
    assert means["advantage_staleness_2_to_3"] == pytest.approx(4.0)
    assert means["abs_log_rho_nats_staleness_16_to_more"] == pytest.approx(1.0)
    assert not [name for name in means if "staleness_1" in name and "16" not in name], "empty buckets are left out"


def test_parts_add_up_to_the_whole() -> None:
    slopes, advantages, staleness = [-1.0, 6.0, 0.0, 2.0], [1.0, -2.0, 4.0, -1.0], [0, 1, 5, 9]
    whole = sums(slopes, advantages, staleness=staleness)
    parts = sums(slopes[:1], advantages[:1], staleness=staleness[:1]) + sums(
        slopes[1:], advantages[1:], staleness=staleness[1:]
    )
    assert parts.means() == pytest.approx(whole.means())
