"""Compares the PPO family with torchrl's ClipPPOLoss, in value and in gradient with respect to the logits.

With `delay_actor`, torchrl's loss is decoupled: its delayed parameters are the proximal policy, its `action_log_prob`
is the behaviour policy, and its weight is their ratio without a bound. torchrl's CISPOLoss is not an oracle. It
multiplies the clamped weight by A only, without the log-prob that the paper (2506.13585) has, so a clamped token has no
gradient.
"""

import msgspec
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torchrl.objectives import ClipPPOLoss

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Objective
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.slow

TOKENS, VOCABULARY = 24, 5


class Logits(torch.nn.Module):
    """A policy that is a table of logits. The observation is the index of the token."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table.clone())

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


def actor(table: torch.Tensor) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Logits(table), in_keys=["index"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
        ),
    )


def policies() -> dict[str, torch.Tensor]:
    """Returns logits [tokens, vocabulary] of the current, the proximal and the behaviour policy."""
    draw = torch.Generator().manual_seed(1)
    current = torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    proximal = current + 0.6 * torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    behaviour = proximal + 0.5 * torch.randn(TOKENS, VOCABULARY, generator=draw, dtype=torch.float64)
    return {"current": current, "proximal": proximal, "behaviour": behaviour}


ACTIONS = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2))
ADVANTAGES = torch.where(torch.arange(TOKENS) % 2 == 0, 1.5, -0.8).double()


def without_nll(objective: Objective) -> Objective:
    """Returns the objective without the likelihood of good rows, which the library does not have."""
    penalties = tuple(penalty for penalty in objective.penalties if penalty.kind != "positive_nll")
    return msgspec.structs.replace(objective, penalties=penalties)


def chosen(table: torch.Tensor) -> torch.Tensor:
    return table.log_softmax(-1).gather(-1, ACTIONS.unsqueeze(-1)).squeeze(-1)


def ours(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and its gradient with respect to the current logits. All tokens are one sequence."""
    tables = policies()
    table = tables["current"].requires_grad_()
    columns = {
        "prev_logprobs": chosen(tables["proximal"]),
        "generation_logprobs": chosen(tables["behaviour"]),
        "advantages": ADVANTAGES,
        "token_mask": torch.ones(TOKENS),
    }
    data = BatchedDataDict({key: torch.nn.functional.pad(value, (1, 0))[None] for key, value in columns.items()})
    data["sample_mask"] = torch.ones(1)
    loss, _ = ObjectiveLoss(without_nll(PRESETS[name].objective))(
        data=data,
        next_token_logprobs=chosen(table)[None],
        global_valid_seqs=torch.tensor(1.0),
        global_valid_toks=torch.tensor(float(TOKENS)),
    )
    loss.backward()
    assert table.grad is not None
    return loss.detach(), table.grad


def batch(sampler: str) -> TensorDict:
    return TensorDict(
        {
            "index": torch.arange(TOKENS),
            "action": ACTIONS,
            "action_log_prob": chosen(policies()[sampler]),
            "advantage": ADVANTAGES.unsqueeze(-1),
        },
        batch_size=[TOKENS],
    )


def table_of(parameters: TensorDict) -> torch.Tensor:
    [table] = parameters.values(include_nested=True, leaves_only=True)
    return table


# this test sets the delayed parameters itself, once, so torchrl's warning about a missing updater does not apply
@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize(("name", "epsilon"), [("ppo", 0.2), ("dapo", (0.2, 0.28)), ("decoupled_ppo", 0.2)])
def test_a_preset_is_what_torchrl_computes(name: str, epsilon: float | tuple[float, float]) -> None:
    decoupled = name == "decoupled_ppo"
    loss_module = ClipPPOLoss(
        actor(policies()["current"]), None, clip_epsilon=epsilon, entropy_bonus=False, delay_actor=decoupled
    )
    if decoupled:
        table_of(loss_module.target_actor_network_params).data.copy_(policies()["proximal"])
    expected = loss_module(batch("behaviour" if decoupled else "proximal"))["loss_objective"]
    expected.backward()
    loss, gradient = ours(name)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, table_of(loss_module.actor_network_params).grad, rtol=1e-6, atol=1e-7)


def test_the_tokens_reach_both_bounds_with_both_signs_and_no_gate() -> None:
    tables = policies()
    u = (chosen(tables["current"]) - chosen(tables["proximal"])).exp()
    rho = (chosen(tables["proximal"]) - chosen(tables["behaviour"])).exp()
    for sign in (ADVANTAGES > 0, ADVANTAGES < 0):
        assert (u[sign] < 0.8).any()
        assert (u[sign] > 1.28).any()
    assert (rho - 1).abs().max() > 0.3
    assert rho.max() < 5
