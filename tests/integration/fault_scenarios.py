"""The work of the ranks in the fault tests: a reference that fails, a peer that is silent, and a peer that dies.

It runs in spawned processes."""

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rank_scenarios import PROBE
from tiny_groups import make_batch, make_config
from torch.distributed import FileStore

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy import worker as worker_module
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.batching import token_batch

WORLD = 2
STEPS = 16
FAILURES = {"a layer, on all ranks": 6, "the end, on one rank": 10}
"""Maps the place where the reference fails to the step at which it fails."""
DEADLINE_S = 10.0
"""Deadline of a collective. It is long enough for both ranks to create their workers, also on a busy machine."""
LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)


class Injected(Exception):
    """An error that the tests raise on purpose."""


def run_reference_rank(rank: int, folder: Path) -> None:
    found = {
        name: _steps(name, rank, folder, failing=failing) for name, failing in (("calm", False), ("failing", True))
    }
    (folder / f"reference-{rank}.pkl").write_bytes(pickle.dumps(found))


def _worker(name: str, rank: int, folder: Path, **learner: Any) -> PolicyWorker:
    return PolicyWorker(
        model_path=str(folder / "model"),
        config=make_config(micro_batch_size=2, optimizer={"learning_rate": 3e-3}, **learner),
        rank=rank,
        world_size=WORLD,
        store=FileStore(str(folder / f"store-{name}"), WORLD),
    )


def _steps(name: str, rank: int, folder: Path, *, failing: bool) -> dict[str, Any]:
    """Trains `STEPS` updates on this rank's rows, and computes the reference's log-probs in between."""
    policy = _worker(name, rank, folder, total_steps=STEPS)
    shard = make_batch().shard_by_batch_size(WORLD)[rank]
    reference = [_reference(policy, shard)]
    kept = []
    for step in range(STEPS):
        for where, failure_step in FAILURES.items():
            if failing and step == failure_step:
                before = _state(policy)
                failed = False
                with _broken(policy, where):
                    try:
                        _reference(policy, shard)
                    except Injected:
                        failed = True
                kept.append((failed, _same(before, _state(policy))))
                reference.append(_reference(policy, shard))
        policy.train(shard, LOSS, rows_per_update=shard.size)
    reference.append(_reference(policy, shard))
    found = {
        "reference": reference,
        "kept": kept,
        "live": policy.get_logprobs(shard)["logprobs"].numpy(),
        "state": _state(policy),
    }
    policy.close()
    return found


@contextmanager
def _broken(policy: PolicyWorker, where: str) -> Iterator[None]:
    """Makes the reference's log-probs fail: within a layer in the third pass on every rank, or after the last pass on
    rank 1 only, where no other rank waits for it."""
    passes = 0

    def fail_in_layer(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise Injected

    if where == "a layer, on all ranks":
        layers = [m for name, m in policy._reference().named_modules() if name.endswith("layers.1.mlp")]
        [hook] = [layer.register_forward_pre_hook(fail_in_layer) for layer in layers]
        yield
        hook.remove()
        return
    scoring = worker_module.model_logprobs

    def fail_at_the_end(*args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        scored = scoring(*args, **options)
        if passes == 3 and policy.rank == 1:
            raise Injected
        return scored

    worker_module.model_logprobs = fail_at_the_end  # type: ignore[assignment]
    yield
    worker_module.model_logprobs = scoring


def _reference(policy: PolicyWorker, shard: BatchedDataDict) -> np.ndarray:
    column: np.ndarray = policy.get_reference_policy_logprobs(shard)["reference_logprobs"].numpy()
    return column


def _state(policy: PolicyWorker) -> dict[str, np.ndarray]:
    """Returns this rank's shards of the weights and of the optimizer's moments."""
    state = {name: tensor.numpy() for name, tensor in policy.gather_weights()}
    for number, moments in enumerate(policy.optimizer.state.values()):
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{number} {key}"] = moments[key].to_local().numpy().copy()
    return state


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def run_lone_rank(rank: int, fault: str, call: str, folder: Path) -> None:
    """Rank 0 makes a call in which rank 1 does not take part, because it is silent or has died."""
    name = f"{fault} {call}"
    far = FileStore(str(folder / f"end-{name}"), WORLD)
    far.set_timeout(timedelta(seconds=240))
    far.set(f"rank {rank} is here", "1")
    far.wait([f"rank {other} is here" for other in range(WORLD)])
    policy = _worker(name, rank, folder, collective_timeout_s=DEADLINE_S)
    if rank == 1:
        far.get("done" if fault == "silent" else "made")
        os._exit(0)
    far.set("made", "1")
    shard = make_batch().shard_by_batch_size(WORLD)[0]
    calls: dict[str, Any] = {
        "train": lambda: policy.train(shard, LOSS, rows_per_update=shard.size),
        "a pass": lambda: policy.model(input_ids=token_batch(PROBE)["input_ids"]),
    }
    start = time.monotonic()
    try:
        calls[call]()
        error = ""
    except RuntimeError as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.monotonic() - start
    (folder / f"lone-{name}.pkl").write_bytes(pickle.dumps({"error": error, "seconds": seconds}))
    far.set("done", "1")
    os._exit(0)  # a normal exit would leave the process group, which waits for the peer
