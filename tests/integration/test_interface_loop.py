"""A synchronous loop that uses only the documented interfaces, with real ranks and a real engine.

It runs by value and by meta, on 1 and 2 ranks. Before each correct call it makes a wrong call, which must be refused.
Afterwards the ranks must be the same processes. A policy of one rank then starts from the checkpoint.
"""

import os
import re
import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from conftest import small_config
from local_ray import local_ray

from asyncrl.algorithms.interfaces import LossInputType, LossType, masked_mean
from asyncrl.colocated.generation import VLLMGeneration
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data import BatchedDataDict
from asyncrl.data_plane import KVBatchMeta
from asyncrl.errors import (
    CallRefused,
    CheckpointError,
    CollectiveError,
    LossFailed,
    MissingColumns,
    WeightError,
)
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.tq_policy import TQPolicy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LOOPBACK = "127.0.0.1"
PARITY_NATS = 1e-4
PROBE = [[40, 41, 42, 43, 44, 45, 46], [50, 41, 40], [43, 43, 44, 49]]
PROMPTS = [[40, 41, 42], [43, 44], [45, 46, 47, 48], [50, 51]]
GROUP = 2
ROWS = len(PROMPTS) * GROUP
VOCABULARY_END = 10**6


class ClippedRatio:
    """A user's loss in the form of the document: PPO's clip, divided by the global count, with its own metric."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB

    def __call__(
        self, *, next_token_logprobs: Any, data: Any, global_valid_seqs: Any, global_valid_toks: Any
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        advantages = data["advantages"][:, 1:]
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
        surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = masked_mean(surrogate, mask, global_normalization_factor=global_valid_toks)
        ones = masked_mean(torch.ones_like(ratio), mask, global_normalization_factor=global_valid_toks)
        return loss, {"ones": ones.item(), "drift": (data["reference_policy_logprobs"][:, 1:] * mask).sum().item()}


class Failing(ClippedRatio):
    """Fails only on the rank that has the last row."""

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        if bool((arguments["data"]["index"] == ROWS - 1).any()):
            raise ZeroDivisionError("my own mistake")
        return super().__call__(**arguments)


class FailingLater(ClippedRatio):
    """Fails in the second of two updates."""

    def __call__(self, **arguments: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        if bool((arguments["data"]["index"] >= ROWS // 2).any()):
            raise ZeroDivisionError("in the second update")
        return super().__call__(**arguments)


def no_scalar(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
    return next_token_logits


def unimportable() -> Any:
    """Returns a loss of a module that the ranks cannot import."""
    module = types.ModuleType("nowhere_to_be_found")
    loss = type("Loss", (ClippedRatio,), {"__module__": module.__name__})
    module.Loss = loss  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return loss()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import a test module
    with local_ray(cpus=4, object_store_mb=120, namespace="quickstart"):
        yield


@pytest.fixture(scope="module")
def generation(model_path: str, cluster: None) -> Iterator[VLLMGeneration]:
    """Starts an engine, which takes the weights of one policy after the other."""
    generation = VLLMGeneration(small_config(model_path, "generator.replicas=1"))
    yield generation
    assert generation.shutdown()


def config_of(model_path: str, ranks: int) -> Config:
    return small_config(model_path, f"learner.ranks={ranks}", "learner.cpus=0.5", f"weights.bucket_bytes={2**18}")


def pids(policy: Policy) -> list[int]:
    return policy.ranks.call(process_of)


def process_of(worker: Any) -> int:
    return os.getpid()


def probe(worker: Any) -> list[list[float]]:
    return [row.tolist() for row in worker.probe(PROBE)]


def parity_nats(policy: Policy, generation: VLLMGeneration) -> float:
    [ours, *_] = policy.ranks.call(probe)
    [theirs] = generation.score(PROBE)
    return max(abs(a - b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True))


def refused(call: Callable[[], Any], error: type[BaseException] | tuple[type[BaseException], ...], text: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert re.search(text, str(raised.value), re.DOTALL), str(raised.value)


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def prompts() -> BatchedDataDict:
    width = max(map(len, PROMPTS)) + 1
    ids = torch.tensor([row + [0] * (width - len(row)) for row in PROMPTS])
    return BatchedDataDict(input_ids=ids, input_lengths=torch.tensor(list(map(len, PROMPTS)))).repeat_interleave(GROUP)


def generated(generation: VLLMGeneration) -> tuple[BatchedDataDict, torch.Tensor]:
    """Returns rows to train, each with a reward."""
    asked = prompts()
    wrong = BatchedDataDict(input_ids=asked["input_ids"].flip(1), input_lengths=asked["input_lengths"])
    refused(lambda: generation.generate(wrong), ValueError, "not right-padded")
    beyond = BatchedDataDict(input_ids=torch.full((1, 2), VOCABULARY_END), input_lengths=torch.tensor([2]))
    refused(lambda: generation.generate(beyond), Exception, str(VOCABULARY_END))
    output = generation.generate(asked)
    places = torch.arange(output["output_ids"].shape[1])
    inside = (places >= asked["input_lengths"].unsqueeze(1)) & (
        places < output["unpadded_sequence_lengths"].unsqueeze(1)
    )
    rows = BatchedDataDict(
        input_ids=output["output_ids"],
        input_lengths=output["unpadded_sequence_lengths"],
        generation_logprobs=output["logprobs"],
        token_mask=inside.float(),
        sample_mask=torch.ones(ROWS),
        index=torch.arange(ROWS),
    )
    # The rewards depend on the row alone. With rewards of the drawn tokens, an update can have no gradient.
    return rows, torch.arange(ROWS).double()


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    return ((rewards - rewards.mean()) / rewards.std()).float()


def train_by_value(policy: Policy, rows: BatchedDataDict, rewards: torch.Tensor) -> dict[str, Any]:
    policy.prepare_for_lp_inference()
    bare = BatchedDataDict(input_ids=rows["input_ids"])
    refused(lambda: policy.get_logprobs(bare), MissingColumns, "input_lengths")
    outside = BatchedDataDict(**rows)
    outside["input_ids"] = rows["input_ids"].clone()
    outside["input_ids"][-1, 0] = VOCABULARY_END
    refused(lambda: policy.get_logprobs(outside), CallRefused, rf"input_ids\[\d+, 0\] is {VOCABULARY_END}")
    scored = policy.get_logprobs(rows)["logprobs"]
    refused(lambda: policy.get_reference_policy_logprobs(rows, micro_batch_size=0), AssertionError, "at least 1")
    longer = BatchedDataDict(**rows)
    longer["input_lengths"] = rows["input_lengths"] + 100
    refused(lambda: policy.get_reference_policy_logprobs(longer), CallRefused, "input_lengths")
    reference = policy.get_reference_policy_logprobs(rows)["reference_logprobs"]
    policy.finish_inference()

    loss = ClippedRatio()
    batch = BatchedDataDict(**rows, advantages=advantages_of(rewards), reference_policy_logprobs=reference)
    refused(lambda: policy.train(batch, loss, gbs=3), AssertionError, "3")
    # Without the column, each later update would compare the policy with itself. So the call must be refused.
    refused(lambda: policy.train(batch, loss, gbs=ROWS // 2), LossFailed, "KeyError: 'prev_logprobs'")
    batch["prev_logprobs"] = scored
    for wrong, error, text in (
        (Failing(), LossFailed, r"ZeroDivisionError: my own mistake \(.*test_interface_loop\.py:\d+\)"),
        (no_scalar, LossFailed, r"a loss must return \(scalar, metrics\), but this one returned a Tensor"),
        (unimportable(), CallRefused, "nowhere_to_be_found"),
        ("ppo", TypeError, "cannot be called"),
    ):
        refused(lambda wrong=wrong: policy.train(batch, wrong, gbs=ROWS // 2), error, text)  # type: ignore[misc]
    narrow = BatchedDataDict(**batch)
    narrow["advantages"] = batch["advantages"].view(-1, 2, 1).expand(-1, 2, 2).flatten(0, 1)
    refused(lambda: policy.train(narrow, loss), AssertionError, "differ in dimension 1")
    weightless = BatchedDataDict(**batch)
    weightless["sample_mask"] = -batch["sample_mask"]
    refused(lambda: policy.train(weightless, loss), CallRefused, r"sample_mask\[0\] is -1")
    result = policy.train(batch, loss, gbs=ROWS // 2)
    [first, *_] = policy.prepare_weights_for_ipc()
    refused(lambda: policy.train(batch, FailingLater(), gbs=ROWS // 2), LossFailed, "in the second update")
    # The first update of the failed call has changed the weights.
    refused(lambda: policy.get_weights_ipc_handles(first), WeightError, "")
    policy.finish_training()
    return result


def train_by_meta(policy: TQPolicy, rows: BatchedDataDict, rewards: torch.Tensor) -> dict[str, Any]:
    loss, ids = ClippedRatio(), [f"{row // GROUP}.0_g{row % GROUP}" for row in range(ROWS)]
    refused(lambda: policy.prepare_step(0), ValueError, "num_samples is 0")
    policy.prepare_step(ROWS, GROUP)
    refused(lambda: policy.dp_client.put_samples(ids, "nowhere", fields=rows), KeyError, "nowhere")
    policy.dp_client.put_samples(ids, "train", fields=rows)
    meta = KVBatchMeta("train", "train", ids)
    gone = KVBatchMeta("train", "train", ["never.0_g0", *ids[1:]])
    policy.prepare_for_lp_inference()
    for call in (policy.get_logprobs_from_meta, policy.get_reference_policy_logprobs_from_meta):
        refused(lambda call=call: call(gone), (KeyError, CallRefused), "never")  # type: ignore[misc]
        refused(lambda call=call: call(meta.slice(0, 0)), ValueError, "no rows")  # type: ignore[misc]
        refused(lambda call=call: call(meta, micro_batch_size=-1), AssertionError, "at least 1")  # type: ignore[misc]
        call(meta)
    refused(lambda: policy.write_to_dataplane(meta, {"advantages": torch.zeros(ROWS + 1)}), ValueError, str(ROWS + 1))
    policy.prepare_for_training()
    needs_advantages = type("Told", (ClippedRatio,), {"columns": ("advantages",)})()
    refused(lambda: policy.train_from_meta(meta, needs_advantages, gbs=4), MissingColumns, "reads advantages, but")
    policy.write_to_dataplane(meta, {"advantages": advantages_of(rewards)})
    refused(lambda: policy.train_from_meta(gone, loss), KeyError, "never")
    refused(lambda: policy.train_from_meta(meta, loss, gbs=3), AssertionError, "3")
    refused(lambda: policy.train_from_meta(meta.with_fields(["index"]), Failing(), gbs=4), LossFailed, "my own mistake")
    meta.fields = None
    result = policy.train_from_meta(meta, loss, gbs=ROWS // 2)
    refused(lambda: policy.read_from_dataplane(meta, select_fields=["mine"]), KeyError, "mine")
    drift = policy.read_from_dataplane(meta, select_fields=["prev_logprobs", "reference_policy_logprobs"])
    assert drift["prev_logprobs"].shape == rows["input_ids"].shape
    policy.finish_step(meta)
    assert not any(policy.rows_outstanding().values())
    return result


def refit_by_ipc(policy: Policy, generation: VLLMGeneration, *, version: Version | None) -> None:
    """`version` is that of the policy's first weights, if the engine already has weights of another policy."""
    policy.offload_before_refit()
    assert generation.finish_generation()
    refused(lambda: generation.prepare_for_generation(tags=["brain"]), ValueError, "brain")
    assert generation.prepare_for_generation(tags=["weights"])
    with pytest.warns(UserWarning, match="ignores _refit_buffer_size_gb"):
        groups = policy.prepare_weights_for_ipc(_refit_buffer_size_gb=1, version=version)
    for keys in groups:
        refused(lambda: policy.get_weights_ipc_handles(["nowhere"]), WeightError, "nowhere")
        handles = policy.get_weights_ipc_handles(keys)
        assert generation.update_weights_from_ipc_handles(handles)
    policy.offload_after_refit()
    assert generation.prepare_for_generation(tags=["kv_cache"])
    refused(lambda: policy.get_logprobs(prompts()), CallRefused, "offloaded")
    policy.prepare_for_training()


def refit_by_broadcast(policy: Policy, generation: VLLMGeneration, *, ranks: int) -> None:
    refused(lambda: policy.init_collective(LOOPBACK, 1, ranks), CollectiveError, "does not fit")
    refused(lambda: ray.get(policy.broadcast_weights_for_collective()), WeightError, "process group")
    port, world = free_port(), ranks + 1
    joining = policy.init_collective(LOOPBACK, port, world, train_world_size=ranks)
    ray.get([*joining, *generation.init_collective(LOOPBACK, port, world, train_world_size=ranks)], timeout=120)
    received = generation.update_weights_from_collective()
    ray.get([*policy.broadcast_weights_for_collective(), *received], timeout=120)


def save_and_load(policy: Policy, folder: Path) -> None:
    (folder / "a file").touch()
    refused(lambda: policy.save_checkpoint(folder / "a file" / "weights"), CheckpointError, "a file")
    refused(lambda: policy.save_checkpoint(None), TypeError, "")  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"save_checkpoint\(\) ignores checkpointing_cfg"):
        policy.save_checkpoint(
            folder / "weights", optimizer_path=folder / "optimizer", tokenizer_path=folder / "tokenizer",
            checkpointing_cfg={},
        )  # fmt: skip
    refused(lambda: policy.load_checkpoint(folder / "nowhere"), CheckpointError, "nowhere")
    policy.load_checkpoint(folder / "weights", folder / "optimizer")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_a_loop_written_against_the_documents_runs_and_survives_a_wrong_argument_at_each_call(
    model_path: str, generation: VLLMGeneration, tmp_path: Path, ranks: int
) -> None:
    policy = TQPolicy(config_of(model_path, ranks), dp_cfg={"backend": "object_store"})
    run_the_loop(policy, generation, tmp_path, ranks=ranks)
    restored = TQPolicy(
        config_of(model_path, 1), dp_cfg={"backend": "object_store"},
        weights_path=tmp_path / "weights", optimizer_path=tmp_path / "optimizer",
    )  # fmt: skip
    assert parity_nats(restored, generation) < PARITY_NATS, (
        "a policy that starts from the checkpoint must have its weights"
    )
    assert restored.shutdown()


def run_the_loop(policy: TQPolicy, generation: VLLMGeneration, folder: Path, *, ranks: int) -> None:
    processes = pids(policy)
    assert len(processes) == ranks
    refused(lambda: generation.prepare_refit_info({}), WeightError, "")
    assert generation.prepare_refit_info(policy.prepare_refit_info())

    rows, rewards = generated(generation)
    for train in (train_by_value, train_by_meta):
        result = train(policy, rows, rewards)
        assert result["loss"].shape == (2,)
        assert torch.isfinite(result["loss"]).all()
        # Tokens that were certain have no gradient, and the engine may have drawn only such tokens for one update.
        assert result["grad_norm"].max() > 0
        assert sum(result["all_mb_metrics"]["ones"]) == pytest.approx(1.0, rel=1e-6), (
            "the mean of a metric that is 1 in both updates"
        )
        assert result["report"].loss_metrics["ones"] == pytest.approx(1.0, rel=1e-6)
    # Each policy numbers its weights from the start, and the engine refuses older weights than those of the other one.
    refit_by_ipc(policy, generation, version=Version(2, 0) if ranks == 2 else None)
    assert parity_nats(policy, generation) < PARITY_NATS
    policy.train(
        BatchedDataDict(
            **rows, advantages=advantages_of(rewards), reference_policy_logprobs=rows["generation_logprobs"]
        ),
        ClippedRatio(),
    )
    assert parity_nats(policy, generation) > PARITY_NATS
    refit_by_broadcast(policy, generation, ranks=ranks)
    assert parity_nats(policy, generation) < PARITY_NATS
    save_and_load(policy, folder)
    assert parity_nats(policy, generation) < PARITY_NATS
    assert pids(policy) == processes
    assert policy.shutdown()
