"""The registry of a run: its deployments, its state, its metrics endpoints, and its newest published version.

Pure: the clock is an argument. The first deployment sets the run's shared config. Each later deployment must agree with
it key by key. The check is needed because Ray's get-or-create of an actor ignores the arguments of the second caller. A
run has one learner. A deployment that is silent for too long is no longer a member.
"""

from collections.abc import Callable, Mapping

import msgspec

from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.config.load import first_difference
from asyncrl.coordinator.endpoints import Endpoints
from asyncrl.errors import HandshakeError, RunEnded, RunError, RunLocked, RunMismatch, VersionRegression

OVER = (RunState.FINISHED, RunState.FAILED)
"""States of a run that trains no more steps. No other deployment enters it."""
GONE_TIMEOUTS = 4
"""Number of timeouts after which a silent deployment counts as dead when the last other one leaves. After one timeout
it may only be busy: a process whose event loop or machine stalls sends no heartbeats."""
MOST_REPLICAS = 10_000
"""Largest number of replicas of a run. More were never tried."""
GONE_MEMBERS = 1000
"""Number of silent deployments that are remembered, because they may come back."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """An attached deployment, with the host and the pid of its process. `nonce` is that of a learner's run: it
    distinguishes runs of the same name. `replicas` is the number of replicas with which a generator deployment
    starts."""

    id: str
    role: Role
    host: str
    pid: int
    nonce: str = ""
    replicas: int = 0


class Registry:
    """The deployments and the state of one run.

    `timeout_s` is the time without a heartbeat after which a deployment counts as gone. `shared` is the run's shared
    config by dotted key. `learner` is the deployment that was the last to attach as a learner; it may be gone.
    `learner_state_seconds` are its seconds by state, from its last heartbeat. `endpoints` has the metrics endpoints of
    the run's processes. `published` is the newest version that a learner published. `scalings` counts the calls of
    `scale`. `given_up` says why deployments do not start replicas again, by replica, since the last of these calls.
    """

    def __init__(self, *, shared: Mapping[str, object], timeout_s: float, clock: Callable[[], float]) -> None:
        self._shared = dict(shared)
        self._timeout_s = timeout_s
        self._clock = clock
        self._members: dict[str, tuple[Deployment, float]] = {}
        self._fingerprint: tuple[str, str] | None = None
        self._progress_at_s = clock()
        self.state, self.message = RunState.STARTING, ""
        self.learner: Deployment | None = None
        self.learner_state_seconds: dict[str, float] = {}
        self.endpoints = Endpoints()
        self._closed_by = ""  # the deployment that was the last one to leave
        self._scaled: dict[str, int] = {}
        self.scalings = 0
        self.given_up: dict[str, str] = {}
        self.published: Version | None = None

    def attach(self, deployment: Deployment, *, shared: Mapping[str, object]) -> None:
        """Admits a deployment. Raises the errors of `check`. A learner replaces the earlier learner for good."""
        self.check(deployment, shared=shared)
        if deployment.role is Role.LEARNER:
            if self.learner is not None:
                self._members.pop(self.learner.id, None)
            self.learner = deployment
        self._members[deployment.id] = (deployment, self._clock())
        self._forget_gone()

    def check(self, deployment: Deployment, *, shared: Mapping[str, object]) -> None:
        """Raises an error if the deployment may not attach, and changes nothing.

        RunMismatch names the first key whose value differs from the run's. RunLocked names the learner that the run
        has already, or says that the run has ended and its processes are ending: a generator that enters such a run
        would keep them from ending, and so the next learner out.
        """
        enters = deployment.id not in self._members
        if self._closed_by or (deployment.role is Role.GENERATOR and self.state in OVER and enters):
            raise RunLocked(
                "the earlier run of this name has ended, and its last deployment is ending the run's processes; start "
                "this command again in some seconds. If this message stays, end the run with `asyncrl down` first"
            )
        key = first_difference(self._shared, shared)
        if key is not None:
            raise RunMismatch(
                f"{key} = {shared.get(key)!r}, but the run was started with {self._shared.get(key)!r}; use the same "
                "config, or set another run.name for another run"
            )
        if deployment.role is Role.LEARNER:
            for other in self.live():
                if other.role is Role.LEARNER and other.id != deployment.id:
                    raise RunLocked(
                        f"the run has a learner already: pid {other.pid} on {other.host}; end that learner, or set "
                        "another run.name"
                    )

    def keep(self, deployment_id: str, *, state_seconds: Mapping[str, float] = {}) -> bool:
        """Records a heartbeat of the deployment. Returns False if it is not attached.

        `state_seconds` are the learner's seconds by state since its start. Raises RunEnded for a learner whose run
        `asyncrl down` ended.
        """
        member = self._members.get(deployment_id)
        if member is None:
            return False
        self._members[deployment_id] = (member[0], self._clock())
        if member[0].role is Role.LEARNER:
            self.learner_state_seconds = dict(state_seconds)
            if self.state is RunState.FAILED:
                raise RunEnded(self.message)
        return True

    def detach(self, deployment_id: str) -> bool:
        """Removes a deployment that leaves. Returns True if it was the last one: then it must end the run's actors, and
        no deployment can attach any more.

        While the run is not over, a deployment that was silent for less than `GONE_TIMEOUTS` timeouts still counts,
        because it may come back. A deployment that is not attached, such as a replaced learner, is never the last one.
        A repeated call gets the same answer: if the first answer was lost, the run's actors would stay.
        """
        timeouts = 1 if self.state in OVER else GONE_TIMEOUTS
        left = self._members.pop(deployment_id, None) is not None
        if left and not self._heard_within(self._timeout_s * timeouts):
            self._closed_by = deployment_id
        return deployment_id == self._closed_by

    @property
    def learner_attached(self) -> bool:
        """Whether the run has a learner that sent a heartbeat within the timeout."""
        member = self._members.get(self.learner.id) if self.learner is not None else None
        return member is not None and self._clock() - member[1] <= self._timeout_s

    def run_nonce(self) -> str:
        """Returns the nonce in run.json of the run, "" before its first learner attaches."""
        return "" if self.learner is None else self.learner.nonce

    def live(self) -> list[Deployment]:
        """Returns the deployments that sent a heartbeat within the timeout."""
        return self._heard_within(self._timeout_s)

    def _forget_gone(self) -> None:
        """Forgets the deployments that are silent for the longest time, beyond `GONE_MEMBERS` silent ones."""
        if len(self._members) <= GONE_MEMBERS:
            return
        live = {deployment.id for deployment in self.live()}
        gone = sorted((heard_at_s, name) for name, (_, heard_at_s) in self._members.items() if name not in live)
        for _, name in gone[: max(0, len(gone) - GONE_MEMBERS)]:
            del self._members[name]

    def _heard_within(self, seconds: float) -> list[Deployment]:
        now_s = self._clock()
        return [member for member, heard_at_s in self._members.values() if now_s - heard_at_s <= seconds]

    def wanted(self) -> dict[str, int]:
        """Returns the number of replicas that each generator deployment should have, by its id."""
        generators = [each for each in self.live() if each.role is Role.GENERATOR]
        return {each.id: self._scaled.get(each.id, each.replicas) for each in generators}

    def wanted_of(self, deployment_id: str) -> int | None:
        """Returns the number of replicas that a generator deployment should have; None if it is not attached."""
        member = self._members.get(deployment_id)
        return None if member is None else self._scaled.get(deployment_id, member[0].replicas)

    def scale(self, replicas: int) -> dict[str, int]:
        """Sets the number of replicas of all generator deployments together. Returns what `wanted` returns then. The
        deployments poll it. One that is silent now gets 0. Replicas that were given up before may be replaced.

        The smallest deployment grows first, and the largest one shrinks first. Raises RunError if no generator
        deployment is attached, and ValueError for a number that is not from 0 to `MOST_REPLICAS`.
        """
        if not 0 <= replicas <= MOST_REPLICAS:
            raise ValueError(f"the number of replicas is {replicas}, but must be from 0 to {MOST_REPLICAS}")
        if not (wanted := self.wanted()):
            raise RunError("the run has no generator deployment: start one with `asyncrl generator`")
        while (total := sum(wanted.values())) != replicas:
            change = min if total < replicas else max
            wanted[change(wanted, key=wanted.__getitem__)] += 1 if total < replicas else -1
        silent = [
            each.id for each, _ in self._members.values() if each.role is Role.GENERATOR and each.id not in wanted
        ]
        self._scaled |= wanted | dict.fromkeys(silent, 0)  # one that comes back would add replicas
        self.scalings += 1
        self.given_up.clear()
        return wanted

    def gave_up(self, replica: str, why: str) -> None:
        """Records that a deployment does not start a replica again."""
        self.given_up[replica] = why

    def handshake(self, *, who: str, fingerprint: str) -> None:
        """Checks that all pools have the same tokenizer and vocabulary (F25).

        The first caller sets the fingerprint. Raises HandshakeError if that of a later caller differs.
        """
        if self._fingerprint is None:
            self._fingerprint = (who, fingerprint)
        elif self._fingerprint[1] != fingerprint:
            first, expected = self._fingerprint
            raise HandshakeError(
                f"{who} has tokenizer and vocabulary {fingerprint}, but {first} has {expected}; make both pools read "
                "the same files at model.path"
            )

    def set_state(self, state: RunState, message: str = "") -> None:
        """Sets the state of the run. The learner calls it. A new state is progress."""
        self.state, self.message = state, message
        self.progressed()

    def progressed(self) -> None:
        """Records that the run made progress: a committed group, an acked step, or a new state."""
        self._progress_at_s = self._clock()

    @property
    def quiet_s(self) -> float:
        """The seconds since the last progress."""
        return self._clock() - self._progress_at_s

    def publish(self, version: Version, *, learner: Version) -> None:
        """Records that the learner, which is at the version `learner`, published `version`. A repeated call does
        nothing.

        Raises VersionRegression if `version` is older than the newest published version.
        """
        if version.step > learner.step:
            raise ValueError(f"version {version} was published, but the learner has acked only {learner.step} steps")
        if self.published is not None and version < self.published:
            raise VersionRegression(
                f"version {version} was published after {self.published}; versions must not decrease"
            )
        self.published = version
