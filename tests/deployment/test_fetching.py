"""A run is fetched from its mirror into a new directory, and goes on there as in its own one."""

import contextlib
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import fsspec
import msgspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from mirrored_scene import URL, config_in, content, mirror_of, new_run, save, train

from asyncrl.checkpoints.directory import complete_steps, folder_of, verified, write
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.deployment.fetching import fetched, is_url
from asyncrl.deployment.mirror import url_problem
from asyncrl.deployment.resuming import chosen_checkpoint
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import AsyncRLError, CheckpointOfOtherFormat, ConfigError, RunError
from asyncrl.learner.records import StepRecord, read_lines


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a machine that has nothing of the run, which is in `first`. Its mirror is in memory."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


@pytest.fixture
def first(tmp_path: Path) -> RunDir:
    """A mirrored run with checkpoints of steps 2 and 4, which has trained 5 steps."""
    with new_run(tmp_path / "first", steps=5) as run:
        save(run, 2, content=b"2" * 40)
        save(run, 4, content=b"4" * 40)
        run.stopped()
        mirror_of(run).pass_once()
    return run


def fetch(url: str, overrides: Sequence[str], *, step: int | None) -> Path:
    return fetched(url, overrides, step=step, report=print)


def resumed(directory: Path, *, step: int | None = None) -> RunDir:
    return RunDir.create(config_in(directory.parent), choose=partial(chosen_checkpoint, step=step))


def test_the_run_goes_on_from_the_newest_checkpoint_with_its_records(first: RunDir) -> None:
    directory = fetch(URL, [], step=None)
    assert directory == Path("runs/quick")
    assert complete_steps(directory / "checkpoints") == [4]
    assert directory.stat().st_mode & 0o777 == 0o700
    for name in ("config.yaml", "steps.jsonl", "samples/step-3.jsonl", "audit/steps-1.msgpack"):
        assert (directory / name).read_bytes() == (first.path / name).read_bytes()
    with resumed(directory) as run:
        assert run.resumed is not None
        assert (run.resumed.step, run.nonce, run.lineage.incarnation) == (4, first.nonce, 2)
        assert [record.step for record in read_lines(directory / "steps.jsonl", StepRecord)] == [0, 1, 2, 3]
        train(run, range(4, 6))
        mirror_of(run).pass_once()
    assert content()["steps.jsonl"].count(b"\n") == 6
    assert [path.name for path in directory.parent.iterdir()] == ["quick"]


def test_a_checkpoint_can_be_named(first: RunDir) -> None:
    assert complete_steps(fetch(URL, [], step=2) / "checkpoints") == [2]


def test_the_folder_and_the_name_are_those_of_the_user(first: RunDir, tmp_path: Path) -> None:
    """The configuration in the mirror names the folder of another machine."""
    directory = fetch(URL, [f"run.dir={tmp_path}/mine", "run.name=other"], step=None)
    assert directory == tmp_path / "mine" / "other"
    assert complete_steps(directory / "checkpoints") == [4]


@pytest.mark.parametrize("file", ["COMPLETE", "policy/weights", "manifest.json", "buffer.msgpack"])
@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    file: str, damage: str, first: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = [f"/bucket/quick/{name}" for name in content() if re.fullmatch(rf"checkpoints/step-4-\w+/{file}", name)]
    if damage == "gone":
        MemoryFileSystem.store.pop(path)
    else:
        before = MemoryFileSystem.store[path].getvalue()
        nonce = first.nonce.encode()  # of another run, in a manifest that can be read
        changed = before.replace(nonce, b"0" * 16) if file == "manifest.json" else before[:-1] + b"x"
        MemoryFileSystem().pipe_file(path, changed)
    assert complete_steps(fetch(URL, [], step=None) / "checkpoints") == [2]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["cannot be used" in text for text in warned] == ([] if (file, damage) == ("COMPLETE", "gone") else [True])


@pytest.mark.parametrize("step", [None, 4])
def test_only_without_a_step_is_an_older_checkpoint_taken(
    step: int | None, first: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    [path] = [f"/bucket/quick/{name}" for name in content() if re.fullmatch(r"checkpoints/step-4-\w+/policy/.*", name)]
    MemoryFileSystem().pipe_file(path, b"x" * 40)
    with contextlib.nullcontext() if step is None else pytest.raises(RunError, match="no checkpoint of step 4"):
        fetch(URL, [], step=step)
    assert "policy/weights has 40 bytes" in caplog.text
    assert ("older checkpoint is taken" in caplog.text) == (step is None)


def test_a_checkpoint_of_another_version_is_refused_and_no_older_one_is_taken(first: RunDir) -> None:
    path = folder_of(first.checkpoints, 4)
    write(path, msgspec.structs.replace(verified(path), schema=1), fill=lambda path: None)
    mirror_of(first).pass_once()
    with pytest.raises(CheckpointOfOtherFormat, match=f"wrote the checkpoint {URL}/.*step-4.* in format 1"):
        fetch(URL, [], step=None)
    assert not Path("runs/quick").exists()


def test_a_checkpoint_of_lost_weights_is_not_taken(first: RunDir, tmp_path: Path) -> None:
    """The run went back to step 2, and the checkpoint of step 4 is still there."""
    with RunDir.create(config_in(tmp_path / "first"), choose=partial(chosen_checkpoint, step=2)) as again:
        assert again.lineage.branches == (Version(1, 2),)
        mirror_of(again).pass_once()
        assert b"step-2-" in content()["latest.json"]
    assert complete_steps(fetch(URL, [], step=None) / "checkpoints") == [2]


def test_a_directory_of_the_run_is_used_and_not_fetched_again(first: RunDir) -> None:
    directory = fetch(URL, [], step=None)
    with resumed(directory) as run:
        train(run, range(4, 5))
    before = MemoryFileSystem.store.copy()
    assert fetch(URL, [], step=None) == directory
    assert len(read_lines(directory / "steps.jsonl", StepRecord)) == 5
    assert MemoryFileSystem.store == before


def test_a_directory_that_is_older_than_the_mirror_or_of_another_run_is_refused(first: RunDir, tmp_path: Path) -> None:
    with resumed(fetch(URL, [], step=None)) as run:
        mirror_of(run).pass_once()
    with pytest.raises(RunError, match=r"is older than memory://bucket/quick: the run was resumed elsewhere"):
        fetch(URL, [f"run.dir={first.path.parent}"], step=None)
    with new_run(tmp_path / "second") as other, pytest.raises(RunError, match="is not of the run that is mirrored at"):
        fetch(URL, [f"run.dir={other.path.parent}"], step=None)


def test_a_directory_without_the_newest_checkpoint_of_the_mirror_is_refused(first: RunDir) -> None:
    """The same incarnation may have trained on another machine, to which the directory was copied."""
    here = [f"run.dir={first.path.parent}"]
    assert fetch(URL, here, step=None) == first.path
    shutil.rmtree(first.checkpoints / "step-4")
    with pytest.raises(RunError, match=r"has a checkpoint of step 4: move the directory away, and give this command"):
        fetch(URL, here, step=None)


def test_a_later_checkpoint_of_lost_weights_does_not_make_the_mirror_newer(first: RunDir, tmp_path: Path) -> None:
    with RunDir.create(config_in(tmp_path / "first"), choose=partial(chosen_checkpoint, step=2)) as again:
        mirror_of(again).pass_once()
    assert {name.split("/")[1][:6] for name in content() if name.startswith("checkpoints/")} == {"step-2", "step-4"}
    assert fetch(URL, [f"run.dir={first.path.parent}"], step=None) == first.path


def test_of_two_machines_that_resume_from_one_checkpoint_the_second_does_not_take_the_mirror(
    first: RunDir, tmp_path: Path
) -> None:
    places = [fetch(URL, [f"run.dir={tmp_path / name}"], step=None) for name in ("a", "b")]
    with resumed(places[0]) as run, resumed(places[1]) as late:
        assert run.lineage == late.lineage
        mirror_of(run).pass_once()
        before = content()
        with pytest.raises(ConfigError, match=r"was continued elsewhere.* Move this directory away"):
            mirror_of(late).pass_once()
        assert content() == before
    with resumed(places[0]) as run:
        mirror_of(run).pass_once()
    assert content() != before


def test_of_two_fetches_at_once_one_gets_the_directory_and_the_other_says_so(
    first: RunDir, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = MemoryFileSystem._open
    inner: list[str] = []

    def twice(fs: MemoryFileSystem, path: str, *arguments: object, **named: object) -> object:
        if path.endswith("policy/weights") and not inner:
            inner.append("begun")
            inner.append(str(fetch(URL, [], step=None)))
        return opened(fs, path, *arguments, **named)

    monkeypatch.setattr(MemoryFileSystem, "_open", twice)
    with pytest.raises(RunError, match="because the run was fetched twice at once: give this command again"):
        fetch(URL, [], step=None)
    assert inner == ["begun", "runs/quick"]
    assert complete_steps(elsewhere / "runs" / "quick" / "checkpoints") == [4]
    assert [path.name for path in (elsewhere / "runs").iterdir()] == ["quick"]


def test_a_learner_whose_run_went_on_elsewhere_does_not_write_over_it(first: RunDir, tmp_path: Path) -> None:
    with resumed(fetch(URL, [], step=2)) as run:
        mirror_of(run).pass_once()
    before = content()
    with (
        RunDir.create(config_in(tmp_path / "first")) as old,
        pytest.raises(ConfigError, match=r"incarnation 2, and .* lacks what it has trained there"),
    ):
        mirror_of(old).pass_once()
    assert content() == before


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda store: store.clear(), "is not the mirror of a run: it has no config.yaml"),
        (lambda store: [store.pop(name) for name in [*store] if "COMPLETE" in name], "has no checkpoint that is comp"),
    ],
)
def test_a_url_without_a_run_is_refused_and_leaves_nothing(
    change: Callable[[dict[str, object]], object], error: str, first: RunDir, elsewhere: Path
) -> None:
    change(MemoryFileSystem.store)
    with pytest.raises(AsyncRLError, match=re.escape(error)):
        fetch(URL, [], step=None)
    assert [path for path in elsewhere.rglob("*") if path.is_file() or "quick" in path.name] == []


def test_a_storage_that_fails_now_ends_the_fetch_and_the_next_one_succeeds(
    first: RunDir, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint would lose steps."""
    opened = MemoryFileSystem._open

    def failing(fs: MemoryFileSystem, path: str, *arguments: object, **named: object) -> object:
        if path.endswith("policy/weights"):
            raise TimeoutError("no answer")
        return opened(fs, path, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "_open", failing)
        with pytest.raises(RunError, match=r"cannot be read \(TimeoutError: no answer\): check the URL, and the keys"):
            fetch(URL, [], step=None)
    assert not (elsewhere / "runs" / "quick").exists()
    (elsewhere / "runs" / "quick").mkdir()
    assert complete_steps(fetch(URL, [], step=None) / "checkpoints") == [4]
    assert [path.name for path in (elsewhere / "runs").iterdir()] == ["quick"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s4://bucket/x", "s4://bucket/x: asyncrl has no mirrors at s4:// URLs; use e.g. s3://"),
        ("https://server/x", "https://server/x: asyncrl has no mirrors at https:// URLs; use e.g. s3://"),
        ("sftp://server/x", 'sftp://server/x: the package for sftp:// URLs is missing: SFTPFileSystem requires "param'),
        ("file:///folder", None),
        (URL, None),
    ],
)
def test_a_url_that_cannot_work_is_refused_in_a_sentence(url: str, problem: str | None) -> None:
    found = url_problem(url)
    assert (found or "").startswith(problem or "")
    assert (found is None) == (problem is None)
    if problem is not None:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            fetch(url, [], step=None)


@pytest.mark.parametrize(
    ("scheme", "extra"), [("s3", "s3"), ("s3a", "s3"), ("gs", "gs"), ("gcs", "gs"), ("az", "az"), ("abfs", "az")]
)
def test_a_missing_package_is_named_by_its_extra(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str) -> type:
        raise ImportError("Install a package")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    assert url_problem(f"{scheme}://bucket/x") == (
        f"{scheme}://bucket/x: the package for {scheme}:// URLs is missing: install asyncrl with the extra {extra} (in "
        f"a clone: python3 deploy/install.py --also {extra})"
    )
    packages = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
    assert known_implementations[scheme]["class"].startswith(f"{packages[extra]}.")


@pytest.mark.parametrize("text", ["quickstart", "bucket/quickstart", "s3:/bucket/x", "s3::memory://x", "s3://a b"])
def test_the_mirror_of_a_configuration_is_the_url_of_a_folder(text: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of a folder"):
        Config.model_validate({"run": {"mirror": text}})


def test_a_path_is_no_url() -> None:
    assert [is_url(run) for run in ("quick", "runs/quick", "/a/b", "s3://bucket/x", URL)] == [False] * 3 + [True] * 2
