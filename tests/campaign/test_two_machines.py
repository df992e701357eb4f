"""A run on two machines: its learner on the first, its generators on the second, and Ray between them as
configs/two_nodes.yaml describes it.

Only the end of a run writes a checkpoint in the tests of stops. So a run that is resumed has all steps only if its end
was normal. `TRIES=5` in the environment tries each way to stop a run five times.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import listening_sockets
import psutil
import pytest
import yaml
from kills import name_of
from listening_sockets import COLLECTIVES, Listener, NodeListener, documented, documented_on_nodes
from small_run import SETTINGS, made_model, model_at
from two_machines import REPOSITORY, Command, Machine, Switch, two_machines, why_not

from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps
from asyncrl.cli.restarts import RESTART_MENDS
from asyncrl.errors import PREEMPTED

POOLS = ("learner.node_labels={pool: learner}", "generator.node_labels={pool: generator}")
NODE = ("--num-cpus=4", f"--object-store-memory={2**29}")
READY_S = 400.0
"""Time limit until a Ray node runs, and until a run trains."""
ENDS_S = 200.0
"""Time limit until a command has ended."""
CUT_S = 40.0
"""Time for which the generators' machine is cut off. Ray gives up a node only later."""
TRIES = int(os.environ.get("TRIES", "1"))

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


class Cluster:
    """A Ray of the two machines, with a token file on each, and the directory of one run."""

    def __init__(self, machines: tuple[Machine, Machine, Switch], folder: Path, *, model: Path) -> None:
        self.first, self.second, self.switch = machines
        self.folder = folder
        self.model = model
        self.run = folder / "runs" / "two"
        token = secrets.token_hex(32)
        for machine in (self.first, self.second):
            (machine.home / ".ray").mkdir(mode=0o700)
            file = machine.home / ".ray" / "auth_token"
            file.touch(mode=0o600)
            file.write_text(token)

    def node(self, machine: Machine, *options: str, **environment: str) -> Command:
        """Starts a Ray node on a machine, and waits until it runs."""
        log = self.folder / f"ray-{machine.name}.log"
        log.unlink(missing_ok=True)
        words = ["ray", "start", "--disable-usage-stats", "--block", *NODE, *options]
        node = machine.start(*words, log=log, **environment)
        node.wait_for(lambda: "Ray runtime started" in node.output(), READY_S, "a Ray node")
        return node

    def words(self, command: str, *overrides: str) -> list[str]:
        """Returns the words of `asyncrl up`, `learner` or `generator`."""
        of_run = [*model_at(self.model), f"run.dir={self.run.parent}", f"run.name={self.run.name}"]
        return ["asyncrl", command, "-c", "quickstart", *SETTINGS, *of_run, *overrides]

    def start(self, machine: Machine, command: str, *overrides: str) -> Command:
        """Starts `asyncrl up`, `learner` or `generator` on a machine."""
        log = self.folder / f"{command}.log"
        return machine.start(*self.words(command, *overrides), log=log)

    def steps(self) -> int:
        """Returns the number of steps that the run's records have."""
        path = self.run / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def resumed(self) -> list[int]:
        """Returns the step at which each restart of the run began."""
        info = json.loads((self.run / "run.json").read_bytes())
        return [each["step"] for each in info["resumed"]]

    def lost_steps(self) -> int:
        path = self.run / "lost-steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def train(self, command: Command, steps: int, limit_s: float = READY_S) -> None:
        """Waits until the run has trained `steps` more steps than now."""
        until = self.steps() + steps
        command.wait_for(lambda: self.steps() >= until, limit_s, f"step {until}")

    def audit(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl", "audit", str(self.run)], cwd=REPOSITORY, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_model(tmp_path_factory.mktemp("models") / "speller")


@pytest.fixture
def cluster(model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_machines(tmp_path / "machines", shared=[tmp_path_factory.getbasetemp()]) as machines:
        yield Cluster(machines, tmp_path, model=model)


class Supervised:
    """A command that is started again when it has ended, as a supervisor does. `ended` has its exit codes."""

    def __init__(self, begin: Callable[[], Command]) -> None:
        self.begin = begin
        self.command = begin()
        self.ended: list[int] = []

    def look(self) -> None:
        if (code := self.command.returncode()) is not None:
            self.ended.append(code)
            self.command = self.begin()


class TwoNodeRun:
    """A run with its learner on the first machine and its generators on the second. Ray's head is on `head`."""

    def __init__(self, cluster: Cluster, *overrides: str, head: Machine, options: Sequence[str] = ()) -> None:
        self.cluster = cluster
        first, second = cluster.first, cluster.second
        label = {first.name: "--labels=pool=learner", second.name: "--labels=pool=generator"}
        self.head = cluster.node(head, "--head", label[head.name], *options)
        other = second if head is first else first
        join = partial(cluster.node, other, f"--address={head.name}:6379", label[other.name])
        self.node = Supervised(join)
        words = [*POOLS, f"ray.address={head.name}:6379", *overrides]
        self.generator = Supervised(partial(cluster.start, second, "generator", *words))
        self.learner = cluster.start(first, "learner", *words)

    def train(self, steps: int) -> None:
        """Waits for more steps. Starts the second Ray node and the generator again if they have ended."""
        until = self.cluster.steps() + steps

        def trained() -> bool:
            self.node.look()
            self.generator.look()
            return self.cluster.steps() >= until

        self.learner.wait_for(trained, READY_S, f"step {until}")

    def stop(self) -> None:
        """Ends the learner, and asserts that its last checkpoint has all steps, and that the audit passes."""
        self.learner.signal(signal.SIGTERM)
        assert self.learner.wait(ENDS_S) == PREEMPTED, self.learner.output()[-4000:]
        assert self.generator.command.wait(ENDS_S) == PREEMPTED, self.generator.command.output()[-4000:]
        assert self.head.returncode() is None
        assert complete_steps(self.cluster.run / CHECKPOINTS)[-1] == self.cluster.steps()
        self.cluster.audit()


@pytest.fixture(scope="module")
def public_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodeRun]:
    """The commands of configs/two_nodes.yaml. Only the end of the run writes a checkpoint."""
    folder = tmp_path_factory.mktemp("public")
    with two_machines(folder / "machines", shared=[tmp_path_factory.getbasetemp()]) as machines:
        cluster = Cluster(machines, folder, model=model)
        public = ["learner.ranks=2", "metrics.host=node", "--allow-public", "checkpoint.every_steps=1000000"]
        run = TwoNodeRun(cluster, *public, head=cluster.first)
        run.train(3)
        yield run


def metrics_ports(cluster: Cluster) -> str:
    """Returns the ports of metrics of the run's processes, as JSON."""
    targets = json.loads((cluster.run / "metrics" / "targets.json").read_bytes())
    served = [each for group in targets if group["labels"]["role"] != "ray" for each in group["targets"]]
    return json.dumps([int(each.rpartition(":")[2]) for each in served])


def test_up_listens_where_the_security_page_says_on_a_host_whose_name_leads_to_its_network(cluster: Cluster) -> None:
    """`tests/integration/test_up.py` compares the table on a host whose name may lead to its loopback interface."""
    command = cluster.start(cluster.first, "up", "learner.ranks=2")
    cluster.train(command, 3)
    answer = cluster.first.call("python", "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))")
    assert answer.strip() == cluster.first.address
    script = [sys.executable, listening_sockets.__file__, "up", metrics_ports(cluster)]
    listening = {Listener(*row) for row in json.loads(cluster.first.call(*script))}
    assert listening == documented()
    of_the_model = {(row.process, row.address) for row in listening if row.process in COLLECTIVES}
    assert of_the_model == {(kind, "127.0.0.1") for kind in COLLECTIVES}


def test_the_processes_of_two_nodes_listen_where_the_security_page_says(public_run: TwoNodeRun) -> None:
    """The host names resolve to addresses that the other machine reaches. The table has no other row."""
    cluster = public_run.cluster
    script = [sys.executable, listening_sockets.__file__, "nodes", metrics_ports(cluster)]
    learner, generators = (
        {NodeListener(*row) for row in json.loads(machine.call(*script))} for machine in (cluster.first, cluster.second)
    )
    assert (learner, generators) == documented_on_nodes()
    of_the_model = {(row.process, row.address) for row in learner | generators if row.process in COLLECTIVES}
    assert of_the_model == {(kind, "127.0.0.1") for kind in COLLECTIVES}


def test_the_generators_machine_is_cut_off_and_the_learner_keeps_its_steps(public_run: TwoNodeRun) -> None:
    run, cluster = public_run, public_run.cluster
    began_s = time.monotonic()
    with cluster.switch.without(cluster.second):
        time.sleep(CUT_S)  # the partition
    print(f"{cluster.steps()} steps after {time.monotonic() - began_s:.0f} s")
    run.train(5)
    print(f"{cluster.steps()} steps after {time.monotonic() - began_s:.0f} s", run.node.ended, run.generator.ended)
    assert set(run.generator.ended) <= {RESTART_MENDS}
    run.stop()
    assert (cluster.resumed(), cluster.lost_steps()) == ([], 0)


def test_the_learners_machine_is_cut_off_and_the_run_resumes_from_its_newest_checkpoint(cluster: Cluster) -> None:
    """The head is on the other machine, and Ray gives up the learner's node."""
    options = ["--include-dashboard=false"]
    run = TwoNodeRun(cluster, "checkpoint.every_steps=3", head=cluster.second, options=options)
    run.train(5)
    began_s = time.monotonic()
    with cluster.switch.without(cluster.first):
        run.learner.wait_for(lambda: run.generator.command.returncode() is not None, READY_S, "Ray gives up the node")
    print(f"{cluster.steps()} steps after {time.monotonic() - began_s:.0f} s")
    run.train(5)
    print(f"{cluster.steps()} steps after {time.monotonic() - began_s:.0f} s", run.node.ended, run.generator.ended)
    print(f"resumed at {cluster.resumed()}, {cluster.lost_steps()} steps trained again")
    assert set(run.generator.ended) <= {RESTART_MENDS}
    run.stop()
    assert len(cluster.resumed()) == 1
    assert not [*cluster.run.glob("checkpoints/lost-*/*/COMPLETE")], "a newer checkpoint was not used"


# --- autoscaling ---------------------------------------------------------------------------------------------------

AUTOSCALED = (
    "generator.autoscale={max: 2, dwell_s: 10}",
    "generator.max_starts_per_s=2",
    "staleness.max_versions=3",
    "learner.groups_per_step=8",
    "checkpoint.every_steps=1000000",
    "generator.startup_timeout_s=900",  # the machine may be busy
)
FROZEN_S = 8.0
"""Two replicas start the groups of a step in a quarter of this time."""
CHANGE = re.compile(r"generator\.autoscale: from (\d) to (\d) replicas, because (the learner|the staleness limit)")


def test_a_replica_is_added_while_the_learner_waits_and_drained_while_the_generators_wait(cluster: Cluster) -> None:
    """At first, the only replica may start two groups a second, and the learner waits. Then the learner's rank is
    frozen again and again, so that the generators wait. No group is lost."""
    run = TwoNodeRun(cluster, *AUTOSCALED, head=cluster.first)
    added, drained = ("1", "2", "the learner"), ("2", "1", "the staleness limit")

    def changes() -> list[tuple[str, str, str]]:
        return CHANGE.findall(run.generator.command.output())

    def engines(node: Command) -> int:
        return sum(name_of(each).startswith("VLLM::EngineCore") for each in node.family())

    run.learner.wait_for(changes, READY_S + 900, "a second replica is wanted")
    assert changes() == [added]
    run.learner.wait_for(lambda: engines(run.node.command) == 2, 900, "a second engine")
    [rank] = [each for each in run.head.family() if name_of(each).startswith("learner rank")]
    deadline_s = time.monotonic() + 600
    while len(changes()) == 1:
        assert time.monotonic() < deadline_s, run.learner.output()[-4000:]
        trained = cluster.steps()
        frozen_for(rank, FROZEN_S)
        run.learner.wait_for(lambda trained=trained: cluster.steps() > trained, 120, "a step")
    assert changes() == [added, drained]
    run.learner.wait_for(lambda: engines(run.node.command) == 1, 300, "the end of one engine")
    assert engines(run.head) == 0
    run.stop()
    summary = json.loads((cluster.run / "summary.json").read_bytes())
    assert (summary["ledger_closed"], summary["groups_failed"]) == (True, {})
    assert summary["tokens_thrown_away"] == 0, "the drained replica has finished its groups"


def frozen_for(process: psutil.Process, seconds: float) -> None:
    """Stops a process for some seconds, and lets it go on."""
    process.suspend()
    try:
        time.sleep(seconds)
    finally:
        process.resume()


# --- stops ---------------------------------------------------------------------------------------------------------


class Stops:
    """A run that is stopped and resumed again and again."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ends: list[int] = []

    def assert_nothing_lost(self) -> None:
        """Asserts that the run was stopped, and that its newest checkpoint has all steps of its records."""
        cluster = self.cluster
        assert json.loads((cluster.run / "run.json").read_bytes())["state"] == "stopped"
        assert complete_steps(cluster.run / CHECKPOINTS)[-1] == cluster.steps()
        assert (cluster.resumed(), cluster.lost_steps()) == (self.ends, 0)
        self.ends.append(cluster.steps())


def down(cluster: Cluster, _: Command) -> None:
    print(cluster.first.call("asyncrl", "down", str(cluster.run)))


WAYS: dict[str, tuple[Callable[[Cluster, Command], object], int]] = {
    "asyncrl down": (down, 0),
    "TERM to the parent": (lambda _, command: command.process.terminate(), PREEMPTED),
    "TERM to the child": (lambda _, command: command.process.children()[0].terminate(), PREEMPTED),
    "TERM to the process group": (lambda _, command: os.killpg(command.process.pid, signal.SIGTERM), PREEMPTED),
}
"""Each way to stop `asyncrl up` with a Ray of its own, and the exit code."""


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_loses_no_step(cluster: Cluster, way: str) -> None:
    stop, code = WAYS[way]
    stops = Stops(cluster)
    for attempt in range(TRIES):
        command = cluster.start(cluster.first, "up", "checkpoint.every_steps=1000000")
        cluster.train(command, 2 + attempt)
        stop(cluster, command)
        assert command.wait(ENDS_S) == code, command.output()[-4000:]
        stops.assert_nothing_lost()
    print(f"{way}: {TRIES} tries, steps {stops.ends}")
    cluster.audit()


def pod(group: str) -> dict[str, Any]:
    """Returns the container of a group of deploy/kuberay."""
    spec = yaml.safe_load((REPOSITORY / "deploy" / "kuberay" / "base" / "raycluster.yaml").read_text())["spec"]
    groups = {each["groupName"]: each for each in spec["workerGroupSpecs"]} | {"head": spec["headGroupSpec"]}
    [found] = groups[group]["template"]["spec"]["containers"]
    return dict(found)


def pre_stop(group: str) -> list[str]:
    return list(pod(group)["lifecycle"]["preStop"]["exec"]["command"])


@pytest.mark.parametrize("way", ["ray job stop", "preStop"])
def test_the_stop_of_a_job_loses_no_step(cluster: Cluster, way: str) -> None:
    first, second = cluster.first, cluster.second
    [stop_s] = [each["value"] for each in pod("head")["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    options = ["--head", "--labels=pool=learner", "--dashboard-host=0.0.0.0"]
    cluster.node(first, *options, RAY_JOB_STOP_WAIT_TIME_S=stop_s)
    node = cluster.node(second, f"--address={first.name}:6379", "--labels=pool=generator")
    client = {"RAY_API_SERVER_ADDRESS": f"http://{first.name}:8265"}
    words = cluster.words("up", *POOLS, "checkpoint.every_steps=1000000", "ray.address=auto")
    stops = Stops(cluster)
    for job in [f"try-{number}" for number in range(TRIES)]:
        second.call("ray", "job", "submit", "--no-wait", f"--submission-id={job}", "--", *words, **client)
        cluster.train(node, 2)
        if way == "ray job stop":
            print(second.call("ray", "job", "stop", job, **client))
        else:
            print(second.call(*pre_stop("head"), FQ_RAY_IP=first.name))
        assert "was stopped" in second.call("ray", "job", "status", job, **client)
        stops.assert_nothing_lost()
    print(f"{way}: {TRIES} tries, steps {stops.ends}")
    cluster.audit()


@pytest.mark.parametrize("group", ["learner", "generator"])
def test_the_end_of_a_pod_of_a_pool_loses_no_step_and_the_run_goes_on_in_the_next_pod(
    cluster: Cluster, group: str
) -> None:
    """The pool's pod is the second machine: its preStop command runs there, and then its Ray node is ended."""
    first, second = cluster.first, cluster.second
    other = {"learner": "generator", "generator": "learner"}[group]
    options = ["--head", f"--labels=pool={other}", "--dashboard-host=0.0.0.0", '--resources={"driver": 1}']
    head = cluster.node(first, *options, RAY_JOB_STOP_WAIT_TIME_S=str(int(ENDS_S)))
    join = partial(cluster.node, second, f"--address={first.name}:6379", f"--labels=pool={group}")
    node = join()
    client = {"RAY_API_SERVER_ADDRESS": f"http://{first.name}:8265"}
    submit = ["ray", "job", "submit", "--no-wait", "--submission-id=it", '--entrypoint-resources={"driver": 1}', "--"]
    words = cluster.words("up", *POOLS, "checkpoint.every_steps=1000000", "ray.address=auto")
    first.call(*submit, *words, **client)
    for attempt in range(TRIES):
        cluster.train(head, 2 + attempt)
        print(second.call(*pre_stop(group), limit_s=ENDS_S))
        saved = cluster.steps()
        if group == "learner":
            assert complete_steps(cluster.run / CHECKPOINTS)[-1] == saved
        node.signal(signal.SIGTERM)
        node.wait(ENDS_S)
        node = join()
        cluster.train(head, 3)
        assert "RUNNING" in first.call("ray", "job", "status", "it", **client)
        assert cluster.lost_steps() == 0
        assert len(cluster.resumed()) == (attempt + 1 if group == "learner" else 0)
    first.call("ray", "job", "stop", "it", **client)
    cluster.audit()
