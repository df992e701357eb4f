"""Losses as users write them: healthy ones, and ones with a mistake that the witness finds."""

from typing import Any, ClassVar

import torch

from asyncrl.algorithms.loss import gather_logprobs
from asyncrl.algorithms.step_statistics import StepStatistic, StepTokens, mean, quantile

Result = tuple[torch.Tensor, dict[str, float]]


class OfLogprobs:
    """A loss of log-probs. `columns` are those that it reads."""

    input_type = "logprob"
    loss_type = "token_level"
    columns = ("advantages",)

    def __call__(
        self,
        *,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
    ) -> Result:
        return self.total(data, next_token_logprobs) / global_valid_toks, {}

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        """Returns the sum over tokens, by default of REINFORCE."""
        mask_BT = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        return -(data["advantages"][:, 1:] * logprobs_BT * mask_BT).sum()


class Pairwise(OfLogprobs):
    """The better sample of each pair of a group should be more likely than the worse one."""

    columns = ("group_ids", "rewards")

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        score_B = (logprobs_BT * mask_BT).sum(1)
        better_BB = data["rewards"].unsqueeze(1) > data["rewards"].unsqueeze(0)
        better_BB &= data["group_ids"].unsqueeze(1) == data["group_ids"].unsqueeze(0)
        apart_BB = score_B.unsqueeze(1) - score_B.unsqueeze(0)
        return -(torch.nn.functional.logsigmoid(0.1 * apart_BB) * better_BB).sum()


def ratios(tokens: StepTokens) -> torch.Tensor:
    return tokens.log_ratio("current", "behaviour").exp()


def covariances(tokens: StepTokens) -> torch.Tensor:
    """The product of each token's distances from the mean log-prob and from the mean advantage."""
    apart = tokens.sources["current"] - tokens.statistics["logprob"]
    return apart * (tokens.advantages - tokens.statistics["advantage"])


class OfTheStep(OfLogprobs):
    """REINFORCE whose advantages are centred over the whole step, with each token weighted by its ratio to the sampler
    over the mean ratio, up to a cap. Tokens with the largest covariances are left out."""

    columns = ("advantages", "generation_logprobs", "prev_logprobs")
    statistics: ClassVar = {
        "ratio": StepStatistic(ratios, mean),
        "logprob": StepStatistic(lambda tokens: tokens.sources["current"], mean),
        "advantage": StepStatistic(lambda tokens: tokens.advantages, mean),
        "high": StepStatistic(covariances, quantile(0.8)),
    }

    def __init__(self, *, cap: float) -> None:
        self.cap = cap

    def __call__(
        self,
        *,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        next_token_logprobs: torch.Tensor,
        statistics: dict[str, float] | None = None,
    ) -> Result:
        assert statistics is not None
        proximal_BT, centred_BT = data["prev_logprobs"][:, 1:], data["advantages"][:, 1:] - statistics["advantage"]
        weight_BT = (proximal_BT - data["generation_logprobs"][:, 1:]).exp() / statistics["ratio"]
        covariance_BT = (proximal_BT - statistics["logprob"]) * centred_BT
        mask_BT = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        kept_BT = weight_BT.clamp(max=self.cap) * (covariance_BT <= statistics["high"]) * mask_BT
        loss = -(centred_BT * kept_BT * next_token_logprobs).sum() / global_valid_toks
        return loss, {f"{name}_max": value for name, value in statistics.items()}


class WithoutTokenMask(OfLogprobs):
    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        return -(data["advantages"][:, 1:] * logprobs_BT * data["sample_mask"].unsqueeze(1)).sum()


class WithoutSampleMask(OfLogprobs):
    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        return -(data["advantages"][:, 1:] * logprobs_BT * data["token_mask"][:, 1:]).sum()


class MeanOfMicroBatch(OfLogprobs):
    """Divides by the tokens of the micro-batch, so that the cut into micro-batches changes the gradient."""

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        return super().total(data, logprobs_BT) / data["token_mask"].sum()


class Random(OfLogprobs):
    """Trains another half of the tokens in each call."""

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        return super().total(data, logprobs_BT * (torch.rand_like(logprobs_BT) < 0.5))


class ChangesItsRows(OfLogprobs):
    """Halves the advantages that it gets, which a second call would then find."""

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        data["advantages"].mul_(0.5)
        return super().total(data, logprobs_BT)


class Overflows(OfLogprobs):
    """Has gradients of +∞ and of −∞."""

    def total(self, data: Any, logprobs_BT: torch.Tensor) -> torch.Tensor:
        return 1e38 * (1e38 * super().total(data, logprobs_BT))


def of_logits(
    logits: torch.Tensor, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor
) -> Result:
    logprobs_BT = gather_logprobs(logits, input_ids_BS=data["input_ids"])
    return OfLogprobs().total(data, logprobs_BT) / global_valid_toks, {}


def of_logits_without_mask(
    logits: torch.Tensor, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor
) -> Result:
    logprobs_BT = gather_logprobs(logits, input_ids_BS=data["input_ids"])
    return WithoutTokenMask().total(data, logprobs_BT) / global_valid_toks, {}


def of_logits_of_micro_batch(
    logits: torch.Tensor, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor
) -> Result:
    logprobs_BT = gather_logprobs(logits, input_ids_BS=data["input_ids"])
    return MeanOfMicroBatch().total(data, logprobs_BT), {}


HEALTHY = {
    "reinforce": (OfLogprobs(), "own function, each sample alone"),
    "pairwise": (Pairwise(), "own function, the group alone"),
    "of logits": (of_logits, "own function, each sample alone"),
    "of the step": (OfTheStep(cap=2.0), "own function, each sample alone"),
    "random": (Random(), "not witnessed: two calls with the same rows give different derivatives"),
}
"""Losses without a mistake, and the kind of witness that each has."""

MISTAKEN = {
    "without token mask": (WithoutTokenMask(), "by a token that its masks leave out"),
    "without sample mask": (WithoutSampleMask(), "by a token that its masks leave out"),
    "mean of the micro-batch": (MeanOfMicroBatch(), "if the micro-batch has only this group"),
    "of logits, without token mask": (of_logits_without_mask, "by a token that its masks leave out"),
    "of logits, mean of the micro-batch": (of_logits_of_micro_batch, "if the micro-batch has only this group"),
}
"""Losses with a mistake, and the words with which the witness finds it."""
