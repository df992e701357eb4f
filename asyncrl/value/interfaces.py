"""The interface of a critic that is trained. Calls with `*args, **kwargs` ignore what they do not know, with a warning.

Legend: B rows, S tokens. `values[b, t]` is V(before token t), the state that `input_ids[b, :t]` is; right padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import torch

    from asyncrl.algorithms.interfaces import ValueLossFunction
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.policy.interfaces import Timer


class ValueOutputSpec(TypedDict):
    """Columns that `get_values` returns."""

    values: torch.Tensor
    """float32 [B, S]; 0 at the first token and beyond a row's length."""


class ValueInterface(ABC):
    """A model that tells what states are worth. Calls block; rows are in the caller's order, and results on the CPU."""

    @abstractmethod
    def get_values(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        """`ValueOutputSpec` of rows with `input_ids`, `input_lengths`.

        No gradient. AssertionError when B is no multiple of the ranks, and when tensors of two or more dimensions
        differ in dimension 1.
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
        """One optimizer step for every `gbs` rows (all of them unless given), one scheduler step a call.

        `data` has `returns` [B, S], the masks and, when the loss clips, the old `values` [B, S]. What else is said, and
        what is returned, is as `PolicyInterface.train` has it.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Weights and optimizer are on the ranks' devices when it returns."""

    @abstractmethod
    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        """Weights are on the ranks' devices when it returns, and no gradient is kept."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Lets go of gradients."""

    @abstractmethod
    def save_checkpoint(
        self,
        weights_path: str | Path,
        optimizer_path: str | Path | None = None,
        tokenizer_path: str | Path | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Writes the sharded weights and, where paths are given, the optimizer's state and the tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the ranks; idempotent, and dead ones do no harm. Whether all of them left in order."""
