"""The members of a run: which deployments are admitted, and which are removed."""

import re
from typing import Any

import msgspec
import pytest

from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.config.schema import MOST_REPLICAS, AutoscaleSection
from asyncrl.coordinator.registry import OVER, Attachment, Deployment, Registry
from asyncrl.errors import HandshakeError, RunError, RunLocked, RunMismatch, VersionRegression


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def deployment(name: str, role: Role) -> Deployment:
    return Deployment(id=name, role=role, host="node-1", pid=17)


def registry(clock: Clock, **limits: Any) -> Registry:
    return Registry(shared={"staleness.max_versions": 2, "run.seed": 0}, timeout_s=10.0, clock=clock, **limits)


@pytest.mark.fault("F32")
def test_a_deployment_with_another_config_is_refused_by_the_key_that_differs() -> None:
    members = registry(Clock())
    with pytest.raises(RunMismatch, match=r"staleness.max_versions = 4.*started with 2"):
        members.check(deployment("g", Role.GENERATOR), shared={"staleness.max_versions": 4, "run.seed": 0})
    assert members.live() == []


VERSIONS = {"asyncrl": "0.2.0", "torch": "2.9.1+cpu", "transformers": "4.57.1", "vllm": "0.12.0"}


@pytest.mark.fault("F32")
@pytest.mark.parametrize(
    ("package", "version"),
    [("asyncrl", "0.3.0"), ("torch", "2.10.0+cpu"), ("transformers", "5.0.0"), ("vllm", "0.13.0.dev3+g1a2b")],
)
def test_a_deployment_with_another_version_is_refused_with_both_versions_and_both_hosts(
    package: str, version: str
) -> None:
    members, shared = registry(Clock()), {"staleness.max_versions": 2, "run.seed": 0}
    learner = msgspec.structs.replace(deployment("l", Role.LEARNER), versions=VERSIONS)
    members.check(learner, shared=shared)
    members.attach(learner)
    joins = msgspec.structs.replace(
        deployment("g", Role.GENERATOR), host="node-2", versions=VERSIONS | {package: version}
    )
    named = f"node-2 has {package} {version}, but the run was started on node-1 with {package} {VERSIONS[package]}"
    with pytest.raises(RunMismatch, match=re.escape(named)):
        members.check(joins, shared=shared | {"run.seed": 1})  # another version may have other keys
    assert members.live() == [learner]


@pytest.mark.parametrize("versions", [{}, {name: version for name, version in VERSIONS.items() if name != "asyncrl"}])
def test_a_deployment_that_does_not_send_its_version_of_asyncrl_is_refused(versions: dict[str, str]) -> None:
    members, shared = registry(Clock()), {"staleness.max_versions": 2, "run.seed": 0}
    joins = msgspec.structs.replace(deployment("g", Role.GENERATOR), host="node-2", versions=versions)
    members.check(joins, shared=shared)  # the run has no version that it could differ from
    members.attach(msgspec.structs.replace(deployment("l", Role.LEARNER), versions=VERSIONS))
    with pytest.raises(
        RunMismatch, match=r"node-2 does not say its version of asyncrl, but .* node-1 with asyncrl 0\.2"
    ):
        members.check(joins, shared=shared)


def test_generators_are_compared_with_each_other_where_the_learner_lacks_the_package() -> None:
    members, shared = registry(Clock()), {"staleness.max_versions": 2, "run.seed": 0}
    for number, versions in enumerate([{"torch": "2.13.0"}, {"torch": "2.13.1", "vllm": "0.32.0"}]):
        members.attach(msgspec.structs.replace(deployment(f"d{number}", Role.GENERATOR), versions=versions))
    with pytest.raises(RunMismatch, match=r"vllm 0.33.0, but .* vllm 0.32.0"):
        members.check(
            msgspec.structs.replace(deployment("g", Role.GENERATOR), versions={"vllm": "0.33.0"}), shared=shared
        )


@pytest.mark.parametrize(
    "versions",
    [
        VERSIONS | {"torch": "2.9.0+cu128", "vllm": "0.12.3"},  # the CUDA build, and patch releases
        {name: version for name, version in VERSIONS.items() if name != "vllm"},  # a learner needs no vLLM
    ],
)
def test_patch_releases_and_packages_that_only_one_node_has_are_admitted(versions: dict[str, str]) -> None:
    members, shared = registry(Clock()), {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(msgspec.structs.replace(deployment("g1", Role.GENERATOR), versions=VERSIONS))
    members.check(msgspec.structs.replace(deployment("g2", Role.GENERATOR), versions=versions), shared=shared)


def test_who_only_asks_whether_it_may_attach_is_no_member() -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.check(deployment("l1", Role.LEARNER), shared=shared)
    assert members.live() == []
    with pytest.raises(RunMismatch):
        members.check(deployment("g", Role.GENERATOR), shared=shared | {"run.seed": 1})
    members.attach(deployment("l1", Role.LEARNER))
    with pytest.raises(RunLocked):
        members.check(deployment("l2", Role.LEARNER), shared=shared)


@pytest.mark.fault("F35")
def test_a_second_learner_is_refused_and_told_who_holds_the_run() -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(deployment("l1", Role.LEARNER))
    with pytest.raises(RunLocked, match="pid 17 on node-1"):
        members.check(deployment("l2", Role.LEARNER), shared=shared)
    members.attach(deployment("g1", Role.GENERATOR))
    members.attach(deployment("g2", Role.GENERATOR))


def test_a_silent_learner_no_longer_holds_the_run() -> None:
    clock = Clock()
    members = registry(clock)
    members.attach(deployment("l1", Role.LEARNER))
    clock.now_s = 10.5
    members.attach(deployment("l2", Role.LEARNER))
    assert [member.id for member in members.live()] == ["l2"]


def test_a_member_that_is_only_silent_keeps_the_run_until_several_timeouts_have_passed() -> None:
    clock = Clock()
    members = registry(clock)
    for name in ("g1", "g2", "g3"):
        members.attach(deployment(name, Role.GENERATOR))
    members.attach(deployment("l1", Role.LEARNER))
    clock.now_s = 40.0
    assert members.keep("g2") is Attachment.ATTACHED
    assert not members.detach("g1"), "l1 was silent for four timeouts, and may come back"
    assert members.keep("l1") is Attachment.ATTACHED
    clock.now_s = 80.0
    assert not members.detach("g2"), "l1 was silent for four timeouts"
    members.attach(deployment("g4", Role.GENERATOR))
    clock.now_s = 80.5
    assert members.detach("g4"), "all others were silent for more than four timeouts"
    assert members.keep("g4") is Attachment.GONE


def test_only_the_attached_learner_is_asked_to_end_and_its_successor_is_not() -> None:
    members = registry(Clock())
    members.attach(deployment("g", Role.GENERATOR))
    assert not members.ask_to_end()
    members.attach(deployment("l1", Role.LEARNER))
    assert members.keep("l1") is Attachment.ATTACHED, "the request before the learner's start counts for none"
    assert members.ask_to_end()
    assert (members.keep("g"), members.keep("l1")) == (Attachment.ATTACHED, Attachment.ASKED_TO_END)
    members.attach(deployment("l2", Role.LEARNER))
    assert (members.keep("l1"), members.keep("l2")) == (Attachment.GONE, Attachment.ATTACHED)


@pytest.mark.parametrize("requests", [[True, False], [False, True]])
def test_a_learner_that_shall_restart_ends_for_good_if_that_was_asked_for_too(requests: list[bool]) -> None:
    members = registry(Clock())
    assert not members.ask_to_end(restart=True)
    members.attach(deployment("l1", Role.LEARNER))
    assert members.keep("l1") is Attachment.ATTACHED
    assert members.ask_to_end(restart=True)
    assert members.keep("l1") is Attachment.ASKED_TO_RESTART
    members.attach(deployment("l2", Role.LEARNER))
    assert members.keep("l2") is Attachment.ATTACHED
    assert all(members.ask_to_end(restart=restart) for restart in requests)
    assert members.keep("l2") is Attachment.ASKED_TO_END


@pytest.mark.parametrize("state", OVER)
def test_a_run_that_is_over_does_not_wait_for_silent_members(state: RunState) -> None:
    clock = Clock()
    members = registry(clock)
    for name in ("g1", "g2", "g3"):
        members.attach(deployment(name, Role.GENERATOR))
    members.set_state(state)
    clock.now_s = 8.0
    assert members.keep("g1") is Attachment.ATTACHED
    assert members.keep("g2") is Attachment.ATTACHED
    clock.now_s = 11.0
    assert not members.detach("g1")
    assert members.detach("g2"), "g3 is silent"


def test_no_deployment_attaches_after_the_last_one_has_left() -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(deployment("g1", Role.GENERATOR))
    assert members.detach("g1")
    assert members.detach("g1"), "the first answer may be lost, and then no deployment would end the run's processes"
    assert not members.detach("g2"), "only the last deployment ends the run's processes"
    with pytest.raises(RunLocked, match=r"start this command again.*asyncrl down"):
        members.check(deployment("g2", Role.GENERATOR), shared=shared)


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED, RunState.FAILED])
def test_no_other_generator_enters_a_run_that_is_over(state: RunState) -> None:
    members = registry(Clock())
    shared = {"staleness.max_versions": 2, "run.seed": 0}
    members.attach(deployment("g1", Role.GENERATOR))
    members.set_state(state)
    members.attach(deployment("g1", Role.GENERATOR))
    with pytest.raises(RunLocked, match=r"has ended.*start this command again"):
        members.check(deployment("g2", Role.GENERATOR), shared=shared)
    assert members.detach("g1"), "no other deployment keeps the processes of the run"


def test_a_learner_that_was_replaced_does_not_end_the_run_of_its_successor() -> None:
    clock = Clock()
    members = registry(clock)
    members.attach(deployment("l1", Role.LEARNER))
    clock.now_s = 10.5
    members.attach(deployment("l2", Role.LEARNER))
    clock.now_s = 60.0
    assert not members.detach("l1")
    assert members.keep("l2") is Attachment.ATTACHED


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


def test_a_new_number_of_replicas_is_divided_among_the_living_generator_deployments() -> None:
    clock = Clock()
    members = registry(clock)
    members.attach(deployment("l", Role.LEARNER))
    with pytest.raises(RunError, match="no generator deployment: start one"):
        members.scale(2, because="why")
    for name, replicas in (("small", 1), ("large", 3), ("gone", 5)):
        generators = msgspec.structs.replace(deployment(name, Role.GENERATOR), replicas=replicas)
        members.attach(generators)
    clock.now_s += 10.1
    assert all(members.keep(name) is Attachment.ATTACHED for name in ("l", "small", "large"))
    assert members.wanted() == {"small": 1, "large": 3}
    assert members.scale(6, because="why") == members.wanted() == {"small": 3, "large": 3}, (
        "the smallest one grows first"
    )
    assert members.scale(7, because="why") in ({"small": 4, "large": 3}, {"small": 3, "large": 4})
    assert members.scale(1, because="why") in ({"small": 1, "large": 0}, {"small": 0, "large": 1}), (
        "the largest one shrinks first"
    )
    members.attach(msgspec.structs.replace(deployment("new", Role.GENERATOR), replicas=2))
    assert members.wanted()["new"] == 2, "a later deployment starts as its configuration says"
    clock.now_s += 10.1
    members.gave_up("generator-a", "no memory")
    assert all(members.keep(name) is Attachment.ATTACHED for name in ("l", "small", "new"))
    assert members.scale(3, because="its own rule", again=False) == {"small": 1, "new": 2}
    assert (members.given_up, members.scalings) == ({"generator-a": "no memory"}, 3)
    assert members.scaled_because == "its own rule"
    assert members.scale(3, because="why") == {"small": 1, "new": 2}
    assert (members.given_up, members.scalings) == ({}, 4)
    assert members.keep("large") is Attachment.ATTACHED
    assert members.wanted() == {"small": 1, "large": 0, "new": 2}, "one that was silent adds no replicas"
    for impossible in (-1, MOST_REPLICAS + 1):
        with pytest.raises(ValueError, match="must be from 0 to 10000"):
            members.scale(impossible, because="why")
    assert (members.wanted_of("new"), members.wanted_of("nobody")) == (2, None)


def test_a_number_of_replicas_outside_the_limits_of_autoscale_is_refused() -> None:
    members = registry(Clock(), autoscale=AutoscaleSection(min=2, max=3))
    members.attach(msgspec.structs.replace(deployment("g", Role.GENERATOR), replicas=2))
    for impossible in (1, 4):
        with pytest.raises(RunError, match=rf"generators={impossible}: must be from 2 to 3, .* \(generator\.autoscale"):
            members.scale(impossible, because="why")
    assert (members.wanted(), members.scaled_because) == ({"g": 2}, "")
    members.scale(3, because="why")
    assert (members.wanted(), members.scaled_because) == ({"g": 3}, "why")


def test_of_many_silent_deployments_only_the_newest_are_remembered() -> None:
    clock = Clock()
    members = registry(clock, gone_members=2)
    for number in range(5):
        members.attach(deployment(f"g{number}", Role.GENERATOR))
        clock.now_s += 11.0
    members.attach(deployment("live", Role.GENERATOR))
    assert [members.keep(f"g{number}") for number in range(5)] == [
        Attachment.GONE, Attachment.GONE, Attachment.GONE, Attachment.ATTACHED, Attachment.ATTACHED,
    ]  # fmt: skip
    assert members.keep("live") is Attachment.ATTACHED
