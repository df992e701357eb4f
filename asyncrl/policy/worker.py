"""One rank of the policy: a sharded model (FSDP2 through accelerate), its optimizer, and the training step.

A plain class that a Ray actor wraps (`rank_actor.py`); it knows nothing of Ray.

What must hold: every method but `close` is a collective, all ranks call it in the same order; the result of a step is
the same for any number of ranks and any micro-batch size, to float tolerance; either all ranks apply an update or none.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.algorithms.calibration import StepTokens, calibrated, needs_calibration
from asyncrl.algorithms.diagnostics import OffPolicySums, merge_metrics
from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.kernel import KernelSums
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.accelerator import forget_accelerator, frozen, make_accelerator
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
from asyncrl.policy.micro_batch import aligned, loss_of
from asyncrl.policy.packed import ATTENTION
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
        self._packed = learner.batching == "packed"
        self._loss = build_loss(config)
        torch.manual_seed(config.run.seed)
        on_gpu = learner.gpus > 0
        self._accelerator = make_accelerator(
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
        model = self._loaded(model_path)
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
        self._reference = (
            frozen(self._loaded(model_path), accelerator=self._accelerator) if _needs_reference(self._loss) else None
        )

    def _loaded(self, model_path: str) -> torch.nn.Module:
        return cast(
            torch.nn.Module,
            AutoModelForCausalLM.from_pretrained(
                model_path, dtype=torch.float32, attn_implementation=ATTENTION if self._packed else "sdpa"
            ),
        )

    # -- training ------------------------------------------------------------------------------------------------

    def train_step(self, updates: Sequence[Sequence[TrainGroup]], *, step: int) -> StepReport:
        """Trains step `step` on this rank's groups, one optimizer update for each element of `updates`.

        All ranks pass the same number of updates; a rank may have no groups in some of them. StalenessViolation when
        a trained token is older than its ticket allows. The report is over all ranks, and the same on each.
        """
        seconds: dict[str, float] = defaultdict(float)
        batches = [rank_batch(groups, step=step) for groups in updates]
        parts = [micro_batches(batch, self._config.learner) for batch in batches]
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
                    micro_batch["reference_policy_logprobs"] = self._logprobs(self._reference, micro_batch)
                if _needs_proximal(loss_fn, updates=len(updates)):
                    micro_batch["prev_logprobs"] = self._logprobs(self._model, micro_batch)
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
        metrics: list[Mapping[str, float]] = []
        counts = {
            "global_valid_seqs": torch.tensor(plan.samples, device=self._device),
            "global_valid_toks": torch.tensor(plan.tokens, device=self._device),
        }
        with _timed(seconds, "forward_backward"):
            self._optimizer.zero_grad()
            for part in parts:
                data = part.to(self._device)
                outcome = loss_of(
                    data,
                    model=self._model,
                    loss_fn=loss_fn,
                    counts=counts,
                    temperature=self._config.generator.temperature,
                    packed=self._packed,
                    step=step,
                )
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

    @torch.no_grad()
    def _logprobs(
        self, model: torch.nn.Module, batch: BatchedDataDict, *, temperature: float | None = None
    ) -> torch.Tensor:
        """[B, S], entry 0 is 0, at the sampler's temperature unless another is given."""
        logprobs_BT, _ = model_logprobs(
            cast(PreTrainedModel, model),
            batch["input_ids"].to(self._device),
            temperature=self._config.generator.temperature if temperature is None else temperature,
            with_entropy=False,
            packed_lengths_B=batch["input_lengths"] if self._packed else None,
        )
        return aligned(logprobs_BT)

    # -- scoring and weights -------------------------------------------------------------------------------------

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Temperature-1 log-probs (nats) of tokens[1:] given their prefixes; all ranks pass the same sequences."""
        return [row[1:] for row in self._score(sequences, temperature=1.0)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Log-probs at the sampler's temperature, entry i of token i, entry 0 is 0; each rank passes its own."""
        return self._score(sequences, temperature=self._config.generator.temperature)

    def _score(self, sequences: Sequence[Sequence[int]], *, temperature: float) -> list[npt.NDArray[np.float32]]:
        size = self._config.learner.micro_batch_size
        parts = [token_batch(sequences[start : start + size]) for start in range(0, len(sequences), size)]
        passes = max(self._gather(len(parts)))
        parts.extend(empty_micro_batch() for _ in range(passes - len(parts)))
        rows: list[npt.NDArray[np.float32]] = []
        for part in parts:
            logprobs_BS = self._logprobs(self._model, part, temperature=temperature).cpu().numpy()
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
        forget_accelerator()


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
        name: torch.cat([part[column].cpu()[trained_mask(part)] for part in parts])
        for name, column in columns.items()
        if column in parts[0]
    }
    return StepTokens(advantages=flat.pop("advantages"), sources=flat)


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - start
