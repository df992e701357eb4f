"""The interfaces of a policy that is trained, and what it reports of a step.

Calls that trainers elsewhere pass more arguments to take `*args, **kwargs`; they ignore what they do not know, with a
warning that names it.

Legend: B rows, S tokens. Column `c[b, i]` belongs to token `input_ids[b, i]` given its prefix; right padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

if TYPE_CHECKING:
    import ray
    import torch

    from asyncrl.algorithms.interfaces import LossFunction
    from asyncrl.buffer.records import Version
    from asyncrl.data.batched_data_dict import BatchedDataDict


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step did, over all ranks.

    `skipped`: nothing was applied because every update was non-finite on some rank (F21). A step without a trained
    token applies no update either, but is not skipped. In eval mode: what training would have reported.
    """

    skipped: bool = False
    updates_applied: int = 0
    updates_nonfinite: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    trained_tokens: int = 0
    trained_samples: int = 0
    entropy_nats: float = 0.0
    ess: float = 1.0
    importance_weight_mean: float = 1.0
    importance_weight_max: float = 1.0
    kl_behaviour_k1_nats: float = 0.0
    kl_behaviour_k3_nats: float = 0.0
    on_policy_tokens: int = 0
    on_policy_parity_max_nats: float = 0.0
    token_staleness: tuple[int, ...] = ()
    """Trained tokens by staleness: entry s counts those that are s versions old."""
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    """By name: what `asyncrl.algorithms.kernel` measured, but for a user's loss that takes logits; the mean e^|log ρ|
    and the largest |log ρ|; the KL to the reference; the share of real tokens among those that went through the model;
    how many tokens were left out because a log-prob or advantage was no number. What was not measured is not there."""
    loss_metrics: Mapping[str, float] = field(default_factory=dict)
    """The loss's own metrics, added over micro-batches and ranks and averaged over updates: `clipped_ratio` and
    `gated_ratio` for the presets."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds of rank 0 in `log_probs`, `forward_backward` and `optimizer`."""
    model_flops: int | None = None
    """Of the passes, in eval mode forward alone, as `asyncrl.policy.flops` counts them; None where it does not."""
    peak_flops_per_s: float | None = None
    """What the ranks' devices could do together, in the precision of the passes; None where it is not known."""


class ParameterSpec(NamedTuple):
    """One parameter as the engine gets it: Hugging Face name, shape, torch dtype without `torch.`, bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class LogprobOutputSpec(TypedDict):
    """Columns that `get_logprobs` returns."""

    logprobs: torch.Tensor
    """float32 [B, S], nats; 0 at the first token and beyond a row's length."""


class ReferenceLogprobOutputSpec(TypedDict):
    """Columns that `get_reference_policy_logprobs` returns."""

    reference_logprobs: torch.Tensor
    """float32 [B, S], nats; 0 at the first token and beyond a row's length."""


class Timer(Protocol):
    """Measures stages: `with timer.time("policy_training/ranks"): …`.

    A call times its stages under `<call>/…`, never the call itself, so that its caller may:
    `with timer.time("policy_training"): policy.train(data, loss_fn, timer=timer)`.
    """

    def time(self, label: str) -> AbstractContextManager[Any]: ...


class PolicyInterface(ABC):
    """A model that scores and learns. Calls block; rows are in the caller's order, and results on the CPU."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        """`LogprobOutputSpec` of rows with `input_ids`, `input_lengths`, at the sampler's temperature.

        No gradient. AssertionError when B is no multiple of the ranks, and when tensors of two or more dimensions
        differ in dimension 1.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        """`ReferenceLogprobOutputSpec`: the same under the first weights. The live ones are not touched."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for every `gbs` rows (all of them unless given), one scheduler step a call.

        `data` has the columns that the loss reads: `staleness` [B, S], in versions, among them where the proximal
        policy is interpolated, `prev_logprobs` when there are several updates, `group_ids` [B] where the loss averages
        over prompts, `rewards` [B] where it imitates good rows. `advantages` may be [B, S] or [B]. `mbs` rows of a rank
        share a pass, padded, when it is given. In eval mode nothing changes.

        Returns `loss`, `grad_norm` float32 [steps], `all_mb_metrics` (by name a value for every micro-batch of all
        ranks: the loss's own, `lr`, `wd` and its update's `global_valid_seqs` and `global_valid_toks`; the loss's own
        add up to their mean over the updates), `timing` (seconds by stage) and `report`, a `StepReport`.

        Errors leave the ranks alive. AssertionError when the rows are no multiple of `gbs`, or `gbs` of the ranks
        unless it is all rows, or `mbs` is below 1. MissingColumns names what the loss reads and the rows lack.
        CallRefused names the column, row and value that the model cannot use. LossFailed when the loss raises, or
        returns something other than a scalar and a dict of numbers.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Weights and optimizer are on the ranks' devices when it returns."""

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


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that gives its weights to engines, on devices of their own or on its own ones.

    Once: `prepare_refit_info`, whose answer is for the generation side's call of that name. `generation/refit.py` has
    the calls of a refit in their order: by broadcast, after `init_collective` on both sides at once,
    `broadcast_weights_for_collective` together with `update_weights_from_collective`; on one device
    `offload_before_refit`, `prepare_weights_for_ipc`, `get_weights_ipc_handles` group by group, `offload_after_refit`,
    and `prepare_for_training` to go on.

    Weights carry a version. Unless it is given, it is one step further than the last that this policy has sent; the
    first is step 0. A failure is a WeightError; CollectiveError when a peer is dead, missing or late.
    """

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *args: Any, train_world_size: int | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[None]]:
        """Every rank joins the process group at `ip`:`port`, where rank 0 listens. Returns at once; the references are
        done when all `world_size` have come: this policy's ranks first, the engines' workers after them. They end with
        CollectiveError after `weights.load_timeout_s`. A group that was joined before is left."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype without `torch.`) of every weight by its Hugging Face name, in the order of a broadcast."""

    def prepare_info_for_collective(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """`prepare_refit_info`, as it is called elsewhere."""
        return self.prepare_refit_info()

    @abstractmethod
    def broadcast_weights_for_collective(
        self, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[ray.ObjectRef[None]]:
        """Every rank sends its part of the current weights. Returns at once; the references are done when all engines
        hold them whole. UpdateRefused when an engine's model is another; the group stays usable then."""

    @abstractmethod
    def prepare_weights_for_ipc(
        self, refit_buffer_size_gb: float | None = None, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[list[str]]:
        """Names of the weights in groups, in the order in which they are to be asked for. A group fits
        `refit_buffer_size_gb` GiB and half of the free memory of each rank's device; a weight that does not is a group
        of its own."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, Any]:
        """The next group, `keys`, in memory that an engine on the device opens: what to open, by device. The group
        before it is freed. AssertionError before `prepare_weights_for_ipc`; WeightError out of its order, and when the
        policy was trained or loaded since."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """The optimizer's state is off the ranks' devices when it returns, and gradients are gone."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """The model is off the devices too when it returns, and what was shared is freed."""
