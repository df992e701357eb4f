"""Compares GAE and V-trace over trained tokens with torchrl over the trained tokens alone."""

import pytest
import torch
from returns_scene import GAMMA, gae_of, scene, vtrace_of
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

from asyncrl.algorithms.returns import TokenAdvantages

pytestmark = pytest.mark.slow


def compacted(column_BS: torch.Tensor, mask_BS: torch.Tensor, row: int) -> torch.Tensor:
    """Returns only the trained tokens of a row, in the shape that torchrl needs: [T, 1]."""
    return column_BS[row][mask_BS[row]].unsqueeze(-1)


def trajectory(data: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """Returns one row's trained tokens as a torchrl trajectory that the last token terminates."""
    values_T1 = compacted(data["values"], data["mask"], row)
    done_T1 = torch.zeros_like(values_T1, dtype=torch.bool)
    done_T1[-1] = True
    return {
        "state_value": values_T1,
        "next_state_value": torch.cat([values_T1[1:], torch.full((1, 1), 123.0, dtype=torch.float64)]),
        "reward": compacted(data["rewards"], data["mask"], row),
        "done": done_T1,
        "terminated": done_T1,
    }


def assert_row_is(
    found: TokenAdvantages, data: dict[str, torch.Tensor], row: int, oracle: tuple[torch.Tensor, torch.Tensor]
) -> None:
    advantages_T1, returns_T1 = oracle
    torch.testing.assert_close(compacted(found.advantages_BS, data["mask"], row), advantages_T1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(compacted(found.returns_BS, data["mask"], row), returns_T1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (GAMMA, 0.75), (GAMMA, 0.0), (0.0, 0.5)])
def test_gae_over_trained_tokens_is_torchrls_over_those_alone(gamma: float, lam: float) -> None:
    data = scene()
    found = gae_of(data, gamma=gamma, lam=lam)
    for row in (0, 2, 3, 4):
        assert_row_is(found, data, row, generalized_advantage_estimate(gamma, lam, **trajectory(data, row)))


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 1.0), (1.5, 0.5), (50.0, 50.0)])
@pytest.mark.parametrize("gamma", [1.0, GAMMA])
def test_vtrace_over_trained_tokens_is_torchrls_over_those_alone(gamma: float, rho_bar: float, c_bar: float) -> None:
    data = scene(1)
    found = vtrace_of(data, gamma=gamma, rho_bar=rho_bar, c_bar=c_bar)
    for row in (0, 2, 3, 4):
        log_pi_T1 = compacted(data["log_ratios"], data["mask"], row)
        oracle = vtrace_advantage_estimate(
            gamma,
            log_pi_T1,
            torch.zeros_like(log_pi_T1),
            **trajectory(data, row),
            rho_thresh=rho_bar,
            c_thresh=c_bar,
        )
        # torchrl's advantages contain ρ; in asyncrl, the objective applies it
        rho_T1 = log_pi_T1.exp().clamp(max=rho_bar)
        assert_row_is(found, data, row, (oracle[0] / rho_T1, oracle[1]))
