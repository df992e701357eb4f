"""One rank of the critic: a backbone with a scalar head that learns what states are worth.

Legend: B rows, S tokens.
"""

from collections.abc import Mapping

import torch

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.batching import trained_mask
from asyncrl.policy.micro_batch import MicroBatchOutcome
from asyncrl.policy.sharded_worker import ShardedWorker
from asyncrl.policy.step_plan import check_columns
from asyncrl.policy.step_report import RankRecord
from asyncrl.value.model import load_value_model, model_values


class ValueWorker(ShardedWorker[ValueLossFunction]):
    """A rank of the critic that grows from the language model at `model_path`."""

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: ValueLossFunction,
        *,
        rows_per_update: int,
        micro_batch_size: int | None = None,
        eval_mode: bool = False,
        step: int | None = None,
    ) -> RankRecord:
        """`ShardedWorker.train`. MissingColumns, on all ranks, when the loss reads a column that is not there."""
        check_columns(loss_fn, data, gather=self.gather)
        return super().train(
            data,
            loss_fn,
            rows_per_update=rows_per_update,
            micro_batch_size=micro_batch_size,
            eval_mode=eval_mode,
            step=step,
        )

    def get_values(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`values` float32 [B, S] of this rank's rows; 0 at the first token and beyond a row's length. Reads
        `input_ids`, `input_lengths`."""
        return BatchedDataDict(values=self._scored(data, self._values, micro_batch_size=micro_batch_size))

    def _loaded(self, model_path: str) -> torch.nn.Module:
        return load_value_model(model_path, packed=self._packed)

    def _outcome(
        self,
        part: BatchedDataDict,
        *,
        loss_fn: ValueLossFunction,
        counts: Mapping[str, torch.Tensor],
        step: int | None,
    ) -> MicroBatchOutcome:
        values_BS = self._values(part)
        if not bool(trained_mask(part).any()):
            # the graph stays, so that FSDP's hooks and collectives run as on the other ranks
            return MicroBatchOutcome(differentiable=0.0 * values_BS.sum())
        loss, metrics = loss_fn(values_BS, part, **counts)
        return MicroBatchOutcome(
            differentiable=loss,
            loss=float(loss.detach()),
            metrics={name: float(value) for name, value in metrics.items()},
        )

    def _values(self, part: BatchedDataDict) -> torch.Tensor:
        lengths_B = part["input_lengths"] if self._packed else None
        return model_values(self._model, part["input_ids"], packed_lengths_B=lengths_B)
