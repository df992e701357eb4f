"""The interfaces of a policy that is trained.

Other trainers pass more arguments to some of these methods. These methods take `*args, **kwargs`. They ignore arguments
that they do not know, with a warning that names the arguments.

Legend: B rows, S tokens. Column entry `c[b, i]` belongs to token `input_ids[b, i]` given its prefix. Padding is on the
right.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.ranks.interfaces import TrainedModelInterface

if TYPE_CHECKING:
    import ray
    import torch

    from asyncrl.common.version import Version
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.ranks.timer import Timer


class LogprobOutputSpec(TypedDict):
    """The columns that `get_logprobs` returns."""

    logprobs: torch.Tensor
    """float32 [B, S], nats; 0 at the first token and beyond a row's length."""


class ReferenceLogprobOutputSpec(TypedDict):
    """The columns that `get_reference_policy_logprobs` returns."""

    reference_logprobs: torch.Tensor
    """float32 [B, S], nats; 0 at the first token and beyond a row's length."""


class PolicyInterface(TrainedModelInterface[LossFunction]):
    """A model that computes log-probs and is trained. Calls block. Rows keep the caller's order, and results are on the
    CPU.

    `train` reads the columns that the loss reads. Among them are:

    - `staleness` [B, S], in versions, if the proximal policy is interpolated;
    - `prev_logprobs` [B, S], if there are several updates, or if the loss has statistics of the whole step;
    - `group_ids` [B], if the loss averages over prompts;
    - `rewards` [B], if the loss adds the likelihood of good rows.

    `advantages` may be [B, S] or [B].
    """

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        """Returns the `LogprobOutputSpec` of rows with `input_ids` and `input_lengths`, at the sampler's temperature.

        Computes no gradient. Raises AssertionError if B is not a multiple of the number of ranks, or if tensors of two
        or more dimensions differ in dimension 1.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """Returns the `ReferenceLogprobOutputSpec`: log-probs like those of `get_logprobs`, but under the initial
        weights. The live weights stay unchanged."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that gives its weights to engines, which run on other devices or share the policy's devices.

    Call `prepare_refit_info` once, and pass its result to the generation side's `prepare_refit_info`.
    `colocated/refit.py` makes the calls of a refit in their order:

    - By broadcast: call `init_collective` on both sides at the same time. Then call `broadcast_weights_for_collective`
      together with `update_weights_from_collective`.
    - On a shared device: `offload_before_refit`, `prepare_weights_for_ipc`, `get_weights_ipc_handles` for one group of
      parameters after the other, `offload_after_refit`, and `prepare_for_training` before the next training step.

    Weights have a version. If it is not given, it is one step after the newest version that this policy has sent; the
    first is step 0. A failure raises a WeightError. It is a CollectiveError if a peer is dead, missing or late.
    """

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *args: Any, train_world_size: int | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[None]]:
        """Makes every rank join the process group at `ip`:`port`, where rank 0 listens.

        Returns at once. The references are done when all `world_size` members have joined. The group numbers this
        policy's ranks first, and then the engines' workers. After `weights.load_timeout_s`, the references raise
        CollectiveError. If a rank has joined a group before, it leaves that group.
        """

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns (shape, dtype without `torch.`) of every weight by its Hugging Face name, in broadcast order."""

    def prepare_info_for_collective(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns `prepare_refit_info()`. Other trainers call it by this name."""
        return self.prepare_refit_info()

    @abstractmethod
    def broadcast_weights_for_collective(
        self, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[None]]:
        """Makes every rank broadcast its part of the current weights to the engines.

        Returns at once. The references are done when all engines have received all weights. They raise UpdateRefused if
        an engine has another model; the group stays usable then.
        """

    @abstractmethod
    def prepare_weights_for_ipc(
        self, refit_buffer_size_gb: float | None = None, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[list[str]]:
        """Returns the names of the weights in groups, in the order in which `get_weights_ipc_handles` needs them.

        A group fits into `refit_buffer_size_gb` GiB and into half of the free memory of each rank's device. A weight
        that does not fit is a group of its own.
        """

    @abstractmethod
    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, Any]:
        """Puts the next group of weights, `keys`, into memory that an engine on the same device can open.

        Returns the handles to open, by device. The memory of the previous group is freed. Raises AssertionError if
        `prepare_weights_for_ipc` was not called. Raises WeightError if `keys` is not the next group, or if the policy
        was trained or loaded in the meantime.
        """

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Moves the optimizer's state off the ranks' devices, and frees the gradients."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Moves the model off the ranks' devices, too, and frees the shared memory."""
