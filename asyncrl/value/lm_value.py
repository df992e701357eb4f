"""The driver's side of the critic. The driver is the process that calls the ranks.

critic = Value(critic_config(config))
values = critic.get_values(batch)["values"]
result = critic.train(batch, ClippedValueLoss(clip=0.2), gbs=64)
critic.shutdown()
"""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import LP_SEED_FIELDS
from asyncrl.ranks.driver import RankDriver, ignore_arguments
from asyncrl.ranks.timer import Timer
from asyncrl.value.interfaces import ValueInterface
from asyncrl.value.worker import ValueWorker


class Value(RankDriver[ValueWorker], ValueInterface):
    """A critic on `config.learner.ranks` ranks, initialised from the language model at `model_path`. Here
    `config.learner` has the critic's settings: see `critic_config`."""

    _worker = ValueWorker
    _training = "value_training"
    _advantages = ("advantages", "returns")
    _trained_fields = (*LP_SEED_FIELDS, "returns", "values", "weight_versions")

    def get_values(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        return self._score(data, timer, ValueWorker.get_values)

    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("prepare_for_inference", args, kwargs)
        # the worker has no method of its own for inference: this one moves the weights, and frees the gradients
        self.ranks.call(ValueWorker.prepare_for_training)


def critic_config(config: Config) -> Config:
    """Returns the configuration for the critic's ranks: `learner` gets the ranks, resources, labels and optimizer of
    `critic`. The critic's ranks always share one copy of the critic, even if the policy has several copies."""
    assert config.critic is not None
    own = {name: getattr(config.critic, name) for name in ("ranks", "optimizer", "cpus", "gpus", "node_labels")}
    return config.model_copy(update={"learner": config.learner.model_copy(update={**own, "shards": None})})
