"""The driver's side of sending weights: by broadcast to engines elsewhere, by shared memory to engines on the same
device.

Invariants: the driver never holds a weight. A refit that fails raises a WeightError and leaves the ranks unchanged and
usable.
"""

from collections.abc import Sequence
from typing import Any

import ray

from asyncrl.config.schema import Config
from asyncrl.errors import CollectiveError
from asyncrl.policy.interfaces import ColocatablePolicyInterface, ParameterSpec
from asyncrl.policy.rank_driver import RankDriver, ignore_arguments
from asyncrl.run.version import Version
from asyncrl.weights.transports.ipc import SharedGroup
from asyncrl.weights.transports.peers import Rendezvous

GIB = 2**30


class RefitDriver(RankDriver, ColocatablePolicyInterface):
    """The part of `Policy` that sends weights. Training and scoring are in `RankDriver` and `Policy`."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self._specs: tuple[ParameterSpec, ...] = ()
        self._sent: Version | None = None
        self._sharing = False

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Returns names, shapes, dtypes and sizes of the weights that `PolicyWorker.gather_weights` yields, in
        order."""
        if not self._specs:
            self._specs = self._ranks.call("weights_metadata")[0]
        return self._specs

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {spec.name: (spec.shape, spec.dtype) for spec in self.weights_metadata()}

    # -- by broadcast --------------------------------------------------------------------------------------------

    def init_collective(
        self, ip: str, port: int, world_size: int, *args: Any, train_world_size: int | None = None, **kwargs: Any
    ) -> list["ray.ObjectRef[None]"]:
        ignore_arguments("init_collective", args, kwargs)
        ranks = self._ranks.size
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
        return self._ranks.launch("init_collective", rendezvous)

    def broadcast_weights_for_collective(
        self, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list["ray.ObjectRef[None]"]:
        ignore_arguments("broadcast_weights_for_collective", args, kwargs)
        return self._ranks.launch("broadcast_weights", self._next(version))

    # -- by shared memory ----------------------------------------------------------------------------------------

    def prepare_weights_for_ipc(
        self, refit_buffer_size_gb: float | None = None, *args: Any, version: Version | None = None, **kwargs: Any
    ) -> list[list[str]]:
        ignore_arguments("prepare_weights_for_ipc", args, kwargs)
        limit = None if refit_buffer_size_gb is None else int(refit_buffer_size_gb * GIB)
        groups: list[list[str]] = self._ranks.call("prepare_weights_for_ipc", limit, self._next(version))[0]
        self._sharing = True
        return groups

    def get_weights_ipc_handles(self, keys: Sequence[str]) -> dict[str, Any]:
        assert self._sharing, "call prepare_weights_for_ipc() first"
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(
                f"keys are {keys!r}; they must be names of weights, as in a group of prepare_weights_for_ipc()"
            )
        by_rank: list[dict[str, SharedGroup]] = self._ranks.call("get_weights_ipc_handles", list(keys))
        # ranks on one device share the same bytes, so the first rank's handle is enough
        return {device: group for handles in reversed(by_rank) for device, group in handles.items()}

    def offload_before_refit(self) -> None:
        self._ranks.call("offload_optimizer")

    def offload_after_refit(self) -> None:
        self._sharing = False
        self._ranks.call("offload_after_refit")

    def _next(self, version: Version | None) -> Version:
        if not isinstance(version, Version | None):
            raise TypeError(f"version is {version!r}; it must be a Version, or None for the next one")
        if version is None:
            version = Version(1, 0) if self._sent is None else Version(self._sent.incarnation, self._sent.step + 1)
        # the engines refuse an older version; the next version must be newer than all that were sent
        self._sent = version if self._sent is None else max(self._sent, version)
        return version
