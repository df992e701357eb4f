"""The driver's side of the critic.

critic = Value(critic_config(config))
values = critic.get_values(batch)["values"]
result = critic.train(batch, ClippedValueLoss(clip=0.2), gbs=64)
critic.shutdown()
"""

from typing import Any

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.rank_actor import RankKind
from asyncrl.policy.rank_driver import RankDriver, ignore_arguments
from asyncrl.value.interfaces import ValueInterface


class Value(RankDriver, ValueInterface):
    """`config.learner.ranks` ranks of a critic that grows from the language model at `model_path`: `config.learner` is
    the critic's own here."""

    _kind = RankKind(
        section="critic",
        worker="asyncrl.value.worker:ValueWorker",
        meta_rank="asyncrl.value.meta_rank:ValueMetaRank",
    )
    _training = "value_training"

    def get_values(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        return self._scored("get_values", data, micro_batch_size=None, timer=timer)

    def prepare_for_inference(self, *args: Any, **kwargs: Any) -> None:
        ignore_arguments("prepare_for_inference", args, kwargs)
        # the ranks' move to their devices lets go of gradients
        self._ranks.call("prepare_for_training")

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Lets go of gradients; scoring keeps nothing else."""
        ignore_arguments("finish_inference", args, kwargs)
        self._ranks.call("finish_training")


def critic_config(config: Config) -> Config:
    """`config` as the critic's ranks see it: `learner` with what `critic` says of ranks, places and optimizer. They
    share one copy of the critic, whatever the policy's ranks do."""
    assert config.critic is not None
    own = {name: getattr(config.critic, name) for name in ("ranks", "optimizer", "cpus", "gpus", "node_labels")}
    return config.model_copy(update={"learner": config.learner.model_copy(update={**own, "shards": None})})
