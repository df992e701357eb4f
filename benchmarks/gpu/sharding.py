"""FSDP2 with one rank: over NCCL on a GPU, over gloo on a CPU.

With one rank, FSDP2 copies shards instead of gathering them (torch 2.13). So the collectives are also called directly.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from asyncrl.ranks.gather import gather_weights
from gpu.models import loss, random_model
from gpu.rows import Row, check
from gpu.sizes import Size

STEPS = 3
LEARNING_RATE = 1e-3
ROUNDING = 1e-5
"""The largest difference of gradients, relative to the largest gradient. Both models compute the same in float32."""


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone, with the backends of the learner's ranks."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def shard(model: Qwen2ForCausalLM, *, device: torch.device, compute: torch.dtype) -> None:
    """Shards the model as the learner does: each layer on its own, and gradients are reduced in float32."""
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def sharding(size: Size) -> Iterator[Row]:
    """Compares steps of a sharded model with those of the same model unsharded, in float32."""
    device = torch.device(size.device)
    with one_rank(device):
        yield from _collectives(size, device=device)
        yield from _steps(size, device=device)


def _collectives(size: Size, *, device: torch.device) -> Iterator[Row]:
    sent = torch.arange(size.shared_bytes // 4, dtype=torch.float32, device=device)
    received = torch.empty_like(sent)
    works: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(received.copy_(sent)),
        "all_gather": lambda: dist.all_gather_into_tensor(received, sent),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(received, sent),
    }
    for name, work in works.items():
        received.zero_()
        work()
        check(float((received - sent).abs().max()), at_most=0.0, what=f"the error of {name}")
        yield Row(f"{name} with one rank, {dist.get_backend_config()}", "the right result")


def _steps(size: Size, *, device: torch.device) -> Iterator[Row]:
    whole = random_model(size.sharded, device=device)
    split = copy.deepcopy(whole)
    shard(split, device=device, compute=torch.float32)
    fused = device.type == "cuda"  # as in the learner
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused) for model in (whole, split)]
    worst = 0.0
    for _ in range(STEPS):
        tokens_BS = torch.randint(size.sharded.vocabulary, (size.trained_rows, size.trained_tokens), device=device)
        losses = [loss(model, tokens_BS) for model in (whole, split)]
        for each in losses:
            each.backward()  # type: ignore[no-untyped-call]
        worst = max(worst, _difference(whole, split))
        check(worst, at_most=ROUNDING, what="the difference of a gradient from that of the unsharded model")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    what = f"fully_shard, {size.sharded.name}, float32: {STEPS} AdamW steps against the unsharded model"
    yield Row(what, f"gradients differ by at most {worst:.1e} of the largest gradient")
    weights = dict(whole.named_parameters(remove_duplicate=False))
    apart = max(
        float((weights[name].cpu() - full).detach().abs().max())
        for name, full in gather_weights(split, dtype=torch.float32)
    )
    check(apart, at_most=LEARNING_RATE / 10, what="the difference of a weight from that of the unsharded model")
    yield Row("weights that are gathered after these steps", f"differ by at most {apart:.1e}")


def _difference(whole: Qwen2ForCausalLM, split: Qwen2ForCausalLM) -> float:
    """Returns the largest difference of a gradient, relative to the largest gradient of the same parameter."""
    worst = 0.0
    for (name, one), other in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert one.grad is not None, name
        assert isinstance(other.grad, DTensor), name
        worst = max(worst, float((one.grad - other.grad.full_tensor()).abs().max() / one.grad.abs().max()))
    return worst
