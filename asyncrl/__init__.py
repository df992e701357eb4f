"""asyncrl: asynchronous reinforcement learning of language models.

The generators and the learner of a run work at the same time, each at its own speed. Importing this package does not
import torch, ray or vllm: the public names below are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncrl.user_code import find_user_modules as _find_user_modules

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
    from asyncrl.deployment.run_tables import Columns as Columns
    from asyncrl.deployment.run_tables import RunTables as RunTables
    from asyncrl.deployment.run_tables import load_run as load_run
    from asyncrl.deployment.run_tables import load_sweep as load_sweep
    from asyncrl.environments.agents import Session as Session
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
    from asyncrl.ranks.timer import Timer as Timer
    from asyncrl.value.interfaces import ValueInterface as ValueInterface
    from asyncrl.value.lm_value import Value as Value
    from asyncrl.value.tq_value import TQValue as TQValue

    __version__: str

_NAMES = {
    "algorithms.advantages": ["Samples", "compute_advantages", "resolve_estimator"],
    "algorithms.interfaces": [
        "LossFunction",
        "LossInputType",
        "LossType",
        "MetricNormalization",
        "ValueLossFunction",
        "masked_mean",
    ],
    "algorithms.loss": ["ObjectiveLoss"],
    "algorithms.objective": ["Objective"],
    "algorithms.presets": ["resolve_objective"],
    "algorithms.returns": ["gae", "vtrace"],
    "algorithms.value_loss": ["ClippedValueLoss"],
    "api": ["RunResult", "run"],
    "colocated.generation": ["VLLMGeneration"],
    "colocated.refit": ["refit_by_broadcast", "refit_colocated"],
    "config.load": ["dump_config", "load_config"],
    "config.schema": ["Config"],
    "data.batched_data_dict": ["BatchedDataDict"],
    "data.prompts": ["Task"],
    "data.tokenizer": ["encode_prompt", "load_tokenizer"],
    "data_plane.interfaces": ["DataPlaneClient", "KVBatchMeta"],
    "deployment.cluster": ["start_local"],
    "deployment.run_tables": ["Columns", "RunTables", "load_run", "load_sweep"],
    "environments.agents": ["Session"],
    "environments.interfaces": ["Environment"],
    "errors": ["AsyncRLError", "ConfigError", "DatasetError", "RunError"],
    "generation.interfaces": ["GenerationInterface"],
    "learner.records": ["EvalRecord", "StepRecord", "Summary"],
    "policy.interfaces": ["ColocatablePolicyInterface", "PolicyInterface"],
    "policy.lm_policy": ["Policy"],
    "policy.tq_policy": ["TQPolicy"],
    "ranks.timer": ["Timer"],
    "value.interfaces": ["ValueInterface"],
    "value.lm_value": ["Value"],
    "value.tq_value": ["TQValue"],
}
"""Maps each module to the public names that it defines."""

_find_user_modules()  # the first import of asyncrl in a worker of Ray comes before any import of the user's code

_MODULES = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # type checkers see the imports above; with a __getattr__ they would accept any other name too
    __all__ = ["__version__", *_MODULES]

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return _installed_version()
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})


def _installed_version() -> str:
    """Returns the version of the installed package, which pyproject.toml sets; `unknown` for files that were not
    installed."""
    from importlib import metadata  # takes as long to import as the rest of this module

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "unknown"
