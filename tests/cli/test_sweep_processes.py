"""The processes of a sweep: a run whose settings fit goes to the process of a run that has finished, and any other one
to a new process. A process ends after a run that did not finish, and takes no other run."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl import log_files
from asyncrl.cli.kept import KeptProcess
from asyncrl.cli.restarts import RESTART_MENDS
from asyncrl.cli.sweep import SweptRun, planned, train_all
from asyncrl.cli.sweep_processes import Ending, TrainingProcess, TrainingProcesses, kept_for
from asyncrl.errors import INTERRUPTED, ConfigError

pytestmark = pytest.mark.timeout(120)

FILES = [Path("quickstart")]
PROGRAM = """
import os, sys
sys.path[:0] = {path!r}
from asyncrl.cli.kept import KEPT
def app(words):
    name = (words or sys.argv[2:])[-1].partition('=')[2]
    print('output of', name, flush=True)
    with open('trained', 'a') as file:
        file.write(name + ' ' + str(os.getpid()) + chr(10))
    KEPT.in_order = True
    {text}
    raise SystemExit(0)
KEPT.train_each(app)
"""


def command(text: str, run: SweptRun) -> list[str]:
    """Returns the command of a run whose process keeps the protocol of `asyncrl.cli.kept`. It executes `text` in each
    of its runs: `name` is the name of the run, `words` is None in the first one."""
    return [sys.executable, "-S", "-c", PROGRAM.format(path=sys.path, text=text), "asyncrl", "up", f"run={run.name}"]


def trained(runs: Sequence[SweptRun], text: str = "pass", *, parallel: int = 1) -> tuple[list[str], list[list[str]]]:
    """Trains the runs. Returns the names of those that failed, and the runs of each process in order."""
    failed = asyncio.run(
        train_all(runs, [command(text, run) for run in runs], parallel=parallel, first=1, of=len(runs))
    )
    by_process: dict[str, list[str]] = {}
    for line in Path("trained").read_text().splitlines():
        name, _, pid = line.partition(" ")
        by_process.setdefault(pid, []).append(name)
    for pid in by_process:
        assert not Path(f"/proc/{pid}").exists(), "the sweep has left a process"
    return failed, [*by_process.values()]


def test_runs_that_differ_in_seed_and_objective_share_a_process_and_have_their_own_logs(in_tmp_path: None) -> None:
    runs = planned(FILES, ["algorithm.loss=tis,opsm"], name="mine", seeds=2)
    assert trained(runs) == ([], [[run.name for run in runs]])
    assert [run.log.read_text() for run in runs] == [f"output of {run.name}\n" for run in runs]


def test_a_full_log_of_a_run_continues_in_a_new_file_when_the_run_goes_on(
    in_tmp_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    runs = planned(FILES, [], name="mine", seeds=2)
    for run in runs:
        run.log.parent.mkdir(parents=True, exist_ok=True)
        run.log.write_text("before the kill\n")
    assert trained(runs) == ([], [[run.name for run in runs]])
    for run in runs:
        assert run.log.read_text() == f"output of {run.name}\n"
        assert Path(f"{run.log}.1").read_text() == "before the kill\n"


def test_a_run_with_another_engine_gets_another_process(in_tmp_path: None) -> None:
    runs = planned(FILES, ["generator.max_concurrent_groups=8,4"], name="mine", seeds=2)
    assert trained(runs) == ([], [[run.name for run in runs[:2]], [run.name for run in runs[2:]]])


@pytest.mark.parametrize(
    "text", ["KEPT.in_order = False", "raise SystemExit(1)", "os._exit(1)", "os.kill(os.getpid(), 9)"]
)
def test_a_process_whose_run_was_stopped_failed_or_was_killed_takes_no_other_run(in_tmp_path: None, text: str) -> None:
    runs = planned(FILES, [], name="mine", seeds=3)
    second = f"name == 'seed-1' and exec({text!r})"
    failed, by_process = trained(runs, second)
    assert [names[-1] for names in by_process[1:]][-1:] == ["seed-2"]
    assert "seed-2" not in by_process[0]
    assert by_process[0][:2] == ["seed-0", "seed-1"]
    assert failed == ([] if "in_order" in text else ["seed-1"])


@pytest.mark.parametrize("text", ["os.kill(os.getpid(), 9)", f"raise SystemExit({RESTART_MENDS})"])
def test_a_run_that_dies_in_the_process_of_another_one_goes_to_a_new_one(in_tmp_path: None, text: str) -> None:
    runs = planned(FILES, [], name="mine", seeds=3)
    failed, by_process = trained(runs, f"name == 'seed-1' and words and exec({text!r})")
    assert failed == []
    assert by_process == [["seed-0", "seed-1"], ["seed-1", "seed-2"]]


def test_without_restarts_such_a_run_has_failed(in_tmp_path: None) -> None:
    runs = planned(FILES, ["run.max_restarts=0"], name="mine", seeds=2)
    failed, by_process = trained(runs, "name == 'seed-1' and os.kill(os.getpid(), 9)")
    assert (failed, by_process) == (["seed-1"], [["seed-0", "seed-1"]])


def test_a_run_that_a_second_signal_ends_at_once_is_not_continued(in_tmp_path: None) -> None:
    runs = planned(FILES, [], name="mine", seeds=3)
    failed, by_process = trained(runs, f"name == 'seed-1' and os._exit({INTERRUPTED})")
    assert (failed, by_process) == (["seed-1"], [["seed-0", "seed-1"], ["seed-2"]])


@pytest.mark.asyncio
async def test_a_process_that_has_died_without_a_run_gets_none(in_tmp_path: None) -> None:
    [run] = planned(FILES, ["run.max_restarts=0"], name="mine", seeds=1)
    shared = kept_for(run.config)
    assert shared is not None
    dead = await TrainingProcess.start([sys.executable, "-S", "-c", "pass"], log=Path("dead.log"))
    await dead.process.wait()
    processes = TrainingProcesses(Ending(), {dead: shared})
    try:
        assert await processes.train(command("pass", run), run.config, log=run.log) == 0
    finally:
        await processes.close()
        await dead.close()


def test_a_process_without_a_run_ends_when_no_other_run_waits(in_tmp_path: None) -> None:
    """It would keep its devices for as long as other runs train."""
    runs = planned(FILES, [], name="mine", seeds=2)
    waits = """
import time
deadline_s = time.monotonic() + 60
def pids():
    return [int(line.split()[1]) for line in open('trained') if line.startswith('seed-0')]
while not pids() or os.path.exists(f'/proc/{pids()[0]}'):
    time.sleep(0.05)
    if time.monotonic() > deadline_s:
        raise SystemExit(1)
"""
    failed, _ = trained(runs, f"name == 'seed-1' and exec({waits!r}, globals())", parallel=2)
    assert failed == []


def test_a_run_whose_files_have_changed_since_the_sweep_began_gets_no_ray_of_a_run_before() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        kept = KeptProcess(sweep=its)
        assert [kept.ray_of(b"a", lambda: 1), kept.ray_of(b"a", lambda: 2)] == [1, 1]
        with pytest.raises(ConfigError, match="a configuration file of the sweep has changed"):
            kept.ray_of(b"b", lambda: 2)


def test_processes_below_a_run_do_not_see_the_socket(in_tmp_path: None) -> None:
    runs = planned(FILES, [], name="mine", seeds=1)
    seen = "['ASYNCRL_SWEEP_SOCKET' in os.environ, os.get_inheritable(KEPT.sweep.fileno())]"
    trained(runs, f"open('seen', 'w').write(str({seen}))")
    assert Path("seen").read_text() == "[False, False]"


@pytest.mark.parametrize(
    ("override", "shared"),
    [
        ("algorithm.loss=opsm", True),
        ("staleness.max_versions=1", True),
        ("learner.optimizer.learning_rate=1e-5", True),
        ("run.seed=9", True),
        ("model.max_length=17", False),
        ("generator.temperature=0.9", False),
        ("generator.kv_cache_gib=1", False),
        ("learner.ranks=2", False),
        ("learner.group_size=4", False),
        ("weights.probe_every_updates=2", False),
        ("environment.options.size=4000", False),
    ],
)
def test_runs_may_differ_only_in_settings_on_which_no_process_depends(
    in_tmp_path: None, override: str, shared: bool
) -> None:
    [plain], [other] = (planned(FILES, given, name="mine", seeds=1) for given in ([], [override]))
    assert kept_for(plain.config) is not None
    assert (kept_for(plain.config) == kept_for(other.config)) is shared


@pytest.mark.parametrize(
    "override",
    ["ray.address='10.0.0.7:6379'", "run.mirror=file:///tmp/copies", "metrics.trackers=[tensorboard]"],
)
def test_a_run_whose_process_has_state_of_its_own_is_trained_alone(in_tmp_path: None, override: str) -> None:
    [run] = planned(FILES, [override], name="mine", seeds=1)
    assert kept_for(run.config) is None


def test_a_run_with_code_of_the_user_in_its_process_is_trained_alone(
    in_tmp_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine_of_kept.py").write_text("def centred(columns):\n    return columns\n")
    [run] = planned(FILES, [], name="mine", seeds=1)
    own = run.config.algorithm.model_copy(update={"advantage": "mine_of_kept:centred"})
    assert kept_for(run.config.model_copy(update={"algorithm": own})) is None
    assert os.path.exists("mine_of_kept.py")
