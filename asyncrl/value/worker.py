"""One rank of the critic: a backbone with a scalar head that learns the value of states.

Legend: B rows, S tokens.
"""

import copy

import torch

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.masks import trained_mask
from asyncrl.ranks.loss_pass import (
    MicroBatchOutcome,
    UpdateContext,
    checked_loss,
    loss_failed,
    slopes_of,
    with_slopes,
)
from asyncrl.ranks.worker import RankWorker
from asyncrl.value.model import ValueModel, load_value_model, model_values


class ValueWorker(RankWorker[ValueLossFunction]):
    """A rank of the critic, initialised from the language model at `model_path`."""

    section = "critic"

    def get_values(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> BatchedDataDict:
        """Returns `values` float32 [B, S] of this rank's rows; 0 at the first token and beyond a row's length. Reads
        `input_ids` and `input_lengths`."""
        return BatchedDataDict(values=self._scored(data, self._values, micro_batch_size=micro_batch_size))

    def _loaded(self, model_path: str) -> ValueModel:
        return load_value_model(model_path, packed=self._packed)

    def _outcome(self, part: BatchedDataDict, context: UpdateContext[ValueLossFunction]) -> MicroBatchOutcome:
        values_BS = self._values(part)
        if not bool(trained_mask(part).any()):
            # the result keeps the graph, so that FSDP's hooks and collectives run as on the other ranks
            return MicroBatchOutcome(differentiable=0.0 * values_BS.sum())
        leaf_BS = values_BS.detach().requires_grad_()
        try:
            # first differentiated only with respect to the values, so a failing loss never reaches the model
            with torch.enable_grad():
                loss, metrics = checked_loss(context.loss_fn(leaf_BS, copy.copy(part), **context.counts))
                [slopes_BS] = slopes_of(loss, leaf_BS)
                value = float(loss.detach())
        except Exception as error:
            return MicroBatchOutcome(differentiable=0.0 * values_BS.sum(), failure=loss_failed(error))
        return MicroBatchOutcome(differentiable=with_slopes(values_BS, slopes_BS), loss=value, metrics=metrics)

    def _values(self, part: BatchedDataDict) -> torch.Tensor:
        lengths_B = part["input_lengths"] if self._packed else None
        return model_values(self._model, part["input_ids"], packed_lengths_B=lengths_B)
