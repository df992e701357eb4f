"""Refits: bring the policy's current weights into every engine, and leave the engines ready to generate.

Invariants:

- Every failure raises, so that no engine generates with weights that are labelled with a wrong version.
- An engine that received only a part of an update refuses to generate until a later refit succeeds.
- Both refit functions use policy and engines through their interfaces only.

Call `prepare_refit_info` before the first refit. Before the first refit by broadcast, also call `init_collective` on
policy and engines at the same time.
"""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.common.version import Version
from asyncrl.errors import ActorGone, AsyncRLError, CollectiveError, UpdateRefused, WeightError
from asyncrl.generation.interfaces import GenerationInterface, all_succeeded
from asyncrl.policy.interfaces import ColocatablePolicyInterface

CONSEQUENCES = (UpdateRefused, CollectiveError)
"""Errors that a rank raises only because another rank has refused or failed. Another error is the cause, if there is
one, so it is raised in place of these."""


def refit_colocated(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    *,
    refit_buffer_size_gb: float | None = None,
    version: Version | None = None,
) -> None:
    """Refits through memory that policy and engines share, on a device whose memory is too small for both to be active.

    Call it after `finish_generation`. The policy is off the device afterwards: `prepare_for_training` brings it back.
    The weights are shared in groups that fit into `refit_buffer_size_gb` GiB, if it is given, and into half of the free
    memory of a device. `version` is the label of the weights; None: one step after the last one that the policy sent.
    """
    policy.offload_before_refit()
    _require(generation.prepare_for_generation(tags=["weights"]), "waking the engines' weights")
    budget = () if refit_buffer_size_gb is None else (refit_buffer_size_gb,)
    for names in policy.prepare_weights_for_ipc(*budget, **_numbered(version)):
        _require(generation.update_weights_from_ipc_handles(policy.get_weights_ipc_handles(names)), "loading weights")
    policy.offload_after_refit()
    _require(generation.prepare_for_generation(tags=["kv_cache"]), "waking the engines' KV caches")


def refit_by_broadcast(
    policy: ColocatablePolicyInterface, generation: GenerationInterface, *, version: Version | None = None
) -> None:
    """Refits through the process group of policy and engines. The group's deadlines bound every wait. `version` is the
    label of the weights; None: one step after the last one that the policy sent."""
    received = generation.update_weights_from_collective()
    sent = policy.broadcast_weights_for_collective(**_numbered(version))
    outcomes = [_outcome(ref) for ref in [*received, *sent]]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, CONSEQUENCES))
    _require(all_succeeded(outcomes[: len(received)]), "loading weights")


def _numbered(version: Version | None) -> dict[str, Any]:
    """Returns the keyword argument `version`, or no argument if `version` is None: the caller's own policy may not
    accept one."""
    return {} if version is None else {"version": version}


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayActorError as error:
        return ActorGone(f"a rank or an engine has died: {error}")
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, AsyncRLError) else error


def _require(success: bool, what: str) -> None:
    if success is not True:
        raise WeightError(f"{what} did not succeed on every engine; call the refit again or restart the engines")
