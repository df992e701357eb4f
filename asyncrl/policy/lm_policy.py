"""The driver's side of the policy. The driver is the process that calls the ranks.

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
    """The policy at `model_path` on `config.learner.ranks` ranks."""

    _kind = POLICY_RANKS
    _training = "policy_training"

    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        return self._scored("get_logprobs", data, micro_batch_size=None, timer=timer)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        return self._scored("get_reference_policy_logprobs", data, micro_batch_size=micro_batch_size, timer=timer)

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Loads the weights onto the ranks' devices, for `get_logprobs`."""
        ignore_arguments("prepare_for_lp_inference", args, kwargs)
        self._ranks.call("prepare_for_training")

    def finish_inference(self, *args: Any, **kwargs: Any) -> None:
        """Frees the gradients. Scoring keeps no other state."""
        ignore_arguments("finish_inference", args, kwargs)
        self._ranks.call("finish_training")

    def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM can serve, on rank 0's node. A reader sees the complete directory
        or none. Raises CheckpointError if it cannot be written, or if something other than an export is at `path`; the
        ranks stay usable."""
        self._ranks.call("save_hf", path.absolute())
