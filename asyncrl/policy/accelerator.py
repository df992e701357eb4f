"""accelerate, met in one file: the process group of the ranks and FSDP2, by the same code on GPUs and on CPUs."""

import os
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import MixedPrecisionPolicy


def make_accelerator(
    *, rank: int, world_size: int, store: Store, timeout: timedelta, on_gpu: bool, dtype: torch.dtype
) -> Accelerator:
    """An accelerator that shards with FSDP2, on GPUs and on CPUs, for one rank and for many."""
    # how accelerate finds out about a group that it did not make; a rank sees one GPU, and with one rank too this
    # keeps it from concluding that nothing is distributed
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"
    )
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        # gradients are reduced in float32 even where layers compute in bfloat16
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    if on_gpu:
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True)
    _enable_fsdp_on_cpu(plugin)
    return accelerator


def _enable_fsdp_on_cpu(plugin: FullyShardedDataParallelPlugin) -> None:
    """accelerate 1.15 falls back to DDP on CPUs although FSDP2 runs over gloo: this says what it would on a GPU."""
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def frozen(model: torch.nn.Module, *, accelerator: Accelerator) -> torch.nn.Module:
    """`model` sharded like a trained one, and never trained."""
    return cast(torch.nn.Module, fsdp2_prepare_model(accelerator, model.requires_grad_(False).train(False)))


def forget_accelerator() -> None:
    """Leaves the process group; another accelerator may then be made in this process. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
