"""The members of a run: which deployments are admitted, and which are removed."""

import pytest

from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.registry import Deployment, Registry
from asyncrl.errors import HandshakeError, RunLocked, RunMismatch, VersionRegression


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def deployment(name: str, role: Role) -> Deployment:
    return Deployment(id=name, role=role, host="node-1", pid=17)


def registry(clock: Clock) -> Registry:
    return Registry(shared={"staleness.max_versions": 2, "run.seed": 0}, timeout_s=10.0, clock=clock)


@pytest.mark.fault("F32")
def test_a_deployment_with_another_config_is_refused_by_the_key_that_differs() -> None:
    members = registry(Clock())
    with pytest.raises(RunMismatch, match=r"staleness.max_versions = 4.*started with 2"):
        members.attach(deployment("g", Role.GENERATOR), shared={"staleness.max_versions": 4, "run.seed": 0})
    assert members.live() == []


def test_who_only_asks_whether_it_may_attach_is_no_member() -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.check(deployment("l1", Role.LEARNER), shared=shared)
    assert members.live() == []
    with pytest.raises(RunMismatch):
        members.check(deployment("g", Role.GENERATOR), shared=shared | {"run.seed": 1})
    members.attach(deployment("l1", Role.LEARNER), shared=shared)
    with pytest.raises(RunLocked):
        members.check(deployment("l2", Role.LEARNER), shared=shared)


@pytest.mark.fault("F35")
def test_a_second_learner_is_refused_and_told_who_holds_the_run() -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(deployment("l1", Role.LEARNER), shared=shared)
    with pytest.raises(RunLocked, match="pid 17 on node-1"):
        members.attach(deployment("l2", Role.LEARNER), shared=shared)
    members.attach(deployment("g1", Role.GENERATOR), shared=shared)
    members.attach(deployment("g2", Role.GENERATOR), shared=shared)


def test_a_silent_learner_no_longer_holds_the_run() -> None:
    clock = Clock()
    members = registry(clock)
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(deployment("l1", Role.LEARNER), shared=shared)
    clock.now_s = 10.5
    members.attach(deployment("l2", Role.LEARNER), shared=shared)
    assert [member.id for member in members.live()] == ["l2"]


def test_the_last_that_leaves_is_told_so_and_the_silent_do_not_count() -> None:
    clock = Clock()
    members = registry(clock)
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    for name in ("g1", "g2", "g3"):
        members.attach(deployment(name, Role.GENERATOR), shared=shared)
    clock.now_s = 8.0
    assert members.keep("g1")
    assert members.keep("g2")
    clock.now_s = 11.0
    assert members.detach("g1") == 1
    assert members.detach("g2") == 0
    assert not members.keep("g2")


@pytest.mark.fault("F25")
def test_another_tokenizer_fails_the_handshake_and_both_fingerprints_are_shown() -> None:
    members = registry(Clock())
    members.handshake(who="the learner", fingerprint="97:aa")
    members.handshake(who="generator a", fingerprint="97:aa")
    with pytest.raises(HandshakeError, match=r"generator b .*98:bb.*the learner has 97:aa"):
        members.handshake(who="generator b", fingerprint="98:bb")


@pytest.mark.fault("F13")
def test_a_publication_is_repeated_without_effect_and_never_undone() -> None:
    members, learner = registry(Clock()), Version(1, 1)
    members.publish(Version(1, 1), learner=learner)
    members.publish(Version(1, 1), learner=learner)
    with pytest.raises(VersionRegression, match=r"1\.0.*1\.1"):
        members.publish(Version(1, 0), learner=learner)
    with pytest.raises(ValueError, match=r"1\.2.*acked only 1"):
        members.publish(Version(1, 2), learner=learner)
    assert members.published == Version(1, 1)


@pytest.mark.fault("F5")
def test_a_new_state_ends_the_quiet_time() -> None:
    clock = Clock()
    members = registry(clock)
    clock.now_s = 5.0
    assert members.quiet_s == 5.0
    members.set_state(RunState.FAILED, "why")
    assert (members.state, members.message, members.quiet_s) == (RunState.FAILED, "why", 0.0)
