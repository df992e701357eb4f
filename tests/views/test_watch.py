"""`asyncrl top` and `asyncrl status --watch`: the records of a run, and the present answers of its buffer."""

import doctest
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from made_up_run import make_status, make_step, status_of
from rich.console import Console
from typer.testing import CliRunner
from written_runs import write_run

from asyncrl.buffer.ledger import Account, Amount, Fate
from asyncrl.buffer.records import Failure, FailureCount
from asyncrl.cli import status as command
from asyncrl.cli.main import app
from asyncrl.common.roles import RunState
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import RunStatus
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import FailureClass, RunEnded, RunError
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord
from asyncrl.views import live, watch
from asyncrl.views.live import LiveView, render
from asyncrl.views.watch import presence, view_since_start


def nonce_of(run: Path) -> str:
    return msgspec.json.decode((run / "run.json").read_bytes(), type=RunInfo).nonce


def append(run: Path, *steps: StepRecord) -> None:
    with (run / "steps.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(step) + b"\n" for step in steps)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunDir]:
    """The directory of a run that goes on, with three steps. It holds the run's lock."""
    with RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})) as run:
        for step in range(3):
            run.append_step(make_step(step))
        run.append_eval(EvalRecord(version=0, wall_s=9, prompts=8, reward_mean=0.25))
        yield run


@pytest.fixture
def run(folder: RunDir) -> Path:
    return folder.path


def shown(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=150)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_doctests() -> None:
    assert doctest.testmod(live).failed == 0


def test_a_view_has_the_steps_so_far_and_the_present_answer_of_the_buffer(run: Path) -> None:
    answers = iter([status_of(run), status_of(run, published=Version(1, 5), quiet_s=75.0)])
    views = watch.watch(run, ask=lambda: next(answers))
    first = next(views)
    append(run, make_step(3), make_step(4, ess_ratio=0.5))
    second = next(views)
    assert (first.run.step, second.run.step) == (3, 5)
    assert list(second.run.rewards) == [make_step(step).reward_mean for step in range(5)]
    assert second.run.heldout == {"heldout": [(0, 0.25)]}
    assert (first.run.ess_ratio, second.run.ess_ratio) == (0.95, 0.5)
    assert second.run.buffer_groups == {"reserved": 2, "ready": 1, "leased": 0}, "the buffer's, not the last record's"
    assert (second.run.published_version, second.run.replica_versions) == (5, {"generator-a": 3})
    assert second.run.samples_per_s == pytest.approx(128.0), "one step a second"
    assert second.run.learner_shares == pytest.approx(
        {"waiting_for_groups": 0.25, "forward_backward": 0.5, "other": 0.25}
    )
    text = shown(second)
    assert "learner trains, last progress 1 min 15 s ago" in text
    assert "published 5; 1 replica at 3" in text
    assert "The learner waits for groups 25 %" in text


def test_a_line_that_is_still_being_written_is_read_when_it_is_complete(run: Path) -> None:
    views = watch.watch(run, ask=lambda: None)
    line = msgspec.json.encode(make_step(3)) + b"\n"
    for part, step in ((line[:40], 3), (line[40:], 4), (b"", 4)):
        with (run / "steps.jsonl").open("ab") as file:
            file.write(part)
        assert next(views).run.step == step


def test_without_an_answer_of_the_buffer_the_records_are_shown_and_the_view_says_so(run: Path) -> None:
    view = next(watch.watch(run, ask=lambda: None))
    assert (view.phase, view.run.step, view.run.learner_activity) == ("the buffer does not answer", 3, None)
    assert view.run.buffer_groups == {"reserved": 16, "ready": 5, "leased": 0}


def test_a_replica_without_heartbeats_and_a_missing_learner_are_named(run: Path) -> None:
    status = status_of(run)
    silent = msgspec.structs.replace(status.replicas[0], replica="generator-b", live=False)
    assert presence(status) == "running, 1 replica"
    both = msgspec.structs.replace(status, replicas=(*status.replicas, silent), deployments=status.deployments[1:])
    assert presence(both) == "running, no learner, 2 replicas, generator-b: no heartbeats"


def failing(run: Path) -> RunStatus:
    fates = dict.fromkeys(Fate, Amount()) | {Fate.FAILED: Amount(20, 20, 0)}
    first = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="m")
    return status_of(
        run,
        failures=(FailureCount(rollouts=20, groups=20, first=first),),
        account=Account(issued=Amount(20, 20, 0), fates=fates, events={}),
    )


def test_groups_that_fail_before_the_first_step_are_warned_of(tmp_path: Path) -> None:
    run = write_run(tmp_path, [], finish=False, evals=False, end=None)
    view = next(watch.watch(run, ask=lambda: failing(run)))
    assert view.headline is not None
    assert view.headline.sentence.startswith("100 % of the groups failed and were not trained (reward_raised 20)")


def test_the_numbers_of_another_run_of_the_same_name_are_not_shown(run: Path) -> None:
    with pytest.raises(RunError, match="is not the run of"):
        next(watch.watch(run, ask=make_status))
    for directory, status in ((run, make_status()), (run / "nowhere", status_of(run))):
        other = view_since_start(directory, status)
        assert (other.steps_trained, [*other.evals]) == (None, [])
    own = view_since_start(run, status_of(run))
    assert (own.steps_trained, [record.version for record in own.evals]) == (3, [0])


def test_a_run_whose_directory_another_run_has_taken_has_ended(run: Path) -> None:
    views = watch.watch(run, ask=lambda: None)
    next(views)
    info = run / "run.json"
    info.write_text(info.read_text().replace(nonce_of(run), "another"))
    with pytest.raises(RunEnded, match="another run of this name has started"):
        next(views)


def test_a_directory_without_a_description_is_an_error_that_names_the_file(run: Path) -> None:
    (run / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"cannot read .*run\.json"):
        next(watch.watch(run, ask=lambda: None))


def test_a_run_that_trained_its_last_step_or_reported_its_end_is_ending_when_its_buffer_is_gone(run: Path) -> None:
    answers = iter([status_of(run), None, status_of(run, state=RunState.CLOSING), None])
    views = watch.watch(run, ask=lambda: next(answers), absence=lambda: "connecting")
    assert [next(views).phase for _ in range(4)][1:] == ["connecting", "closing, 1 replica", "the run is ending"]
    append(run, make_step(199))
    assert next(watch.watch(run, ask=lambda: None)).phase == "the run is ending"


COMMANDS = {"top": ["top"], "status": ["status", "--watch"]}


def connected(monkeypatch: pytest.MonkeyPatch, ask: Callable[[], RunStatus]) -> None:
    monkeypatch.setattr(command, "_status_of", lambda *_: ask)


def test_once_prints_the_panel_also_where_there_is_no_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(monkeypatch, lambda: status_of(run))
    result = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert result.exit_code == 0, result.output
    assert "published 3; 1 replica at 3" in result.output
    assert "3 of 48 slots" in result.output


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_both_commands_show_the_run_until_it_ends_which_is_no_error(
    folder: RunDir, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    run = folder.path
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        append(run, make_step(2 + len(slept)))
        if len(slept) == 2:
            folder.close(state="finished", reason="done")

    connected(monkeypatch, lambda: None if len(slept) == 2 else status_of(run))
    monkeypatch.setattr(command.time, "sleep", sleep)
    result = CliRunner().invoke(app, [words[0], str(run), *words[1:]])
    assert result.exit_code == 0, result.output
    assert slept == [2.0, 2.0]
    lines = result.output.splitlines()
    assert lines[0].startswith("step 3/200, reward ")
    assert lines[1].startswith("connecting to the run's Ray ("), "the records are shown before Ray is joined"
    assert any(line.startswith("running, 1 replica (") for line in lines)
    assert lines[-2].startswith("finished (")
    assert "the buffer does not answer" not in result.output
    assert lines[-1].startswith(f"run {run.name} finished ")
    assert lines[-1].endswith(" UTC (done)")


def test_a_buffer_that_cannot_be_reached_is_said_once_and_the_records_are_shown(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Callable[[], RunStatus]:
        raise RunError("no Ray cluster answers")

    monkeypatch.setattr(command, "_status_of", refuse)
    result = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert result.exit_code == 0, result.output
    assert "no Ray cluster answers; the view shows only the records in" in result.stderr
    assert "the buffer does not answer" in result.stdout


def test_a_buffer_that_stops_to_answer_does_not_end_the_view(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late() -> RunStatus:
        raise RunError("the buffer's status: no answer")

    connected(monkeypatch, late)
    result = CliRunner().invoke(app, ["top", str(run), "--once"])
    assert "the buffer does not answer" in result.stdout


def test_a_command_that_waits_for_ray_says_so_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> Callable[[], RunStatus]:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_status_of", wait)
    for words in (["status", str(run)], ["top", str(run), "--once"]):
        for address, where in (([], ""), (["--address", "10.0.0.1:6379"], " at 10.0.0.1:6379")):
            assert (
                CliRunner()
                .invoke(app, [*words, *address])
                .stderr.startswith(f"connecting to the run's Ray{where} ...\n")
            )


@pytest.mark.parametrize("words", [["status"], ["top"]], ids=["status", "top"])
def test_sigterm_ends_a_command_without_a_traceback(
    words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def ended(*_: object) -> Callable[[], RunStatus]:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError

    monkeypatch.setattr(command, "_status_of", ended)
    result = CliRunner().invoke(app, [*words, str(run)])
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_status_as_json_is_not_a_live_view(run: Path) -> None:
    result = CliRunner().invoke(app, ["status", str(run), "--watch", "--json"])
    assert result.exit_code == 2
    assert "leave out --watch" in result.output
