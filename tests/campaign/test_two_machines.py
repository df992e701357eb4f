"""A run on two machines: its learner on the first, its generators on the second, and Ray between them as
configs/two_nodes.yaml describes it.

Only the end of a run writes a checkpoint in the tests of stops. So a run that is resumed has all steps only if its end
was normal. `TRIES=5` in the environment tries each way to stop a run five times.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import listening_sockets
import pytest
import yaml
from listening_sockets import COLLECTIVES, NodeListener, documented_on_nodes
from small_run import SETTINGS, made_model, model_at
from two_machines import REPOSITORY, Command, Machine, Switch, two_machines, why_not

from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps
from asyncrl.cli.restarts import PREEMPTED, RESTART_MENDS

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


def test_the_processes_of_two_nodes_listen_where_the_security_page_says(public_run: TwoNodeRun) -> None:
    """The host names resolve to addresses that the other machine reaches. The table has no other row."""
    cluster = public_run.cluster
    targets = json.loads((cluster.run / "metrics" / "targets.json").read_bytes())
    served = [each for group in targets if group["labels"]["role"] != "ray" for each in group["targets"]]
    metrics = json.dumps([int(each.rpartition(":")[2]) for each in served])
    script = [sys.executable, listening_sockets.__file__, metrics]
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


@pytest.mark.parametrize("way", ["ray job stop", "preStop"])
def test_the_stop_of_a_job_loses_no_step(cluster: Cluster, way: str) -> None:
    first, second = cluster.first, cluster.second
    pods = yaml.safe_load((REPOSITORY / "deploy" / "kuberay" / "base" / "raycluster.yaml").read_text())
    [container] = pods["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    [stop_s] = [each["value"] for each in container["env"] if each["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
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
            print(second.call(*container["lifecycle"]["preStop"]["exec"]["command"], FQ_RAY_IP=first.name))
        assert "was stopped" in second.call("ray", "job", "status", job, **client)
        stops.assert_nothing_lost()
    print(f"{way}: {TRIES} tries, steps {stops.ends}")
    cluster.audit()
