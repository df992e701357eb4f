"""The order of a refit: the policy's current weights in every engine, and the engines ready to generate.

Invariants: every failure raises, so that no engine generates with weights under a wrong version. An engine that
received half an update refuses to generate until the next refit succeeds. Both functions use policy and engines through
their interfaces only. `prepare_refit_info` comes before the first refit; `init_collective`, on both sides at once,
before the first by broadcast.
"""

from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from asyncrl.buffer.records import Version
from asyncrl.errors import ActorGone, AsyncRLError, CollectiveError, UpdateRefused, WeightError
from asyncrl.generation.interfaces import GenerationInterface, all_succeeded
from asyncrl.policy.interfaces import ColocatablePolicyInterface

CONSEQUENCES = (UpdateRefused, CollectiveError)
"""What a rank raises because another one has refused or failed."""


def refit_colocated(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    *,
    refit_buffer_size_gb: float | None = None,
    version: Version | None = None,
) -> None:
    """Through memory that both share, on a device that has no room for both at work.

    Begins after `finish_generation`. Leaves the policy off the device: `prepare_for_training` brings it back.
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
    """Through the process group of both sides, whose deadlines bound every wait here."""
    received = generation.update_weights_from_collective()
    sent = policy.broadcast_weights_for_collective(**_numbered(version))
    outcomes = [_outcome(ref) for ref in [*received, *sent]]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, CONSEQUENCES))
    _require(all_succeeded(outcomes[: len(received)]), "loading weights")


def _numbered(version: Version | None) -> dict[str, Any]:
    """The keyword of a version that was given. A policy of the caller's own may not number its weights."""
    return {} if version is None else {"version": version}


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayActorError as error:
        return ActorGone(f"a rank or an engine is gone: {error}")
    except RayTaskError as error:
        return error.cause if isinstance(error.cause, AsyncRLError) else error


def _require(success: bool, what: str) -> None:
    if success is not True:
        raise WeightError(f"{what} did not succeed on every engine")
