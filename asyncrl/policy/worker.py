"""One rank of the policy: a sharded model (FSDP2 through accelerate), its optimizer, and the training step.

A plain class that a Ray actor wraps (`rank_actor.py`); it knows nothing of Ray.

What must hold: every method but `close` is a collective, all ranks call it in the same order; the result of a step is
the same for any number of ranks and any micro-batch size, to float tolerance; either all ranks apply an update or none.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.calibration import StepTokens, calibrated, needs_calibration
from asyncrl.algorithms.diagnostics import OffPolicySums, merge_metrics, off_policy_sums
from asyncrl.algorithms.interfaces import LossFunction, LossInputType
from asyncrl.algorithms.kernel import KernelSums, kernel_sums
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss, entropy, gather_logprobs
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.batching import (
    count_trained,
    empty_micro_batch,
    micro_batches,
    rank_batch,
    staleness_counts,
    token_batch,
    trained_mask,
)
from asyncrl.policy.interfaces import ParameterSpec, StepReport, TrainGroup
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.schedule import learning_rate
from asyncrl.policy.sharded import gather_weights, parameter_specs, save_hf
from asyncrl.policy.step_report import RankRecord, UpdateOutcome, UpdatePlan, global_plan, step_report


class PolicyWorker:
    """Rank `rank` of `world_size`. Blocks in the constructor until all ranks have met at `store`."""

    def __init__(self, *, model_path: str, config: Config, rank: int, world_size: int, store: Store) -> None:
        learner = config.learner
        self._config = config
        self._model_path = model_path
        self.rank, self.world_size = rank, world_size
        self.snapshot: Any = None  # the newest one, kept for whoever delivers it
        self._timeout = timedelta(seconds=learner.collective_timeout_s)
        self._engine_dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self._loss = build_loss(config)
        torch.manual_seed(config.run.seed)
        on_gpu = learner.gpus > 0
        self._accelerator = _accelerator(
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=self._timeout,
            on_gpu=on_gpu,
            dtype=self._engine_dtype,
        )
        self._device = self._accelerator.device
        # after accelerate, which has its own opinion on CPUs
        torch.set_num_threads(learner.threads)
        # small objects, on the CPU and beside the gradients' traffic
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        # master weights are float32 whatever the engine's precision: bfloat16 loses updates below 2⁻⁸ of a weight
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
        # dropout would make a token's ratio to itself differ from 1
        model.train(False)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=learner.optimizer.learning_rate,
            betas=learner.optimizer.betas,
            eps=learner.optimizer.eps,
            weight_decay=learner.optimizer.weight_decay,
        )
        self._model, self._optimizer = self._accelerator.prepare(model, optimizer)
        self._reference = self._frozen(model_path) if _needs_reference(self._loss) else None

    def _frozen(self, model_path: str) -> torch.nn.Module:
        """The first weights, sharded like the live ones and never trained."""
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa")
        return cast(torch.nn.Module, fsdp2_prepare_model(self._accelerator, model.requires_grad_(False).train(False)))

    # -- training ------------------------------------------------------------------------------------------------

    def train_step(self, updates: Sequence[Sequence[TrainGroup]], *, step: int) -> StepReport:
        """Trains step `step` on this rank's groups, one optimizer update for each element of `updates`.

        All ranks pass the same number of updates; a rank may have no groups in some of them. StalenessViolation when
        a trained token is older than its ticket allows. The report is over all ranks, and the same on each.
        """
        seconds: dict[str, float] = defaultdict(float)
        batches = [rank_batch(groups, step=step) for groups in updates]
        parts = [micro_batches(batch, size=self._config.learner.micro_batch_size) for batch in batches]
        local = [
            UpdatePlan(tokens=tokens, samples=samples, micro_batches=len(part))
            for (tokens, samples), part in zip(map(count_trained, batches), parts, strict=True)
        ]
        plans = [global_plan(ranks) for ranks in zip(*self._gather(local), strict=True)]
        for part, plan in zip(parts, plans, strict=True):
            part.extend(empty_micro_batch() for _ in range(plan.micro_batches - len(part)))
        loss_fn = self._loss
        with _timed(seconds, "log_probs"):
            for micro_batch in (micro_batch for part in parts for micro_batch in part):
                micro_batch["staleness"] = (step - micro_batch["weight_versions"]).float()
                if self._reference is not None:
                    self._add_logprobs(micro_batch, column="reference_policy_logprobs", model=self._reference)
                if _needs_proximal(loss_fn, updates=len(updates)):
                    self._add_logprobs(micro_batch, column="prev_logprobs", model=self._model)
            if isinstance(loss_fn, ObjectiveLoss) and needs_calibration(loss_fn.objective):
                tokens = _step_tokens([micro_batch for part in parts for micro_batch in part])
                loss_fn = ObjectiveLoss(calibrated(loss_fn.objective, tokens=tokens, reduce=self._sum))
        rate = learning_rate(self._config.learner.optimizer, step=step, total_steps=self._config.learner.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        outcomes = [
            self._update(part, loss_fn=loss_fn, plan=plan, step=step, seconds=seconds)
            for part, plan in zip(parts, plans, strict=True)
            if plan.tokens > 0
        ]
        record = RankRecord(
            outcomes=tuple(outcomes),
            staleness=tuple(staleness_counts(batch, step=step) for batch in batches),
        )
        return step_report(
            self._gather(record),
            plans=plans,
            normalizations=getattr(self._loss, "metric_normalizations", {}),
            learning_rate=rate,
            seconds=seconds,
        )

    def _update(
        self,
        parts: list[BatchedDataDict],
        *,
        loss_fn: LossFunction,
        plan: UpdatePlan,
        step: int,
        seconds: dict[str, float],
    ) -> UpdateOutcome:
        """Forward, backward and, when every rank is finite, one optimizer step."""
        loss_total, sums, kernel = 0.0, OffPolicySums(), KernelSums()
        metrics: list[dict[str, float]] = []
        counts = {
            "global_valid_seqs": torch.tensor(plan.samples, device=self._device),
            "global_valid_toks": torch.tensor(plan.tokens, device=self._device),
        }
        with _timed(seconds, "forward_backward"):
            self._optimizer.zero_grad()
            for part in parts:
                data = part.to(self._device)
                outcome = self._loss_of(data, loss_fn=loss_fn, step=step, counts=counts)
                # FSDP averages gradients over the ranks; the loss is already a part of the global sum
                self._accelerator.backward(outcome.differentiable * self.world_size)
                loss_total += outcome.loss
                sums += outcome.sums
                kernel += outcome.kernel
                metrics.append(outcome.metrics)
        with _timed(seconds, "optimizer"):
            norm = self._accelerator.clip_grad_norm_(
                self._model.parameters(), self._config.learner.optimizer.max_grad_norm
            )
            grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            finite = all(self._gather(bool(np.isfinite([loss_total, grad_norm]).all())))
            if finite:
                self._optimizer.step()
            self._optimizer.zero_grad()
        return UpdateOutcome(
            loss=loss_total,
            grad_norm=grad_norm,
            finite=finite,
            sums=sums,
            kernel=kernel,
            loss_metrics=merge_metrics(metrics),
        )

    def _loss_of(
        self, data: BatchedDataDict, *, loss_fn: LossFunction, step: int, counts: dict[str, torch.Tensor]
    ) -> "_MicroBatchOutcome":
        """Loss, diagnostics and the loss's own metrics of one micro-batch."""
        from_logprobs = loss_fn.input_type is LossInputType.LOGPROB
        if from_logprobs:
            logprobs_BT, entropy_BT = self._logprobs(self._model, data["input_ids"], with_entropy=True)
        else:
            logits_BSV = self._logits(data["input_ids"])
            logprobs_BT = gather_logprobs(logits_BSV, input_ids_BS=data["input_ids"])
            entropy_BT = entropy(logits_BSV.detach())
        assert entropy_BT is not None
        mask_BT = trained_mask(data)[:, 1:]
        if not bool(mask_BT.any()):
            # the graph stays, so that FSDP's hooks and collectives run as on the other ranks
            return _MicroBatchOutcome(differentiable=0.0 * logprobs_BT.sum())
        if "prev_logprobs" not in data:
            # The weights at the step's start are the current ones in its only update; an interpolated proximal policy,
            # which the loss makes for itself, starts from the current ones in every update.
            data["prev_logprobs"] = _aligned(logprobs_BT.detach())
        kernel = KernelSums()
        if from_logprobs:
            # The loss alone is differentiated first: its slopes by the log-probs are the kernel, and all that the
            # model's own backward pass needs.
            leaf_BT = logprobs_BT.detach().requires_grad_()
            loss, metrics = loss_fn(data=data, **counts, next_token_logprobs=leaf_BT)
            slopes_BT = _slopes(loss, leaf_BT)
            differentiable = (logprobs_BT * slopes_BT).sum()
            kernel = kernel_sums(
                slopes_BT=slopes_BT,
                advantages_BT=data["advantages"][:, 1:],
                staleness_BT=data["staleness"][:, 1:],
                log_rho_BT=data["prev_logprobs"][:, 1:] - data["generation_logprobs"][:, 1:],
                mask_BT=mask_BT,
            )
        else:
            loss, metrics = loss_fn(logits_BSV, data, **counts)
            differentiable = loss
        sums = off_policy_sums(
            proximal_BT=data["prev_logprobs"][:, 1:],
            behaviour_BT=data["generation_logprobs"][:, 1:],
            entropy_BT=entropy_BT,
            mask_BT=mask_BT,
            on_policy_BT=data["weight_versions"][:, 1:] == step,
        )
        return _MicroBatchOutcome(
            differentiable=differentiable,
            loss=float(loss.detach()),
            sums=sums,
            kernel=kernel,
            metrics={name: float(value) for name, value in metrics.items()},
        )

    @torch.no_grad()
    def _add_logprobs(self, data: BatchedDataDict, *, column: str, model: torch.nn.Module) -> None:
        logprobs_BT, _ = self._logprobs(model, data.to(self._device)["input_ids"])
        data[column] = _aligned(logprobs_BT)

    def _logprobs(
        self,
        model: torch.nn.Module,
        input_ids_BS: torch.Tensor,
        *,
        temperature: float | None = None,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and, if asked for, entropies [B, T], at the sampler's temperature unless another is given."""
        return model_logprobs(
            cast(PreTrainedModel, model),
            input_ids_BS,
            temperature=self._config.generator.temperature if temperature is None else temperature,
            with_entropy=with_entropy,
        )

    def _logits(self, input_ids_BS: torch.Tensor) -> torch.Tensor:
        """[B, S, V] float32, divided by the sampler's temperature: for a loss that wants them all.

        No attention mask: padding is on the right, where causal attention never looks.
        """
        logits_BSV: torch.Tensor = self._model(input_ids=input_ids_BS, use_cache=False).logits.float()
        temperature = self._config.generator.temperature
        return logits_BSV if temperature == 1.0 else logits_BSV / temperature

    # -- scoring and weights -------------------------------------------------------------------------------------

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Temperature-1 log-probs (nats) of tokens[1:] given their prefixes; all ranks pass the same sequences."""
        return [row[1:] for row in self._score(sequences, temperature=1.0)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs at the sampler's temperature, entry i of token i, entry 0 is 0; each rank passes its own."""
        return self._score(sequences, temperature=self._config.generator.temperature)

    @torch.no_grad()
    def _score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> list[npt.NDArray[np.float32]]:
        size = self._config.learner.micro_batch_size
        parts = [token_batch(sequences[start : start + size]) for start in range(0, len(sequences), size)]
        passes = max(self._gather(len(parts)))
        parts.extend(empty_micro_batch() for _ in range(passes - len(parts)))
        rows: list[npt.NDArray[np.float32]] = []
        for part in parts:
            input_ids_BS = part["input_ids"].to(self._device)
            logprobs_BT, _ = self._logprobs(self._model, input_ids_BS, temperature=temperature)
            logprobs_BS = _aligned(logprobs_BT).cpu().numpy()
            rows.extend(row[:length] for row, length in zip(logprobs_BS, part["input_lengths"].tolist(), strict=True))
        return rows[: len(sequences)]

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Every parameter, in the order of `gather_weights` and in the engine's precision. No collective."""
        return parameter_specs(self._model, dtype=self._engine_dtype)

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full CPU tensor in the engine's precision); every rank must exhaust it, and send only after."""
        return gather_weights(self._model, dtype=self._engine_dtype)

    def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM serves, by rank 0; returns on every rank when it is written."""
        save_hf(
            self._model,
            tokenizer_path=self._model_path,
            path=path,
            dtype=self._engine_dtype,
            is_writer=self.rank == 0,
        )
        self._gather(None)

    # -- the group of ranks --------------------------------------------------------------------------------------

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self._gather(flag))

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """A small tensor added up over the ranks."""
        dist.all_reduce(values, group=self._control)
        return values

    def _gather(self, value: Any) -> list[Any]:
        """One small object of every rank, in rank order; fails after `learner.collective_timeout_s`."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._control)
        return gathered

    def close(self) -> None:
        """Leaves the process group; another worker may then live in this process. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatchOutcome:
    """`differentiable` has the loss's gradient by the weights, not always its value."""

    differentiable: torch.Tensor
    loss: float = 0.0
    sums: OffPolicySums = field(default_factory=OffPolicySums)
    kernel: KernelSums = field(default_factory=KernelSums)
    metrics: dict[str, float] = field(default_factory=dict)


def _slopes(loss: torch.Tensor, leaf_BT: torch.Tensor) -> torch.Tensor:
    """∂loss/∂leaf; zeros for a loss that does not look at it."""
    if not loss.requires_grad:
        return torch.zeros_like(leaf_BT)
    [slopes_BT] = torch.autograd.grad(loss, leaf_BT, allow_unused=True)
    return torch.zeros_like(leaf_BT) if slopes_BT is None else slopes_BT


def _needs_reference(loss_fn: LossFunction) -> bool:
    return isinstance(loss_fn, ObjectiveLoss) and "reference" in loss_fn.objective.sources()


def _needs_proximal(loss_fn: LossFunction, *, updates: int) -> bool:
    """Whether the weights at the step's start must be asked before they change, in a forward pass of its own."""
    if isinstance(loss_fn, ObjectiveLoss):
        if needs_calibration(loss_fn.objective):
            return True
        if loss_fn.objective.proximal == "interpolated":
            return False
    return updates > 1


def _step_tokens(parts: Sequence[BatchedDataDict]) -> StepTokens:
    """This rank's trained tokens of the whole step, flat."""
    columns = {
        "proximal": "prev_logprobs",
        "behaviour": "generation_logprobs",
        "reference": "reference_policy_logprobs",
        "advantages": "advantages",
    }
    flat = {
        name: torch.cat([part[column][trained_mask(part)].cpu() for part in parts])
        for name, column in columns.items()
        if column in parts[0]
    }
    return StepTokens(advantages=flat.pop("advantages"), sources=flat)


def _accelerator(
    *, rank: int, world_size: int, store: Store, timeout: timedelta, on_gpu: bool, dtype: torch.dtype
) -> Accelerator:
    """An accelerator that shards with FSDP2, on GPUs and on CPUs, for one rank and for many."""
    # how accelerate finds out about a group that it did not make; a rank sees one GPU, and with one rank too this
    # keeps it from concluding that nothing is distributed
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"
    )
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        # gradients are reduced in float32 even where layers compute in bfloat16
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    if on_gpu:
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True)
    _enable_fsdp_on_cpu(plugin)
    return accelerator


def _enable_fsdp_on_cpu(plugin: FullyShardedDataParallelPlugin) -> None:
    """accelerate 1.15 falls back to DDP on CPUs although FSDP2 runs over gloo: this says what it would on a GPU."""
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - start


def _aligned(logprobs_BT: torch.Tensor) -> torch.Tensor:
    """[B, S] from [B, S − 1]: entry i belongs to token i, entry 0 is 0."""
    return torch.nn.functional.pad(logprobs_BT, (1, 0))
