"""Every command that takes a run directory, and `asyncrl.load_run`, end on every input of `hostile_runs.py`: soon, in
bounded memory, with one sentence and no traceback, and without a touch of any file outside of the directory."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hostile_runs import INPUTS, SECRET, Change, outside, write_run
from typer.testing import CliRunner

from asyncrl.cli import main
from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import dead_runs, live_runs
from asyncrl.deployment.resuming import Choice, chosen_checkpoint, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.run_tables import load_run
from asyncrl.errors import AsyncRLError, RunError
from asyncrl.learner.records import ForkPoint

LIMIT_S = 60
"""Ends a command that hangs. It is longer than the 10 s of the documentation, because a busy machine is slow."""
MEMORY_KIB = 500 * 1024
LONGEST_LINE = 1200

MIRROR = "memory://of/evil"

Commands = Sequence[Sequence[str]]
OF_EVERY_INPUT: Commands = (
    ("status", "runs/evil"),
    ("audit", "runs/evil"),
    ("samples", "runs/evil", "--worst", "--color", "mask"),
    ("export", "runs/evil", "weights", "--at", "best"),
)
BY_TURNS: Sequence[Commands] = (
    (("report", "runs/evil"), ("config", "show", "-c", "runs/evil/config.yaml"), ("stacks", "runs/evil")),
    (("compare", "runs/good", "runs/evil"), ("top", "runs/evil", "--once"), ("samples", "runs/evil")),
    (("status", "runs/evil", "--json"), ("export", "runs/evil", "weights"), ("down", "runs/evil")),
    (("mirror", "runs/evil", MIRROR), ("audit", MIRROR), ("samples", MIRROR), ("report", MIRROR)),
)
"""Each input gets one of them after the others: each makes a report, which takes most of the time."""
ALL: Commands = [*OF_EVERY_INPUT, *chain.from_iterable(BY_TURNS)]
NUMBERED = [pytest.param(number, change, id=name) for number, (name, change) in enumerate(INPUTS)]


class TookTooLong(BaseException):
    """No command catches it."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and files outside of them."""
    place = tmp_path_factory.mktemp("written")
    for name in ("evil", "good"):
        asyncio.run(write_run(place / "runs", name))
    (place / "outside" / "folder" / "step-2").mkdir(parents=True)
    for name in ("secret.txt", "folder/step-1.jsonl", "folder/steps-1.msgpack", "folder/step-2/COMPLETE"):
        (place / "outside" / name).write_bytes(SECRET)
    return place


@pytest.fixture
def evil(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run to change, in the working directory."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr("asyncrl.deployment.cluster.join", refuse)  # no test joins a cluster of this machine
    return tmp_path / "runs" / "evil"


def refuse(address: str, *, namespace: str, folder: Path) -> None:
    raise RunError(f"no Ray cluster at {address}")


@pytest.mark.parametrize(("number", "change"), NUMBERED)
def test_every_command_ends_with_one_sentence_and_touches_nothing_outside(
    number: int, change: Change, evil: Path
) -> None:
    change(evil)
    before = contents(outside(evil)), contents(evil.parent / "good")
    for command in (*OF_EVERY_INPUT, *BY_TURNS[number % len(BY_TURNS)]):
        with bounded(command):
            result = CliRunner().invoke(app, list(command))
        assert isinstance(result.exception, SystemExit | None), (command, result.exception)
        assert "Traceback" not in result.output, command
        assert result.exit_code in (0, 1, 2), command
        assert SECRET.decode().strip() not in result.output, command
        errors = [line for line in result.output.splitlines() if "error:" in line]
        assert len(errors) <= 1, (command, errors)
        assert max(map(len, errors), default=0) <= LONGEST_LINE, (command, errors)
        assert result.exit_code == 0 or errors or "FAILED" in result.output, (command, result.output)
        assert (contents(outside(evil)), contents(evil.parent / "good")) == before, command
        assert all(SECRET not in file.getvalue() for file in MemoryFileSystem.store.values()), command
        if Path("weights").exists():
            assert SECRET not in contents(Path("weights")).values(), command
            shutil.rmtree("weights")
    with bounded(["load_run"]), contextlib.suppress(AsyncRLError):
        load_run("runs/evil")
    assert (contents(outside(evil)), contents(evil.parent / "good")) == before


@pytest.mark.parametrize(("number", "change"), NUMBERED)
def test_a_run_that_goes_on_there_touches_nothing_outside(number: int, change: Change, evil: Path) -> None:
    """The part of `resume` and of `up`, by turns, that uses the directory, without Ray."""
    choose: Choice = unfinished_run if number % 2 else partial(chosen_checkpoint, step=None)
    config = load_config(
        [evil.parent / "good" / "config.yaml"], ["run.dir=runs", "run.name=evil", "learner.total_steps=9"]
    )
    change(evil)
    before = contents(outside(evil)), contents(evil.parent / "good")
    with bounded(["resume"]), contextlib.suppress(AsyncRLError), RunDir.create(config, choose=choose) as run:
        run.write_samples(2, [])
        run.failures_path.write_bytes(b"[]")
    with bounded(["doctor"]):
        assert not live_runs()
        dead_runs()
    assert (contents(outside(evil)), contents(evil.parent / "good")) == before


@pytest.mark.parametrize(("number", "change"), NUMBERED)
def test_a_fork_of_it_only_reads_it(number: int, change: Change, evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of `fork` that uses the directory, without Ray."""
    change(evil)
    before = contents(outside(evil)), contents(evil.parent / "good"), entries(evil)
    begun = fork_without_ray(monkeypatch)
    command = ("fork", "runs/evil", "forked", *(("--at", "step-2") if number % 2 else ()))
    with bounded(command):
        result = CliRunner().invoke(app, list(command))
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in (0, 1, 2)
    assert SECRET.decode().strip() not in result.output
    errors = [line for line in result.output.splitlines() if "error:" in line]
    assert len(errors) == (result.exit_code != 0), result.output
    assert max(map(len, errors), default=0) <= LONGEST_LINE, errors
    assert len(begun) == (result.exit_code == 0)
    assert (contents(outside(evil)), contents(evil.parent / "good"), entries(evil)) == before


def test_the_good_run_is_forked(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = fork_without_ray(monkeypatch)
    result = CliRunner().invoke(app, ["fork", "runs/good", "forked"])
    assert result.exit_code == 0, result.output
    assert [(point.run, point.version.step) for point in begun] == [("good", 2)]


def fork_without_ray(monkeypatch: pytest.MonkeyPatch) -> list[ForkPoint]:
    """Makes `asyncrl fork` create the directory of the new run and nothing else. The list gets the checkpoint with
    which it begins."""
    begun: list[ForkPoint] = []

    def create(config: Config, prompts: None, *, forked_from: ForkPoint, choose: Choice, **_: object) -> None:
        with RunDir.create(config, choose=choose, forked_from=forked_from):
            begun.append(forked_from)

    monkeypatch.setattr("asyncrl.cli.fork.prepared", lambda layers, words, **_: (load_config(layers, words), None))
    monkeypatch.setattr("asyncrl.cli.fork.run_in_terminal", create)
    return begun


def test_the_good_run_is_used_by_every_command(evil: Path) -> None:
    for command in ALL:
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 0, (command, result.output)


def test_a_run_is_used_through_links_outside_of_its_directory(evil: Path) -> None:
    evil.parent.rename(evil.parent.with_name("elsewhere"))
    evil.parent.symlink_to("elsewhere")
    (evil.parent / "named").symlink_to("evil")
    for name in ("runs/evil", "runs/named"):
        for command in ("audit", "report", "samples", "status"):
            assert CliRunner().invoke(app, [command, name]).exit_code == 0, (command, name)


def test_every_command_of_a_run_is_tried() -> None:
    assert {command[0] for command in ALL} | {"resume", "scale"} >= {*main.READERS, "config"}


@contextlib.contextmanager
def bounded(command: Sequence[str]) -> Iterator[None]:
    """Fails if the block takes too long or too much memory."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(command)

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at the memory that is used now
    before = memory_kib("VmRSS")
    old = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert memory_kib("VmHWM") - before < MEMORY_KIB, command


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def entries(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Returns the mode, the size and the time of the last change of each entry below a folder."""
    found = {str(path.relative_to(folder)): path.lstat() for path in sorted(folder.rglob("*"))}
    return {name: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def contents(folder: Path) -> dict[str, bytes | str]:
    """Returns the content of each file and the target of each link below a folder."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }
