"""The output of the commands about runs: report, status, and the last lines of a run."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from made_up_run import TOTALS, make_status, make_step, status_of
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.cli.options import again, print_outcome, print_previous, weights_named
from asyncrl.cli.status import status
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config, LoraSection
from asyncrl.coordinator.registry import Registry
from asyncrl.coordinator.status import RunStatus
from asyncrl.deployment import cluster, shared_actors
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import Summary, build_summary, read_info
from asyncrl.views.outcome import lines_to_go_on

runner = CliRunner()


def run_in(folder: Path) -> RunDir:
    return RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(folder)}}))


def test_a_run_says_where_the_one_before_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("", f"note: the previous run is now {tmp_path / 'quick.1'}\n"):
        with run_in(tmp_path) as run:
            print_previous(run)
            (run.path / "steps.jsonl").touch()
        assert capsys.readouterr().err == said


def ended(folder: Path, *, steps: int, saved: bool = True) -> tuple[Config, Path, Summary]:
    """Returns the config, the directory and the summary of a run of 9 steps that ended after `steps` steps."""
    config = Config.model_validate(
        {
            "run": {"name": "quick", "dir": str(folder)},
            "learner": {"total_steps": 9, "optimizer": {"warmup_steps": 0}},
            "model": {"tiny": {}},
        }
    )
    summary = build_summary([make_step(step) for step in range(steps)], [], TOTALS, staleness_limit=2)
    path = folder / "quick"
    if saved:
        (path / "checkpoints" / f"step-{steps}" / "hf").mkdir(parents=True)
        (path / "checkpoints" / f"step-{steps}" / "hf" / COMPLETE).touch()
    return config, path, summary


def test_the_last_lines_of_a_stopped_run_say_where_its_weights_are_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path, summary = ended(tmp_path, steps=4)
    command = again("up", [Path("a.yaml")], ["run.name=quick", "run.seed=7"], allow_public=True)
    print_outcome(summary, path, config=config, again=command)
    lines = capsys.readouterr().out.splitlines()
    weights = f"{path}/checkpoints/step-4/hf"
    assert lines[0] == "Stopped at step 4 of 9."
    assert f"weights: {weights}" in lines
    assert f"  use them: vllm serve {weights}" in lines
    assert lines[-1] == "resume the run: asyncrl up -c a.yaml --allow-public run.name=quick run.seed=7"


def test_the_last_lines_of_a_run_with_an_adapter_say_how_to_merge_it_and_how_to_train_it_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path, summary = ended(tmp_path, steps=9)
    lora = config.model.model_copy(update={"lora": LoraSection()})
    print_outcome(summary, path, config=config.model_copy(update={"model": lora}), again=again("up", [], []))
    lines = capsys.readouterr().out.splitlines()
    assert f"adapter: {path}/checkpoints/step-9/hf" in lines
    assert f"  use it: asyncrl export {path} quick-model --merge" in lines
    assert lines[-1] == f"train it further: asyncrl resume {path} learner.total_steps=18"
    assert not any("vllm serve" in line for line in lines), "vLLM cannot serve an adapter without its model"


@pytest.mark.parametrize(
    "own",
    [
        {"environment": {"reward": "mine:score"}},
        {"environment": {"secrets": ["JUDGE_KEY"]}},
        {"algorithm": {"loss": "mine:loss"}},
        {"environment": {"mcp_servers": [{"command": ["tools"]}]}},
    ],
    ids=["reward", "secrets", "loss", "program"],
)
def test_the_command_that_trains_an_adapter_further_has_trust_if_resume_needs_it(
    own: dict[str, Any], tmp_path: Path
) -> None:
    config = Config.model_validate({"model": {"lora": {}}, "learner": {"total_steps": 9}} | own)
    [line] = lines_to_go_on(tmp_path, finished=True, config=config, again=["up"])
    assert line == "train it further: asyncrl resume runs/quickstart --trust learner.total_steps=18"


def test_the_last_lines_of_a_finished_run_say_how_to_continue_its_training_in_a_new_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path, summary = ended(tmp_path, steps=9)
    (tmp_path / "quick-part2").mkdir()
    print_outcome(summary, path, config=config, again=again("up", [Path("a.yaml")], ["run.name=quick", "run.seed=7"]))
    lines = capsys.readouterr().out.splitlines()
    assert "  continue training from them in a new run, with a new optimizer and step count:" in lines
    assert lines[-1].split() == [
        "asyncrl", "up", "-c", "a.yaml", "run.seed=7", "run.name=quick-part3",
        f"model.path={path}/checkpoints/step-9/hf", "model.tiny=null",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("run", "name", "mirror"),
    [
        ({"name": "sweep_seed-1"}, "sweep_seed-1-part2", None),
        ({"name": "quick-part2"}, "quick-part3", None),
        ({"name": "a" * 64}, "a" * 58 + "-part2", None),
        ({"name": "quick", "mirror": "s3://bucket/quick/"}, "quick-part2", "s3://bucket/quick-part2"),
    ],
    ids=["number", "part", "long", "mirror"],
)
def test_the_run_that_continues_another_has_a_name_and_a_mirror_that_no_other_run_has(
    run: dict[str, Any], name: str, mirror: str | None, tmp_path: Path
) -> None:
    """`seed-2` would be the next run of a sweep, a name has 64 characters at most, and a mirror takes one run."""
    config = Config.model_validate({"run": {"dir": str(tmp_path), **run}})
    command = ["up", *(f"run.{key}={value}" for key, value in run.items())]
    *_, line = lines_to_go_on(tmp_path, finished=True, config=config, again=command)
    expected = [f"run.name={name}", *([f"run.mirror={mirror}"] if mirror else []), f"model.path={tmp_path}"]
    assert line.split() == ["asyncrl", "up", *expected]
    Config.model_validate({"run": {"name": name}})


@pytest.mark.parametrize(
    ("reward", "set_to", "begin"),
    [
        ("tasks:reward", "my tasks:b", "    PYTHONPATH='my tasks:b' asyncrl up"),
        ("tasks:reward", None, "    asyncrl up"),
        ("exact_match", "my tasks:b", "    asyncrl up"),
    ],
)
def test_the_command_to_go_on_sets_the_python_path_that_the_user_s_code_needs(
    reward: str,
    set_to: str | None,
    begin: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if set_to is not None:
        monkeypatch.setenv("PYTHONPATH", set_to)
    config, path, summary = ended(tmp_path, steps=9)
    config = config.model_copy(update={"environment": config.environment.model_copy(update={"reward": reward})})
    print_outcome(summary, path, config=config, again=["up"])
    assert capsys.readouterr().out.splitlines()[-1].startswith(begin)


def test_a_run_that_took_all_its_steps_was_not_stopped_and_without_weights_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path, summary = ended(tmp_path, steps=9, saved=False)
    print_outcome(summary, path, config=config, again=["up"])
    said = capsys.readouterr().out
    assert "Stopped" not in said
    assert "weights" not in said


def test_an_error_that_ends_a_run_comes_after_where_its_weights_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path, _ = ended(tmp_path, steps=4)
    with pytest.raises(ZeroDivisionError), weights_named(path):
        _ = 1 / 0
    assert capsys.readouterr().err == f"weights: {path}/checkpoints/step-4/hf\n"


@pytest.mark.parametrize("named", ["quick", "runs/quick"])
@pytest.mark.usefixtures("in_tmp_path")
def test_a_report_takes_a_runs_name_or_its_directory(named: str) -> None:
    with run_in(Path("runs")):
        pass
    result = runner.invoke(app, ["report", named])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "runs/quick/report.html\n"


@pytest.mark.usefixtures("in_tmp_path")
def test_a_directory_comes_before_a_run_of_the_same_name() -> None:
    for folder in ("runs", "."):
        with run_in(Path(folder)):
            pass
    assert runner.invoke(app, ["report", "quick"]).stdout == "quick/report.html\n"


@pytest.mark.usefixtures("in_tmp_path")
def test_a_report_of_no_run_names_what_was_asked_for() -> None:
    result = runner.invoke(app, ["report", "quik"])
    assert result.exit_code == 1
    assert "there is no run quik in runs/; existing runs: none" in result.stderr


@pytest.mark.parametrize(("command", "has_config"), [("status", False), ("down", False), ("learner", True)])
def test_only_commands_that_read_a_config_promise_its_address(command: str, has_config: bool) -> None:
    text = " ".join(runner.invoke(app, [command, "--help"]).stdout.split())
    assert ("the config's ray.address" in text) is has_config
    assert ("RAY_ADDRESS" in text) is not has_config


@pytest.mark.parametrize("terminal", [False, True])
def test_json_is_a_line_for_programs_and_indented_on_a_terminal(
    terminal: bool, live: RunStatus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    status(Path("quick"), json=True)
    printed = capsys.readouterr().out
    assert msgspec.json.decode(printed, type=RunStatus) == live
    assert (len(printed.splitlines()) == 1) is not terminal


def test_status_says_what_limits_the_run_and_json_says_the_same(
    live: RunStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    status(Path("quick"), json=True)
    found = json.loads(capsys.readouterr().out)["since_start"]
    status(Path("quick"))
    lines = capsys.readouterr().out.splitlines()
    assert found["bottleneck"]["bound"] == "generators"
    assert found["learner_shares"]["waiting_for_groups"] == 0.75
    assert found["generator_shares"]["generating"] == 1.0
    assert f"since the start: {found['bottleneck']['sentence']}" in lines
    assert re.fullmatch(r"run quick: running, as of \d\d:\d\d:\d\d UTC", lines[0])
    assert f"metrics of learner: http://{live.targets['learner']}/metrics" in lines


@pytest.mark.parametrize("joined_before", [False, True])
def test_status_leaves_the_cluster_that_it_joined_and_no_other(
    joined_before: bool, live: RunStatus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    joined, left = [joined_before], list[str]()
    monkeypatch.setattr(ray, "is_initialized", lambda: joined[0])
    monkeypatch.setattr(ray, "shutdown", lambda: left.append(capsys.readouterr().out))
    monkeypatch.setattr(cluster, "join", lambda *_, **__: joined.__setitem__(0, True))
    status(Path("quick"))
    assert [text.startswith("run quick: running, ") for text in left] == ([] if joined_before else [True])


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunStatus]:
    """The status of a run, which its fake coordinator returns. The run's records are in runs/."""
    monkeypatch.chdir(tmp_path)
    report = msgspec.structs.replace(make_status().reports["generator-a"], state_seconds={"generating": 8.0})
    targets = {"learner": "127.0.0.1:9400"}

    async def answer(method: object) -> RunStatus | str:
        return read_info(run.path).nonce if method is Registry.run_nonce else found

    # The command sets this variable in this process. monkeypatch removes it after the test.
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(cluster, "join", lambda *_, **__: None)
    monkeypatch.setattr(shared_actors, "find_run", lambda _: SimpleNamespace(call=answer))
    with run_in(tmp_path / "runs") as run:  # it holds the lock: without it, the run would count as dead
        run.append_step(make_step(0))
        seconds = {"waiting_for_groups": 6.0, "optimizer": 2.0}
        reports = {"generator-a": report}
        found = status_of(run.path, reports=reports, targets=targets, learner_state_seconds=seconds)
        yield found
