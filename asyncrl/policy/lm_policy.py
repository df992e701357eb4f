"""The driver's side of the policy. The driver is the process that calls the ranks.

policy = Policy(config)
scored = policy.get_logprobs(batch)
result = policy.train(batch, loss_fn, gbs=64)
policy.shutdown()

It also sends weights: by broadcast to engines elsewhere, by shared memory to engines on the same device. Invariants:
the driver never holds a weight. A refit that fails raises a WeightError and leaves the ranks unchanged and usable.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import DP_TRAIN_FIELDS, SUPPORT
from asyncrl.errors import CollectiveError, ConfigError
from asyncrl.policy.families import check_family
from asyncrl.policy.interfaces import ColocatablePolicyInterface
from asyncrl.policy.model_directory import counts_problem, read_json
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import SAVING
from asyncrl.ranks.driver import RankDriver, ignore_arguments
from asyncrl.ranks.timer import Timer
from asyncrl.weights.manifest import ParameterSpec
from asyncrl.weights.transports.peers import Rendezvous

GIB = 2**30


class Policy(RankDriver[PolicyWorker], ColocatablePolicyInterface):
    """The policy at `model_path` on `config.learner.ranks` ranks. Raises ConfigError for a folder with a model that
    cannot be trained as `config` says; the ranks check a model of the Hugging Face Hub when they start."""

    _worker = PolicyWorker
    _training = "policy_training"
    _advantages = ("advantages",)
    _trained_fields = (*DP_TRAIN_FIELDS, "weight_versions", SUPPORT)
    _sent: Version | None = None
    """The newest version that was sent to engines."""
    _sharing = False
    """True from `prepare_weights_for_ipc` to the end of the refit."""

    def __init__(self, config: Config, model_path: str | None = None, **options: Any) -> None:
        super().__init__(config, model_path, **options)
        path = model_path or config.model.path
        file = Path(path) / "config.json"
        if file.is_file():
            if (problem := counts_problem(file.parent)) is not None:
                raise ConfigError(f"model.path = {path}: {problem}")
            check_family(read_json(file), config, path=path)

    def get_logprobs(self, data: BatchedDataDict, timer: Timer | None = None) -> BatchedDataDict:
        return self._score(data, timer, PolicyWorker.get_logprobs)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None, timer: Timer | None = None
    ) -> BatchedDataDict:
        method = PolicyWorker.get_reference_policy_logprobs
        return self._score(data, timer, method, micro_batch_size=micro_batch_size)

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """Moves weights and optimizer to the ranks' devices, for `get_logprobs`."""
        ignore_arguments("prepare_for_lp_inference", args, kwargs)
        self.ranks.call(PolicyWorker.prepare_for_training)

    def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM can serve, to a path that all ranks share. A reader sees the
        complete directory or none. During the call there are also files beside `path`, with the float32 weights.

        Raises CheckpointError if it cannot be written within `checkpoint.timeout_s`, or if something other than an
        export or a checkpoint is at `path`; the ranks stay usable.
        """
        self.ranks.call(PolicyWorker.stage_checkpoint, False)
        self.ranks.beside(SAVING, PolicyWorker.write_hf, None, path.absolute())

    def write_hf(self, weights_path: Path, path: Path) -> None:
        """Writes a Hugging Face directory like `save_hf`, with the weights that `write_checkpoint` wrote to
        `weights_path`.

        It blocks, but another thread may make any other call meanwhile. Raises CheckpointError if it cannot be written.
        """
        self.ranks.beside(SAVING, PolicyWorker.write_hf, weights_path.absolute(), path.absolute())

    def trained_step(self) -> int | None:
        """Returns the version of the ranks' weights: 1 more than the `step` of the last call that applied an update;
        None if there was none since the start or the last load. Waits for the end of a call that trains."""
        return self.ranks.call(PolicyWorker.trained_step)[0]

    # -- weights -------------------------------------------------------------------------------------------------

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Returns names, shapes, dtypes and sizes of the weights that `PolicyWorker.gather_weights` yields, in
        order."""
        return self.ranks.call(PolicyWorker.weights_metadata)[0]

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {spec.name: (spec.shape, spec.dtype) for spec in self.weights_metadata()}

    # -- by broadcast --------------------------------------------------------------------------------------------

    def init_collective(
        self, ip: str, port: int, world_size: int, *args: Any, train_world_size: int | None = None, **kwargs: Any
    ) -> list["ray.ObjectRef[None]"]:
        ignore_arguments("init_collective", args, kwargs)
        ranks = self.ranks.size
        if train_world_size not in (None, ranks) or world_size <= ranks:
            raise CollectiveError(
                f"this policy has {ranks} ranks (learner.ranks), and the rest of the group are the engines' workers: "
                f"train_world_size={train_world_size} of world_size={world_size} does not fit; train_world_size must "
                "be the number of ranks, and world_size must be larger"
            )
        rendezvous = Rendezvous(
            host=ip,
            port=port,
            world_size=world_size,
            train_world_size=ranks,
            timeout_s=self._config.weights.load_timeout_s,
        )
        return self.ranks.launch(PolicyWorker.init_collective, rendezvous)

    def broadcast_weights_for_collective(
        self, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list["ray.ObjectRef[None]"]:
        ignore_arguments("broadcast_weights_for_collective", args, kwargs)
        return self.ranks.launch(PolicyWorker.broadcast_weights, self._next(version))

    # -- by shared memory ----------------------------------------------------------------------------------------

    def prepare_weights_for_ipc(
        self, refit_buffer_size_gb: float | None = None, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[list[str]]:
        ignore_arguments("prepare_weights_for_ipc", args, kwargs)
        limit = None if refit_buffer_size_gb is None else int(refit_buffer_size_gb * GIB)
        groups = self.ranks.call(PolicyWorker.prepare_weights_for_ipc, limit, self._next(version))[0]
        self._sharing = True
        return groups

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, Any]:
        assert self._sharing, "call prepare_weights_for_ipc() first"
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(
                f"keys are {keys!r}; they must be names of weights, such as a group from prepare_weights_for_ipc()"
            )
        by_rank = self.ranks.call(PolicyWorker.get_weights_ipc_handles, list(keys))
        # ranks on one device share the same bytes, so the first rank's handle is enough
        return {device: group for handles in reversed(by_rank) for device, group in handles.items()}

    def offload_before_refit(self) -> None:
        self.ranks.call(PolicyWorker.offload_optimizer)

    def offload_after_refit(self) -> None:
        self._sharing = False
        self.ranks.call(PolicyWorker.offload_after_refit)

    def _next(self, version: Version | None) -> Version:
        if not isinstance(version, Version | None):
            raise TypeError(f"version is {version!r}; it must be a Version, or None for the next one")
        if version is None:
            version = Version(1, 0) if self._sent is None else Version(self._sent.incarnation, self._sent.step + 1)
        # the engines refuse an older version; the next version must be newer than all that were sent
        self._sent = version if self._sent is None else max(self._sent, version)
        return version
