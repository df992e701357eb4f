"""`asyncrl sweep`: its runs by combination and seed, and what it does with the processes that train them."""

import asyncio
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from asyncrl.cli import sweep
from asyncrl.cli.main import app
from asyncrl.cli.sweep import SweptRun, as_yaml, divided, has_finished, planned, train_all
from asyncrl.config.load import parse_yaml
from asyncrl.config.schema import RunSection
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import ConfigError
from asyncrl.views.short_values import run_name

pytestmark = pytest.mark.timeout(120)

FILES = [Path("quickstart")]


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("algorithm.loss=grpo,dapo", ["grpo", "dapo"]),
        ("staleness.max_versions=1, 4", [1, 4]),
        ("generator.stop=[a, b],[c]", [["a", "b"], ["c"]]),
        ('data.system_prompt="Think, then answer.",Answer.', ["Think, then answer.", "Answer."]),
        ("algorithm.loss={name: grpo, level: token},gspo", [{"name": "grpo", "level": "token"}, "gspo"]),
    ],
)
def test_an_override_with_commas_lists_values(override: str, values: list[object]) -> None:
    assert divided([override]) == ([], {override.partition("=")[0]: values})


@pytest.mark.parametrize(
    "override", ["generator.stop=[a, b]", 'data.system_prompt="Think, then answer."', "run.seed=3", "run.dir=there"]
)
def test_an_override_of_one_value_is_shared(override: str) -> None:
    assert divided([override]) == ([override], {})


@pytest.mark.parametrize("override", ["run.name=a", "run.dir=here,there", "run.seed=1,2"])
def test_settings_of_the_sweep_are_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="give it a --name, one"):
        divided([override])


def test_each_combination_has_a_run_for_each_seed(in_tmp_path: None) -> None:
    overrides = ["algorithm.loss=tis,opsm", "staleness.max_versions=1,4", "learner.total_steps=37"]
    overrides += ["run.dir=there", "run.seed=5"]
    runs = planned(FILES, overrides, name="mine", seeds=2)
    of_each = [(run.config.algorithm.loss, run.config.staleness.max_versions, run.config.run.seed) for run in runs]
    assert of_each == [(loss, limit, seed) for loss in ("tis", "opsm") for limit in (1, 4) for seed in (5, 6)]
    assert {run.config.learner.total_steps for run in runs} == {37}
    assert runs[0].directory == Path("there/mine/loss-tis_max_versions-1_seed-5")
    assert len({run.directory for run in runs}) == 8


AXES = "{surrogate: {kind: linear}, anchor: behaviour, level: token}"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        (f"algorithm.loss=aipo,{AXES}", r"loss-aipo loss-axes-[0-9a-f]{6}"),
        ("algorithm.overrides={},{surrogate: {hi: 1.2}}", r"overrides-none overrides-axes-[0-9a-f]{6}"),
        (f"data.system_prompt={'a' * 80},b", r"system_prompt-a{24}-[0-9a-f]{6} system_prompt-b"),
        ("data.system_prompt=a b,a+b,a-b", r"(system_prompt-a-b-[0-9a-f]{6} ){2}system_prompt-a-b"),
    ],
)  # fmt: skip
def test_the_name_of_a_run_is_valid_for_every_value_and_the_same_each_time(
    override: str, names: str, in_tmp_path: None
) -> None:
    runs = [run.name for run in planned(FILES, [override], name="mine", seeds=1)]
    assert re.fullmatch(names, " ".join(runs))
    assert len({*runs}) == len(runs)
    assert [run.name for run in planned(FILES, [override], name="other", seeds=1)] == runs


def test_a_hash_in_a_name_is_that_of_the_value_alone() -> None:
    value = parse_yaml(AXES, source="test")
    assert isinstance(value, dict)
    name = run_name({"algorithm.loss": value}, seed=None)
    assert name == "loss-axes-6f578b", "runs of earlier sweeps are found by it"
    assert run_name({"algorithm.loss": dict(reversed(value.items()))}, seed=3) == f"{name}_seed-3"


def test_a_name_of_many_values_is_cut_and_differs_for_each_combination() -> None:
    names = {
        run_name({f"generator.setting_with_a_name_{n}": n + last for n in range(5)}, seed=2**31 - 1) for last in (0, 1)
    }
    assert len(names) == 2
    for name in names:
        RunSection(name=name)


@pytest.mark.parametrize("value", ["a, b", 1e-6, {"hi": math.inf, "lo": -math.inf}, [True, None], "Infinity", "é: x"])
def test_a_value_stays_the_same_in_an_override(value: object) -> None:
    assert parse_yaml(as_yaml(value), source="test") == value


def test_each_run_has_a_mirror_of_its_own(in_tmp_path: None, tmp_path: Path) -> None:
    runs = planned(FILES, [f"run.mirror=file://{tmp_path}/copies"], name="mine", seeds=2)
    assert [run.config.run.mirror for run in runs] == [f"file://{tmp_path}/copies/mine/seed-{n}" for n in (0, 1)]


def test_a_run_that_another_process_finishes_meanwhile_is_not_trained_again(in_tmp_path: None) -> None:
    [run] = runs_of(1)
    holds = (
        "import sys\nfrom pathlib import Path\nfrom asyncrl.cli.sweep import planned\n"
        "from asyncrl.deployment.run_dir import RunDir\n"
        "[run] = planned([Path('quickstart')], [], name='mine', seeds=1)\n"
        "with RunDir.create(run.config) as directory:\n    print(flush=True)\n    sys.stdin.read()"
    )
    with psutil.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        threading.Timer(0.5, other.stdin.close).start()
        assert asyncio.run(train_all([run], [program("open('trained', 'w')")], parallel=1, first=1, of=1)) == []
    assert not Path("trained").exists()


def test_an_error_names_the_combination_before_any_run_starts(in_tmp_path: None) -> None:
    result = CliRunner().invoke(app, ["sweep", "-c", "quickstart", "algorithm.loss=tis,tiss"])
    assert result.exit_code == 2
    assert "error: algorithm.loss = tiss: " in result.output
    assert not Path("runs").exists()


def test_values_that_would_share_a_directory_are_refused(in_tmp_path: None) -> None:
    with pytest.raises(ConfigError, match="list each value once"):
        planned(FILES, ["staleness.max_versions=4,4"], name="mine", seeds=1)


def test_a_run_that_finished_is_skipped_and_one_with_other_settings_is_refused(in_tmp_path: None) -> None:
    [run] = planned(FILES, ["learner.total_steps=37"], name="mine", seeds=1)
    assert not has_finished(run)
    with RunDir.create(run.config) as directory:
        assert not has_finished(run), "it still runs"
        directory.finished("all steps are trained")
    assert has_finished(run)
    [longer] = planned(FILES, ["learner.total_steps=38"], name="mine", seeds=1)
    with pytest.raises(ConfigError, match=r"learner.total_steps = 38, but .* has finished with 37"):
        has_finished(longer)
    result = CliRunner().invoke(
        app, ["sweep", "--dry-run", "-c", "quickstart", "--name", "mine", "learner.total_steps=37"]
    )
    assert "seed-0  finished" in result.output


def runs_of(count: int) -> list[SweptRun]:
    return planned(FILES, [], name="mine", seeds=count)


def program(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", text]


def test_a_run_that_fails_is_named_and_the_others_train(in_tmp_path: None, capsys: pytest.CaptureFixture[str]) -> None:
    runs = runs_of(3)
    commands = [program(f"open('trained-{number}', 'w')") for number in range(3)]
    commands[1] = program("import sys; print('error: no disk'); sys.exit(1)")
    assert asyncio.run(train_all(runs, commands, parallel=1, first=1, of=3)) == [runs[1].name]
    assert [Path(f"trained-{number}").exists() for number in range(3)] == [True, False, True]
    shown = capsys.readouterr()
    assert "run 3 of 3: seed-2" in shown.out
    assert "seed-1 failed" in shown.err
    assert "exit code 1: no disk; see runs/mine/seed-1.log" in shown.err


def test_runs_train_beside_each_other(in_tmp_path: None) -> None:
    """Each of the two processes waits for the other one."""
    text = "import os, pathlib\npathlib.Path('here-{}').touch()\nwhile not os.path.exists('here-{}'): pass"
    commands = [program(text.format(0, 1)), program(text.format(1, 0))]
    assert asyncio.run(train_all(runs_of(2), commands, parallel=2, first=1, of=2)) == []


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [(signal.SIGTERM, 76, 76), (signal.SIGINT, 0, 0), (signal.SIGINT, 1, 1), (signal.SIGTERM, 130, 130)],
)
def test_a_signal_ends_the_process_in_order_and_starts_no_other(
    in_tmp_path: None, number: signal.Signals, code: int, expected: int
) -> None:
    saves = (
        "import os, pathlib, signal, sys\n"
        f"def save(number, frame):\n    pathlib.Path('saved').write_text(str(number))\n    sys.exit({code})\n"
        f"signal.signal({int(number)}, save)\n"
        f"os.kill({os.getpid()}, {int(number)})\n"
        "while True: signal.pause()"
    )
    with pytest.raises(typer.Exit) as ended:
        asyncio.run(train_all(runs_of(2), [program(saves), program("open('second', 'w')")], parallel=1, first=1, of=2))
    assert ended.value.exit_code == expected
    assert Path("saved").read_text() == str(int(number))
    assert not Path("second").exists()


def test_a_run_of_another_sweep_is_waited_for_and_not_its_process(
    in_tmp_path: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may train other runs of its sweep, which may wait for a run of this one."""
    looks = itertools.count()
    monkeypatch.setattr(sweep, "LOOK_S", 0.01)
    monkeypatch.setattr(sweep, "process_of", lambda _: psutil.Process() if next(looks) < 3 else None)
    assert asyncio.run(train_all(runs_of(1), [program("pass")], parallel=1, first=1, of=1)) == []
    assert next(looks) > 3


def test_a_run_whose_log_is_missing_has_no_error(in_tmp_path: None) -> None:
    assert sweep.last_error(Path("absent.log")) == "no error was printed"


def test_the_process_of_a_run_ends_with_a_sweep_that_is_killed(in_tmp_path: None) -> None:
    text = (
        "import asyncio, sys\nfrom pathlib import Path\n"
        "from asyncrl.cli.sweep import planned, train_all\n"
        "runs = planned([Path('quickstart')], [], name='mine', seeds=1)\n"
        f"command = {program('import os, time; open(chr(112), chr(119)).write(str(os.getpid())); time.sleep(300)')!r}\n"
        "asyncio.run(train_all(runs, [command], parallel=1, first=1, of=1))"
    )
    with psutil.Popen(
        [sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as sweep:
        while not (path := Path("p")).exists() or not path.read_text():
            assert sweep.poll() is None
        trained = psutil.Process(int(path.read_text()))
        sweep.kill()
    assert not psutil.wait_procs([trained], timeout=60)[1]


def test_a_warning_names_the_combinations_it_is_about_unless_it_is_about_all(
    in_tmp_path: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("quickstart.yaml").touch()
    planned(FILES, ["algorithm.advantage={name: group_norm, single: raw},group_norm"], name="mine", seeds=2)
    about_all, about_one = capsys.readouterr().err.splitlines()
    assert about_all.startswith("note: -c quickstart is the recipe")
    assert about_one.startswith('note: algorithm.advantage = {"name": "group_norm", "single": "raw"}: ')
