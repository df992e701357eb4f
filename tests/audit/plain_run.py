"""Records a small run whose steps torch trains in this process: autograd derives a loss of three lines, and
`torch.optim.AdamW` steps. No code of the learner computes a number of it. A `Faults` plants errors.

The group that a step trains first was sampled one version before the step, the other one by the step's own weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from learner_scenes import meta_of, rows_of
from made_up_run import make_step
from tiny_groups import TEMPERATURE, make_config, make_model
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from transformers import AutoModelForCausalLM

from asyncrl.audit.chain import saved_digest
from asyncrl.buffer.ledger import Amount, LedgerEntry
from asyncrl.buffer.records import Lease, LeasedGroup, Ticket
from asyncrl.common.version import Lineage, Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.load import dump_config, shared_config
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import row_checksums
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.learner.audit_records import (
    Began,
    Machine,
    TrainedGroup,
    TrainedSample,
    TrainedStep,
    framed,
    records_path,
)
from asyncrl.learner.records import StepRecord
from asyncrl.learner.saving import KeptSteps
from asyncrl.ranks.digest import XXH3
from asyncrl.ranks.shard_files import write_tensors

STEPS = 4
RATE = 0.01
WARMUP_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The numbers of a step with which its run differs from what its configuration says, by the number of the step."""

    exchanged_advantages: int | None = None
    untrained_sample: int | None = None
    double_rate: int | None = None
    moved_tensor: int | None = None
    wrong_norm: int | None = None
    wrong_start: int | None = None
    tripled_advantages: int | None = None
    schedule_counted_twice: bool = False
    beta_left_in: int | None = None
    beta_twice_in: int | None = None
    wrong_kl: int | None = None


BROKEN = 5
"""The group of which a token of the second sample has no finite sampling log-prob, if the run has one."""


def record_plainly(
    directory: Path,
    *,
    faults: Faults = Faults(),
    has_broken_token: bool = False,
    rate: float = RATE,
    momentum: float | None = None,
    **algorithm: Any,
) -> Path:
    """Records the run in `directory`, with the model and the tokenizer that it describes in a folder that is removed.
    With a `momentum`, the optimizer is torch's SGD, by import path.
    `algorithm.advantage` is `group_mean`, or reinforce_pp_baseline with a `gamma`. A penalty in `overrides` with a
    `control` is one of kind k3 to the sampler. Returns the directory."""
    config = _config(directory.parent / "model", rate=rate, momentum=momentum, **algorithm)
    kept = KeptSteps(directory)
    kept.keep_model(make_model(Path(config.model.path)), with_weights=False)
    (directory / "config.yaml").write_text(dump_config(config))
    machine = Machine(processor="abacus", ranks=1, threads=1, packages={"torch": "2"})
    records: list[Any] = [Began(lineage=Lineage(), settings=dict(shared_config(config)), machine=machine)]
    steps, lines = _steps(config, kept, faults, broken=BROKEN if has_broken_token else None)
    records += steps
    (directory / "steps.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    path = records_path(directory, 1)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(map(framed, records)))
    for file in Path(config.model.path).iterdir():
        file.unlink()
    Path(config.model.path).rmdir()
    return directory


def _config(model: Path, *, rate: float, momentum: float | None, **algorithm: Any) -> Config:
    optimizer: dict[str, Any] = {"learning_rate": rate, "warmup_steps": WARMUP_STEPS, "schedule": "constant"}
    if momentum is None:
        optimizer["weight_decay"] = 0.1
    else:
        optimizer |= {"name": "torch.optim:SGD", "options": {"momentum": momentum}}
    made = make_config(groups_per_step=2, group_size=2, updates_per_step=1, ranks=1, optimizer=optimizer)
    sections = {
        "model": made.model.model_copy(update={"path": str(model)}),
        "algorithm": made.algorithm.model_copy(update={"advantage": "group_mean", **algorithm}),
        "audit": made.audit.model_copy(update={"keep_weights": "all"}),
    }
    return made.model_copy(update=sections)


def _steps(
    config: Config, kept: KeptSteps, faults: Faults, *, broken: int | None
) -> tuple[list[TrainedStep], list[StepRecord]]:
    model: Any = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    model.train(False)
    settings = config.learner.optimizer
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    if settings.own is not None:
        optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, **settings.options)
    _keep(model, kept.weights_path(Version(1, 0)))
    waiting, steps, lines = _generated(model, group=0, step=0), [], []
    penalties = config.algorithm.overrides.get("penalties", [])
    penalty = penalties[0] if penalties and "control" in penalties[0] else None
    beta = 0.0 if penalty is None else penalty["beta"]
    for step in range(STEPS):
        groups, waiting = (
            [waiting, _generated(model, group=2 * step + 1, step=step, broken=2 * step + 1 == broken)],
            _generated(model, group=2 * step + 2, step=step),
        )
        lease = Lease(incarnation=1, step=step, groups=tuple(group for group, _ in groups))
        rows = BatchedDataDict.from_batches([rows for _, rows in groups], pad_value_dict=dict(PAD_VALUES))
        rows["sample_mask"] = torch.ones(4)
        rows["prev_logprobs"] = _logprobs(model, rows).detach() * (rows["token_mask"] > 0)
        rows["advantages"] = _advantages(rows["token_mask"], config.algorithm.advantage)
        if faults.tripled_advantages == step:
            rows["advantages"] *= 3
        if faults.wrong_start == step:
            rows["prev_logprobs"][1, 4] += 0.01
        if faults.exchanged_advantages == step:
            rows["advantages"] = rows["advantages"][[0, 1, 3, 2]]
        if faults.untrained_sample == step:
            rows["sample_mask"][3] = 0.0
        counted = step * (2 if faults.schedule_counted_twice else 1)
        rate = settings.learning_rate * min(1.0, (counted + 1) / WARMUP_STEPS)
        used = _without_broken(rows)
        kl = _kl(used)
        norm = _trained(model, optimizer, used, rate=rate * (2 if faults.double_rate == step else 1), beta=beta)
        if faults.moved_tensor == step:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight[0] += 0.01
        made = kept.weights_path(Version(1, step + 1))
        _keep(model, made)
        kept.write_batch(lease, rows)
        norm *= 1.01 if faults.wrong_norm == step else 1.0
        before = saved_digest(kept.weights_path(Version(1, step)), XXH3)
        steps.append(_record(lease, used, before=before, after=saved_digest(made, XXH3), norm=norm))
        kl *= 1.5 if faults.wrong_kl == step else 1.0
        numbers = {} if penalty is None else {"penalty_beta": beta, "kl_to_behaviour_nats": kl}
        lines.append(make_step(step, learning_rate=rate, diagnostics=numbers))
        for _ in range({faults.beta_left_in: 0, faults.beta_twice_in: 2}.get(step, 1) if penalty is not None else 0):
            beta *= 1 + penalty["control"]["gain"] * min(max(kl / penalty["control"]["target"] - 1, -0.2), 0.2)
    return steps, lines


def _advantages(mask_BS: torch.Tensor, estimator: Any) -> torch.Tensor:
    """Returns ±0.5 for the tokens of a sample; with a `gamma`, they are discounted and then whitened over the step."""
    found_BS = torch.tensor([-0.5, 0.5, -0.5, 0.5]).unsqueeze(1).expand_as(mask_BS).clone()
    if isinstance(estimator, str):
        return found_BS
    trained_BS = mask_BS > 0
    later_BS = trained_BS.flip(1).cumsum(1).flip(1) - 1
    found_BS *= torch.tensor(estimator["gamma"]) ** later_BS
    known = found_BS[trained_BS]
    return torch.where(trained_BS, (found_BS - known.mean()) / (known.std() + 1e-6), 0.0)


def _without_broken(rows: BatchedDataDict) -> BatchedDataDict:
    """Returns the rows with the mask 0 at tokens without a finite sampling log-prob."""
    broken_BS = ~rows["generation_logprobs"].isfinite()
    changed = BatchedDataDict(rows)
    for name in ("token_mask", "generation_logprobs"):
        changed[name] = rows[name].masked_fill(broken_BS, 0)
    return changed


def _generated(model: Any, *, group: int, step: int, broken: bool = False) -> tuple[LeasedGroup, BatchedDataDict]:
    task = Task(question="q", prompt="q", answer="a")
    ticket = Ticket(
        group=group, attempt=0, task=task, seed=0, version=Version(1, step), max_staleness_versions=2, replica="a"
    )
    rows = rows_of(ticket)
    rows["input_ids"][:, 3:] += group * (rows["token_mask"][:, 3:] > 0)
    rows["generation_logprobs"] = _logprobs(model, rows).detach() * (rows["token_mask"] > 0)
    if broken:
        rows["generation_logprobs"][1, 4] = -torch.inf
    meta = msgspec.structs.replace(meta_of(ticket), row_checksums=tuple(row_checksums(rows)))
    leased = LeasedGroup(
        meta=meta, deadline=ticket.deadline, max_staleness_versions=2, reserved_step=step, ready_step=step
    )
    return leased, rows


def _logprobs(model: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    ids_BS = rows["input_ids"]
    logp_BTV = (model(input_ids=ids_BS).logits[:, :-1] / TEMPERATURE).log_softmax(-1)
    return torch.nn.functional.pad(logp_BTV.gather(2, ids_BS[:, 1:, None]).squeeze(2), (1, 0))


def _kl(rows: Mapping[str, torch.Tensor]) -> float:
    """Returns the mean of u − 1 − log u over the trained tokens, with u = start / sampler."""
    known_BS = rows["token_mask"] * rows["sample_mask"].unsqueeze(1) > 0
    apart = (rows["prev_logprobs"] - rows["generation_logprobs"])[known_BS].double()
    return float((apart.exp() - 1 - apart).mean())


def _trained(
    model: Any, optimizer: torch.optim.Optimizer, rows: Mapping[str, torch.Tensor], *, rate: float, beta: float
) -> float:
    """Trains a step of decoupled_icepop with one update, and with a penalty k3 to the sampler. Returns the gradient's
    norm."""
    mask_BS = rows["token_mask"] * rows["sample_mask"].unsqueeze(1)
    logprobs_BS = _logprobs(model, rows)
    weight_BS = (logprobs_BS - rows["generation_logprobs"]).exp().detach()
    weight_BS = weight_BS * ((weight_BS >= 0.5) & (weight_BS <= 5.0))
    apart_BS = logprobs_BS - rows["generation_logprobs"]
    loss_BS = -rows["advantages"] * weight_BS * logprobs_BS + beta * ((-apart_BS).exp() - 1 + apart_BS)
    ((loss_BS * mask_BS).sum() / mask_BS.sum()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _keep(model: Any, path: Path) -> None:
    tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
    offsets = {name: {SAVED_OFFSETS_KEY: [0] * each.ndim} for name, each in tensors.items()}
    (path / "state").mkdir(parents=True)
    file = path / "state" / "shard-00001-model-00001-of-00001.safetensors"
    write_tensors(tensors, file, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
    (path / COMPLETE).touch()


def _record(lease: Lease, rows: BatchedDataDict, *, before: int, after: int, norm: float) -> TrainedStep:
    masks = iter((rows["sample_mask"] > 0).tolist())
    mask_BS = rows["token_mask"] * rows["sample_mask"].unsqueeze(1) > 0
    ages = torch.bincount(lease.step - rows["weight_versions"][mask_BS], minlength=2)
    return TrainedStep(
        incarnation=1,
        step=lease.step,
        before=before,
        after=after,
        loss=0.0,
        grad_norm=norm,
        token_staleness=tuple(ages.tolist()),
        groups=tuple(
            TrainedGroup(
                group=group.meta.group,
                attempt=0,
                incarnation=1,
                deadline=group.deadline,
                max_staleness_versions=2,
                samples=tuple(
                    TrainedSample(tokens=tokens, spans=spans, reward=reward, trained=next(masks), row=row)
                    for tokens, spans, reward, row in zip(
                        group.meta.completion_tokens,
                        group.meta.version_spans,
                        group.meta.rewards,
                        group.meta.row_checksums,
                        strict=True,
                    )
                ),
            )
            for group in lease.groups
        ),
        ledger=LedgerEntry(prompts=0, open=(), ended=(), issued=Amount(), fates={}),
    )
