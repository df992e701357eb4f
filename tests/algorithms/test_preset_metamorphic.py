"""Properties of every preset: splitting, reordering, padding or packing the rows of a step does not change its result.

The tests compare gradients, not only values. Losses are float64 here, so equal means equal.
"""

import math
from typing import Any

import msgspec
import pytest
import torch
from worked_sequences import with_choices

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import (
    Aggregation,
    Clamp,
    Clipped,
    Objective,
    Penalty,
    Regression,
    Reinforce,
    Weighted,
)
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.shares import with_shares
from asyncrl.data.batched_data_dict import BatchedDataDict

pytestmark = pytest.mark.slow

LENGTHS = (5, 3, 6, 1)
PROMPT = 2
PER_TOKEN = (
    *("logprobs", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages", "staleness"),
    *("centering", "top_ids", "top_logprobs"),
)
PER_ROW = ("sample_mask", "group_ids", "rewards", "prompt_share", "positive_share")
Row = dict[str, torch.Tensor]
# choices on the axes that no preset makes, and that a split, an order or packing could change
OWN = {
    "prompt_mean": Objective(
        surrogate=Clipped(),
        aggregation=Aggregation.PROMPT_MEAN,
        penalties=(Penalty(beta=0.3, kind="positive_nll"), Penalty(beta=0.1, kind="k3")),
    )
}


def runnable(name: str) -> Objective:
    objective = PRESETS[name].objective if name in PRESETS else OWN[name]
    if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT:
        objective = msgspec.structs.replace(objective, constant=4.0)
    gates = tuple(
        # these rows have drifted further than the narrowest bounds allow
        msgspec.structs.replace(gate, budget=None, hi=0.05) if gate.budget or gate.hi < 0.01 else gate
        for gate in objective.gates
    )
    # sets the bounds that the step's calibration would compute; an effective share of 1 caps a weight at 1
    surrogate = objective.surrogate
    if isinstance(surrogate, Weighted) and Clamp(ess=True) in (surrogate.positive, surrogate.negative):
        surrogate = Weighted(positive=Clamp(hi=1.0), negative=Clamp(hi=1.0))
    penalties = tuple(
        msgspec.structs.replace(penalty, ess=False, beta=0.5) if penalty.ess else penalty
        for penalty in objective.penalties
    )
    objective = msgspec.structs.replace(objective, surrogate=surrogate, gates=gates, penalties=penalties)
    # a random choice compares a hash of 32 bits
    above = 0.1 if objective.dropped is None else 2.0**31
    return with_choices(objective, above=above, lo=-math.inf, hi=math.inf)


def rows(*, off_policy: float = 0.3) -> list[Row]:
    """Returns sequences of a prompt and a completion. `logprobs[i]` belongs to token i. The last sequence is masked."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    found = []
    for index, length in enumerate(LENGTHS):
        total = PROMPT + length
        beh = -1.5 + 0.3 * normal(total)
        drift = off_policy * normal(total)
        if index == 0:  # in one sequence, sampler and trainer agree on average
            drift[PROMPT:] -= drift[PROMPT:].mean()
        prox = beh + drift
        found.append(
            {
                "generation_logprobs": beh,
                "prev_logprobs": prox,
                "reference_policy_logprobs": prox + off_policy * normal(total),
                "logprobs": prox + off_policy * normal(total),
                "centering": normal(total),
                # the model's output `centering` was computed from them
                **dict.fromkeys(("top_ids", "top_logprobs"), torch.zeros(total, dtype=torch.float64)),
                "advantages": normal(1).expand(total).clone(),
                "staleness": torch.randint(0, 4, (total,), generator=draw).double(),
                "token_mask": (torch.arange(total) >= PROMPT).double(),
                "sample_mask": torch.tensor(0.0 if index == 3 else 1.0, dtype=torch.float64),
                "group_ids": torch.tensor(index % 2),
                "rewards": torch.tensor(float(index > 0), dtype=torch.float64),
            }
        )
    # the coefficients are computed over the whole step, and a part of the step gets the same ones
    whole = with_shares(padded(found))
    for index, row in enumerate(found):
        row |= {name: whole[name][index] for name in ("prompt_share", "positive_share")}
    return found


def padded(batch: list[Row], *, extra: int = 0) -> BatchedDataDict:
    width = max(len(row["logprobs"]) for row in batch) + extra

    def column(name: str) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(row[name], (0, width - len(row[name]))) for row in batch])

    data = BatchedDataDict({name: column(name) for name in (*PER_TOKEN, "token_mask")})
    for name in PER_ROW:
        if name in batch[0]:
            data[name] = torch.stack([row[name] for row in batch])
    return data


def packed(batch: list[Row]) -> BatchedDataDict:
    """Returns all sequences one after another in one row. The first token of a sequence is never trained, because every
    prompt has more than one token."""
    data = BatchedDataDict({name: torch.cat([row[name] for row in batch])[None] for name in PER_TOKEN})
    data["token_mask"] = torch.cat([row["token_mask"] * row["sample_mask"] for row in batch])[None]
    data["segment_ids"] = torch.cat([torch.full((len(row["logprobs"]),), i) for i, row in enumerate(batch)])[None]
    for name in PER_ROW:
        data[name] = torch.cat([row[name].expand(len(row["logprobs"])) for row in batch])[None]
    data["sample_mask"] = torch.ones(1, dtype=torch.float64)
    return data


def counts(batch: list[Row]) -> dict[str, torch.Tensor]:
    return {
        "global_valid_seqs": sum((row["sample_mask"] for row in batch), torch.zeros((), dtype=torch.float64)),
        "global_valid_toks": sum(
            ((row["token_mask"][1:] * row["sample_mask"]).sum() for row in batch), torch.zeros((), dtype=torch.float64)
        ),
    }


def evaluated(
    objective: Objective, data: BatchedDataDict, **global_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Returns the loss, its gradient with respect to the log-prob of every token [B, S], and the metrics."""
    leaf = data["logprobs"].clone().requires_grad_()
    columns = BatchedDataDict({name: column for name, column in data.items() if name != "logprobs"})
    outputs = {"next_token_logprobs": leaf[:, 1:], "next_token_centering": data["centering"][:, 1:]}
    loss, metrics = ObjectiveLoss(objective)(data=columns, **outputs, **global_counts)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, metrics


every_preset = pytest.mark.parametrize("name", [*PRESETS, *OWN])


@every_preset
def test_micro_batches_add_up_to_the_step(name: str) -> None:
    batch, objective = rows(), runnable(name)
    loss, gradient, metrics = evaluated(objective, padded(batch), **counts(batch))
    assert gradient.abs().sum() > 0
    for size in (1, 3):
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        found = [evaluated(objective, padded(part), **counts(batch)) for part in parts]
        torch.testing.assert_close(sum(part[0] for part in found), loss)
        flat = torch.cat([row[row != 0] for part in found for row in part[1]])
        torch.testing.assert_close(flat, torch.cat([row[row != 0] for row in gradient]))
        assert {key: sum(part[2][key] for part in found) for key in metrics} == pytest.approx(metrics)


@every_preset
def test_packed_and_padded_agree(name: str) -> None:
    batch, objective = rows(), runnable(name)
    loss, gradient, metrics = evaluated(objective, padded(batch), **counts(batch))
    together, packed_gradient, packed_metrics = evaluated(objective, packed(batch), **counts(batch))
    torch.testing.assert_close(together, loss)
    torch.testing.assert_close(
        packed_gradient[0], torch.cat([row[: PROMPT + length] for row, length in zip(gradient, LENGTHS, strict=True)])
    )
    assert packed_metrics == metrics


@every_preset
def test_the_order_of_rows_and_the_width_of_padding_change_nothing(name: str) -> None:
    batch, objective = rows(), runnable(name)
    loss, gradient, _ = evaluated(objective, padded(batch), **counts(batch))
    order = [2, 0, 3, 1]
    moved, moved_gradient, _ = evaluated(objective, padded([batch[i] for i in order], extra=3), **counts(batch))
    torch.testing.assert_close(moved, loss)
    torch.testing.assert_close(moved_gradient[:, : gradient.shape[1]], gradient[order])


@every_preset
def test_nan_in_masked_slots_changes_nothing(name: str) -> None:
    batch, objective = rows(), runnable(name)
    data = padded(batch)
    loss, gradient, metrics = evaluated(objective, data, **counts(batch))
    masked = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) == 0
    for column in PER_TOKEN:
        data[column] = torch.where(masked, torch.nan, data[column])
    poisoned, poisoned_gradient, poisoned_metrics = evaluated(objective, data, **counts(batch))
    torch.testing.assert_close(poisoned, loss)
    torch.testing.assert_close(poisoned_gradient, gradient)
    assert poisoned_metrics == metrics


@every_preset
def test_on_policy_the_gradient_is_that_of_reinforce_with_the_same_aggregation(name: str) -> None:
    """u = ρ = 1, and the policy equals its reference: clips, weights, gates and divergences have no effect."""
    batch, objective = rows(off_policy=0.0), runnable(name)
    divergences = tuple(penalty for penalty in objective.penalties if penalty.kind != "positive_nll")
    objective = msgspec.structs.replace(objective, penalties=divergences, dropped=None)
    plain = Objective(surrogate=Reinforce(), aggregation=objective.aggregation, constant=objective.constant)
    scale = 1.0
    if isinstance(objective.surrogate, Regression):
        # (β · Σ d − A)² has the gradient −2 · β · A at every token, for every length of the sequence
        plain, scale = (
            Objective(surrogate=Reinforce(), aggregation=Aggregation.SEQUENCE_SUM),
            2 * objective.surrogate.beta,
        )
    _, gradient, metrics = evaluated(objective, padded(batch), **counts(batch))
    torch.testing.assert_close(gradient, scale * evaluated(plain, padded(batch), **counts(batch))[1])
    assert set(metrics.values()) == {0.0}


@every_preset
def test_without_penalties_the_gradient_is_proportional_to_the_advantages(name: str) -> None:
    """A regression also has a gradient where advantages are 0, because it pulls the policy to the sampler's policy."""
    objective = msgspec.structs.replace(runnable(name), penalties=())

    def gradient(factor: float) -> torch.Tensor:
        batch = rows()
        for row in batch:
            row["advantages"] = factor * row["advantages"]
        return evaluated(objective, padded(batch), **counts(batch))[1]

    at_zero = gradient(0.0)
    assert bool(at_zero.any()) == isinstance(objective.surrogate, Regression)
    torch.testing.assert_close(gradient(3.0) - at_zero, 3 * (gradient(1.0) - at_zero))


@every_preset
def test_with_rho_one_the_off_policy_correction_is_inert(name: str) -> None:
    """beh = prox: the result is the same without the weight and without the gates between these two."""
    batch, objective = rows(), runnable(name)
    for row in batch:
        row["generation_logprobs"] = row["prev_logprobs"].clone()
        row["staleness"] = torch.zeros_like(row["staleness"])
    kept = tuple(gate for gate in objective.gates if {gate.p, gate.q} != {"proximal", "behaviour"})
    bare = msgspec.structs.replace(objective, weight=None, gates=kept, proximal="recomputed")
    if objective.proximal == "interpolated":  # then the proximal policy is the current policy, and u = 1
        for row in batch:
            row["prev_logprobs"] = row["logprobs"].clone()
            row["generation_logprobs"] = row["logprobs"].clone()
    _, gradient, metrics = evaluated(objective, padded(batch), **counts(batch))
    _, bare_gradient, _ = evaluated(bare, padded(batch), **counts(batch))
    torch.testing.assert_close(gradient, bare_gradient)
    assert metrics["gated_ratio"] == 0 or kept or objective.dropped is not None


@every_preset
@pytest.mark.fault("F24")
def test_a_step_with_nothing_to_train_is_zero_with_a_graph(name: str) -> None:
    batch = rows()
    for row in batch:
        row["sample_mask"] = torch.zeros((), dtype=torch.float64)
    loss, gradient, metrics = evaluated(runnable(name), padded(batch), **counts(batch))
    assert float(loss) == 0.0
    assert not gradient.any()
    assert set(metrics.values()) == {0.0}
