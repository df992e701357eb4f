"""The driver's side of the policy.

policy = Policy(config)
scored = policy.get_logprobs(batch)
result = policy.train(batch, loss_fn, gbs=64)
policy.shutdown()
"""

from pathlib import Path
from typing import Any

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.interfaces import Timer
from asyncrl.policy.rank_actor import POLICY_RANKS
from asyncrl.policy.rank_driver import ignore_arguments
from asyncrl.policy.refit_driver import RefitDriver


class Policy(RefitDriver):
    """`config.learner.ranks` ranks of the policy at `model_path`."""

    _kind = POLICY_RANKS
    _training = "policy_training"

    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        return self._scored("get_logprobs", data, micro_batch_size=None, timer=timer)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        return self._scored("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size, timer=timer)

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """The weights are on the ranks' devices when it returns, ready for `get_logprobs`."""
        ignore_arguments("prepare_for_lp_inference", args, kwargs)
        self._ranks.call("prepare_for_training")

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Lets go of gradients; scoring keeps nothing else."""
        ignore_arguments("finish_inference", args, kwargs)
        self._ranks.call("finish_training")

    def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM serves, on rank 0's node, whole or not at all. CheckpointError when
        it cannot, or when something that is no export is there; then the ranks can go on."""
        self._ranks.call("save_hf", path.absolute())
