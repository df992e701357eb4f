"""One rank of the policy: a causal language model that computes log-probs, is trained, and sends its weights to
engines.

Legend: B rows, S tokens, T = S − 1 next tokens, V vocabulary.
"""

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.distributed_c10d import Store
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from asyncrl.algorithms.interfaces import LossFunction
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.common.version import Version
from asyncrl.complete_directory import prepare, unfinished
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import SUPPORT
from asyncrl.errors import WeightError
from asyncrl.policy.export import convert_to_hf
from asyncrl.policy.families import check_family
from asyncrl.policy.flops import device_peak_flops_per_s, model_cost
from asyncrl.policy.logprobs import model_logprobs, rounded_weights
from asyncrl.policy.micro_batch import OnPolicy, check_supports, loss_of, passed_columns
from asyncrl.policy.step_loss import add_update_shares, holds_reference, step_tokens, with_statistics
from asyncrl.ranks.accelerator import compute_dtype, frozen
from asyncrl.ranks.batching import token_batch, without_nonfinite
from asyncrl.ranks.collectives import on_first_rank
from asyncrl.ranks.digest import model_digest
from asyncrl.ranks.gather import gather_weights, own_shards, parameter_specs
from asyncrl.ranks.loss_pass import MicroBatchOutcome, UpdateContext, aligned
from asyncrl.ranks.model_rows import ModelRows
from asyncrl.ranks.packed import ATTENTION
from asyncrl.ranks.plan import PlannedUpdate
from asyncrl.ranks.start_check import check_start
from asyncrl.ranks.witnessed import UpdateWitness, judged
from asyncrl.ranks.worker import HOST, MODEL, SCORED_COLUMNS, RankWorker, move_model
from asyncrl.weights.delta import DeltaSender
from asyncrl.weights.manifest import ParameterSpec, TensorEntry, layout
from asyncrl.weights.publisher import (
    ChangedElements,
    DeliveredBucket,
    Snapshot,
    changed_elements,
    deliver,
    snapshot_of,
)
from asyncrl.weights.transports.collective import send_snapshot
from asyncrl.weights.transports.interfaces import Sender, Transport
from asyncrl.weights.transports.ipc import SharedGroup, SharedWeights
from asyncrl.weights.transports.peers import Peers, Rendezvous
from asyncrl.witness.judge import Finding, bounds_finding
from asyncrl.witness.objective import Axes


class PolicyWorker(RankWorker[LossFunction]):
    """A rank of the policy at `model_path`. It also holds the frozen initial weights, the reference, if the objective
    or the advantages read them. With `model.lora` the reference is the policy without its adapter, so there is no
    second copy."""

    section = "learner"

    def __init__(self, *, model_path: str, config: Config, rank: int, world_size: int, store: Store) -> None:
        super().__init__(model_path=model_path, config=config, rank=rank, world_size=world_size, store=store)
        self._snapshots: dict[int, Snapshot] = {}
        weights = config.weights
        self._deltas = DeltaSender(anchor_every=weights.anchor_every) if weights.delta else None
        self._sender: Sender | None = None
        self._peers: Peers | None = None  # the process group for weights that this rank has joined
        self._shared = SharedWeights(world_size=world_size, device=self._device)
        self._on_policy = OnPolicy(whole_samples=config.weights.kv_cache == "keep")
        self._engine_dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self._specs = parameter_specs(self.model, dtype=self._engine_dtype)
        self._first_weights: torch.nn.Module | None = None
        self._first_digest: int | None = None
        self._lora = config.model.lora
        check_start(
            partial(_token_logprobs, self.model),
            sharded=self.model,
            model=self.model,
            config=config,
            vocabulary=self._vocabulary,
            device=self._device,
        )
        if holds_reference(config) and self._lora is None:
            self._reference()  # loaded at the start, so that a lack of memory shows at once

    def _loaded(self, model_path: str) -> PreTrainedModel:
        described, _ = PreTrainedConfig.get_config_dict(model_path)
        check_family(described, self.config, path=model_path)
        lora = self.config.model.lora
        # With an adapter these weights are frozen, and need no more precision than the passes compute in.
        dtype = torch.float32 if lora is None else compute_dtype(self.config)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype,
            attn_implementation=ATTENTION if self._packed else "sdpa",
            trust_remote_code=False,
        )
        if lora is None:
            return model
        from asyncrl.policy.adapter import with_adapter  # imports peft, which other runs do not need

        return with_adapter(model, lora, seed=self.config.run.seed)

    # -- training ------------------------------------------------------------------------------------------------

    def _prepared(
        self, data: BatchedDataDict, loss_fn: LossFunction, *, step: int | None, updates: int, eval_mode: bool
    ) -> tuple[BatchedDataDict, int]:
        data = copy.copy(data)
        if data.size and step is not None and "weight_versions" in data:
            data["staleness"] = (step - data["weight_versions"]).float()
        check_supports(data, loss_fn, has_supports=self.config.has_supports)
        data, _ = super()._prepared(data, loss_fn, step=step, updates=updates, eval_mode=eval_mode)
        if isinstance(loss_fn, ObjectiveLoss):
            loss_fn.check_precision(data)
        if "advantages" in data and data["advantages"].ndim == 1:
            data["advantages"] = data["advantages"].unsqueeze(1).expand_as(data["input_ids"])
        return without_nonfinite(data)

    def _step_loss(self, loss_fn: LossFunction, updates: Sequence[PlannedUpdate]) -> LossFunction:
        add_update_shares(loss_fn, updates, gather=self.gather)
        return with_statistics(loss_fn, updates, reduce=self.add_up, together=self.together)

    def _bounds_finding(
        self, configured: LossFunction, used: LossFunction, updates: Sequence[PlannedUpdate]
    ) -> Finding | None:
        axes, used_axes = self._axes(configured), self._axes(used)
        if configured is used or not isinstance(configured, ObjectiveLoss) or axes is None or used_axes is None:
            return None
        own = step_tokens(configured, updates)
        columns = {name: values.tolist() for name, values in (*own.sources.items(), ("advantages", own.advantages))}
        ranks: list[dict[str, list[float]]] = self.gather_on_first(columns)
        if not ranks:
            return None
        tokens = {name: [value for rank in ranks for value in rank[name]] for name in columns}
        return judged("bounds", lambda: [bounds_finding(axes, used_axes, tokens)])[0]

    def _outcome(self, part: BatchedDataDict, context: UpdateContext[LossFunction]) -> MicroBatchOutcome:
        return loss_of(
            part,
            model=self.model,
            context=context,
            temperature=self.config.generator.temperature,
            packed=self._packed,
            on_policy=self._on_policy,
        )

    def _passed_columns(self, loss_fn: LossFunction) -> Sequence[str]:
        return passed_columns(loss_fn)

    def _axes(self, loss_fn: LossFunction) -> Axes | None:
        if not isinstance(loss_fn, ObjectiveLoss):
            return None
        axes: Axes = msgspec.to_builtins(loss_fn.objective)
        return axes

    def _penalty_beta(self, loss_fn: LossFunction) -> float | None:
        penalty = loss_fn.objective.controlled() if isinstance(loss_fn, ObjectiveLoss) else None
        return None if penalty is None else penalty.beta

    def _witness_reference(self, update: PlannedUpdate, witness: UpdateWitness) -> None:
        if not any(self.gather(any("reference_policy_logprobs" in part for part in update.parts))):
            return
        with self._as_reference() as model:
            first = self._first_digest  # None with model.lora: the reference has no own weights that could have changed
            is_initial = first is None or first == self._reference_digest(model)
            witness.compare_reference(update.parts, model, is_initial=is_initial, device=self._device)

    def _weights_changed(self) -> None:
        self._shared.void()

    def _model_flops(self, lengths: Sequence[int], *, backward: bool) -> int | None:
        if self.config.generator.top_k is not None:
            return None  # the output head then multiplies only the supports' rows, whose number is not known here
        adapters = None
        if self._lora is not None:
            from asyncrl.policy.adapter import ranks_of

            adapters = ranks_of(self._specs)
        cost = model_cost(self.model.config, adapters=adapters)
        return None if cost is None else cost.flops(lengths, backward=backward)

    def _peak_flops_per_s(self) -> float | None:
        return device_peak_flops_per_s(self._device, dtype=compute_dtype(self.config))

    # -- scoring and weights -------------------------------------------------------------------------------------

    def get_logprobs(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> BatchedDataDict:
        """Returns `logprobs` float32 [B, S] of this rank's rows at the sampler's temperature; 0 at the first token and
        beyond a row's length. Reads `input_ids` and `input_lengths`, and with `generator.top_k` also `support_ids`:
        then they are log-probs among the tokens of the supports, and 0 for tokens without one."""
        scored_BS = self._scored_logprobs(data, model=self.model, micro_batch_size=micro_batch_size)
        return BatchedDataDict(logprobs=scored_BS)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, *, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """Returns `reference_logprobs` [B, S]: log-probs like those of `get_logprobs`, but under the initial weights.
        The live weights are not changed."""
        with self._as_reference() as model:
            scored_BS = self._scored_logprobs(data, model=model, micro_batch_size=micro_batch_size)
        return BatchedDataDict(reference_logprobs=scored_BS)

    def probe(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Returns for each sequence the log-probs (nats, temperature 1) of all tokens but the first, given the tokens
        before them. The weights are rounded to the engine's precision, as they are published. All ranks must pass the
        same sequences."""
        with rounded_weights(self.model, self._engine_dtype):
            scored_BS = self._scored_logprobs(token_batch(sequences), model=self.model, temperature=1.0).numpy()
        return [row[1 : len(tokens)] for row, tokens in zip(scored_BS, sequences, strict=True)]

    @contextmanager
    def _as_reference(self) -> Iterator[torch.nn.Module]:
        """Yields a model with the initial weights within the block."""
        if self._lora is None:
            yield self._reference()
        else:
            from asyncrl.policy.adapter import adapter_off

            with adapter_off(self.model):
                yield self.model

    def _reference(self) -> torch.nn.Module:
        """Returns the initial weights, sharded like the live ones. The first call loads them."""
        if self._first_weights is None:
            self._first_weights = frozen(self._loaded(self._model_path), accelerator=self._accelerator)
            self._first_digest = self._reference_digest(self._first_weights)
        return self._first_weights

    def _reference_digest(self, model: torch.nn.Module) -> int:
        return model_digest(model, rank=self.rank, kind=self.config.learner.weights_digest, frozen=True)

    def _scored_logprobs(
        self,
        data: BatchedDataDict,
        *,
        model: torch.nn.Module,
        temperature: float | None = None,
        micro_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Returns log-probs [B, S] of this rank's rows under `model`; entry 0 is 0. Without a `temperature`, they are
        of the distribution of the sampler: with its temperature, and over the supports if the rows have them."""
        of_sampler = temperature is None

        def score(part: BatchedDataDict) -> torch.Tensor:
            rows = ModelRows.of(part, packed=self._packed, wide=(SUPPORT,) if of_sampler else ())
            of_rows = self.config.generator.temperature if temperature is None else temperature
            return _token_logprobs(model, rows, temperature=of_rows)

        columns = (*SCORED_COLUMNS, *([SUPPORT] if of_sampler and self.config.has_supports else []))
        return self._scored(data, score, micro_batch_size=micro_batch_size, columns=columns)

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Returns name, shape, dtype and size of every trained parameter in the engine's precision, in the order of
        `gather_weights`. Not a collective."""
        return self._specs

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, full CPU tensor in the engine's precision). Every rank must exhaust the iterator before it
        communicates again."""
        self._placement.check(MODEL)
        return gather_weights(self.model, dtype=self._engine_dtype)

    def write_hf(self, weights_path: Path | None, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM can serve, with the weights of the checkpoint at `weights_path`, or
        with those that `stage_checkpoint` copied. With `model.lora` the directory has the adapter and the tokenizer
        only. The call may run in a second thread, like `write_checkpoint`.

        Raises CheckpointError if the directory cannot be written, or if something other than an export or a checkpoint
        is at `path`. Copies of `stage_checkpoint` are first written as a checkpoint beside `path`, because no rank has
        whole tensors.
        """
        if weights_path is not None and self._lora is not None:
            from asyncrl.policy.adapter_export import convert_adapter  # imports peft, which other runs do not need

            export = partial(
                convert_adapter,
                self._lora,
                weights_path=weights_path,
                base=self._model_name,
                tokenizer_path=self._model_path,
                path=path,
                dtype=self._engine_dtype,
            )
            on_first_rank(export, group=self._saving)
            return
        if weights_path is not None:
            convert_to_hf(
                self.model,
                self._specs,
                weights_path=weights_path,
                tokenizer_path=self._model_path,
                path=path,
                dtype=self._engine_dtype,
                group=self._saving,
            )
            return
        on_first_rank(lambda: prepare(path), group=self._saving)  # refuses a wrong path before anything is written
        shards = path.with_name(f"{path.name}.shards")
        try:
            self.write_checkpoint(shards)
            self.write_hf(shards, path)
        finally:
            if self.rank == 0:
                for folder in (shards, unfinished(shards)):
                    shutil.rmtree(folder, ignore_errors=True)

    # -- sending weights -----------------------------------------------------------------------------------------

    def take_snapshot(
        self, entries: Sequence[TensorEntry], probe_tokens: Sequence[Sequence[int]], slot: int = 0
    ) -> tuple[list[list[float]], ChangedElements | None]:
        """Copies this rank's shards of the current weights into the memory `slot`, in place of the snapshot there.
        Returns the log-probs (nats) of the sequences `probe_tokens` under these weights, and an estimate of how many
        elements of these shards have other bits than in the snapshot of the other slot. The latter is None if that slot
        has no snapshot of the same shards.

        Do not pass the slot of a snapshot that is being delivered, because its memory would be overwritten.
        """
        last = self._snapshots.pop(slot, None)
        logprobs = [row.tolist() for row in self.probe(probe_tokens)] if probe_tokens else []
        self._placement.check(MODEL)
        self._snapshots[slot] = snapshot_of(
            own_shards(self.model, rank=self.rank),
            entries,
            bucket_bytes=self.config.weights.bucket_bytes,
            shared=self.config.weights.transport == "ipc",
            last=last,
        )
        other = self._snapshots.get(1 - slot)
        return logprobs, None if other is None else changed_elements(self._snapshots[slot], other)

    def deliver(
        self, transport: Transport, slot: int, version: Version, previous: Version | None, whole: bool = False
    ) -> list[DeliveredBucket]:
        """Sends this rank's buckets of the snapshot in `slot`, which has the weights of `version`. `previous` is the
        newest version that the weight store has, to which deltas refer. If the delivery must be `whole`, no bucket is
        sent as a delta. The first call opens the sender of its `transport`, and later calls use this sender."""
        if self._sender is None:
            self._sender = transport.sender(self.rank, self.world_size)
        if self._deltas is None:
            return deliver(self._snapshots[slot], self._sender, version)
        return self._deltas.deliver(self._snapshots[slot], self._sender, version, previous=previous, whole=whole)

    def init_collective(self, rendezvous: Rendezvous) -> None:
        """Joins a new process group for weights, and leaves the old one if there is one. Returns when all ranks have
        joined.

        Call it on every rank, and `init_weight_transfer_engine` on every engine, at the same time. The bytes are sent
        from this rank's device. Raises CollectiveError after `rendezvous.timeout_s`.
        """
        self._leave_collective()
        self._peers = Peers.join(rendezvous, rank=self.rank, device=self._device)

    def _leave_collective(self) -> None:
        """Leaves the process group for weights if this rank has joined one. Ranks that are in an exchange get
        CollectiveError."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()

    def broadcast_weights(self, version: Version) -> None:
        """Sends the current weights as `version`. Returns when every engine worker has received them. If this rank
        cannot copy its weights, it leaves the process group, so that no peer waits for it."""
        if self._peers is None:
            raise WeightError("this rank has not joined a process group for weights: call init_collective() first")
        entries = layout(self.weights_metadata())
        try:
            self.take_snapshot(entries, ())
        except Exception:
            self._leave_collective()
            raise
        try:
            send_snapshot(self._peers, self._snapshots[0], version)
        finally:
            self._snapshots.clear()

    def prepare_weights_for_ipc(self, refit_buffer_size_bytes: int | None, version: Version) -> list[list[str]]:
        """Divides the current weights into groups, to share them with engines on the ranks' devices one group after the
        other. Returns the names of the weights of each group. A group of several weights fits into
        `refit_buffer_size_bytes` and into half of the free memory of each rank's device."""
        specs, weights = self.weights_metadata(), self.gather_weights()
        return self._shared.prepare(specs, weights, refit_buffer_size_bytes, version=version)

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, SharedGroup]:
        """Copies the next group of weights, which have the names `keys`, into shared memory of this rank's device.
        Returns what an engine needs to open the memory, by device."""
        return self._shared.next_group(keys)

    def offload_after_refit(self) -> None:
        """Frees the memory of this rank's device: frees the shared weights, and moves model, optimizer and reference to
        the host's memory."""
        self._shared.release()
        self.offload_optimizer()
        self._placement.offload_model()
        if self._first_weights is not None:
            move_model(self._first_weights, HOST)

    def prepare_for_training(self) -> None:
        super().prepare_for_training()
        if self._first_weights is not None:
            move_model(self._first_weights, self._device)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._leave_collective()
        self._shared.release()
        super().close()


def _token_logprobs(model: torch.nn.Module, rows: ModelRows, *, temperature: float = 1.0) -> torch.Tensor:
    """Returns log-probs [B, S] of the tokens of `rows`; entry 0 is 0."""
    live = cast(PreTrainedModel, model)
    logprobs_BT, _, _ = model_logprobs(live, rows, temperature=temperature, with_entropy=False)
    return aligned(logprobs_BT)
