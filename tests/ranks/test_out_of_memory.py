"""A rank without memory ends the run with the same advice, wherever in a step the memory runs out."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_ranks import Rank, rank_of, started
from tiny_groups import make_batch, make_config, make_model
from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.errors import LossFailed, RunError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import RankActor
from asyncrl.ranks.out_of_memory import is_out_of_memory

pytestmark = pytest.mark.slow

LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)


def allocate_too_much() -> None:
    torch.empty(2**60, dtype=torch.uint8)  # 2^57 bytes are the most that a process of Linux can address


def raise_python_error() -> None:
    raise MemoryError


def raise_gpu_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79.19 GiB in total")


LACKS = [allocate_too_much, raise_python_error, raise_gpu_error]


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankActor]:
    """The only rank of a policy."""
    path = make_model(tmp_path_factory.mktemp("model"))
    config = make_config(micro_batch_size=4)
    with rank_of(PolicyWorker, config, model=str(path)) as actor:
        yield actor


def train(actor: RankActor, loss: Any = LOSS) -> Any:
    batch = make_batch()
    batch["prev_logprobs"] = batch["generation_logprobs"]
    return actor.call_with_rows(PolicyWorker.train, batch, {}, (), loss_fn=loss, rows_per_update=batch.size)


def in_the_loss(actor: RankActor, lack: Callable[[], None]) -> None:
    def loss(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        lack()

    train(actor, loss)


def in_the_backward_pass(actor: RankActor, lack: Callable[[], None]) -> None:
    modules = actor.call(lambda worker: list(worker.model.named_modules()))
    [layer] = [module for name, module in modules if name.endswith("layers.1.mlp")]
    hook = layer.register_full_backward_hook(lambda *_: lack())
    try:
        train(actor)
    finally:
        hook.remove()


def in_the_optimizer(actor: RankActor, lack: Callable[[], None]) -> None:
    hook = register_optimizer_step_pre_hook(lambda *_: lack())
    try:
        train(actor)
    finally:
        hook.remove()


@pytest.mark.fault("F26")
@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("place", [in_the_loss, in_the_backward_pass, in_the_optimizer])
def test_a_lack_of_memory_anywhere_in_a_step_ends_the_ranks_with_advice(
    actor: RankActor, place: Any, lack: Callable[[], None]
) -> None:
    """The rank raises the error. A refusal would be an answer, and the driver would add no advice to it."""
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        place(actor, lack)
    group, _ = started(Rank(raised.value))
    with pytest.raises(RunError) as failure:
        group.call(PolicyWorker.train)
    assert type(failure.value) is RunError
    text = str(failure.value)
    assert re.match(r"learner rank 0 ran out of memory in train: lower ", text)
    for key in ("learner.micro_batch_size", "learner.micro_batch_tokens", "learner.activation_checkpointing"):
        assert key in text


def test_another_error_of_a_loss_stays_a_refusal(actor: RankActor) -> None:
    def loss(next_token_logits: torch.Tensor, data: Any, global_valid_seqs: Any, global_valid_toks: Any) -> Any:
        raise ValueError("this prompt is out of memory range")

    refusal = train(actor, loss)
    assert isinstance(refusal, LossFailed)
    assert "ValueError: this prompt is out of memory range" in str(refusal)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes",
    ],
)
def test_errors_of_libraries_without_memory_are_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
