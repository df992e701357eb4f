"""Compares presets with liger-kernel's fused GRPO family (from LinkedIn, itself tested against TRL), in value and
gradient.

Liger computes a loss from hidden states and the head's weight. Here the presets get the log-probs of the same head, so
the gradients with respect to both inputs can be compared. Liger's argument `old_per_token_logps` is the anchor of u.
Its argument `vllm_is_ratio` is a weight that the caller computes. Its settings per preset are ε around 1, and its
`delta` is our dual clip.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Aggregation, Clipped, Objective
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.slow

LENGTHS = (6, 4, 5, 3, 6, 2)
ADVANTAGES = (1.5, 0.7, -1.2, -0.4, 0.9, -0.8)
HIDDEN, VOCABULARY, CONSTANT = 8, 13, 9
GSPO, LUSPO = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}, {"epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
PPO, HIGHER = {"epsilon_low": 0.2, "epsilon_high": 0.2}, {"epsilon_low": 0.2, "epsilon_high": 0.28}


@dataclass(frozen=True, kw_only=True)
class Liger:
    """A preset in Liger's terms: its settings, the policy whose log-probs are the old ones, and its weight as a
    function of ρ [B, T] and the mask."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    old: str | None = "prev_logprobs"
    weight: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def within(low: float, high: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda rho, _: torch.where((rho >= low) & (rho <= high), rho, 0.0)


EQUIVALENTS = {
    "grpo": Liger(settings={"loss_type": "grpo", "beta": 0.04, "use_ref_model": True, **PPO}),
    "ppo": Liger(settings={"loss_type": "bnpo", **PPO}),
    "dapo": Liger(settings={"loss_type": "dapo", **HIGHER}),
    "dr_grpo": Liger(settings={"loss_type": "dr_grpo", "max_completion_length": CONSTANT, **PPO}),
    "dual_clip": Liger(settings={"loss_type": "dapo", "delta": 3.0, **PPO}),
    "two_sided": Liger(settings={"loss_type": "dapo", "delta": 4.0, **PPO}),
    "gspo": Liger(settings={"loss_type": "grpo", "importance_sampling_level": "sequence", **GSPO}),
    "luspo": Liger(settings={"loss_type": "luspo", "importance_sampling_level": "sequence", **LUSPO}),
    "cispo": Liger(settings={"loss_type": "cispo", "epsilon_high": 5.0}),
    "aipo": Liger(settings={"loss_type": "cispo", "epsilon_high": 5.0}, old="generation_logprobs"),
    "vtrace": Liger(settings={"loss_type": "cispo", "epsilon_high": 1.0}, old="generation_logprobs"),
    "reinforce": Liger(settings={"loss_type": "cispo", "epsilon_high": 5.0}, old=None),
    "sapo": Liger(settings={"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
    "vespo": Liger(settings={"loss_type": "vespo"}, old="generation_logprobs"),
    "tis": Liger(settings={"loss_type": "dapo", **PPO}, weight=lambda rho, _: rho.clamp(max=2)),
    "icepop": Liger(settings={"loss_type": "dapo", **PPO}, weight=within(0.5, 5)),
    "decoupled_ppo": Liger(settings={"loss_type": "dapo", **PPO}, weight=within(0, 5)),
    "decoupled_icepop": Liger(settings={"loss_type": "dapo", "delta": 3.0, **HIGHER}, weight=within(0.5, 5)),
    "seq_tis": Liger(
        settings={"loss_type": "dapo", **PPO},
        weight=lambda rho, mask: torch.where(mask > 0, rho, 1.0).prod(dim=1, keepdim=True).clamp(max=2),
    ),
}


def step() -> tuple[torch.Tensor, torch.Tensor, BatchedDataDict]:
    """Returns hidden states [B, T, H], the head [V, H], and columns [B, 1 + T] whose first token is a prompt.

    The drifts are large enough that every bound acts on both sides. The mean log-ratio of one sequence lies inside
    GSPO's bounds.
    """
    draw = torch.Generator().manual_seed(5)
    rows, tokens = len(LENGTHS), max(LENGTHS)
    hidden = torch.randn(rows, tokens, HIDDEN, generator=draw)
    head = 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=draw)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=draw)
    mask = (torch.arange(tokens) < torch.tensor(LENGTHS).unsqueeze(1)).float()
    drift = 0.7 * torch.randn(rows, tokens, generator=draw)
    drift[1, 0], drift[2, 0] = -1.5, -1.6  # u = 4.5 and 5: beyond the dual clips, the second with A < 0
    drift[4, : LENGTHS[4]] -= drift[4, : LENGTHS[4]].mean() - 1e-4
    proximal = logprobs(hidden, head, ids=ids) + drift
    columns = {
        "prev_logprobs": proximal,
        "generation_logprobs": proximal + 1.2 * torch.randn(rows, tokens, generator=draw),
        "reference_policy_logprobs": proximal + 0.5 * torch.randn(rows, tokens, generator=draw),
        "advantages": torch.tensor(ADVANTAGES).unsqueeze(1).expand(rows, tokens),
        "token_mask": mask,
    }
    data = BatchedDataDict(
        {name: torch.nn.functional.pad(column, (1, 0), value=0.0) for name, column in columns.items()}
    )
    data["input_ids"] = torch.nn.functional.pad(ids, (1, 0))
    data["sample_mask"] = torch.ones(rows)
    return hidden, head, data


def logprobs(hidden: torch.Tensor, head: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
    return (hidden @ head.T).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def without_nll(objective: Objective) -> Objective:
    """Returns the objective without the likelihood of good rows, which neither library has."""
    penalties = tuple(penalty for penalty in objective.penalties if penalty.kind != "positive_nll")
    return msgspec.structs.replace(objective, penalties=penalties)


@pytest.mark.parametrize("name", list(EQUIVALENTS))
def test_a_preset_is_what_liger_computes(name: str) -> None:
    hidden, head, data = step()
    equivalent, objective = EQUIVALENTS[name], without_nll(PRESETS[name].objective)
    if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT:
        objective = msgspec.structs.replace(objective, constant=float(CONSTANT))

    ours_hidden, ours_head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss, metrics = ObjectiveLoss(objective)(
        data=data,
        next_token_logprobs=logprobs(ours_hidden, ours_head, ids=data["input_ids"][:, 1:]),
        global_valid_seqs=torch.tensor(float(len(LENGTHS))),
        global_valid_toks=torch.tensor(float(sum(LENGTHS))),
    )
    loss.backward()
    assert metrics["clipped_ratio"] > 0 or not isinstance(objective.surrogate, Clipped), "the clip must act"

    mask = data["token_mask"][:, 1:]
    rho = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].exp()
    their_hidden, their_head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    liger = LigerFusedLinearGRPOLoss(**{"compiled": False, "use_ref_model": False, "beta": 0.0, **equivalent.settings})
    expected, _ = liger(
        their_hidden,
        their_head,
        data["input_ids"][:, 1:],
        mask,
        torch.tensor(ADVANTAGES),
        ref_per_token_logps=data["reference_policy_logprobs"][:, 1:],
        old_per_token_logps=data[equivalent.old][:, 1:] if equivalent.old is not None else None,
        vllm_is_ratio=equivalent.weight(rho, mask) if equivalent.weight is not None else None,
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours_hidden.grad, their_hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours_head.grad, their_head.grad, rtol=1e-4, atol=1e-6)


def test_the_step_reaches_every_bound_on_both_sides() -> None:
    """Without this, the comparison could pass although a bound never acts."""
    hidden, head, data = step()
    mask = data["token_mask"][:, 1:] > 0
    log_u = logprobs(hidden, head, ids=data["input_ids"][:, 1:]) - data["prev_logprobs"][:, 1:]
    u = log_u.exp()
    rho = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].exp()
    good = data["advantages"][:, 1:] > 0
    for sign in (good & mask, ~good & mask):
        assert (u[sign] < 0.8).any()
        assert (u[sign] > 1.28).any()
        assert (u[sign] > 4).any()
        assert (rho[sign] < 0.5).any()
        assert (rho[sign] > 2).any()
    assert (rho[mask] > 5).any()
    mean = torch.where(mask, log_u, 0.0).sum(1) / mask.sum(1)
    assert {(bool(mean[row] > 0), ADVANTAGES[row] > 0) for row in range(len(LENGTHS))} == {
        (above, positive) for above in (True, False) for positive in (True, False)
    }
    assert (mean.abs() < 3e-4).sum() == 1
