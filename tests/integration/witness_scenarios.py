"""The work of each rank in the tests of the witness: healthy steps, and steps with a planted fault. It runs in spawned
processes and writes the findings to a file."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import msgspec
import torch
from own_losses import HEALTHY, MISTAKEN, ChangesItsRows, Overflows, Random
from rounding import SMOOTH_OPTIMIZER
from tiny_groups import STEP, join, make_config, make_groups, with_tops
from torch.distributed import FileStore

from asyncrl.algorithms import loss as loss_module
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.objective import Aggregation, Objective
from asyncrl.algorithms.presets import PRESETS
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.errors import WitnessFailed
from asyncrl.policy import logprobs as logprobs_module
from asyncrl.policy import micro_batch
from asyncrl.policy.step_loss import needs_proximal, needs_reference
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks import witnessed as witnessed_module
from asyncrl.ranks import worker as worker_module
from asyncrl.ranks.gather import reshard
from asyncrl.ranks.plan import PlannedUpdate
from asyncrl.ranks.report import StepReport, step_report
from asyncrl.ranks.witnessed import WITNESS
from asyncrl.ranks.worker import RankWorker
from asyncrl.witness.judge import Request
from asyncrl.witness.objective import Counts

MODES: Mapping[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 4},
    "dynamic": {"batching": "dynamic", "micro_batch_tokens": 48},
    "packed": {"batching": "packed", "micro_batch_tokens": 48},
}
SOME_OBJECTIVES = {
    "float32": ("decoupled_icepop", "grpo", "gspo", "m2po"),
    "bfloat16": ("decoupled_icepop", "score_centering"),
}
DRAWN = 3
"""The group that is drawn, whose three samples have 8, 1 and 3 tokens."""

Ratios = dict[str, float]


EQUAL = 2
"""A group whose three samples have 4 tokens."""


def batch(group: int = DRAWN) -> BatchedDataDict:
    data = join(make_groups())
    drawn = (data["group_ids"] == group).nonzero().flatten()
    data[WITNESS] = torch.full((data.size,), -1)
    data[WITNESS][drawn] = torch.arange(len(drawn))
    return data


def request_of(data: BatchedDataDict) -> Request:
    weight_BS = data["token_mask"] * data["sample_mask"].unsqueeze(1)
    weight_BS[:, 0] = 0.0
    groups = data["group_ids"].unique().tolist()
    counts = Counts(
        tokens=float(weight_BS.sum()),
        sequences=float(data["sample_mask"].sum()),
        tokens_by_group={group: float(weight_BS[data["group_ids"] == group].sum()) for group in groups},
        positive_tokens=float(weight_BS[data["rewards"] > 0].sum()),
    )
    drawn = tuple(data["advantages"][data[WITNESS] >= 0].tolist())
    rewards = tuple(data["rewards"][data[WITNESS] >= 0].tolist())
    return Request(counts=(counts,), advantages=drawn, every_part=True, rewards=rewards)


def objective_of(name: str) -> Objective:
    objective = PRESETS[name].objective
    if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT:
        return msgspec.structs.replace(objective, constant=17.0)
    return objective


def step(policy: PolicyWorker, name: str) -> Ratios:
    """Trains a step that is witnessed, and returns the largest difference of each check as a share of its limit."""
    return {check: finding.ratio for check, finding in reported(policy, name, batch()).findings.items()}


def reported(policy: PolicyWorker, name: str, data: BatchedDataDict) -> StepReport:
    loss = ObjectiveLoss(objective_of(name))
    return trained_with(policy, loss, with_tops(data) if loss.needs_centering else data)


def with_equal_samples() -> BatchedDataDict:
    data = batch(EQUAL)
    drawn = data[WITNESS] >= 0
    data["input_ids"][drawn] = data["input_ids"][drawn][0]
    return data


def without_drawn_rows() -> BatchedDataDict:
    data = batch()
    data[WITNESS] = torch.full((data.size,), -1)
    return data


def trained_with(policy: PolicyWorker, loss: Any, data: BatchedDataDict, *, witnessed: bool = True) -> StepReport:
    shard = data.shard_by_batch_size(policy.world_size, allow_uneven_shards=True)[policy.rank]
    if needs_reference(loss):
        shard["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(shard)["reference_logprobs"]
    if needs_proximal(loss, updates=1):
        shard["prev_logprobs"] = policy.get_logprobs(shard)["logprobs"]
    rows = -(-data.size // policy.world_size)
    request = request_of(data) if witnessed else None
    record = policy.train(shard, loss, rows_per_update=rows, step=STEP, witness=request)
    return step_report(policy.gather(record))


# --- planted faults -------------------------------------------------------------------------------------------------


@contextmanager
def replaced(where: Any, name: str, made_of: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces a function within the block by one that is made of it."""
    with patch.object(where, name, made_of(getattr(where, name))):
        yield


def rows_left_out(prepared: Any) -> Any:
    def without_one(self: PolicyWorker, data: BatchedDataDict, *args: Any, **options: Any) -> Any:
        data["sample_mask"] = data["sample_mask"].clone()
        data["sample_mask"][0] = 0.0
        return prepared(self, data, *args, **options)

    return without_one


def advantages_exchanged(prepared: Any) -> Any:
    def rolled(self: PolicyWorker, data: BatchedDataDict, *args: Any, **options: Any) -> Any:
        data["advantages"] = data["advantages"].roll(1)
        return prepared(self, data, *args, **options)

    return rolled


def rewards_exchanged(prepared: Any) -> Any:
    def rolled(self: PolicyWorker, data: BatchedDataDict, *args: Any, **options: Any) -> Any:
        data["rewards"] = 1.0 - (data["rewards"] > 0).float()
        return prepared(self, data, *args, **options)

    return rolled


def of_current(sources: Any) -> Any:
    def found(self: ObjectiveLoss, column: Any, *, logprobs: torch.Tensor) -> Any:
        return {name: logprobs.detach() for name in sources(self, column, logprobs=logprobs)}

    return found


def scaled(factor: float) -> Any:
    return lambda function: lambda *args, **options: factor * function(*args, **options)


def without_temperature(model_logprobs: Any) -> Any:
    return lambda *args, temperature, **options: model_logprobs(*args, temperature=1.0, **options)


@contextmanager
def half_of_the_tensors_stay(policy: PolicyWorker) -> Iterator[None]:
    step_of, kept = policy.optimizer.step, [*policy.model.parameters()][::2]

    def without_half() -> None:
        before = [parameter.detach().clone() for parameter in kept]
        step_of()
        for parameter, value in zip(kept, before, strict=True):
            parameter.data.copy_(value)

    policy.optimizer.step = without_half
    try:
        yield
    finally:
        policy.optimizer.step = step_of


@contextmanager
def a_layer_without_gradient(policy: PolicyWorker) -> Iterator[None]:
    """The backward pass of packed rows loses a half of the gradient of a layer. Rows alone keep it."""
    layer = policy.model.model.layers[0].mlp

    def halved(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if policy.model.config._attn_implementation == "eager":
            return output
        return output / 2 + output.detach() / 2

    hook = layer.register_forward_hook(halved)
    try:
        yield
    finally:
        hook.remove()


def no_clip(policy: PolicyWorker) -> Any:
    clip = policy._accelerator.clip_grad_norm_
    return patch.object(policy._accelerator, "clip_grad_norm_", lambda parameters, _: clip(parameters, 1e9))


@contextmanager
def another_decay(policy: PolicyWorker) -> Iterator[None]:
    """The optimizer decays the weights, which the configuration does not ask for."""
    for group in policy.optimizer.param_groups:
        group["weight_decay"] = 0.5
    try:
        yield
    finally:
        for group in policy.optimizer.param_groups:
            group["weight_decay"] = policy.config.learner.optimizer.weight_decay


@contextmanager
def micro_batches(passes: Callable[[int], int]) -> Iterator[None]:
    """The update passes its n-th micro-batch `passes(n)` times."""
    update = RankWorker._update

    def changed(self: PolicyWorker, planned: PlannedUpdate, *args: Any, **options: Any) -> Any:
        parts = [part for n, part in enumerate(planned.parts) for _ in range(passes(n))]
        return update(self, planned._replace(parts=parts), *args, **options)

    with patch.object(RankWorker, "_update", changed):
        yield


@contextmanager
def gradients_lost(policy: PolicyWorker) -> Iterator[None]:
    """Only the last micro-batch of an update has a gradient."""
    synchronise = policy.model.set_requires_gradient_sync

    def reset(_: bool) -> None:
        policy.optimizer.zero_grad()
        synchronise(True)

    with patch.object(policy.model, "set_requires_gradient_sync", reset):
        yield


@contextmanager
def moments_reset(policy: PolicyWorker) -> Iterator[None]:
    kept = dict(policy.optimizer.optimizer.state)
    policy.optimizer.optimizer.state.clear()
    try:
        yield
    finally:
        policy.optimizer.optimizer.state.update(kept)
        policy._optimizer_steps -= 1  # the step of the block is in none of these moments


def younger(prepared: Any) -> Any:
    def found(self: PolicyWorker, data: BatchedDataDict, *args: Any, **options: Any) -> Any:
        data, left_out = prepared(self, data, *args, **options)
        data["staleness"] = (data["staleness"] - 1).clamp(min=0)
        return data, left_out

    return found


def norm_too_small(policy: PolicyWorker) -> Any:
    clip = policy._accelerator.clip_grad_norm_
    return patch.object(policy._accelerator, "clip_grad_norm_", lambda *args: 0.9 * clip(*args))


@contextmanager
def reference_trained(policy: PolicyWorker) -> Iterator[None]:
    """The weights of the reference are halved after they were loaded."""

    def scaled_by(factor: float) -> None:
        reshard(policy._reference())
        with torch.no_grad():
            for parameter in policy._reference().parameters():
                parameter.mul_(factor)

    scaled_by(0.5)
    try:
        yield
    finally:
        scaled_by(2.0)


def of_live_weights(_: Any) -> Any:
    """The reference's log-probs are those of the weights that are trained."""

    def found(self: PolicyWorker, data: BatchedDataDict) -> BatchedDataDict:
        return BatchedDataDict(reference_logprobs=self.get_logprobs(data)["logprobs"])

    return found


def warmer(get_logprobs: Any) -> Any:
    return lambda self, data: BatchedDataDict(logprobs=get_logprobs(self, data)["logprobs"] * 1.01)


def without_centering(token_terms: Any) -> Any:
    def found(objective: Objective, *, centering_BT: torch.Tensor | None, **options: Any) -> Any:
        return token_terms(msgspec.structs.replace(objective, centering=None), **options)

    return found


def without_rest(centering_slopes: Any) -> Any:
    return lambda *, has_rest, **options: centering_slopes(has_rest=torch.zeros_like(has_rest), **options)


FAULTS: Mapping[str, tuple[str, Callable[[PolicyWorker], Any]]] = {
    "a row is left out": ("counts", lambda _: replaced(PolicyWorker, "_prepared", rows_left_out)),
    "advantages are exchanged": ("advantages", lambda _: replaced(PolicyWorker, "_prepared", advantages_exchanged)),
    "rewards are exchanged": ("coefficients", lambda _: replaced(PolicyWorker, "_prepared", rewards_exchanged)),
    "the clip never acts": ("coefficients", lambda _: replaced(ObjectiveLoss, "sources", of_current)),
    "another divisor": ("coefficients", lambda _: replaced(loss_module, "_divisor", scaled(1.01))),
    "no temperature": ("rows", lambda _: replaced(micro_batch, "model_logprobs", without_temperature)),
    "half of a layer's gradient": ("gradient", a_layer_without_gradient),
    "gradients are lost": ("gradient", gradients_lost),
    "half of the tensors stay": ("frozen", half_of_the_tensors_stay),
    "another learning rate": ("optimizer", lambda _: replaced(worker_module, "learning_rate", scaled(1.05))),
    "no learning rate": ("frozen", lambda _: replaced(worker_module, "learning_rate", scaled(0.0))),
    "gradients are not clipped": ("optimizer", no_clip),
    "another weight decay": ("optimizer", another_decay),
    "a micro-batch is lost": ("counts", lambda _: micro_batches(lambda n: int(n > 0))),
    "a micro-batch passes twice": ("counts", lambda _: micro_batches(lambda n: 1 + (n == 0))),
    "the moments are lost": ("optimizer", moments_reset),
    "the norm is measured too small": ("optimizer", norm_too_small),
    "the reference has the live weights": (
        "rows",
        lambda _: replaced(PolicyWorker, "get_reference_policy_logprobs", of_live_weights),
    ),
    "the reference is trained": ("rows", reference_trained),
    "other log-probs of the start": ("rows", lambda _: replaced(PolicyWorker, "get_logprobs", warmer)),
    "tokens count as younger": ("coefficients", lambda _: replaced(PolicyWorker, "_prepared", younger)),
    "centering is left out": ("coefficients", lambda _: replaced(loss_module, "token_terms", without_centering)),
    "the rest of the sampler is left out": (
        "gradient",
        lambda _: replaced(logprobs_module, "centering_slopes", without_rest),
    ),
}
"""Faults by name: the check that finds each, and what plants it on a rank within a block."""
OBJECTIVES = {
    "tokens count as younger": "a3po",
    "centering is left out": "score_centering",
    "the rest of the sampler is left out": "score_centering",
    "rewards are exchanged": "vapo",
    "the reference has the live weights": "grpo",
    "the reference is trained": "grpo",
    "other log-probs of the start": "m2po",
}
"""The objectives of faults that need another one than `decoupled_icepop`."""


def run_rank(rank: int, world_size: int, folder: Path, work: Callable[..., dict[str, Any]]) -> None:
    """Does one of the works below, and writes its results."""

    def worker(name: str, *, dtype: str = "float32", on_failure: str = "warn", **learner: Any) -> PolicyWorker:
        config = make_config(loss="decoupled_icepop", **{"optimizer": SMOOTH_OPTIMIZER, **learner}).model_dump()
        config["model"]["dtype"] = dtype
        config["witness"]["on_failure"] = on_failure
        store = FileStore(str(folder / f"store-{world_size}-{name}"), world_size)
        return PolicyWorker(
            model_path=str(folder / "model"), config=Config.model_validate(config), rank=rank, world_size=world_size,
            store=store,
        )  # fmt: skip

    (folder / f"results-{world_size}-{rank}.pkl").write_bytes(pickle.dumps(work(worker)))


def healthy_steps(worker: Callable[..., PolicyWorker], *, every: bool = False) -> dict[str, Any]:
    """Trains steps in each batching mode and precision: of every objective, or, without `every`, of all of them only on
    packed rows in float32 on one rank."""
    results: dict[str, Any] = {}
    for mode, learner in MODES.items():
        for dtype in ("float32", "bfloat16"):
            policy = worker(f"{mode} {dtype}", dtype=dtype, **learner)
            all_of_them = every or (policy.world_size, mode, dtype) == (1, "packed", "float32")
            for name in PRESETS if all_of_them else SOME_OBJECTIVES[dtype]:
                results[f"{mode} {dtype} {name}"] = step(policy, name)
            policy.close()
    return results


def steps_with_faults(worker: Callable[..., PolicyWorker]) -> dict[str, Any]:
    """Trains steps with a fault, each followed by a healthy one, and steps with losses of a user's own."""
    results: dict[str, Any] = {}
    policy = worker("faults", batching="packed", micro_batch_tokens=24)  # at least two micro-batches on each rank
    for name, (_, plant) in FAULTS.items():
        with ExitStack() as stack:
            stack.enter_context(plant(policy))
            results[f"fault: {name}"] = step(policy, OBJECTIVES.get(name, "decoupled_icepop"))
        results[f"after: {name}"] = step(policy, "decoupled_icepop")
    with patch.object(witnessed_module, "plain_pass", Mock(wraps=witnessed_module.plain_pass)) as passes:
        equal = reported(policy, "reinforce", with_equal_samples()).findings
    results["equal samples"] = {check: finding.ratio for check, finding in equal.items()}, passes.call_count
    policy.close()
    for mode in ("packed", "padded"):
        policy = worker(f"own {mode}", **MODES[mode])
        for name, (loss, _) in {**HEALTHY, **MISTAKEN}.items():
            results[f"own {mode}: {name}"] = dict(trained_with(policy, loss, batch()).findings)
        results[f"random, not drawn: {mode}"] = dict(trained_with(policy, Random(), without_drawn_rows()).findings)
        policy.close()
    digests = set()
    for witnessed in (False, True):
        policy = worker(f"untouched {witnessed}", batching="packed", micro_batch_tokens=24)
        trained_with(policy, ChangesItsRows(), batch(), witnessed=witnessed)
        digests.add(sum(policy.gather(policy.weights_digest())))
        results["overflow"] = trained_with(policy, Overflows(), batch()).skipped
        policy.close()
    results["untouched"] = len(digests) == 1
    rate_0 = SMOOTH_OPTIMIZER | {"learning_rate": 0.0, "weight_decay": 0.1}
    policy = worker("fixed", optimizer=rate_0, **MODES["packed"])
    reports = [reported(policy, "decoupled_icepop", batch()) for _ in range(3)]
    results["fixed"] = [
        (each.weights_before == each.weights_after, each.grad_norm > 0, each.learning_rate, dict(each.findings))
        for each in reports
    ]
    policy.close()
    results["stopped"] = _stopped(worker("stopped", on_failure="stop", **MODES["packed"]))
    return results


def _stopped(policy: PolicyWorker) -> dict[str, Any]:
    """Plants a fault that ends the step before the optimizer's, and trains a healthy step afterwards."""
    before = policy.weights_digest()
    message = ""
    with replaced(loss_module, "_divisor", scaled(1.01)):
        try:
            step(policy, "decoupled_icepop")
        except WitnessFailed as error:
            message = str(error)
    found = {"message": message, "unchanged": policy.weights_digest() == before, "after": step(policy, "grpo")}
    overflow = batch()
    overflow["advantages"][overflow[WITNESS] == 0] = 3e38
    report = reported(policy, "decoupled_icepop", overflow)
    found["nonfinite"] = (report.skipped, dict(report.findings))
    policy.close()
    return found
