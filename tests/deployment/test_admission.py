"""A deployment that the run refuses gets the error before anything is started for it."""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from typer.testing import CliRunner

from asyncrl.cli import start
from asyncrl.cli.main import app
from asyncrl.common.names import COORDINATOR, WEIGHTS
from asyncrl.common.roles import Role, RunState
from asyncrl.common.version import Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import OVER, Deployment, Registry
from asyncrl.data.prompts import Task
from asyncrl.data_plane import calls
from asyncrl.data_plane.calls import control_placement
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.deployment import cluster, pool, shared_actors
from asyncrl.errors import ActorGone, AnotherRun, RunLocked, RunMismatch

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


RunThere = Callable[..., Registry]


@pytest.fixture
def a_run_is_there(monkeypatch: pytest.MonkeyPatch) -> RunThere:
    """Returns a function that puts a run into a fake Ray, and returns the members of the run."""

    async def ready() -> None:
        """Stands for Ray's answer that the actor is placed."""

    def put(config: Config, *, clock: Callable[[], float] = lambda: 0.0) -> Registry:
        members = Registry(shared=shared_config(config), timeout_s=10.0, clock=clock)

        async def perform(call: Call) -> Any:
            if call.method == "brief_status":
                return SimpleNamespace(published=members.published)
            assert (call.receiver, call.method) == ("Coordinator", "check_attach")
            return members.check(*call.arguments, shared=call.options["shared"])

        def get_actor(name: str, *, namespace: str) -> Any:
            if (name, namespace) != ("buffer", config.run.name):
                raise ValueError("no such actor")
            return SimpleNamespace(__ray_ready__=SimpleNamespace(remote=ready), perform=SimpleNamespace(remote=perform))

        monkeypatch.setattr(calls.ray, "get_actor", get_actor)
        return members

    return put


@pytest.mark.asyncio
async def test_a_run_that_is_there_is_asked_and_one_that_is_not_takes_everybody(
    a_run_is_there: RunThere,
) -> None:
    config = Config()
    members = a_run_is_there(config)
    other = Config.model_validate({"eval": {"prompts": 16}})
    for role in Role:
        await shared_actors.check_admission(config, role=role)
        with pytest.raises(RunMismatch, match=r"eval\.prompts = 16, but the run was started with 128"):
            await shared_actors.check_admission(other, role=role)
    assert members.live() == []
    await shared_actors.check_admission(
        Config.model_validate({"run": {"name": "another"}, "eval": {"prompts": 16}}), role=role
    )

    members.attach(Deployment(id="l", role=Role.LEARNER, host="h", pid=7))
    await shared_actors.check_admission(config, role=Role.GENERATOR)
    with pytest.raises(RunLocked, match="pid 7 on h"):
        await shared_actors.check_admission(config, role=Role.LEARNER)


@pytest.mark.asyncio
@pytest.mark.fault("F6")
async def test_a_learner_waits_until_the_one_that_was_killed_counts_as_gone(a_run_is_there: RunThere) -> None:
    config, now = Config(), itertools.count(0.0, 3.0)
    members = a_run_is_there(config, clock=lambda: next(now))
    killed = Deployment(id="l", role=Role.LEARNER, host="h", pid=7)
    members.attach(killed)
    with pytest.raises(RunLocked):
        await shared_actors.check_admission(config, role=Role.LEARNER, restores="n")
    members.keep(killed.id)
    await shared_actors.check_admission(config, role=Role.LEARNER, restores="n", patience_s=60.0, poll_s=0.0)
    assert members.live() == []


@pytest.mark.parametrize(("command", "role"), [("generator", "generator"), ("learner", "learner"), ("up", "learner")])
def test_what_is_refused_has_started_nothing_and_says_one_line(
    command: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    async def refused(config: Config, *, role: Role, **_: object) -> None:
        raise RunMismatch(f"not this {role}")

    # The command sets this variable in this process. monkeypatch removes it after the test.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(cluster, "join", lambda *_, **__: None)
    monkeypatch.setattr(shared_actors, "check_admission", refused)
    monkeypatch.setattr(start, "Inputs", started)
    monkeypatch.setattr(pool.ray, "remote", started)
    overrides = [f"run.dir={tmp_path / 'runs'}", "ray.address='10.0.0.7:6379'"]
    result = CliRunner().invoke(app, [command, "-c", str(QUICKSTART), *overrides])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"error: not this {role}"
    assert not (tmp_path / "runs").exists()


@pytest.mark.asyncio
async def test_leaving_a_run_whose_coordinator_is_gone_raises_nothing() -> None:
    calls: list[object] = []

    async def gone(method: object, *_: object) -> None:
        calls.append(method)
        raise ActorGone("the coordinator has ended")

    coordinator: Any = SimpleNamespace(call=gone)
    await shared_actors.leave_run(coordinator, shared_actors.new_deployment(Role.LEARNER), namespace="run")
    assert calls == [Registry.detach]


class Rows:
    """Replaces a data-plane client. `registered` says whether its index knows the training partition."""

    def __init__(self, registered: bool) -> None:
        self.registered = registered
        self.closed = False

    def fields_of(self, samples: list[str], partition: str) -> set[str]:
        assert (samples, partition) == ([], TRAIN_PARTITION)
        if not self.registered:
            raise KeyError("not registered")
        return {"input_ids"}

    def close(self) -> None:
        self.closed = True


@pytest.mark.asyncio
@pytest.mark.fault("F41")
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("lives", [False, True])
async def test_a_learner_that_restores_ends_a_buffer_whose_index_has_died(
    restores: bool, published: bool, lives: bool, a_run_is_there: RunThere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner registers the partition before it publishes. Until then, an index without it need not be a new one."""
    config, opened = Config(), list[Rows]()
    members = a_run_is_there(config)
    members.published = Version(1, 4) if published else None
    ended: list[str] = []
    # Another deployment starts a new buffer before the weight store has ended.
    ids = {"buffer": iter([1, 9, 9]), "weights": iter([2, 2, None])}

    def open_client(_: Config, *, here: bool) -> Rows:
        assert here, "a learner opens it, so the index belongs on its node"
        opened.append(Rows(lives))
        return opened[-1]

    def end_actors(namespace: str) -> dict[str, int]:
        ended.append(namespace)
        return {"buffer": 1, "weights": 2}

    monkeypatch.setattr(shared_actors, "open_client", open_client)
    monkeypatch.setattr(shared_actors, "end_actors", end_actors)
    monkeypatch.setattr(shared_actors, "_actor_id", lambda name, _: next(ids[name]))
    monkeypatch.setattr(shared_actors, "POLL_S", 0.0)
    learner = shared_actors.new_deployment(Role.LEARNER)
    client = await shared_actors.open_data_plane(config, deployment=learner, restores=restores)
    gone = restores and published and not lives
    assert ended == ([config.run.name] if gone else [])
    assert client is opened[-1]
    assert [rows.closed for rows in opened] == ([True, False] if gone else [False])
    assert next(ids["weights"], "ended") == ("ended" if gone else 2), "the weight store must have ended"

    members.attach(Deployment(id="l", role=Role.LEARNER, host="h", pid=7))
    with pytest.raises(RunLocked):
        await shared_actors.open_data_plane(config, deployment=learner, restores=True)
    assert len(ended) == gone, "the run of a learner that lives is left alone"


@pytest.mark.fault("F6")
@pytest.mark.parametrize("nonce", ["n0", "n1"])
def test_a_run_that_no_learner_can_continue_is_ended_from_its_own_directory_only(
    nonce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    ids = iter([1, None])

    async def run_nonce(_: object) -> str:
        return "n0"

    def end_actors(namespace: str) -> dict[str, int]:
        ended.append(namespace)
        return {"buffer": 1}

    monkeypatch.setattr(shared_actors, "find_run", lambda _: SimpleNamespace(call=run_nonce))
    monkeypatch.setattr(shared_actors, "end_actors", end_actors)
    monkeypatch.setattr(shared_actors, "_actor_id", lambda *_: next(ids))
    monkeypatch.setattr(shared_actors, "POLL_S", 0.0)
    if nonce == "n1":
        with pytest.raises(AnotherRun):
            shared_actors.end_lost_run(Path("runs/quick"), nonce)
        assert ended == []
        return
    shared_actors.end_lost_run(Path("runs/quick"), nonce)
    assert ended == ["quick"]
    assert next(ids, "asked until it had ended") == "asked until it had ended"


@pytest.mark.parametrize(
    ("state", "then"),
    [
        (RunState.RUNNING, RunState.FAILED),
        (RunState.PREEMPTED, RunState.STOPPED),
        (RunState.FINISHED, RunState.FINISHED),
    ],
)
def test_down_ends_a_run_also_if_its_generators_wait_for_a_learner(
    state: RunState, then: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Registry(shared={}, timeout_s=10.0, clock=lambda: 0.0)
    members.attach(Deployment(id="g", role=Role.GENERATOR, host="h", pid=1))
    members.set_state(state)

    async def call(method: Any, *arguments: Any) -> Any:
        if method is Coordinator.brief_status:
            return SimpleNamespace(state=members.state)
        if method is Registry.live and members.state in OVER and members.state is not RunState.PREEMPTED:
            members.detach("g")  # the generator reads the state, and leaves
        return method(members, *arguments)

    monkeypatch.setattr(shared_actors, "find_run", lambda _: SimpleNamespace(call=call))
    monkeypatch.setattr(shared_actors, "_shared_actors", lambda _: [])
    monkeypatch.setattr(shared_actors, "END_S", 1e-9)
    shared_actors.end_run("quick")
    assert (members.state, members.live()) == (then, [])


class AttachedCluster:
    """A fake cluster with the registry of a run. The answer to an attach is lost after the registry has booked it.
    `placements` has Ray's options of each actor by name."""

    def __init__(self, config: Config) -> None:
        self.placements: dict[str, dict[str, Any]] = {}
        self.members = Registry(shared=shared_config(config), timeout_s=10.0, clock=lambda: 0.0)
        self.ended: list[str] = []

    def options(self, *, name: str, **options: Any) -> "AttachedCluster":
        self.placements[name] = options
        return self

    def remote(self, *_: object) -> Any:
        return SimpleNamespace(
            __ray_ready__=SimpleNamespace(remote=self.ready), perform=SimpleNamespace(remote=self.perform)
        )

    async def ready(self) -> None:
        """Stands for Ray's answer that the actor is placed."""

    async def perform(self, call: Call) -> object:
        if call.method == "attach":
            self.members.attach(*call.arguments)
            raise ActorGone("the answer is lost")
        if call.method == "detach":
            return self.members.detach(*call.arguments)
        assert call.method == "start"
        return None


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Ray's list of nodes by one node, the head, on which this process is."""
    head = {"NodeID": "head", "Alive": True, "Resources": {HEAD_NODE_RESOURCE_NAME: 1.0}}
    here = SimpleNamespace(get_node_id=lambda: "head")
    monkeypatch.setattr(shared_actors.ray, "nodes", lambda: [head])
    monkeypatch.setattr(shared_actors.ray, "get_runtime_context", lambda: here)


@pytest.fixture
def there(one_node: None, monkeypatch: pytest.MonkeyPatch) -> AttachedCluster:
    fake = AttachedCluster(Config())
    monkeypatch.setattr(shared_actors.ray, "put", lambda tasks: tasks)
    monkeypatch.setattr(shared_actors.ray, "remote", lambda _: fake)
    monkeypatch.setattr(shared_actors, "end_actors", fake.ended.append)
    return fake


@pytest.mark.asyncio
@pytest.mark.fault("F6")
@pytest.mark.parametrize("others", [False, True])
async def test_a_learner_that_gets_no_answer_to_its_attach_does_not_keep_the_next_one_out(
    others: bool, there: AttachedCluster
) -> None:
    config = Config()
    if others:
        generator = Deployment(id="g", role=Role.GENERATOR, host="h", pid=1)
        there.members.attach(generator)
    with pytest.raises(ActorGone, match="the answer is lost"):
        await shared_actors.enter_run(config, deployment=shared_actors.new_deployment(Role.LEARNER), tasks=[])
    assert [member.id for member in there.members.live()] == (["g"] if others else [])
    assert there.ended == ([] if others else [config.run.name]), "the last one that leaves ends the run's actors"


@pytest.mark.asyncio
@pytest.mark.fault("F42")
@pytest.mark.parametrize("role", Role)
async def test_the_first_deployment_starts_the_shared_actors_away_from_the_generators(
    role: Role, there: AttachedCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate({"learner": {"node_labels": {"pool": "learner"}}})
    nodes = [
        {
            "NodeID": name, "Alive": True, "Resources": {HEAD_NODE_RESOURCE_NAME: 1.0} if name == "head" else {},
            "NodeManagerHostname": f"host-{name}", "NodeManagerAddress": "10.0.0.7",
        }
        for name in ("own", "head")
    ]  # fmt: skip
    monkeypatch.setattr(shared_actors.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(shared_actors.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "own"))
    monkeypatch.setattr(shared_actors, "node_of", lambda _: "head")
    with caplog.at_level(logging.INFO), pytest.raises(ActorGone, match="the answer is lost"):
        await shared_actors.enter_run(config, deployment=shared_actors.new_deployment(role), tasks=[])
    assert there.placements.keys() == {COORDINATOR, WEIGHTS}
    expected = control_placement(config, here=role is Role.LEARNER)
    for options in there.placements.values():
        assert {key: options[key] for key in expected} == expected
    assert "the run's buffer is on the node host-head (10.0.0.7), Ray's head; the run ends with it" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F32")
async def test_the_second_deployment_of_a_run_is_refused_if_its_prompts_are_not_those_of_the_first(
    one_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one creates the coordinator. Ray ignores the prompts that a later one passes to the constructor."""
    config = Config.model_validate({"data": {"dataset": "jsonl", "path": "rows.jsonl"}})
    actors: dict[type, Any] = {}

    async def ready() -> None:
        """Stands for Ray's answer that the actor is placed."""

    class NoRows:
        async def clear(self, keys: object) -> None:
            raise AssertionError("there are no rows")

        async def keys(self) -> list[str]:
            return []

    def create(kind: type, *arguments: Any) -> Any:
        if kind is shared_actors.CoordinatorActor and kind not in actors:
            coordinator = Coordinator(config=config, tasks=arguments[1], rows=NoRows(), started_s=0.0)
            monkeypatch.setattr(coordinator, "start", ready)  # it would open a port

            actors[kind] = SimpleNamespace(
                __ray_ready__=SimpleNamespace(remote=ready),
                perform=SimpleNamespace(remote=partial(perform, coordinator)),
            )
        return actors.setdefault(kind, None)

    def remote_class(kind: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: create(kind, *given)))

    monkeypatch.setattr(shared_actors.ray, "remote", remote_class)
    monkeypatch.setattr(shared_actors.ray, "put", lambda tasks: tasks)
    tasks = [Task(question=text, prompt=text, answer="", row=row) for row, text in enumerate("abc", start=2)]
    first, second = (shared_actors.new_deployment(role) for role in (Role.GENERATOR, Role.LEARNER))
    await shared_actors.enter_run(config, deployment=first, tasks=tasks)
    place = r"number 2 on, which is 'b' in the run \(row 3 of its dataset\)"
    message = rf"data\.path = rows\.jsonl on {second.host} has 2 training prompts, .* {place}"
    with pytest.raises(RunMismatch, match=message):
        await shared_actors.enter_run(config, deployment=second, tasks=[tasks[0], tasks[2]])
    await shared_actors.enter_run(config, deployment=second, tasks=tasks)
