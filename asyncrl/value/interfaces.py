"""The interface of a critic that is trained.

Calls with `*args, **kwargs` ignore arguments that they do not know, with a warning.

Legend: B rows, S tokens. `values[b, t]` is V(before token t): the value of the state `input_ids[b, :t]`. Padding is on
the right.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypedDict

from asyncrl.algorithms.interfaces import ValueLossFunction
from asyncrl.ranks.interfaces import TrainedModelInterface

if TYPE_CHECKING:
    import torch

    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.ranks.timer import Timer


class ValueOutputSpec(TypedDict):
    """The columns that `get_values` returns."""

    values: torch.Tensor
    """float32 [B, S]; 0 at the first token and beyond a row's length."""


class ValueInterface(TrainedModelInterface[ValueLossFunction]):
    """A model that predicts the value of states. Calls block. Rows keep the caller's order, and results are on the
    CPU.

    `train` reads `returns` [B, S], the masks and, if the loss clips, the old `values` [B, S].
    """

    @abstractmethod
    def get_values(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        """Returns the `ValueOutputSpec` of rows with `input_ids` and `input_lengths`.

        Computes no gradient. Raises AssertionError if B is not a multiple of the number of ranks, or if tensors of two
        or more dimensions differ in dimension 1.
        """

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Moves the weights and the optimizer's state to the ranks' devices, if they were moved away, and frees the
        gradients."""
