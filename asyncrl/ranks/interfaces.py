"""The calls that the interfaces of the policy and of the critic have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.ranks.timer import Timer

LossT_contra = TypeVar("LossT_contra", contravariant=True)
"""Type of the losses with which a model is trained."""


class TrainedModelInterface(ABC, Generic[LossT_contra]):
    """A model on ranks that is trained. Calls block. Rows keep the caller's order, and results are on the CPU."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossT_contra,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Trains on the rows. Each `gbs` rows (default: all) are one update.

        An update makes an optimizer step if it has a trained token, and loss and gradient are finite. The call makes
        one step of the learning-rate schedule, also if there is no trained token, but not if the loss or gradient of
        every update was not finite.

        `data` has the columns that the loss reads, which `PolicyInterface` and `ValueInterface` list. If `mbs` is
        given, `mbs` rows of a rank share a pass. In eval mode, weights, optimizer and schedule do not change.

        Returns a dict:

        - `loss` and `grad_norm`: float32, one entry for each update with a trained token;
        - `all_mb_metrics`: by name, one value for every micro-batch of all ranks for which the loss has metrics (if it
          has none, one value for each rank and update). These are the loss's own metrics, `lr`, `wd`, and the
          `global_valid_seqs` and `global_valid_toks` of the micro-batch's update. The values of one of the loss's own
          metrics add up to its mean over these updates, unless it is an extreme or an average;
        - `timing`: seconds by stage;
        - `report`: an `asyncrl.ranks.report.StepReport`.

        All errors of arguments leave the ranks alive. Raises AssertionError if the number of rows is not a multiple of
        `gbs`, if `gbs` is neither a multiple of the number of ranks nor all rows, if `mbs` is below 1, or if tensors of
        two or more dimensions differ in dimension 1. Raises MissingColumns with the columns that the loss reads and the
        rows lack. Raises CallRefused with the column, row and value that the model cannot use. Raises LossFailed if the
        loss raises an error or does not return a scalar and a dict of numbers. Raises RunError, and ends the ranks, if
        a rank has too little memory, also inside the loss.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Moves the weights and the optimizer's state to the ranks' devices, if they were moved away."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Frees the gradients."""

    @abstractmethod
    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Writes the sharded weights, and the optimizer's state and the tokenizer if their paths are given."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the ranks. Idempotent. A rank that is already dead does not cause an error. Returns True if all ranks
        left their process group in time and without an error."""
