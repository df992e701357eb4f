"""One rank of the critic: a backbone with a scalar head that learns the value of states.

Legend: B rows, S tokens.
"""

import copy
from functools import partial

import torch
from torch.distributed.distributed_c10d import Store

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import trained_mask
from asyncrl.ranks.loss_pass import MicroBatchOutcome, UpdateContext, outcome_of, without_slopes
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.start_check import check_start
from asyncrl.ranks.worker import RankWorker
from asyncrl.value.model import ValueModel, load_value_model, model_states, model_values


class ValueWorker(RankWorker[ValueLossFunction]):
    """A rank of the critic, initialised from the language model at `model_path`."""

    section = "critic"

    def __init__(self, *, model_path: str, config: Config, rank: int, world_size: int, store: Store) -> None:
        super().__init__(model_path=model_path, config=config, rank=rank, world_size=world_size, store=store)
        check_start(
            partial(model_states, self.model),
            sharded=self.model,
            model=self.model.backbone,
            config=config,
            vocabulary=self._vocabulary,
            device=self._device,
        )

    def get_values(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> BatchedDataDict:
        """Returns `values` float32 [B, S] of this rank's rows; 0 at the first token and beyond a row's length. Reads
        `input_ids`, `input_lengths`, and `branch_ids` if the rows have them."""
        return BatchedDataDict(values=self._scored(data, self._values, micro_batch_size=micro_batch_size))

    def _loaded(self, model_path: str) -> ValueModel:
        return load_value_model(model_path, packed=self._packed)

    def _outcome(self, part: BatchedDataDict, context: UpdateContext[ValueLossFunction]) -> MicroBatchOutcome:
        values_BS = self._values(part)
        if not bool(trained_mask(part).any()):
            return MicroBatchOutcome(differentiable=without_slopes(values_BS))
        return outcome_of(
            {"values": values_BS}, lambda values: context.loss_fn(values, copy.copy(part), **context.counts)
        )

    def _values(self, part: BatchedDataDict) -> torch.Tensor:
        return model_values(self.model, ModelRows.of(part, packed=self._packed))
