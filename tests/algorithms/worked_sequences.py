"""Sequences that are worked by hand: their probabilities, and the expected loss and gradient of every token.

Tests compare `asyncrl/algorithms/loss.py` with them; nothing here computes a loss. Prompts and padding have ratios of
their own, so a value that leaks from a masked position changes the result. The sequences are a micro-batch of a step of
STEP_TOKENS trained tokens in STEP_SEQUENCES sequences. STEP_POSITIVE_TOKENS of these tokens are in sequences with a
positive reward. So a loss that wrongly uses the micro-batch's own counts gives another result, too.
"""

import math
from dataclasses import dataclass

import msgspec
import torch

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import ByCovariance, ChosenByCovariance, Objective
from asyncrl.data.batched_data_dict import BatchedDataDict

STEP_TOKENS = 10
STEP_SEQUENCES = 4
STEP_POSITIVE_TOKENS = 5
PROMPT = 2
MASKED = {
    "logprobs": 0.9,
    "prev_logprobs": 0.07,
    "generation_logprobs": 0.6,
    "reference_policy_logprobs": 0.03,
}


@dataclass(frozen=True, kw_only=True)
class Worked:
    """One sequence. The probabilities are those of its tokens. `losses` and `gradients` (with respect to the current
    log-prob) are before the aggregation, which divides them by `over`.

    A column that is a single number applies to every token. The defaults make every ratio far from 1, so an objective
    that reads a ratio by mistake gives another result.
    """

    advantage: float | tuple[float, ...]
    current: tuple[float, ...]
    losses: tuple[float, ...]
    gradients: tuple[float, ...]
    over: float
    proximal: float | tuple[float, ...] = 0.2
    behaviour: float | tuple[float, ...] = 0.05
    reference: float | tuple[float, ...] = 0.6
    staleness: float | tuple[float, ...] = 3.0
    reward: float = 0.0


def with_choices(objective: Objective, *, above: float, **bounds: float) -> Objective:
    """Returns the objective with choices of tokens by covariance as the calibration of a step would fill them in, with
    the means ln 0.2 and 0."""

    def filled(choice: ByCovariance | None) -> ByCovariance | None:
        if choice is None:
            return None
        configured = {name: getattr(choice, name) for name in ByCovariance.__struct_fields__} | bounds
        return ChosenByCovariance(**configured, mean_logprob=math.log(0.2), mean_advantage=0.0, above=above)

    penalties = tuple(msgspec.structs.replace(each, tokens=filled(each.tokens)) for each in objective.penalties)
    return msgspec.structs.replace(objective, dropped=filled(objective.dropped), penalties=penalties)


def log_weighted(
    *,
    advantage: float,
    current: tuple[float, ...],
    gradients: tuple[float, ...],
    proximal: float | tuple[float, ...] = 0.2,
    behaviour: float | tuple[float, ...] = 0.05,
    over: float = STEP_TOKENS,
) -> Worked:
    """Returns a sequence under −A · k · lp with k detached: the gradient is −A · k, and the loss is that times lp."""
    losses = tuple(gradient * math.log(p) for gradient, p in zip(gradients, current, strict=True))
    return Worked(
        advantage=advantage,
        current=current,
        losses=losses,
        gradients=gradients,
        over=over,
        proximal=proximal,
        behaviour=behaviour,
    )


def each(value: float | tuple[float, ...], *, length: int) -> list[float]:
    return list(value) if isinstance(value, tuple) else [value] * length


def batch_of(sequences: tuple[Worked, ...]) -> BatchedDataDict:
    width = PROMPT + max(len(sequence.current) for sequence in sequences)
    columns: dict[str, list[list[float]]] = {}
    for sequence in sequences:
        length = len(sequence.current)
        probabilities = {
            "logprobs": sequence.current,
            "prev_logprobs": sequence.proximal,
            "generation_logprobs": sequence.behaviour,
            "reference_policy_logprobs": sequence.reference,
        }
        padding = width - PROMPT - length
        for name, value in probabilities.items():
            masked = MASKED[name]
            row = [masked] * PROMPT + each(value, length=length) + [masked] * padding
            columns.setdefault(name, []).append(torch.tensor(row, dtype=torch.float64).log().tolist())
        for name, value in {"advantages": sequence.advantage, "staleness": sequence.staleness}.items():
            row = [7.0] * PROMPT + each(value, length=length) + [7.0] * padding
            columns.setdefault(name, []).append(row)
        columns.setdefault("token_mask", []).append([0.0] * PROMPT + [1.0] * length + [0.0] * padding)
    data = BatchedDataDict({name: torch.tensor(rows, dtype=torch.float64) for name, rows in columns.items()})
    data |= dict.fromkeys(("top_ids", "top_logprobs"), torch.zeros(*data["token_mask"].shape, 1))
    data["sample_mask"] = torch.ones(len(sequences), dtype=torch.float64)
    data["rewards"] = torch.tensor([sequence.reward for sequence in sequences], dtype=torch.float64)
    data["positive_share"] = (data["rewards"] > 0) / STEP_POSITIVE_TOKENS
    return data


def assert_as_worked(objective: Objective, sequences: tuple[Worked, ...]) -> None:
    """Asserts the value of the loss and its gradient at every log-prob of the batch, including prompts and padding."""
    data = batch_of(sequences)
    leaf = data["logprobs"].requires_grad_()
    columns = BatchedDataDict({name: column for name, column in data.items() if name != "logprobs"})
    loss, _ = ObjectiveLoss(objective)(
        data=columns,
        next_token_logprobs=leaf[:, 1:],
        next_token_centering=torch.zeros_like(leaf[:, 1:]),  # test_centering.py has its values
        global_valid_seqs=torch.tensor(float(STEP_SEQUENCES)),
        global_valid_toks=torch.tensor(float(STEP_TOKENS)),
    )
    loss.backward()
    assert leaf.grad is not None
    width = leaf.shape[1]
    gradients = torch.tensor(
        [
            [0.0] * PROMPT
            + [gradient / sequence.over for gradient in sequence.gradients]
            + [0.0] * (width - PROMPT - len(sequence.current))
            for sequence in sequences
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(leaf.grad, gradients, rtol=1e-6, atol=1e-7)
    value = sum(sum(sequence.losses) / sequence.over for sequence in sequences)
    # the loss uses float32 bounds and temperatures, and large terms of the sum cancel, so the tolerance is 1e-6
    torch.testing.assert_close(loss.detach().double(), torch.tensor(value, dtype=torch.float64), rtol=1e-6, atol=1e-6)
