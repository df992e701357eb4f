"""A dry run of the Slurm script with stand-ins for Slurm's commands, which record how they were called.

The decisions of the script are real: the nodes of each pool, the reaction to signals, and restarts. The stand-in for
`srun` runs its task in a process of its own. Like srun, it kills the task when it gets TERM, and only `scancel` sends a
TERM to the task. tests/campaign/test_slurm_jobs.py submits the script to a real Slurm.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.load import load_config

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "asyncrl.sbatch"
QUICKSTART = SCRIPT.parents[2] / "configs" / "quickstart.yaml"
JOB = "1234567"
ADDRESS = f"10.0.0.1:{20000 + int(JOB) % 20000}"
pytestmark = pytest.mark.slow

FAR_S = 120.0
"""Time limit of a failing test. A passing test does not wait that long."""

SRUN = """#!/usr/bin/env -S {python} -S -E
import json, os, pathlib, signal, stat, sys, time
argv = sys.argv[1:]
command = argv[next(i for i, word in enumerate(argv) if not word.startswith("--")):]
shell = command[:3] if command[0] == "bash" else []
command = command[4:] if shell else command  # bash -c SCRIPT NAME command…
token = pathlib.Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "/missing"))
record = {{
    "options": argv[: len(argv) - len(command)], "shell": shell, "command": command,
    "mode": os.environ.get("RAY_AUTH_MODE"),
    "token": token.read_text() if token.exists() else None,
    "token_mode": stat.S_IMODE(token.stat().st_mode) if token.exists() else None,
}}
def write(**more):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(record | more) + "\\n")
def ended(*_):
    write(ended=True)
    time.sleep(float(os.environ.get("END_S", "0")))
    os._exit(int(os.environ.get("CODE_AFTER_TERM", "76")))
write()
steps = pathlib.Path(os.environ["RECORD"]).parent / "steps"
steps.mkdir(exist_ok=True)
task = os.fork()
if task:
    def forced(*_):
        write(forced=True)
        os.kill(task, signal.SIGKILL)
    signal.signal(signal.SIGTERM, forced)
    step, name = steps / str(os.getpid()), argv[[word.startswith("--job-name=") for word in argv].index(True)]
    step.with_suffix(".new").write_text(f"{{name.partition('=')[2]}} {{task}}")
    step.with_suffix(".new").rename(step)
    code = os.waitstatus_to_exitcode(os.waitpid(task, 0)[1])
    step.unlink()
    sys.exit(code if code >= 0 else 128 - code)
signal.signal(signal.SIGTERM, ended)
if command[0] == "hostname":
    print(os.environ.get("ADDRESS_OF_HEAD", "10.0.0.1"))
elif command[:2] == ["ray", "start"]:
    time.sleep(300)
elif command[:2] == ["asyncrl", "learner"]:
    def all_others_came():
        called = [json.loads(line)["command"] for line in open(os.environ["RECORD"])]
        pools = [word for command in called for word in command if word.startswith("--labels=")]
        generators = [each[:2] for each in called].count(["asyncrl", "generator"])
        ends = os.environ.get("GENERATOR_EXITS", "").split()
        return generators > ends.count("75") and len(pools) >= int(os.environ["RAY_STEPS"])
    while not all_others_came():
        time.sleep(0.05)
    time.sleep(float(os.environ.get("LEARNER_S", "0")))
    sys.exit(int(os.environ.get("LEARNER_EXIT", "0")))
elif command[:2] == ["asyncrl", "generator"]:
    starts = [json.loads(line)["command"][:2] for line in open(os.environ["RECORD"])].count(command[:2])
    how = (os.environ.get("GENERATOR_EXITS", "").split() + ["0"] * starts)[starts - 1]
    if how == "stays":
        time.sleep(300)
    sys.exit(int(how))
"""
SQUEUE = """#!/bin/sh
if [ -n "$LATE" ] && [ ! -e late ]; then touch late; exit; fi
for step in steps/*[0-9]; do
  if [ -e "$step" ]; then echo "$SLURM_JOB_ID.${{step#steps/}} $(cut -d ' ' -f 1 "$step")"; fi
done
"""
SCANCEL = """#!/bin/sh
if [ "$1 $2" != "--ctld --signal=TERM" ]; then exit 2; fi
kill -TERM "$(cut -d ' ' -f 2 "steps/${{3#"$SLURM_JOB_ID".}}")"
"""
SCONTROL = """#!/bin/sh
case "$1" in
  show) printf '%s\\n' $NODES ;;
  requeue) echo "$2" >> requeued ;;
esac
"""
ASYNCRL = """#!/bin/sh
kept={kept}/$(printf '%s\\n' "$@" | cksum | tr ' ' -)
if [ ! -e "$kept" ]; then {python} -m asyncrl "$@" > "$kept.new" && mv "$kept.new" "$kept" || exit; fi
cat "$kept"
"""
"""The script calls `config check` and `config show`, whose output depends on their arguments only. So the output for
each list of arguments is kept for all jobs. If the command fails, nothing is kept."""

COMMANDS = {"srun": SRUN, "squeue": SQUEUE, "scancel": SCANCEL, "scontrol": SCONTROL, "asyncrl": ASYNCRL}


class Job:
    """A job with its working directory; it can be started there several times."""

    def __init__(self, folder: Path, *, kept: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in COMMANDS.items():
            (bin_folder / name).write_text(text.format(python=sys.executable, kept=kept))
            (bin_folder / name).chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(SCRIPT.parents[2]),
            "RECORD": str(folder / "calls"),
            "RAY_STEPS": "2",  # one step for the head and one for the generators; a test with more learner nodes sets 3
            "SLURM_JOB_ID": JOB,
            "SLURM_JOB_NODELIST": "n[1-4]",
            "NODES": "n1 n2 n3 n4",
        }
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT), "-c", str(QUICKSTART), *arguments],
            cwd=self.folder, env=self.environment | environment, text=True, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        return self.process

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Runs the script to its end. Returns its exit code and its messages."""
        process = self.start(*arguments, **environment)
        said = process.communicate(timeout=FAR_S)[1]
        return process.returncode, said

    def calls(self) -> list[dict[str, Any]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def commands(self, *begin: str) -> list[dict[str, Any]]:
        return [
            each
            for each in self.calls()
            if each["command"][: len(begin)] == list(begin) and not {"ended", "forced"} & set(each)
        ]

    def marked(self, mark: str) -> list[str]:
        """Returns the first two words of the commands whose record has `mark`, in their order: `ended` for a task that
        got TERM, `forced` for a step that srun killed."""
        return [" ".join(each["command"][:2]) for each in self.calls() if mark in each]

    def record_end(self, state: str, *, run: str = "runs/quickstart") -> None:
        """Writes the run.json of a run that ended."""
        (self.folder / run).mkdir(parents=True)
        (self.folder / run / "run.json").write_text(json.dumps({"name": run.split("/")[1], "state": state}, indent=2))

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the outputs of `asyncrl config`."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def job(tmp_path: Path, kept: Path) -> Iterator[Job]:
    job = Job(tmp_path, kept=kept)
    yield job
    if job.process is not None and job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGKILL)


def nodes_of(call: dict[str, Any]) -> str:
    [found] = [option.partition("=")[2] for option in call["options"] if option.startswith("--nodelist=")]
    for of in ("--nodes=", "--ntasks="):  # without --ntasks, Slurm takes the number of the job's tasks (SLURM_NTASKS)
        [count] = [option.partition("=")[2] for option in call["options"] if option.startswith(of)]
        assert int(count) == len(found.split(","))
    return str(found)


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + FAR_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)  # polls another process


def test_the_first_nodes_train_and_all_others_generate(job: Job) -> None:
    code, said = job.run("generator.replicas=2", LEARNER_NODES="2", RAY_STEPS="3")
    assert code == 0, said
    nodes = {nodes_of(call): call for call in job.commands("ray", "start")}
    head, learners, generators = nodes["n1"], nodes["n2"], nodes["n3,n4"]
    assert {"--head", "--node-ip-address=10.0.0.1", "--labels=pool=learner", "--block"} <= set(head["command"])
    for call, pool in ((learners, "learner"), (generators, "generator")):
        assert {f"--address={ADDRESS}", f"--labels=pool={pool}", "--block"} <= set(call["command"])
    [learner], [generator] = job.commands("asyncrl", "learner"), job.commands("asyncrl", "generator")
    assert (nodes_of(learner), nodes_of(generator)) == ("n1", "n3")
    for call, pool in ((learner, "learner"), (generator, "generator")):
        assert call["command"][2:4] == ["--address", ADDRESS]
        assert {"generator.replicas=2", "metrics.host=node", f"{pool}.node_labels={{pool: {pool}}}"} <= set(
            call["command"]
        )
    assert job.requeued is False


def test_the_run_may_use_three_quarters_of_the_drain_unless_the_user_says_otherwise(job: Job, tmp_path: Path) -> None:
    """The file with this default is the first one, so that each file and override of the user changes it."""
    own = tmp_path / "own.yaml"
    own.write_text("run: {shutdown_grace_s: 33.0}")
    job.start("-c", str(own), DRAIN_S="100", LEARNER_S="300")
    wait_for(lambda: job.commands("asyncrl", "learner") and job.commands("asyncrl", "generator"))
    for pool in ("learner", "generator"):
        [call] = job.commands("asyncrl", pool)
        words = call["command"]
        files = [Path(words[place + 1]) for place, word in enumerate(words) if word == "-c"]
        assert files[1:] == [QUICKSTART, own]
        assert load_config(files[:2]).run.shutdown_grace_s == 75
        assert load_config(files).run.shutdown_grace_s == 33


def test_a_ray_node_that_does_not_start_is_started_again_except_the_head(job: Job) -> None:
    assert job.run()[0] == 0
    tried = job.folder / "tried"
    for node in job.commands("ray", "start"):
        tried.unlink(missing_ok=True)
        options = [option for option in node["command"] if option == "--head"]
        failing = ["sh", "-c", f"echo >> {tried}; exit 1", "ray", *options]
        for command, code in ((failing, 1), (["true", *options], 0)):
            words = [*node["shell"], "ray-node", *command]
            assert subprocess.run(words, env=job.environment, check=False).returncode == code
        assert tried.read_text().count("\n") == (1 if options else 3)


RAY_NODE = """
import os, signal, sys, time
folder = sys.argv[-1].removeprefix("--temp-dir=")
os.mkdir(folder, 0o777)
def ended(*_):
    open(os.path.join(folder, "log"), "w")
    sys.exit(1)
signal.signal(signal.SIGTERM, ended)
print(folder, flush=True)
while True:
    time.sleep(0.05)
"""
"""A Ray node that writes to its folder when it ends."""


def test_rays_folder_is_private_and_short_and_goes_with_the_step(job: Job) -> None:
    assert job.run()[0] == 0
    for node in job.commands("ray", "start"):
        words = [*node["shell"], "ray-node", sys.executable, "-c", RAY_NODE]
        step = subprocess.Popen(
            words, env=job.environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )  # fmt: skip
        assert step.stdout is not None
        folder = Path(step.stdout.readline().strip())
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        socket = folder / "session_2026-11-30_19-51-42_123456_4194304" / "sockets" / "plasma_store.1"
        assert len(os.fsencode(socket)) <= 107 - len("999")  # numbers of jobs may have three digits more
        os.killpg(step.pid, signal.SIGTERM)  # as Slurm signals all processes of a step
        assert step.wait(FAR_S) == 0
        assert not folder.parent.exists()


def test_every_step_has_the_token_and_no_argument_shows_it(job: Job) -> None:
    assert job.run()[0] == 0
    calls = job.commands()
    [token] = {call["token"] for call in calls}
    assert len(token) == 64
    assert {call["mode"] for call in calls} == {"token"}
    assert {call["token_mode"] for call in calls} == {0o600}
    assert not [call for call in calls if token in " ".join(call["command"] + call["options"])]
    assert not list(job.folder.rglob("ray-token")), "the token outlived its job"


def test_another_start_has_another_token(job: Job) -> None:
    assert job.run()[0] == 0
    assert job.run(SLURM_RESTART_COUNT="1")[0] == 0
    assert len({call["token"] for call in job.calls() if call["token"]}) == 2


def test_the_commands_are_what_asyncrl_takes(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--help` appended, the options must exist. The overrides must be a valid configuration."""
    assert job.run()[0] == 0
    monkeypatch.chdir(job.folder)
    for command in ("learner", "generator"):
        [call] = job.commands("asyncrl", command)
        _, _, address, _, allow, *given = call["command"]
        for words in ([command, address, "x", allow, "--help"], ["config", "check", allow, *given]):
            done = CliRunner().invoke(app, words)
            assert done.exit_code == 0, done.output


def test_metrics_are_read_from_other_nodes_whatever_the_user_says(job: Job) -> None:
    assert job.run("metrics.host=127.0.0.1")[0] == 0
    for command in ("learner", "generator"):
        [call] = job.commands("asyncrl", command)
        assert [word for word in call["command"] if word.startswith("metrics.host=")][-1] == "metrics.host=node"


def test_a_learner_that_fails_fails_the_job_and_does_not_bring_it_back(job: Job) -> None:
    code, _ = job.run(LEARNER_EXIT="7")
    assert code == 7
    assert job.requeued is False
    assert job.marked("ended") == ["ray start"] * 2  # no Ray node is left running


def test_generators_that_a_dead_process_of_the_run_ended_are_started_again(job: Job) -> None:
    code, said = job.run(GENERATOR_EXITS="75 75 1", LEARNER_EXIT="7")
    assert code == 7
    assert said.count("starting the generators again") == 2
    calls = job.commands("asyncrl", "generator")
    assert len(calls) == 3
    assert [call["command"] for call in calls] == [calls[0]["command"]] * 3


@pytest.mark.parametrize("code_after_term", ["0", "76"])
@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_pools_cleanly_and_only_the_time_limits_brings_the_job_back(
    number: signal.Signals, requeued: bool, code_after_term: str, job: Job
) -> None:
    process = job.start(LEARNER_S="600", GENERATOR_EXITS="stays", CODE_AFTER_TERM=code_after_term, END_S="1.5")
    wait_for(lambda: job.commands("asyncrl", "learner") and job.commands("asyncrl", "generator"))
    process.send_signal(number)
    said = process.communicate(timeout=FAR_S)[1]
    assert process.returncode == 0, said
    ended = job.marked("ended")  # each got one TERM
    assert (sorted(ended[:2]), ended[2:]) == (["asyncrl generator", "asyncrl learner"], ["ray start"] * 2)
    assert job.marked("forced") == []
    assert job.requeued is requeued


def test_a_pool_whose_step_slurm_does_not_know_yet_is_signalled_later(job: Job) -> None:
    process = job.start(LEARNER_S="600", GENERATOR_EXITS="stays", LATE="1")
    wait_for(lambda: job.commands("asyncrl", "learner") and job.commands("asyncrl", "generator"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(FAR_S) == 0
    assert sorted(job.marked("ended")[:2]) == ["asyncrl generator", "asyncrl learner"]


def test_generators_end_before_ray_when_the_learner_has_ended(job: Job) -> None:
    assert job.run(GENERATOR_EXITS="stays")[0] == 0
    assert job.marked("ended") == ["asyncrl generator", "ray start", "ray start"]


def test_a_learner_that_was_ended_from_outside_does_not_end_the_job_normally(job: Job) -> None:
    assert job.run(LEARNER_EXIT="76")[0] == 76
    assert job.requeued is False


def test_a_learner_that_does_not_end_in_time_is_named(job: Job) -> None:
    process = job.start(LEARNER_S="600", END_S="600", DRAIN_S="2", RAY_ENDS_S="1")
    wait_for(lambda: job.commands("asyncrl", "learner"))
    process.send_signal(signal.SIGUSR1)
    said = process.communicate(timeout=FAR_S)[1]
    assert process.returncode == 128 + signal.SIGKILL
    assert "the learner did not end within DRAIN_S = 2 s" in said
    assert {"asyncrl learner", "ray start"} <= set(job.marked("forced"))
    assert job.requeued is True


def test_a_run_that_finished_while_it_was_asked_to_end_is_not_brought_back(job: Job) -> None:
    process = job.start(LEARNER_S="600")
    wait_for(lambda: job.commands("asyncrl", "learner"))
    job.record_end("finished")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(FAR_S) == 0
    assert job.requeued is False


def test_restarts_are_bounded(job: Job) -> None:
    process = job.start(LEARNER_S="600", SLURM_RESTART_COUNT="3", MAX_RESTARTS="3")
    wait_for(lambda: job.commands("asyncrl", "learner"))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(FAR_S) == 0
    assert job.requeued is False


@pytest.mark.parametrize("state", ["running", "stopped", "failed", None])
def test_a_restart_gives_the_same_commands_which_resume_the_run(state: str | None, job: Job) -> None:
    assert job.run("learner.total_steps=100")[0] == 0
    if state is not None:
        job.record_end(state)
    assert job.run("learner.total_steps=100", SLURM_RESTART_COUNT="1")[0] == 0
    first, second = job.commands("asyncrl", "learner")
    assert first["command"] == second["command"]


@pytest.mark.parametrize("run", ["runs/quickstart", "runs/20261122", "my runs/quick"])
def test_a_restart_of_what_is_trained_starts_nothing(run: str, job: Job) -> None:
    """Also for a name that YAML quotes, and in a folder with a blank."""
    job.record_end("finished", run=run)
    folder, name = run.split("/")
    code, said = job.run(f'run.name="{name}"', f"run.dir={folder}", SLURM_RESTART_COUNT="1")
    assert code == 0
    assert "every step is trained" in said
    assert job.commands("asyncrl", "learner") == []


def test_a_configuration_that_cannot_run_starts_nothing(job: Job) -> None:
    code, said = job.run("staleness.max_version=1")
    assert code == 2
    assert "unknown key staleness.max_version" in said
    assert job.calls() == []


@pytest.mark.parametrize(("nodes", "learners"), [("n1", "1"), ("n1 n2", "0"), ("n1 n2", "-1")])
def test_an_allocation_without_room_for_two_pools_is_refused(nodes: str, learners: str, job: Job) -> None:
    code, said = job.run(NODES=nodes, LEARNER_NODES=learners)
    assert code == 2
    assert f"LEARNER_NODES = {learners} of {len(nodes.split())} nodes leaves no node to train or to generate" in said
    assert job.calls() == []


def test_a_job_array_is_refused_because_its_jobs_would_share_a_run(job: Job) -> None:
    code, said = job.run(SLURM_ARRAY_JOB_ID=JOB)
    assert code == 2
    assert "submit one job for each run" in said
    assert job.calls() == []


def test_a_configuration_may_have_the_metrics_host_that_the_pools_get(job: Job) -> None:
    assert job.run("metrics.host=node")[0] == 0


def test_a_head_that_nobody_else_can_reach_is_refused(job: Job) -> None:
    for address in ("127.0.1.1", "::1", "2001:db8::5"):
        code, said = job.run(ADDRESS_OF_HEAD=address)
        assert code == 2
        assert f"resolves to {address}, which other nodes cannot reach; set HEAD_IP" in said
    assert job.commands("ray", "start") == []


def test_of_the_addresses_of_the_head_the_first_one_of_ipv4_is_taken(job: Job) -> None:
    assert job.run(ADDRESS_OF_HEAD="2001:db8::5 10.0.0.5 10.0.0.6")[0] == 0
    assert {word for call in job.commands("ray", "start") for word in call["command"] if "node-ip-address" in word} == {
        "--node-ip-address=10.0.0.5"
    }
