"""One rank of a trained model: its shard (FSDP2 through accelerate), its optimizer, and the training step.

The ranks of the policy and of the critic share this class. It is a plain class that the Ray actor in `actor.py`
wraps; it does not use Ray. A subclass defines the model, the result of a micro-batch, and what the model scores.

Invariants:

- A method is a collective unless its docstring says otherwise: all ranks must call it in the same order. `close` is
  not a collective, and `write_checkpoint` may run in a second thread.
- The result of a step is equal for any number of ranks and any micro-batch size, to float tolerance.
- Either all ranks apply an update, or none does.
- If one rank refuses a call before it changes anything, all ranks refuse it, and all stay usable.

Legend: B rows, S tokens.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Generic

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from asyncrl.algorithms.baselines import Whitening
from asyncrl.algorithms.diagnostics import MetricSums
from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.algorithms.token_estimators import TokenEstimator, check_estimate, whitened_advantages
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.light_tokenizer import model_folder
from asyncrl.errors import CallRefused, LossFailed, Offloaded, WitnessFailed
from asyncrl.ranks.accelerator import forget_accelerator, make_accelerator, with_present_layers
from asyncrl.ranks.batching import empty_micro_batch, row_lengths, staleness_counts, tokens_passed
from asyncrl.ranks.collectives import Collectives, on_all_ranks
from asyncrl.ranks.digest import KINDS, StepDigests, combined, model_digest
from asyncrl.ranks.loss_pass import LossT, MicroBatchOutcome, UpdateContext
from asyncrl.ranks.optimizer import make_optimizer, trained_parameters, weight_decay_of
from asyncrl.ranks.plan import BatchingPlan, PlannedUpdate, check_columns, planned_updates, required_columns
from asyncrl.ranks.report import RankRecord, UpdateOutcome
from asyncrl.ranks.row_checks import check_rows
from asyncrl.ranks.schedule import learning_rate
from asyncrl.ranks.sharded_checkpoint import ShardedState, save_tokenizer
from asyncrl.ranks.timer import Timer
from asyncrl.ranks.witnessed import UpdateWitness, Watched, frozen_tensors
from asyncrl.witness.judge import Finding, Request
from asyncrl.witness.objective import Axes

SCORED_COLUMNS = ("input_ids", "input_lengths")
"""The columns that scoring reads."""


class RankWorker(Collectives, ABC, Generic[LossT]):
    """One rank of a trained model: rank `rank` of `world_size`. The constructor loads the model at `model_path`, and
    blocks until all ranks have connected to `store`."""

    section: ClassVar[str]
    """The section of the configuration for these ranks. Errors use it as the ranks' name."""

    def __init__(self, *, model_path: str, config: Config, rank: int, world_size: int, store: Store) -> None:
        learner = config.learner
        self.config = config
        self._model_name = model_path
        # A rank asks the Hugging Face Hub for files only here. Its later saves and exports read this folder.
        self._model_path = model_folder(model_path, weights=True)
        timeout = timedelta(seconds=learner.collective_timeout_s)
        self._packed = learner.batching == "packed"
        self._syncs_often = learner.gradient_sync == "micro_batch"
        torch.manual_seed(config.run.seed)
        self._accelerator = make_accelerator(
            rank=rank, world_size=world_size, store=store, timeout=timeout, config=config
        )
        self._device = self._accelerator.device
        # set after accelerate is initialised, because accelerate sets the number of threads on CPUs
        torch.set_num_threads(learner.threads)
        super().__init__(rank=rank, world_size=world_size, timeout=timeout)
        # a group of its own, because DCP aborts the process if its group has other traffic; the timeout is longer than
        # that of other collectives, because loading a checkpoint may take longer
        self._checkpoints = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.run.stall_timeout_s))
        # for the thread that writes checkpoints while the steps run
        self._saving = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.checkpoint.timeout_s))
        # master weights are float32 for every engine precision: bfloat16 loses updates below 2⁻⁸ of a weight
        model = with_present_layers(self._loaded(self._model_path))
        self._vocabulary = len(model.get_input_embeddings().weight)
        # no dropout: otherwise equal weights would give a token other probabilities, and its ratio would not be 1
        model.train(False)
        # accelerate shards a model only together with an optimizer, so it gets an SGD that never steps. The rank's own
        # optimizer is made afterwards, for the shards, because some, such as Adagrad, make their state at once
        self.model, _ = self._accelerator.prepare(model, torch.optim.SGD(trained_parameters(model)))
        key = f"{self.section}.optimizer"
        optimizer = make_optimizer(self.model, learner.optimizer, key=key, device=self._device)
        self.optimizer = self._accelerator.prepare_optimizer(optimizer, device_placement=False)
        """The live model and its optimizer, with this rank's shards. Functions that `RankGroup.call` runs on the rank
        may read them."""
        self._placement = Placement(self.model, self.optimizer.optimizer, device=self._device)
        self._state = ShardedState(self.model, self.optimizer.optimizer, group=self._checkpoints, saving=self._saving)
        kind = learner.weights_digest
        self._digests = StepDigests(self.model, self.optimizer.optimizer, rank=rank, kind=kind)
        self._just_loaded = False  # whether weights were loaded since the last update
        self.train_calls = 0
        """Position in the learning-rate schedule: the number of `train` calls that have advanced it. A checkpoint of
        the optimizer has it."""
        self._updates = 0  # number of updates that the optimizer has applied in this process
        self._optimizer_steps = 0  # number of updates that the optimizer has applied, also before a resume
        self._trained_step: int | None = None

    # -- the model, defined by subclasses ------------------------------------------------------------------------

    @abstractmethod
    def _loaded(self, model_path: str) -> Any:
        """Loads the whole model, which is the same on every rank. Its trained weights are in float32."""

    @abstractmethod
    def _outcome(self, part: BatchedDataDict, context: UpdateContext[LossT]) -> MicroBatchOutcome:
        """Passes one micro-batch through the live model and the loss.

        The result has a graph even if the micro-batch has no trained token or its loss fails, because hooks and
        collectives must run on all ranks.
        """

    def _prepared(
        self, data: BatchedDataDict, loss_fn: LossT, *, step: int | None, updates: int, eval_mode: bool
    ) -> tuple[BatchedDataDict, int]:
        """Returns the rows in the form that `_outcome` reads, and the number of tokens that it masked because a value
        of theirs is not finite. Raises CallRefused if the rows cannot be used. `updates` is the number of optimizer
        updates of the call. Not a collective."""
        if data.size:
            needed = required_columns(loss_fn, updates=updates, eval_mode=eval_mode)
            check_columns(data, needed, reader="the loss")
        self.check_rows(data)
        return data, 0

    def _step_loss(self, loss_fn: LossT, updates: Sequence[PlannedUpdate]) -> LossT:
        """Returns the loss with which the step is trained: `loss_fn`, or the same loss with numbers that depend on all
        tokens of the step. A collective."""
        return loss_fn

    def _bounds_finding(self, configured: LossT, used: LossT, updates: Sequence[PlannedUpdate]) -> Finding | None:
        """Returns the witness's finding about bounds of a loss that were computed from all tokens of the step.
        `configured` is the loss before they were computed, and `used` the loss with them. Returns None on all ranks but
        the first, and if the loss has no such bounds. A collective if it has some."""
        return None

    def _witness_reference(self, update: PlannedUpdate, witness: UpdateWitness) -> None:
        """Lets the witness compare the drawn rows' log-probs under the reference policy, if the rows have them, with
        those of a second pass. A collective."""

    def _model_flops(self, lengths: Sequence[int], *, backward: bool) -> int | None:
        """Returns the FLOPs for rows of these lengths, forward and optionally backward; None if they are not
        counted."""
        return None

    def _peak_flops_per_s(self) -> float | None:
        """Returns the peak rate of this rank's device, in FLOPs per second; None if it is not known."""
        return None

    def _passed_columns(self, loss_fn: LossT) -> Sequence[str]:
        """Returns the columns in `WIDE_FIELDS` that a pass of `_outcome` reads if the rows have them."""
        return ()

    def _axes(self, loss_fn: LossT) -> Axes | None:
        """Returns the settings (axes) of an objective of asyncrl, for which the witness has formulas; None for other
        losses."""
        return None

    def _penalty_beta(self, loss_fn: LossT) -> float | None:
        """Returns the β of the loss's penalty whose β follows the KL of earlier steps; None without such a penalty."""
        return None

    def _weights_changed(self) -> None:
        """A hook for subclasses: called after `train` has applied an update, and after weights were loaded."""

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossT,
        *,
        rows_per_update: int,
        micro_batch_size: int | None = None,
        eval_mode: bool = False,
        step: int | None = None,
        witness: Request | None = None,
    ) -> RankRecord:
        """Trains on this rank's rows `data`, which have the columns that `loss_fn` reads. `BatchingPlan` cuts the rows
        into updates and micro-batches.

        All ranks run the same updates; a rank that lacks rows runs empty micro-batches. `step` is the version of the
        weights. Without it, no token counts as stale or on-policy. The learning-rate schedule advances by one step,
        unless the loss or gradient of every update was not finite. In eval mode, nothing changes, and there is no
        backward pass through the model. The record covers only this rank. `rows_per_update` counts rows of this rank.

        With `witness`, the rows whose column `witness` is not −1 are computed a second time, one sequence at a time,
        and the record has the findings. A step in eval mode, or with a log-prob or advantage that is not finite, is not
        witnessed.

        All ranks raise CallRefused together if any rank cannot use its rows, LossFailed if the loss fails, and
        WitnessFailed if a check of the witness fails and `witness.on_failure` is `stop`. Raises Offloaded if the model
        or, outside of eval mode, the optimizer is offloaded.
        """
        self._placement.check(MODEL, *([] if eval_mode else [OPTIMIZER]))
        learner = self.config.learner
        timer = Timer()
        with self.together():
            plan = BatchingPlan.of(learner, micro_batch_size=micro_batch_size)
            updates = plan.number_of_updates(data, rows_per_update=rows_per_update)
            data, nonfinite_tokens = self._prepared(data, loss_fn, step=step, updates=updates, eval_mode=eval_mode)
            cuts = plan.updates(data, rows_per_update=rows_per_update)
        planned = planned_updates(cuts, gather=self.gather)
        # torch does not count every write to a weight (`StepDigests`), so the digest at the start is computed, and not
        # taken from the step before, in witnessed steps and in all steps of a run without witnessed ones
        before = self._digests.now(anew=witness is not None or not self.config.witness.every_steps)
        other_kinds = [kind for kind in KINDS if self._just_loaded and kind != self._digests.kind]
        before_by_kind = {kind: self.weights_digest(kind) for kind in other_kinds}
        if witness is not None and (eval_mode or any(self.gather(nonfinite_tokens))):
            witness = None
        configured, findings = loss_fn, list[Finding]()
        with timer.time("log_probs"):
            loss_fn = self._step_loss(loss_fn, planned)
        if witness is not None and (finding := self._bounds_finding(configured, loss_fn, planned)) is not None:
            findings.append(finding)
        rate = learning_rate(learner.optimizer, step=self.train_calls, total_steps=learner.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        updates_before, calls_before = self._updates, self.train_calls
        outcomes = self._run_updates(
            planned, loss_fn=loss_fn, step=step, eval_mode=eval_mode, timer=timer, witness=witness
        )
        after = before if eval_mode else self._digests.now(anew=True)
        run = [i for i, update in enumerate(planned) if update.plan.tokens > 0]
        passed = [part for i in run for part in planned[i].parts]
        real_tokens, passed_tokens = tokens_passed(passed, packed=self._packed, wide=self._passed_columns(loss_fn))
        # only this rank's own rows count: the empty micro-batches that it runs for the collectives are not work
        own = [part for i in run if i < len(cuts) for part in cuts[i]]
        findings += [finding for outcome in outcomes for finding in outcome.findings]
        if self._updates > updates_before:
            same = [name for name, digest in before.items() if after[name] == digest]
            findings += frozen_tensors(self.model, self.optimizer.state, same, learner, train_calls=calls_before)
        return RankRecord(
            plans=tuple(update.plan for update in planned),
            outcomes=outcomes,
            staleness={} if step is None else staleness_counts(data, step=step),
            learning_rate=rate,
            weight_decay=weight_decay_of(self.optimizer),
            seconds=timer.seconds,
            nonfinite_tokens=nonfinite_tokens,
            real_tokens=real_tokens,
            passed_tokens=passed_tokens,
            model_flops=self._model_flops(row_lengths(own), backward=not eval_mode),
            peak_flops_per_s=self._peak_flops_per_s(),
            gpu_memory_bytes=gpu_memory_bytes(self._device),
            weights_before=combined(before.values()),
            weights_after=combined(after.values()),
            weights_before_by_kind=before_by_kind,
            digest_kind=self._digests.kind,
            findings=tuple(findings),
            penalty_beta=self._penalty_beta(loss_fn),
        )

    def trained_step(self) -> int | None:
        """Returns the version of the weights by this rank's own account: 1 more than the `step` of the last `train`
        call that applied an update. None if that call had no `step`, or if there was none since the start or the last
        load. Not a collective."""
        return self._trained_step

    def weights_digest(self, kind: str | None = None) -> int:
        """Returns this rank's part of the digest of the weights (`asyncrl.ranks.digest`), by default of the kind that
        the records of the steps have. Not a collective."""
        return model_digest(self.model, rank=self.rank, kind=kind or self._digests.kind)

    def use_digest(self, kind: str) -> None:
        """Makes the next steps compute digests of this kind, and not of the kind `learner.weights_digest`, so that an
        audit can compare them with recorded ones. Not a collective."""
        self._digests.kind = kind
        self._digests.forget()

    def _run_updates(
        self,
        planned: Sequence[PlannedUpdate],
        *,
        loss_fn: LossT,
        step: int | None,
        eval_mode: bool,
        timer: Timer,
        witness: Request | None,
    ) -> tuple[UpdateOutcome, ...]:
        """Runs the updates that have a trained token, and advances the learning-rate schedule as in `train`."""
        sole_update, updates_before = eval_mode or len(planned) == 1, self._updates
        outcomes = []
        try:
            for i, update in enumerate(planned):
                if update.plan.tokens > 0:
                    context = UpdateContext(
                        loss_fn=loss_fn, counts=update.plan.counts(self._device), step=step, sole_update=sole_update
                    )
                    witnessed = None
                    if witness is not None:
                        witnessed = UpdateWitness(
                            ranks=self,
                            config=self.config,
                            request=witness,
                            update=i,
                            axes=self._axes(loss_fn),
                            step=step,
                            train_calls=self.train_calls,
                            optimizer_steps=self._optimizer_steps,
                        )
                    outcomes.append(self._update(update, context, timer=timer, train=not eval_mode, witness=witnessed))
        except (LossFailed, WitnessFailed):
            # this update is not applied; if earlier updates of this call were, the learning-rate schedule advances
            if self._updates > updates_before:
                self.train_calls += 1
            raise
        finally:
            if self._updates > updates_before:
                self._trained_step = None if step is None else step + 1
                self._just_loaded = False
                self._weights_changed()
        if not eval_mode and (not outcomes or any(outcome.finite for outcome in outcomes)):
            self.train_calls += 1
        return tuple(outcomes)

    def _update(
        self,
        update: PlannedUpdate,
        context: UpdateContext[LossT],
        *,
        timer: Timer,
        train: bool,
        witness: UpdateWitness | None,
    ) -> UpdateOutcome:
        """Runs the forward passes. For training, also runs the backward passes and, if loss and gradient are finite on
        every rank, one optimizer step. If the loss fails on any rank, raises LossFailed on all ranks, without the
        optimizer step. If a check of `witness` fails and `witness.on_failure` is `stop`, raises WitnessFailed in the
        same way."""
        loss_total, sums, grad_norm = 0.0, MetricSums(), 0.0
        metrics: list[Mapping[str, float]] = []
        failure: CallRefused | None = None
        self.optimizer.zero_grad()
        if witness is not None:
            with timer.time("witness"):
                self._passed_again(update, context, witness)
            context = replace(context, watched=witness.watched)
        with timer.time("forward_backward"):
            for i, part in enumerate(update.parts):
                self.model.set_requires_gradient_sync(self._syncs_often or i == len(update.parts) - 1)
                with torch.set_grad_enabled(train):
                    outcome = self._outcome(part.to(self._device), context)
                if train:
                    # FSDP averages gradients over the ranks, but the loss is already a part of the global sum
                    self._accelerator.backward(outcome.differentiable * self.world_size)
                loss_total += outcome.loss
                sums += outcome.sums
                metrics.append(outcome.metrics)
                failure = failure or outcome.failure
        if witness is not None:
            with timer.time("witness"):
                witness.judge(update.plan, self.model, self.optimizer.state)
                self._witness_reference(update, witness)
        with timer.time("optimizer"):
            if train:
                norm = self._accelerator.clip_grad_norm_(
                    self.model.parameters(), self.config.learner.optimizer.max_grad_norm
                )
                grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            own_finite = bool(np.isfinite([loss_total, grad_norm]).all())
            if witness is not None and own_finite:  # otherwise the update is skipped, which is no failure (F21)
                failure = failure or witness.failure
            verdicts = self.gather((own_finite, failure))
            finite, failures = all(own for own, _ in verdicts), [error for _, error in verdicts if error is not None]
            if train and finite and not failures:
                self.optimizer.step()
                self._updates += 1
                self._optimizer_steps += 1
                if self._updates == 1:
                    self._state.check_numbers()  # before hours of training that no checkpoint could keep
                if witness is not None:
                    witness.compare_elements(norm=grad_norm)
            self.optimizer.zero_grad()
            if failures:
                raise failures[0]
        return UpdateOutcome(
            loss=loss_total,
            grad_norm=grad_norm,
            finite=finite,
            sums=sums,
            micro_batch_metrics=tuple(part for part in metrics if part),
            findings=() if witness is None or not finite else witness.worst,
        )

    def _passed_again(self, update: PlannedUpdate, context: UpdateContext[LossT], witness: UpdateWitness) -> None:
        """Lets the witness run its passes of the drawn rows, and in some steps of each micro-batch alone, before the
        update's own passes. All gradients are 0 afterwards."""

        def run(part: BatchedDataDict, seen: Watched | None = None) -> None:
            outcome = self._outcome(part.to(self._device), replace(context, watched=seen))
            self._accelerator.backward(outcome.differentiable * self.world_size)

        self.model.set_requires_gradient_sync(True)
        witness.pass_group(update.parts, self.model, run, device=self._device)
        self.optimizer.zero_grad()
        witness.pass_parts(update.parts, self.model, run, reset=self.optimizer.zero_grad)

    def get_advantages(self, data: BatchedDataDict, estimator: TokenEstimator) -> BatchedDataDict:
        """Returns `advantages` and `returns` [B, S] of this rank's rows, without columns if it has no rows.

        The advantages are whitened over the rows of all ranks, as `estimator.whitening` says. Raises CallRefused if the
        estimator fails or a number is not finite.
        """
        estimated: TokenAdvantages | None = None
        # all checks are inside `together`, so that no rank waits in the whitening's sums for a rank that has failed
        with self.together():
            rule = estimator.whitening
            if not isinstance(rule, Whitening):
                raise CallRefused(f"an estimator's whitening is {rule!r}; it must be a Whitening")
            if data.size:
                self.check_rows(data)
                estimated = estimator(copy.copy(data))
                check_estimate(data, estimated)
        found = whitened_advantages(data, estimated, rule=rule, add_up=self.add_up)
        if found is None:
            return BatchedDataDict()
        return BatchedDataDict(advantages=found.advantages_BS, returns=found.returns_BS)

    # -- scoring -------------------------------------------------------------------------------------------------

    def _scored(
        self,
        data: BatchedDataDict,
        score: Callable[[BatchedDataDict], torch.Tensor],
        *,
        micro_batch_size: int | None = None,
        columns: Collection[str] = SCORED_COLUMNS,
    ) -> torch.Tensor:
        """Scores this rank's rows, which may be none. Returns [B, S] on the CPU in the order of the rows, with 0 beyond
        a row's length. `score` computes [b, s] of one micro-batch from these `columns`. No gradient is computed."""
        self._placement.check(MODEL)
        parts: list[BatchedDataDict] = []
        with self.together():
            if data.size:
                check_columns(data, columns, reader="scoring")
            self.check_rows(data)
            rows = copy.copy(data)
            rows["row"] = torch.arange(data.size)
            plan = BatchingPlan.of(self.config.learner, micro_batch_size=micro_batch_size)
            cuts = plan.updates(rows, rows_per_update=data.size)
            parts = [part for update in cuts for part in update]
        passes: int = max(self.gather(len(parts)))
        scored_BS = torch.zeros(data["input_ids"].shape if data else (0, 0))
        for part in [*parts, *(empty_micro_batch() for _ in range(passes - len(parts)))]:
            with torch.no_grad():
                part_BS = score(part.to(self._device)).cpu()
            if "row" in part:
                inside_BS = torch.arange(part_BS.shape[1]) < part["input_lengths"].cpu().unsqueeze(1)
                scored_BS[part["row"].cpu(), : part_BS.shape[1]] = part_BS * inside_BS
        return scored_BS

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def write_probe(self, folder: Path) -> None:
        """Writes a small file with the rank's number as its name into `folder`. The driver then checks that it sees the
        files of all ranks. Raises CheckpointError, on all ranks, if a rank cannot write."""
        on_all_ranks(lambda: (folder / str(self.rank)).write_bytes(b"asyncrl"), group=self._checkpoints)

    def stage_checkpoint(self, optimizer: bool = True) -> None:
        """Copies this rank's part of the weights, and with `optimizer` of the optimizer's state, to host memory, for
        `write_checkpoint`. Raises CheckpointError if the last copies are still being written, if there is no memory for
        new ones, or if the optimizer's state has other names or numbers on another rank."""
        self._state.stage(train_calls=self.train_calls, optimizer=optimizer)

    def write_checkpoint(
        self, weights_path: Path, optimizer_path: Path | None = None, tokenizer_path: Path | None = None
    ) -> None:
        """Writes the state from which training can continue on any number of ranks: the weights that `stage_checkpoint`
        copied, and the optimizer and the tokenizer if they have a path. Each goes to its own directory, which all ranks
        must share. Raises CheckpointError if it cannot be written.

        It may run in a second thread beside other calls; among themselves, its calls must have the same order on all
        ranks.
        """
        self._state.write(weights_path=weights_path, optimizer_path=optimizer_path)
        if tokenizer_path is not None:
            save_tokenizer(self._model_path, tokenizer_path, group=self._saving)

    def load_checkpoint(self, weights_path: Path, optimizer_path: Path | None = None) -> None:
        """Loads the weights that `write_checkpoint` wrote. With `optimizer_path`, also loads the optimizer's state, the
        position in the learning-rate schedule of `train`, and the random generators.

        Raises CheckpointError if the checkpoint cannot be loaded; then nothing has changed. The reference policy stays
        the model at `model_path`, with which the worker was made.
        """
        train_calls = self._state.load(weights_path=weights_path, optimizer_path=optimizer_path)
        if train_calls is not None:
            self.train_calls = train_calls
            self._optimizer_steps = max(
                (int(state.get("step", 0)) for state in self.optimizer.state.values()), default=0
            )
        self._trained_step = None
        self._just_loaded = True
        self._digests.forget()
        self._weights_changed()

    # -- memory ---------------------------------------------------------------------------------------------------

    def prepare_for_training(self) -> None:
        """Moves weights and optimizer to this rank's device, and frees the gradients."""
        self._placement.load()

    def offload_optimizer(self) -> None:
        """Moves the optimizer's state to the host's memory, and frees the gradients. Until `prepare_for_training` is
        called, training raises Offloaded. This also holds on CPUs, where no memory moves."""
        self._placement.offload_optimizer()

    def finish_training(self) -> None:
        """Frees the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def check_rows(self, data: BatchedDataDict) -> None:
        """Raises CallRefused if the model cannot use these rows. Not a collective."""
        check_rows(data, vocabulary=self._vocabulary)

    def close(self) -> None:
        """Leaves the process group, so that another worker can be made in this process. Idempotent."""
        forget_accelerator()


def gpu_memory_bytes(device: torch.device) -> int | None:
    """Returns the most memory that tensors took on a GPU since the last call, bytes; None on a CPU.

    Memory that torch keeps without a tensor does not count: it is free for the next tensor.
    """
    if device.type != "cuda":
        return None
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


# Where the model and the optimizer of a rank are: on the rank's device, or offloaded to the host's memory.

HOST = torch.device("cpu")
MODEL = "the model"
OPTIMIZER = "the optimizer"


class Placement:
    """Moves the shards of a rank, and knows which of them are offloaded. The rank's device is `device`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._offloaded: frozenset[str] = frozenset()

    def load(self) -> None:
        """Moves the model and the optimizer to the device, and frees the gradients."""
        move_model(self._model, self._device)
        move_optimizer(self._optimizer, self._device)
        self._offloaded = frozenset()

    def offload_optimizer(self) -> None:
        """Moves the optimizer's state to the host's memory, and frees the gradients."""
        move_optimizer(self._optimizer, HOST)
        self._offloaded |= {OPTIMIZER}

    def offload_model(self) -> None:
        """Moves the weights to the host's memory."""
        move_model(self._model, HOST)
        self._offloaded |= {MODEL}

    def check(self, *parts: str) -> None:
        """Raises Offloaded if a part (`MODEL`, `OPTIMIZER`) is offloaded. This also holds on CPUs, where no memory
        moves, so that code that runs there also runs on GPUs."""
        away = sorted(self._offloaded.intersection(parts))
        if away:
            raise Offloaded(f"offloaded: {' and '.join(away)}; call prepare_for_training() to load everything back")


def move_model(model: torch.nn.Module, device: torch.device) -> None:
    """Moves this rank's shards of the weights to `device`."""
    model.to(device)
    _give_back(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves this rank's shards of the optimizer's state to `device`, and frees the gradients."""
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        for name, value in state.items():
            # AdamW's step counter is a 0-dimensional tensor that stays where it is: fused AdamW has it on the GPU
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[name] = value.to(device)
    _give_back(device)


def _give_back(device: torch.device) -> None:
    """After a move to the CPU, empties torch's cache of GPU memory, so that other processes can use this memory."""
    if device.type == "cpu":
        torch.cuda.empty_cache()
