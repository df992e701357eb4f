"""The driver's side of the policy.

policy = Policy(config, model_path=path)
policy.start()
scored = policy.get_logprobs(batch)
result = policy.train(batch, loss_fn, gbs=64)
policy.shutdown()
"""

from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.interfaces import ParameterSpec, PolicyInterface, Timer
from asyncrl.policy.rank_actor import POLICY_RANKS
from asyncrl.policy.rank_driver import RankDriver, timed


class Policy(RankDriver, PolicyInterface):
    """`config.learner.ranks` ranks of the policy at `model_path`."""

    _kind = POLICY_RANKS
    _training = "policy_training"

    def __init__(self, config: Config, *, model_path: str) -> None:
        super().__init__(config, model_path=model_path)
        self._specs: tuple[ParameterSpec, ...] = ()

    def start(self) -> None:
        super().start()
        self._specs = self._ranks.call("weights_metadata")[0]

    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        with timed(timer, "get_logprobs"):
            return self._scored("get_logprobs", data, micro_batch_size=None)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        with timed(timer, "get_reference_policy_logprobs"):
            return self._scored("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size)

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Names, shapes, dtypes and bytes of what `PolicyWorker.gather_weights` yields, in order; after `start`."""
        return self._specs

    def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM serves, on rank 0's node."""
        self._ranks.call("save_hf", path)
