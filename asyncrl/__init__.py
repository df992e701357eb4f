"""asyncrl: asynchronous reinforcement learning of language models.

A pool of generators and a pool of learners run at the same time, each at its own speed. Importing this package does not
import torch, ray or vllm: the public names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.algorithms.advantages import Samples, compute_advantages, resolve_estimator
    from asyncrl.algorithms.interfaces import (
        LossFunction,
        LossInputType,
        LossType,
        MetricNormalization,
        ValueLossFunction,
        masked_mean,
    )
    from asyncrl.algorithms.loss import ObjectiveLoss
    from asyncrl.algorithms.objective import Objective
    from asyncrl.algorithms.presets import resolve_objective
    from asyncrl.algorithms.returns import gae, vtrace
    from asyncrl.algorithms.value_loss import ClippedValueLoss
    from asyncrl.api import RunResult, run
    from asyncrl.colocated.generation import VLLMGeneration
    from asyncrl.colocated.refit import refit_by_broadcast, refit_colocated
    from asyncrl.config.load import dump_config, load_config
    from asyncrl.config.schema import Config
    from asyncrl.data.batched_data_dict import BatchedDataDict
    from asyncrl.data.prompts import Task
    from asyncrl.data.tokenizer import encode_prompt, load_tokenizer
    from asyncrl.data_plane.interfaces import DataPlaneClient, KVBatchMeta
    from asyncrl.deployment.cluster import start_local
    from asyncrl.environments.interfaces import Environment
    from asyncrl.errors import AsyncRLError, ConfigError, DatasetError, RunError
    from asyncrl.generation.interfaces import GenerationInterface
    from asyncrl.learner.records import EvalRecord, StepRecord, Summary
    from asyncrl.policy.interfaces import ColocatablePolicyInterface, PolicyInterface
    from asyncrl.policy.lm_policy import Policy
    from asyncrl.policy.tq_policy import TQPolicy
    from asyncrl.value.interfaces import ValueInterface
    from asyncrl.value.lm_value import Value
    from asyncrl.value.tq_value import TQValue

__version__ = "0.1.0"

_MODULES = {
    "Samples": "algorithms.advantages",
    "compute_advantages": "algorithms.advantages",
    "resolve_estimator": "algorithms.advantages",
    "LossFunction": "algorithms.interfaces",
    "LossInputType": "algorithms.interfaces",
    "LossType": "algorithms.interfaces",
    "MetricNormalization": "algorithms.interfaces",
    "ValueLossFunction": "algorithms.interfaces",
    "masked_mean": "algorithms.interfaces",
    "ObjectiveLoss": "algorithms.loss",
    "Objective": "algorithms.objective",
    "resolve_objective": "algorithms.presets",
    "gae": "algorithms.returns",
    "vtrace": "algorithms.returns",
    "ClippedValueLoss": "algorithms.value_loss",
    "RunResult": "api",
    "run": "api",
    "dump_config": "config.load",
    "load_config": "config.load",
    "Config": "config.schema",
    "BatchedDataDict": "data.batched_data_dict",
    "Task": "data.prompts",
    "encode_prompt": "data.tokenizer",
    "load_tokenizer": "data.tokenizer",
    "DataPlaneClient": "data_plane.interfaces",
    "KVBatchMeta": "data_plane.interfaces",
    "start_local": "deployment.cluster",
    "Environment": "environments.interfaces",
    "AsyncRLError": "errors",
    "ConfigError": "errors",
    "DatasetError": "errors",
    "RunError": "errors",
    "GenerationInterface": "generation.interfaces",
    "refit_by_broadcast": "colocated.refit",
    "refit_colocated": "colocated.refit",
    "VLLMGeneration": "colocated.generation",
    "EvalRecord": "learner.records",
    "StepRecord": "learner.records",
    "Summary": "learner.records",
    "ColocatablePolicyInterface": "policy.interfaces",
    "PolicyInterface": "policy.interfaces",
    "Policy": "policy.lm_policy",
    "TQPolicy": "policy.tq_policy",
    "ValueInterface": "value.interfaces",
    "Value": "value.lm_value",
    "TQValue": "value.tq_value",
}
"""Maps each public name to the module that defines it."""

__all__ = [
    "AsyncRLError",
    "BatchedDataDict",
    "ClippedValueLoss",
    "ColocatablePolicyInterface",
    "Config",
    "ConfigError",
    "DataPlaneClient",
    "DatasetError",
    "Environment",
    "EvalRecord",
    "GenerationInterface",
    "KVBatchMeta",
    "LossFunction",
    "LossInputType",
    "LossType",
    "MetricNormalization",
    "Objective",
    "ObjectiveLoss",
    "Policy",
    "PolicyInterface",
    "RunError",
    "RunResult",
    "Samples",
    "StepRecord",
    "Summary",
    "TQPolicy",
    "TQValue",
    "Task",
    "VLLMGeneration",
    "Value",
    "ValueInterface",
    "ValueLossFunction",
    "__version__",
    "compute_advantages",
    "dump_config",
    "encode_prompt",
    "gae",
    "load_config",
    "load_tokenizer",
    "masked_mean",
    "refit_by_broadcast",
    "refit_colocated",
    "resolve_estimator",
    "resolve_objective",
    "run",
    "start_local",
    "vtrace",
]


if not TYPE_CHECKING:  # type checkers see the imports above, and would accept any name beside a __getattr__

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
