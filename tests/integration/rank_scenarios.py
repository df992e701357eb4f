"""The work of each rank: every scenario runs on a fresh worker. It runs in spawned processes and writes its results to
a file."""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from own_losses import OfTheStep
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import STEP, join, make_batch, make_config, make_group, make_groups, with_tops
from torch.distributed import FileStore

from asyncrl.algorithms.interfaces import LossFunction, LossInputType, LossType, masked_mean
from asyncrl.algorithms.loss import ObjectiveLoss, build_loss, gather_logprobs
from asyncrl.algorithms.presets import PRESETS, resolve_objective
from asyncrl.common.version import Version
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.errors import Offloaded, RunError, WeightError
from asyncrl.learner.penalty_control import next_loss
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.batching import token_batch
from asyncrl.ranks.gather import reshard
from asyncrl.ranks.report import StepReport, step_report
from asyncrl.ranks.worker import RankWorker

WorkerT = TypeVar("WorkerT", bound=RankWorker[Any])

PROBE = ([1, 2, 3, 4, 5, 6, 7], [9, 8], [30, 31, 32, 33])


def poisoned_batch() -> BatchedDataDict:
    """Returns a batch in which one row has an advantage that overflows. The row is in the third of four groups, which
    goes to the second of two ranks."""
    groups = make_groups()
    groups[2]["advantages"][0] = 3e38
    return join(groups)


def batch_with_nan() -> BatchedDataDict:
    """Returns a batch with the same rows, in which one log-prob is NaN."""
    groups = make_groups()
    groups[2]["generation_logprobs"][0, -1] = torch.nan
    return join(groups)


def batch_without_it() -> BatchedDataDict:
    """Returns a batch with the same rows, in which the token of that log-prob is masked instead."""
    groups = make_groups()
    groups[2]["token_mask"][0, -1] = 0.0
    return join(groups)


def untrained_batch() -> BatchedDataDict:
    return join([make_group(0, sample_mask=(0.0, 0.0, 0.0)), make_group(1, lengths=(0, 0, 0))])


class LogitLoss:
    """The default objective, written as a user's loss that takes logits."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGIT

    def __call__(self, next_token_logits: torch.Tensor, data: Any, *counts: Any, **named: Any) -> Any:
        loss, _ = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)(next_token_logits, data, *counts, **named)
        return loss, {"longest_max": float(data["input_lengths"].max()), "rows": data.size}


def cross_entropy(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
    """A user's loss in the oldest form of the interface: without attributes, and it reads only columns of the rows."""
    logprobs_BT = gather_logprobs(next_token_logits, input_ids_BS=data["input_ids"])
    mask_BT = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
    return -masked_mean(logprobs_BT, mask_BT, global_valid_toks), {}


OWN_OPTIMIZER = {
    "name": "torch.optim:SGD",
    "options": {"momentum": 0.9, "nesterov": True},
    "learning_rate": 0.5,
    "warmup_steps": 2,
    "schedule": "constant",
    "max_grad_norm": 0.1,
}
"""Settings with which all steps are clipped, and the second one has twice the learning rate of the first one."""
TRAINING: dict[str, tuple[dict[str, Any], Any]] = {
    "micro_batch_1": ({"micro_batch_size": 1}, make_batch),
    "micro_batch_3": ({"micro_batch_size": 3}, make_batch),
    "micro_batch_all": ({}, make_batch),
    "dynamic": ({"batching": "dynamic", "micro_batch_tokens": 32}, make_batch),
    "packed": ({"batching": "packed", "micro_batch_tokens": 32}, make_batch),
    "own_loss": ({"micro_batch_size": 4}, make_batch),
    "own_loss_packed": ({"batching": "packed", "micro_batch_tokens": 64}, make_batch),
    "two_updates": ({"updates_per_step": 2}, make_batch),
    "one_group": ({"micro_batch_size": 2}, lambda: make_group(4)),
    "nonfinite": ({}, poisoned_batch),
    "with_nan": ({"micro_batch_size": 3}, batch_with_nan),
    "without_it": ({"micro_batch_size": 3}, batch_without_it),
    "untrained": ({}, untrained_batch),
    "reference": ({"micro_batch_size": 5}, make_batch),
    "calibrated": ({"micro_batch_size": 5}, make_batch),
    "interpolated": ({"micro_batch_size": 5, "updates_per_step": 2}, make_batch),
    "counted": ({"micro_batch_size": 5}, make_batch),
    "controlled": ({"micro_batch_size": 5}, make_batch),
    "centered": ({"batching": "packed", "micro_batch_tokens": 32}, lambda: with_tops(make_batch())),
    "own_optimizer": ({"micro_batch_size": 4, "optimizer": OWN_OPTIMIZER}, make_batch),
}
LOSSES: dict[str, Any] = {
    "own_loss": f"{__name__}:LogitLoss",
    "own_loss_packed": f"{__name__}:LogitLoss",
    "reference": {
        **msgspec.to_builtins(PRESETS["decoupled_icepop"].objective),
        "penalties": [{"kind": "k3", "beta": 10.0, "q": "reference"}],
    },
    "controlled": {
        **msgspec.to_builtins(PRESETS["decoupled_icepop"].objective),
        "penalties": [{"kind": "k3", "beta": 0.5, "q": "behaviour", "control": {"target": 0.48, "gain": 1.0}}],
    },
    "calibrated": "m2po",
    "centered": "score_centering",
    "interpolated": "a3po",
    "counted": {
        "surrogate": {"kind": "reinforce"},
        "aggregation": "prompt_mean",
        "penalties": [{"kind": "positive_nll", "beta": 0.5}],
    },
}
LOSSES |= dict.fromkeys(("on the device", "offloaded"), LOSSES["reference"])


CUTS: dict[str, dict[str, Any]] = {
    "padded 1": {"micro_batch_size": 1},
    "padded 4": {"micro_batch_size": 4},
    "padded all": {"micro_batch_size": 1024},
    **{
        f"{batching} {size}": {"batching": batching, "micro_batch_tokens": tokens}
        for batching in ("dynamic", "packed")
        for size, tokens in (("1", 16), ("4", 48), ("all", 1024))
    },
}
"""Ways to cut a rank's rows into micro-batches: one row, about four rows, or all rows in each."""
SOME_CUTS = {name: CUTS[name] for name in ("padded 1", "dynamic 4", "packed 4", "packed all")}
"""A cut of each kind and size, for objectives that share the code of the default one, and for the critic."""
OF_THE_STEP_CAP = 1.1
"""The option of the loss `OfTheStep`, which bounds some weights of `matrix_batch` and not all."""
BY_COVARIANCE: dict[str, dict[str, Any]] = {
    "kl_cov": {"penalties": [{"kind": "abs", "beta": 0.7, "tokens": {"share": 0.2}}]},
    "clip_cov": {"dropped": {"share": 0.1, "lo": 0.1, "hi": 2.0}},
}
"""Overrides of the presets that choose tokens by covariance, with which they choose some tokens of `matrix_batch`."""
UPDATE_ROWS = 20
"""Rows in an update. Each of four ranks has five of them, which are two micro-batches of at most four rows."""


def matrix_batch() -> BatchedDataDict:
    """Returns the rows of two updates."""
    groups = [*make_groups(), make_group(4, lengths=(3, 6, 2, 9)), *(make_group(key) for key in range(5, 13))]
    return with_tops(join(groups))


def shard_of(
    data: BatchedDataDict, *, rank: int, world_size: int, learner: dict[str, Any], update_rows: int = UPDATE_ROWS
) -> BatchedDataDict:
    """Returns a rank's rows, cut as a driver cuts them: an update has `update_rows` rows over all ranks."""
    lengths = {"input_key": "input_ids", "input_lengths_key": "input_lengths"}
    tokens = {"max_tokens_per_microbatch": learner.get("micro_batch_tokens")}
    options: dict[str, Any] = {}
    if learner.get("batching") == "dynamic":
        options = {"dynamic_batching_args": {**tokens, **lengths, "sequence_length_round": 4}}
    elif learner.get("batching") == "packed":
        packing = {"algorithm": "first_fit_decreasing", "sequence_length_pad_multiple": 2}
        options = {"sequence_packing_args": {**tokens, **lengths, **packing}}
    shards = data.shard_by_batch_size(world_size, update_rows, **options)
    return (shards[0] if options else shards)[rank]


def on_fresh_workers(
    worker: Callable[..., WorkerT], cuts: Mapping[str, dict[str, Any]]
) -> Iterator[tuple[WorkerT, str, dict[str, Any]]]:
    """Yields (worker, name, cut) for every cut. The worker has its first weights and a fresh optimizer.

    Creating a worker takes seconds, so there are only two, a packed one and a padded one. The cut of the rows decides
    everything else.
    """
    for packed in (False, True):
        made = worker(f"cuts {packed}", **({"batching": "packed"} if packed else {}))
        first = [parameter.detach().to_local().clone() for parameter in made.model.parameters()]
        for name, learner in cuts.items():
            if packed == (learner.get("batching") == "packed"):
                reshard(made.model)
                for parameter, shard in zip(made.model.parameters(), first, strict=True):
                    parameter.detach().to_local().copy_(shard)
                made.optimizer.optimizer.state.clear()
                made.train_calls = 0
                yield made, name, learner
        made.close()


def half_on_policy(policy: PolicyWorker, data: BatchedDataDict) -> BatchedDataDict:
    """Makes the first half of the rows, which the first of two ranks gets, nearly on-policy. So its tokens use less of
    a budget on the mean, and the tokens of the second half may use more."""
    half = data.size // 2
    scored_BS = policy.get_logprobs(data)["logprobs"]
    data["generation_logprobs"][:half] = scored_BS[:half] - 0.05 * data["advantages"][:half].sign().unsqueeze(1)
    return data


def moments_of(policy: PolicyWorker) -> dict[str, np.ndarray]:
    """Returns the unsharded moments of the optimizer, by the number of the parameter. All ranks must call it."""
    return {
        f"{number} {key}": moments[key].full_tensor().numpy()
        for number, moments in enumerate(policy.optimizer.state.values())
        for key in ("exp_avg", "exp_avg_sq")
    }


def train_step(
    policy: PolicyWorker,
    data: BatchedDataDict,
    *,
    updates_per_step: int = 1,
    loss_fn: LossFunction | None = None,
    **_: Any,
) -> StepReport:
    """Trains a step with the same stages as the learner's loop, on this rank's share. The loss is by default that of
    the configuration. Returns the report of all ranks."""
    ranks, loss_fn = policy.world_size, loss_fn or build_loss(policy.config)
    if data.size % (ranks * updates_per_step):
        shard = data.shard_by_batch_size(ranks, allow_uneven_shards=True)[policy.rank]
    else:
        shard = data.shard_by_batch_size(ranks, data.size // updates_per_step)[policy.rank]
    if needs_reference(loss_fn):
        shard["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(shard)["reference_logprobs"]
    if needs_proximal(loss_fn, updates=updates_per_step):
        shard["prev_logprobs"] = policy.get_logprobs(shard)["logprobs"]
    rows = -(-data.size // (ranks * updates_per_step))
    record = policy.train(shard, loss_fn, rows_per_update=rows, step=STEP)
    return step_report(policy.gather(record))


def run_rank(rank: int, world_size: int, folder: Path) -> None:
    results: dict[str, Any] = {}

    def worker(name: str, **learner: Any) -> PolicyWorker:
        store = FileStore(str(folder / f"store-{world_size}-{name}"), world_size)
        return PolicyWorker(
            model_path=str(folder / "model"),
            config=make_config(loss=LOSSES.get(name, "decoupled_icepop"), **{"optimizer": SMOOTH_OPTIMIZER, **learner}),
            rank=rank,
            world_size=world_size,
            store=store,
        )

    results["interface"] = _interface_scenarios(worker, rank=rank, world_size=world_size)
    if world_size > 2:
        (folder / f"results-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(results))
        return
    for name, (learner, batch) in TRAINING.items():
        policy = worker(name, **learner)
        data = half_on_policy(policy, batch()) if name == "calibrated" else batch()
        report = train_step(policy, data, **learner)
        again = train_step(policy, batch(), **learner) if name == "reference" else None
        if name == "controlled":
            following = next_loss(build_loss(policy.config), report.kl_nats, step=STEP, config=policy.config)
            again = train_step(policy, batch(), loss_fn=following, **learner)
        if name == "own_optimizer":
            results["resumed"] = _resumed(policy, folder / f"own-{world_size}", learner)
        after = {key: tensor.numpy() for key, tensor in policy.gather_weights()}
        results[name] = {"report": report, "again": again, "weights": after, "trained_step": policy.trained_step()}
        policy.close()
    results["offloaded"] = _offload_scenario(worker)
    results["weights"] = _weights_scenario(worker("weights"), folder / f"saved-{world_size}", rank=rank)
    (folder / f"results-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(results))


def _resumed(policy: PolicyWorker, path: Path, learner: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Saves, trains a second step, loads, and trains it again. Returns the weights after both."""
    found = []
    policy.stage_checkpoint()
    policy.write_checkpoint(path / "weights", path / "optimizer")
    for _ in range(2):
        train_step(policy, make_batch(), **learner)
        found.append({key: tensor.numpy().copy() for key, tensor in policy.gather_weights()})
        policy.load_checkpoint(path / "weights", path / "optimizer")
    train_step(policy, make_batch(), **learner)
    return found


def _offload_scenario(worker: Any) -> dict[str, Any]:
    """Trains two steps, once without a break and once with everything offloaded in between.

    Returns the weights, and the calls that are refused while something is offloaded."""
    found: dict[str, Any] = {}
    for name, offloads in (("on the device", False), ("offloaded", True)):
        policy = worker(name, micro_batch_size=4)
        train_step(policy, make_batch(), micro_batch_size=4)
        if offloads:
            first = next(iter(policy.model.parameters()))
            first.grad = torch.zeros_like(first)
            policy.offload_optimizer()
            found["gradients"] = sum(parameter.grad is not None for parameter in policy.model.parameters())
            found["before"] = _refusals(policy)
            policy.offload_after_refit()
            found["after"] = _refusals(policy)
            policy.prepare_for_training()
        first_group, *_ = policy.prepare_weights_for_ipc(1, Version(1, 0))
        train_step(policy, make_batch(), micro_batch_size=4)
        found["outdated"] = _raises(WeightError, partial(policy.get_weights_ipc_handles, first_group))
        found[name] = {key: tensor.numpy() for key, tensor in policy.gather_weights()}
        policy.close()
    return found


def _raises(kind: type[Exception], call: Callable[[], Any]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def _refusals(policy: PolicyWorker) -> list[str]:
    """Returns the names of the calls that are refused because something is offloaded."""
    shard = make_batch().slice(0, 2)
    shard["prev_logprobs"] = shard["generation_logprobs"]
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    calls = {
        "train": lambda: policy.train(shard.slice(0, 0), loss, rows_per_update=1),
        "evaluate": lambda: policy.train(shard, loss, rows_per_update=2, eval_mode=True),
        "score": lambda: policy.get_logprobs(shard),
        "gather": lambda: list(policy.gather_weights()),
    }
    return [name for name, call in calls.items() if _raises(Offloaded, call)]


def _interface_scenarios(worker: Any, *, rank: int, world_size: int) -> dict[str, Any]:
    """Calls `train`, `get_logprobs` and `get_reference_policy_logprobs` on rows that are cut in every way."""
    loss = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
    counted = ObjectiveLoss(resolve_objective(LOSSES["counted"], {}))
    of_the_step = OfTheStep(cap=OF_THE_STEP_CAP)
    centered = ObjectiveLoss(PRESETS["score_centering"].objective)
    by_covariance = {name: ObjectiveLoss(resolve_objective(name, axes)) for name, axes in BY_COVARIANCE.items()}
    data = matrix_batch()
    data["index"] = torch.arange(data.size)
    found: dict[str, Any] = {}
    for policy, name, learner in on_fresh_workers(worker, CUTS):
        shard = shard_of(data, rank=rank, world_size=world_size, learner=learner)
        rows, size = UPDATE_ROWS // world_size, {"micro_batch_size": learner.get("micro_batch_size")}
        before = policy.get_logprobs(shard, **size)["logprobs"]
        shard["prev_logprobs"] = before
        untouched = {key: tensor.numpy() for key, tensor in policy.gather_weights()}
        evaluated = policy.train(shard, loss, rows_per_update=rows, eval_mode=True, **size)
        others: dict[str, Any] = {}
        if name in SOME_CUTS:
            # the current log-probs of `moved` are apart from those of the step's start
            moved = copy.copy(shard)
            moved["prev_logprobs"] = shard["generation_logprobs"]
            others = {
                other: policy.train(rows_of, each, rows_per_update=rows, eval_mode=True, **size)  # type: ignore[arg-type]
                for other, rows_of, each in (
                    ("counted", shard, counted),
                    ("of the step", shard, of_the_step),
                    ("centered", shard, centered),
                    *((other, moved, each) for other, each in by_covariance.items()),
                )
            }
        kept = all(np.array_equal(tensor.numpy(), untouched[key]) for key, tensor in policy.gather_weights())
        trained = policy.train(shard, loss, rows_per_update=rows, **size)
        found[name] = {
            "index": shard["index"].numpy(),
            "before": before.numpy(),
            "evaluated": evaluated,
            **others,
            "kept": kept,
            "trained": trained,
            "schedule": policy.train_calls,
            "reference": policy.get_reference_policy_logprobs(shard, **size)["reference_logprobs"].numpy(),
            "after": policy.get_logprobs(shard, **size)["logprobs"].numpy(),
            "weights": {key: tensor.numpy() for key, tensor in policy.gather_weights()},
        }
    policy = worker("interface uneven", micro_batch_size=1)
    few = make_batch().slice(0, 5)
    shard = few.shard_by_batch_size(world_size, allow_uneven_shards=True)[rank]
    found["uneven"] = {
        "trained": policy.train(shard, loss, rows_per_update=5),
        "weights": {key: tensor.numpy() for key, tensor in policy.gather_weights()},
    }
    few_columns = BatchedDataDict({name: shard[name] for name in LP_SEED_FIELDS})
    found["bare"] = policy.train(few_columns, cross_entropy, rows_per_update=5)  # type: ignore[arg-type]
    try:
        policy.train(shard, ObjectiveLoss(PRESETS["a3po"].objective), rows_per_update=5)
    except RunError as error:
        found["refused"] = str(error)
    policy.close()
    return found


def _weights_scenario(policy: PolicyWorker, saved: Path, *, rank: int) -> dict[str, Any]:
    before = dict(policy.gather_weights())
    kept = {name: tensor.clone() for name, tensor in before.items()}
    found = {
        "specs": policy.weights_metadata(),
        "probe": policy.probe(PROBE),
        # Rank 0 scores two sequences and rank 1 none. The ranks must still run the same collectives.
        "logprobs": policy.get_logprobs(token_batch(PROBE[:2] if rank == 0 else []))["logprobs"].numpy(),
        "gathered": {name: tensor.numpy() for name, tensor in kept.items()},
        "after_probe": all(torch.equal(tensor, kept[name]) for name, tensor in policy.gather_weights()),
        "types": {type(parameter).__name__ for parameter in policy.model.parameters()},
    }
    found["trained"] = train_step(policy, make_batch())
    found["snapshot_unchanged"] = all(torch.equal(before[name], kept[name]) for name in kept)
    found["moved"] = any(not torch.equal(tensor, kept[name]) for name, tensor in policy.gather_weights())
    policy.stage_checkpoint(optimizer=False)
    policy.write_hf(None, saved)
    found["saved"] = {name: tensor.numpy() for name, tensor in policy.gather_weights()}
    policy.close()
    return found
