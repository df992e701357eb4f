"""asyncrl: asynchronous reinforcement learning of language models.

A pool of generators and a pool of learners run at the same time, each at its own speed. Importing this package does not
import torch, ray or vllm: the public names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` makes a name public for type checkers
    from asyncrl.algorithms.advantages import Samples as Samples
    from asyncrl.algorithms.advantages import compute_advantages as compute_advantages
    from asyncrl.algorithms.advantages import resolve_estimator as resolve_estimator
    from asyncrl.algorithms.interfaces import LossFunction as LossFunction
    from asyncrl.algorithms.interfaces import LossInputType as LossInputType
    from asyncrl.algorithms.interfaces import LossType as LossType
    from asyncrl.algorithms.interfaces import MetricNormalization as MetricNormalization
    from asyncrl.algorithms.interfaces import ValueLossFunction as ValueLossFunction
    from asyncrl.algorithms.interfaces import masked_mean as masked_mean
    from asyncrl.algorithms.loss import ObjectiveLoss as ObjectiveLoss
    from asyncrl.algorithms.objective import Objective as Objective
    from asyncrl.algorithms.presets import resolve_objective as resolve_objective
    from asyncrl.algorithms.returns import gae as gae
    from asyncrl.algorithms.returns import vtrace as vtrace
    from asyncrl.algorithms.value_loss import ClippedValueLoss as ClippedValueLoss
    from asyncrl.api import RunResult as RunResult
    from asyncrl.api import run as run
    from asyncrl.colocated.generation import VLLMGeneration as VLLMGeneration
    from asyncrl.colocated.refit import refit_by_broadcast as refit_by_broadcast
    from asyncrl.colocated.refit import refit_colocated as refit_colocated
    from asyncrl.config.load import dump_config as dump_config
    from asyncrl.config.load import load_config as load_config
    from asyncrl.config.schema import Config as Config
    from asyncrl.data.batched_data_dict import BatchedDataDict as BatchedDataDict
    from asyncrl.data.prompts import Task as Task
    from asyncrl.data.tokenizer import encode_prompt as encode_prompt
    from asyncrl.data.tokenizer import load_tokenizer as load_tokenizer
    from asyncrl.data_plane.interfaces import DataPlaneClient as DataPlaneClient
    from asyncrl.data_plane.interfaces import KVBatchMeta as KVBatchMeta
    from asyncrl.deployment.cluster import start_local as start_local
    from asyncrl.environments.interfaces import Environment as Environment
    from asyncrl.errors import AsyncRLError as AsyncRLError
    from asyncrl.errors import ConfigError as ConfigError
    from asyncrl.errors import DatasetError as DatasetError
    from asyncrl.errors import RunError as RunError
    from asyncrl.generation.interfaces import GenerationInterface as GenerationInterface
    from asyncrl.learner.records import EvalRecord as EvalRecord
    from asyncrl.learner.records import StepRecord as StepRecord
    from asyncrl.learner.records import Summary as Summary
    from asyncrl.policy.interfaces import ColocatablePolicyInterface as ColocatablePolicyInterface
    from asyncrl.policy.interfaces import PolicyInterface as PolicyInterface
    from asyncrl.policy.lm_policy import Policy as Policy
    from asyncrl.policy.tq_policy import TQPolicy as TQPolicy
    from asyncrl.value.interfaces import ValueInterface as ValueInterface
    from asyncrl.value.lm_value import Value as Value
    from asyncrl.value.tq_value import TQValue as TQValue

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


if not TYPE_CHECKING:  # type checkers see the imports above, and would accept any name beside a __getattr__
    __all__ = ["__version__", *_MODULES]

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
