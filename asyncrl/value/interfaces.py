"""The interface of a critic that is trained.

Calls with `*args, **kwargs` ignore arguments that they do not know, with a warning.

Legend: B rows, S tokens. `values[b, t]` is V(before token t): the value of the state `input_ids[b, :t]`. Padding is on
the right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.interfaces import ValueLossFunction
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.ranks.timer import Timer


class ValueOutputSpec(TypedDict):
    """The columns that `get_values` returns."""

    values: torch.Tensor
    """float32 [B, S]; 0 at the first token and beyond a row's length."""


class ValueInterface(ABC):
    """A model that predicts the value of states. Calls block. Rows keep the caller's order, and results are on the
    CPU."""

    @abstractmethod
    def get_values(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        """Returns the `ValueOutputSpec` of rows with `input_ids` and `input_lengths`.

        Computes no gradient. Raises AssertionError if B is not a multiple of the number of ranks, or if tensors of two
        or more dimensions differ in dimension 1.
        """

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: ValueLossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Makes one optimizer step for every `gbs` rows (default: all rows), and one scheduler step for the call.

        `data` has `returns` [B, S], the masks and, if the loss clips, the old `values` [B, S]. Other arguments, results
        and errors are those of `PolicyInterface.train`.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Loads weights and optimizer onto the ranks' devices."""

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Loads the weights onto the ranks' devices, and frees the gradients."""

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
        """Writes the sharded weights, and the optimizer's state and the tokenizer if they have a path."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the ranks. Idempotent. A rank that is already dead does not cause an error. Returns True if all ranks
        left in order."""
