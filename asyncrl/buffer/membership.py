"""Who takes part in a run: its deployments, checked when they attach and forgotten when they fall silent.

Pure: the clock is an argument. The first deployment brings the run's shared config; each later one must agree with it
key by key, because get-or-create of an actor ignores the second caller's arguments in silence. A run has one learner.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from asyncrl.config.load import first_difference
from asyncrl.errors import HandshakeError, RunLocked, RunMismatch


class Role(StrEnum):
    """What a deployment runs."""

    LEARNER = "learner"
    GENERATOR = "generator"


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One attached deployment and where it runs."""

    id: str
    role: Role
    host: str
    pid: int


class RunState(StrEnum):
    """Where the run as a whole stands."""

    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    FINISHED = "finished"
    FAILED = "failed"


class Membership:
    """The deployments of one run."""

    def __init__(self, *, shared: Mapping[str, object], timeout_s: float, clock: Callable[[], float]) -> None:
        self._shared = dict(shared)
        self._timeout_s = timeout_s
        self._clock = clock
        self._members: dict[str, tuple[Deployment, float]] = {}
        self._fingerprint: tuple[str, str] | None = None

    def attach(self, deployment: Deployment, *, shared: Mapping[str, object]) -> None:
        """Admits a deployment. Raises as `check` does."""
        self.check(deployment, shared=shared)
        self._members[deployment.id] = (deployment, self._clock())

    def check(self, deployment: Deployment, *, shared: Mapping[str, object]) -> None:
        """Whether it may attach. RunMismatch names the first key that differs, RunLocked the learner that is there."""
        key = first_difference(self._shared, shared)
        if key is not None:
            raise RunMismatch(
                f"{key} = {shared.get(key)!r}, but the run was started with {self._shared.get(key)!r}: use the same "
                "config, or another `run.name` for another run"
            )
        if deployment.role is Role.LEARNER:
            for other in self.live():
                if other.role is Role.LEARNER and other.id != deployment.id:
                    raise RunLocked(f"the run has a learner already: pid {other.pid} on {other.host}")

    def keep(self, deployment_id: str) -> bool:
        """The deployment lives. False when it is not attached (any more)."""
        member = self._members.get(deployment_id)
        if member is None:
            return False
        self._members[deployment_id] = (member[0], self._clock())
        return True

    def detach(self, deployment_id: str) -> int:
        """Forgets a deployment; how many live ones are left."""
        self._members.pop(deployment_id, None)
        return len(self.live())

    def live(self) -> list[Deployment]:
        """Deployments that were heard of within the timeout."""
        now_s = self._clock()
        return [member for member, heard_at_s in self._members.values() if now_s - heard_at_s <= self._timeout_s]

    def handshake(self, *, who: str, fingerprint: str) -> None:
        """Tokenizer and vocabulary of the pools must be one (F25): the first sets it, the others must match."""
        if self._fingerprint is None:
            self._fingerprint = (who, fingerprint)
        elif self._fingerprint[1] != fingerprint:
            first, expected = self._fingerprint
            raise HandshakeError(
                f"{who} has tokenizer and vocabulary {fingerprint}, {first} has {expected}: do both pools read the "
                "same `model.path`?"
            )
