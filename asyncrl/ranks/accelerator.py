"""Creates the process group of the ranks, and the object of the library accelerate that shards models with FSDP2. The
code is the same on GPUs and CPUs."""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import MixedPrecisionPolicy

from asyncrl.config.schema import Config, LearnerSection

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def make_accelerator(*, rank: int, world_size: int, store: Store, timeout: timedelta, config: Config) -> Accelerator:
    """Joins the process group of the ranks, and returns an accelerator that shards with FSDP2 as the section `learner`
    says, on GPUs or CPUs, for one rank or several."""
    on_gpu = config.learner.gpus > 0
    # accelerate reads these variables to learn about a process group that it did not create. LOCAL_RANK is 0 because a
    # rank sees only its own GPU. They are set for a single rank, too: otherwise accelerate would not use FSDP
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
        # gradients are reduced in float32, even if layers compute in bfloat16
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=compute_dtype(config), reduce_dtype=torch.float32),
        activation_checkpointing=config.learner.activation_checkpointing,
    )
    parallelism = _parallelism(config.learner)
    if on_gpu:
        return Accelerator(fsdp_plugin=plugin, parallelism_config=parallelism)
    accelerator = Accelerator(cpu=True)
    _enable_fsdp_on_cpu(plugin, parallelism)
    return accelerator


def compute_dtype(config: Config) -> torch.dtype:
    """Returns the dtype of forward and backward passes: the engine's, unless `learner.mixed_precision` sets another."""
    if config.learner.mixed_precision is None:
        return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    return torch.bfloat16 if config.learner.mixed_precision == "bf16" else torch.float32


def _parallelism(learner: LearnerSection) -> ParallelismConfig | None:
    """Returns the ranks as copies × shards (HSDP), or None if all ranks share one copy of the model."""
    if learner.shards is None or learner.shards == learner.ranks:
        return None
    return ParallelismConfig(dp_replicate_size=learner.ranks // learner.shards, dp_shard_size=learner.shards)


def _enable_fsdp_on_cpu(plugin: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None) -> None:
    """Sets accelerate's state on CPUs to what it would be on GPUs. accelerate 1.15 falls back to DDP on CPUs, although
    FSDP2 runs over gloo, too."""
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if parallelism is not None:
        mesh = parallelism.get_device_mesh("cpu")
        AcceleratorState._shared_state.update(parallelism_config=parallelism, device_mesh=mesh)


def with_present_layers(model: ModuleT) -> ModuleT:
    """Leaves only those classes in `_no_split_modules` of which the model has a layer.

    accelerate shards these layers one by one, and refuses a class without a layer. transformers also lists the layers
    of images and sounds, which the text model alone does not have (Gemma 4, Qwen3.5).
    """
    present = {type(module).__name__ for module in model.modules()}
    named: Iterable[str] = getattr(model, "_no_split_modules", None) or ()
    model._no_split_modules = sorted(present.intersection(named))  # type: ignore[assignment]
    return model


def frozen(model: torch.nn.Module, *, accelerator: Accelerator) -> torch.nn.Module:
    """Shards `model` like a trained model, but without gradients: it is never trained."""
    model = with_present_layers(model.requires_grad_(False).train(False))
    return cast(torch.nn.Module, fsdp2_prepare_model(accelerator, model))


def forget_accelerator() -> None:
    """Leaves the process group, so that another accelerator can be made in this process. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
