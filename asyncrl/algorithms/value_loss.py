"""The critic's loss: the squared error of values against returns, clipped around the old values.

The old values are those from which the returns were computed. The loss is divided by global counts, and with
`sequence_mean` by the tokens of each row, so every split into micro-batches and ranks gives the same gradient. Values
at masked positions are replaced before use, so NaN there has no effect. Only the current values carry gradient. A mask
value between 0 and 1 is a weight, and the global counts are sums of such weights.

Legend: B rows, S tokens. `values_BS[b, t]` is V(before token t). T = S − 1, because the first token is never trained.
"""

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch

from asyncrl.algorithms.interfaces import LossType, MetricNormalization, masked_mean
from asyncrl.algorithms.returns import ROUNDING
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import RunError

ValueAggregation = Literal["token_mean", "sequence_mean"]


class ClippedValueLoss:
    """½ · max((V − R)², (clip(V, V_old ± clip) − R)²) for value V and return R (PPO, 1707.06347 and its reference
    code).

    `aggregation` is `token_mean` or `sequence_mean`. `token_mean` is the mean over all trained tokens. `sequence_mean`
    first takes the mean over each sequence's trained tokens, then the mean over sequences. A sequence without a trained
    token counts as a sequence with mean 0.

    It is called like a `LossFunction`, with the critic's values [B, S] in place of logits. It reads the columns
    `returns`, `token_mask` [B, S], `sample_mask` [B] and, unless `clip` is None, the old values `values` [B, S]. It
    raises RunError if `returns` or the old values are missing.

    The metrics are means over tokens for both aggregations. `value_clipped_ratio` is the share of tokens whose clipped
    error is the larger one; such a token has no gradient. The other metrics are the inputs of `explained_variance`.
    """

    metric_normalizations: Mapping[str, MetricNormalization] = dict.fromkeys(
        ("value_clipped_ratio", "return_mean", "return_square_mean", "value_error_mean", "value_error_square_mean"),
        MetricNormalization.TOKENS,
    )

    def __init__(self, *, clip: float | None, aggregation: ValueAggregation = "token_mean") -> None:
        if aggregation not in get_args(ValueAggregation):
            raise RunError(
                f"the value loss's aggregation is {aggregation!r}; it must be one of "
                f"{', '.join(get_args(ValueAggregation))}"
            )
        if clip is not None and not clip > 0:
            raise RunError(f"the value clip is {clip:g}; it must be above 0, or None to train without a clip")
        self.clip = clip
        self.aggregation = aggregation
        self.loss_type = LossType.TOKEN_LEVEL if aggregation == "token_mean" else LossType.SEQUENCE_LEVEL
        self.columns = frozenset({"returns"} if clip is None else {"returns", "values"})

    def __call__(
        self,
        values_BS: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        missing = sorted(self.columns - set(data))
        if missing:
            raise RunError(
                f"the value loss reads {' and '.join(missing)}, but the rows do not have these columns; add them "
                "before training"
            )
        mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)) > 0

        def inside(column_BS: torch.Tensor) -> torch.Tensor:
            return torch.where(mask_BT, column_BS[:, 1:].float(), 0.0)

        values_BT, returns_BT = inside(values_BS), inside(data["returns"].detach())
        error_BT = values_BT - returns_BT
        square_BT = error_BT.square()
        clipped_BT = torch.zeros_like(mask_BT)
        if self.clip is not None:
            old_BT = inside(data["values"].detach())
            near_BT = torch.clamp(values_BT, min=old_BT - self.clip, max=old_BT + self.clip)
            clipped_square_BT = (near_BT - returns_BT).square()
            clipped_BT = clipped_square_BT > square_BT
            square_BT = torch.maximum(square_BT, clipped_square_BT)
        weight_BT = data["token_mask"][:, 1:].float() * data["sample_mask"].float().unsqueeze(1)
        if self.aggregation == "token_mean":
            loss = 0.5 * masked_mean(square_BT, weight_BT, global_valid_toks)
        else:
            tokens_B1 = data["token_mask"][:, 1:].float().sum(1, keepdim=True)
            means_BT = square_BT / torch.where(tokens_B1 > 0, tokens_B1, 1)
            loss = 0.5 * masked_mean(means_BT, weight_BT, global_valid_seqs)

        def mean(values_BT: torch.Tensor) -> float:
            return float(masked_mean(values_BT.detach().double(), weight_BT, global_valid_toks))

        return loss, {
            "value_clipped_ratio": mean(clipped_BT),
            "return_mean": mean(returns_BT),
            "return_square_mean": mean(returns_BT.double().square()),
            "value_error_mean": mean(error_BT),
            "value_error_square_mean": mean(error_BT.double().square()),
        }


def explained_variance(metrics: Mapping[str, float]) -> float:
    """Returns 1 − Var(R − V) / Var(R) from a step's normalised metrics.

    1 means a perfect critic. 0 means a critic that predicts only the mean. Below 0, the critic is worse than the mean.
    The result is NaN if all returns are equal.
    """
    spread = metrics["return_square_mean"] - metrics["return_mean"] ** 2
    left = metrics["value_error_square_mean"] - metrics["value_error_mean"] ** 2
    # for equal returns, the spread is not exactly 0: it contains the rounding errors of the sums
    return 1 - left / spread if spread > ROUNDING * metrics["return_square_mean"] else math.nan
