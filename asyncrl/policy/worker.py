"""One rank of the policy: a sharded model (FSDP2 through accelerate), its optimizer, and the training step.

A plain class that a Ray actor wraps (`rank_actor.py`); it knows nothing of Ray.

What must hold: every method but `close` is a collective, all ranks call it in the same order; the result of a step is
the same for any number of ranks and any micro-batch size, to float tolerance; either all ranks apply an update or none.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import copy
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

from asyncrl.algorithms.diagnostics import OffPolicySums
from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.kernel import KernelSums
from asyncrl.algorithms.loss import build_loss
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.accelerator import forget_accelerator, frozen, make_accelerator
from asyncrl.policy.batching import empty_micro_batch, staleness_counts, token_batch, without_nonfinite
from asyncrl.policy.checkpoint import load_checkpoint, save_checkpoint, save_tokenizer
from asyncrl.policy.interfaces import ParameterSpec
from asyncrl.policy.logprobs import model_logprobs
from asyncrl.policy.micro_batch import aligned, loss_of
from asyncrl.policy.packed import ATTENTION
from asyncrl.policy.schedule import learning_rate
from asyncrl.policy.sharded import gather_weights, move, parameter_specs, save_hf
from asyncrl.policy.step_plan import (
    PlannedUpdate,
    calibrated_loss,
    check_columns,
    cut_updates,
    needs_reference,
    planned_updates,
)
from asyncrl.policy.step_report import RankRecord, UpdateOutcome


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
        torch.manual_seed(config.run.seed)
        self._accelerator = make_accelerator(
            rank=rank, world_size=world_size, store=store, timeout=self._timeout, config=config
        )
        self._device = self._accelerator.device
        # after accelerate, which has its own opinion on CPUs
        torch.set_num_threads(learner.threads)
        # small objects, on the CPU and beside the gradients' traffic
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        # DCP on a group with other traffic aborts the process; how long a rank writes is no collective's deadline
        self._checkpoints = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.run.stall_timeout_s))
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
        self._calls = 0  # of `train`, which the schedule counts
        self._first_weights: torch.nn.Module | None = None
        if needs_reference(build_loss(config)):
            self._reference()  # what does not fit into memory fails at the start

    def _loaded(self, model_path: str) -> torch.nn.Module:
        return cast(
            torch.nn.Module,
            AutoModelForCausalLM.from_pretrained(
                model_path, dtype=torch.float32, attn_implementation=ATTENTION if self._packed else "sdpa"
            ),
        )

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        rows_per_update: int,
        micro_batch_size: int | None = None,
        eval_mode: bool = False,
        step: int | None = None,
    ) -> RankRecord:
        """Trains on this rank's rows `data` with the columns that `loss_fn` reads, cut as `cut_updates` says.

        All ranks cut equally many updates; a rank may have no rows. `step` is the version of the weights, without which
        no token counts as stale or on-policy. RunError, on all ranks, when a column that the loss reads is missing;
        tokens without a number in one are left out, and counted. The learning rate goes one step on, unless no update
        was finite. In eval mode nothing changes, and no gradient is made. The record is of this rank alone.
        """
        seconds: dict[str, float] = defaultdict(float)
        data = copy.copy(data)
        if data and data["advantages"].ndim == 1:
            data["advantages"] = data["advantages"].unsqueeze(1).expand_as(data["input_ids"])
        data, nonfinite_tokens = without_nonfinite(data)
        if data and step is not None:
            data["staleness"] = (step - data["weight_versions"]).float()
        cuts = cut_updates(
            data, self._config.learner, rows_per_update=rows_per_update, micro_batch_size=micro_batch_size
        )
        check_columns(loss_fn, data, gather=self.gather)
        planned = planned_updates(cuts, gather=self.gather)
        with _timed(seconds, "log_probs"):
            loss_fn = calibrated_loss(loss_fn, planned, reduce=self._sum)
        rate = self._set_learning_rate(self._calls)
        outcomes = tuple(
            self._update(update, loss_fn=loss_fn, step=step, seconds=seconds, train=not eval_mode)
            for update in planned
            if update.plan.tokens > 0
        )
        self._calls += not eval_mode and (not outcomes or any(outcome.finite for outcome in outcomes))
        return RankRecord(
            plans=tuple(update.plan for update in planned),
            outcomes=outcomes,
            staleness={} if step is None else staleness_counts(data, step=step),
            nonfinite_tokens=nonfinite_tokens,
            learning_rate=rate,
            seconds=seconds,
        )

    def _set_learning_rate(self, step: int) -> float:
        rate = learning_rate(self._config.learner.optimizer, step=step, total_steps=self._config.learner.total_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(
        self,
        update: PlannedUpdate,
        *,
        loss_fn: LossFunction,
        step: int | None,
        seconds: dict[str, float],
        train: bool = True,
    ) -> UpdateOutcome:
        """Forward, and to train backward and, when every rank is finite, one optimizer step."""
        loss_total, sums, kernel, grad_norm = 0.0, OffPolicySums(), KernelSums(), 0.0
        metrics: list[Mapping[str, float]] = []
        counts = {
            "global_valid_seqs": torch.tensor(update.plan.samples, device=self._device),
            "global_valid_toks": torch.tensor(update.plan.tokens, device=self._device),
        }
        with _timed(seconds, "forward_backward"):
            self._optimizer.zero_grad()
            for part in update.parts:
                with torch.set_grad_enabled(train):
                    outcome = loss_of(
                        part.to(self._device),
                        model=self._model,
                        loss_fn=loss_fn,
                        counts=counts,
                        temperature=self._config.generator.temperature,
                        packed=self._packed,
                        step=step,
                    )
                if train:
                    # FSDP averages gradients over the ranks; the loss is already a part of the global sum
                    self._accelerator.backward(outcome.differentiable * self.world_size)
                loss_total += outcome.loss
                sums += outcome.sums
                kernel += outcome.kernel
                metrics.append(outcome.metrics)
        with _timed(seconds, "optimizer"):
            if train:
                norm = self._accelerator.clip_grad_norm_(
                    self._model.parameters(), self._config.learner.optimizer.max_grad_norm
                )
                grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            finite = all(self.gather(bool(np.isfinite([loss_total, grad_norm]).all())))
            if train and finite:
                self._optimizer.step()
            self._optimizer.zero_grad()
        return UpdateOutcome(
            loss=loss_total,
            grad_norm=grad_norm,
            finite=finite,
            sums=sums,
            kernel=kernel,
            micro_batch_metrics=tuple(part for part in metrics if part),
        )

    # -- scoring and weights -------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> BatchedDataDict:
        """`logprobs` float32 [B, S] of this rank's rows at the sampler's temperature; 0 at the first token and beyond a
        row's length. Reads `input_ids`, `input_lengths`."""
        return BatchedDataDict(logprobs=self._scored(data, model=self._model, micro_batch_size=micro_batch_size))

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs` [B, S]: the same under the first weights. The live ones are not touched."""
        scored_BS = self._scored(data, model=self._reference(), micro_batch_size=micro_batch_size)
        return BatchedDataDict(reference_logprobs=scored_BS)

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Temperature-1 log-probs (nats) of tokens[1:] given their prefixes; all ranks pass the same sequences."""
        scored_BS = self._scored(token_batch(sequences), model=self._model, temperature=1.0).numpy()
        return [row[1 : len(tokens)] for row, tokens in zip(scored_BS, sequences, strict=True)]

    def _reference(self) -> torch.nn.Module:
        """The first weights, sharded like the live ones; loaded when they are first asked for."""
        if self._first_weights is None:
            self._first_weights = frozen(self._loaded(self._model_path), accelerator=self._accelerator)
        return self._first_weights

    def _scored(
        self,
        data: BatchedDataDict,
        *,
        model: torch.nn.Module,
        temperature: float | None = None,
        micro_batch_size: int | None = None,
    ) -> torch.Tensor:
        """[B, S] on the CPU, in the order of the rows; each rank passes its own, perhaps none."""
        rows = copy.copy(data)
        rows["row"] = torch.arange(data.size)
        cuts = cut_updates(rows, self._config.learner, rows_per_update=data.size, micro_batch_size=micro_batch_size)
        parts = [part for update in cuts for part in update]
        passes = max(self.gather(len(parts)))
        scored_BS = torch.zeros(data["input_ids"].shape if data else (0, 0))
        for part in [*parts, *(empty_micro_batch() for _ in range(passes - len(parts)))]:
            part_BS = self._logprobs(model, part, temperature=temperature).cpu()
            if "row" in part:
                inside_BS = torch.arange(part_BS.shape[1]) < part["input_lengths"].cpu().unsqueeze(1)
                scored_BS[part["row"], : part_BS.shape[1]] = part_BS * inside_BS
        return scored_BS

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
        self.gather(None)

    def save_checkpoint(
        self, weights_path: Path, optimizer_path: Path | None = None, tokenizer_path: Path | None = None
    ) -> None:
        """Writes what training goes on from, by any number of ranks: weights, and where they have a path the optimizer
        and the tokenizer, each to a directory of its own that all ranks see. CheckpointError when it cannot."""
        save_checkpoint(
            self._model,
            self._optimizer.optimizer,
            train_calls=self._calls,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            group=self._checkpoints,
        )
        if tokenizer_path is not None:
            save_tokenizer(self._model_path, tokenizer_path, group=self._checkpoints)

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        """Takes over the weights of `save_checkpoint`, and with a path the optimizer, its place in the schedule of
        `train`, and the random generators. CheckpointError when it cannot: then nothing has changed. The reference
        stays the model that the worker was made with."""
        train_calls = load_checkpoint(
            self._model,
            self._optimizer.optimizer,
            weights_path=weights_path,
            optimizer_path=optimizer_path,
            group=self._checkpoints,
        )
        if train_calls is not None:
            self._calls = train_calls

    def prepare_for_training(self) -> None:
        """Weights and optimizer are on this rank's device."""
        move(self._model, self._optimizer.optimizer, self._device)

    def finish_training(self) -> None:
        """No gradient is kept."""
        self._optimizer.zero_grad(set_to_none=True)

    # -- the group of ranks --------------------------------------------------------------------------------------

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """A small tensor added up over the ranks."""
        dist.all_reduce(values, group=self._control)
        return values

    def gather(self, value: Any) -> list[Any]:
        """One small object of every rank, in rank order; fails after `learner.collective_timeout_s`."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._control)
        return gathered

    def close(self) -> None:
        """Leaves the process group; another worker may then live in this process. Idempotent."""
        forget_accelerator()


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] += time.perf_counter() - start
