"""The mirror of a run's directory: it gets what is finished, in an order in which each moment can be resumed, and sends
nothing twice. A storage that fails does not end the run."""

import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from made_up_run import make_step
from mirrored_scene import URL, Storage, content, mirror_of, new_run, save, train

from asyncrl.cli.start import reported_run
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import CheckpointSection, Config
from asyncrl.deployment import mirror as module
from asyncrl.deployment.mirror import Store
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import ConfigError, RunLocked
from asyncrl.learner.records import EvalRecord
from asyncrl.metrics.recorders import LearnerMetrics


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    return Storage(monkeypatch)


def latest() -> dict[str, object]:
    found: dict[str, object] = json.loads(content()["latest.json"])
    return found


def checkpoints() -> set[str]:
    """Returns the complete checkpoints of the mirror, without their checksums."""
    parts = [name.split("/") for name in content() if name.endswith(f"/{COMPLETE}")]
    return {part[1].rpartition("-")[0] for part in parts}


def test_the_mirror_has_the_records_and_the_checkpoints_as_they_are(tmp_path: Path) -> None:
    with new_run(tmp_path, steps=3) as run:
        save(run, 3)
        (run.path / "logs" / "up-0.log").write_text("a line")
        (run.path / "samples" / "step-9.jsonl.tmp").write_text("not finished")
        mirror_of(run).pass_once()
        found = content()
        for name in ("config.yaml", "run.json", "steps.jsonl", "samples/step-2.jsonl", "audit/steps-1.msgpack"):
            assert found[name] == (run.path / name).read_bytes()
        assert latest()["step"] == 3
        folder = str(latest()["checkpoint"])
        assert {name.removeprefix(f"{folder}/") for name in found if name.startswith(folder)} == {
            "policy/weights", "buffer.msgpack", "manifest.json", COMPLETE,
        }  # fmt: skip
        assert found[f"{folder}/policy/weights"] == b"w" * 100
        assert not [name for name in found if "log" in name or "lock" in name or ".tmp" in name]


def test_at_each_call_the_storage_could_be_resumed_from(storage: Storage, tmp_path: Path) -> None:
    """The records of all steps of a checkpoint are sent before it, COMPLETE after its other files, and the file that
    names it after that."""
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)
        mirror.pass_once()
        train(run, range(2, 4))
        save(run, 4, content=b"x")
        save(run, 6, content=b"y")
        storage.written.clear()

        def before(operation: str, name: str) -> None:
            found = content()
            if name.startswith("checkpoints/step-4"):
                assert found["steps.jsonl"].count(b"\n") == 4
            folder = str(latest()["checkpoint"])
            assert f"{folder}/{COMPLETE}" in found
            for other in checkpoints():
                assert len([each for each in found if each.startswith(f"checkpoints/{other}-")]) == 4

        storage.before = before
        mirror.pass_once()
        steps = [name.split("/")[1].split("-")[1] for name in storage.written if "/step-" in name and "check" in name]
        assert steps == ["4"] * 4 + ["6"] * 4
        assert latest()["step"] == 6


def test_nothing_is_sent_twice(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)
        mirror.pass_once()
        storage.written.clear()
        mirror.pass_once()
        assert storage.written == []
        train(run, range(2, 3))
        mirror.pass_once()
        assert set(storage.written) == {"steps.jsonl", "samples/step-2.jsonl", "audit/steps-1.msgpack", "sent.json"}


def test_a_process_that_was_killed_while_it_sent_leaves_only_the_rest_to_the_next_one(
    storage: Storage, tmp_path: Path
) -> None:
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)

        def killed(operation: str, name: str) -> None:
            if name.endswith("manifest.json"):
                raise KeyboardInterrupt

        storage.before = killed
        with pytest.raises(KeyboardInterrupt):
            mirror_of(run).pass_once()
        assert checkpoints() == set()
        assert "latest.json" not in content()
        storage.before = lambda operation, name: None
        storage.written.clear()
        mirror_of(run).pass_once()
        sent = [name.rpartition("/")[2] for name in storage.written]
        assert sent == ["owner.json", "manifest.json", "weights", COMPLETE, "latest.json"]


def test_a_part_of_a_file_and_a_record_with_other_content_are_sent_again(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path, steps=1) as run:
        save(run, 1)
        mirror_of(run).pass_once()
        folder = str(latest()["checkpoint"])
        fs = MemoryFileSystem()
        fs.pipe_file(f"/bucket/quick/{folder}/policy/weights", b"w" * 99)
        fs.rm_file(f"/bucket/quick/{folder}/{COMPLETE}")
        (run.path / "samples" / "step-0.jsonl").write_text("sample of step 9\n")
        fs.rm_file("/bucket/quick/config.yaml")
        mirror_of(run).pass_once()
        assert content()["config.yaml"] == (run.path / "config.yaml").read_bytes()
        assert content()[f"{folder}/policy/weights"] == b"w" * 100
        assert content()["samples/step-0.jsonl"] == b"sample of step 9\n"


def test_a_checkpoint_of_the_same_step_and_size_is_another_one(tmp_path: Path) -> None:
    """A run that went back to an earlier checkpoint trains the step again."""
    with new_run(tmp_path, steps=2) as run:
        save(run, 2, content=b"a" * 50)
        mirror_of(run).pass_once()
        first = latest()["checkpoint"]
        shutil.rmtree(run.checkpoints / "step-2")
        save(run, 2, content=b"b" * 50, incarnation=2)
        mirror_of(run).pass_once()
        assert latest()["checkpoint"] != first
        assert content()[f"{latest()['checkpoint']}/policy/weights"] == b"b" * 50


def test_a_checkpoint_that_the_keep_rules_have_deleted_is_deleted_in_the_mirror(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        mirror = mirror_of(run, keep=1, keep_every=20, keep_best=1, every_steps=10)
        run.append_eval(EvalRecord(version=10, wall_s=1, prompts=8, reward_mean=0.9))
        run.append_eval(EvalRecord(version=50, wall_s=1, prompts=8, reward_mean=0.1))
        for step in (10, 20, 30):
            save(run, step, content=bytes([step]))
        mirror.pass_once()
        assert checkpoints() == {"step-10", "step-20", "step-30"}
        shutil.rmtree(run.checkpoints / "step-30")
        save(run, 50)
        mirror.pass_once()
        assert checkpoints() == {"step-10", "step-20", "step-50"}
        assert not [name for name in content() if "step-30" in name]


def test_checkpoints_that_were_set_aside_or_are_on_another_machine_stay(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        for step in (10, 20, 30):
            save(run, step, content=bytes([step]))
        mirror_of(run, keep=3).pass_once()
        (run.checkpoints / "lost-2").mkdir()
        (run.checkpoints / "step-30").rename(run.checkpoints / "lost-2" / "step-30")
        shutil.rmtree(run.checkpoints / "step-10")  # the machine has only the one from which the run was resumed
        mirror_of(run, keep=3).pass_once()
        assert checkpoints() == {"step-10", "step-20", "step-30"}
        mirror_of(run, keep=2).pass_once()
        assert checkpoints() == {"step-20", "step-30"}
        assert latest()["step"] == 20
        (run.checkpoints / "step-20").rename(run.checkpoints / "lost-2" / "step-20")
        save(run, 15)
        mirror_of(run, keep=1).pass_once()
        assert checkpoints() == {"step-15", "step-20", "step-30"}


def test_a_bucket_without_the_right_to_delete_is_a_warning_once(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(operation: str, name: str) -> None:
        if operation == "remove":
            raise PermissionError("AccessDenied: s3:DeleteObject")

    storage.before = refused
    with new_run(tmp_path) as run:
        mirror = mirror_of(run, keep=1)
        for step in (1, 2, 3):
            shutil.rmtree(run.checkpoints, ignore_errors=True)
            save(run, step, content=bytes([step]))
            mirror.pass_once()
        assert latest()["step"] == 3
        assert checkpoints() == {"step-1", "step-2", "step-3"}
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "old files in memory://bucket/quick cannot be deleted (PermissionError: AccessDenied" in record.message


def test_a_checkpoint_that_is_deleted_while_it_is_sent_is_no_failure(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        save(run, 1)
        mirror = mirror_of(run)
        seen: list[frozenset[int]] = []

        def deleted(operation: str, name: str) -> None:
            if name.endswith("policy/weights"):
                seen.append(mirror.reading)
                shutil.rmtree(run.checkpoints / "step-1")

        storage.before = deleted
        mirror.pass_once()
        assert seen == [frozenset({1})], "the keep rules see which checkpoint is being sent"
        assert mirror.reading == frozenset()
        assert checkpoints() == set()
        assert "latest.json" not in content()


def test_the_newest_checkpoint_is_kept_while_records_and_older_checkpoints_are_sent(
    storage: Storage, tmp_path: Path
) -> None:
    """Records that take longer than `checkpoint.keep` intervals would else leave each pass without a checkpoint."""
    with new_run(tmp_path) as run:
        save(run, 1)
        save(run, 2)
        mirror = mirror_of(run)
        seen: dict[str, frozenset[int]] = {}

        def sees(operation: str, name: str) -> None:
            seen.setdefault(re.sub("-[0-9a-f]{16}/", "/", name), mirror.reading)

        storage.before = sees
        mirror.pass_once()
        assert seen["config.yaml"] == {2}
        assert seen["checkpoints/step-1/policy/weights"] == {1, 2}
        assert seen["checkpoints/step-2/policy/weights"] == {2}
        assert mirror.reading == frozenset()


def test_a_checkpoint_that_is_replaced_while_it_is_sent_is_not_marked_complete(
    storage: Storage, tmp_path: Path
) -> None:
    """The end of a run saves the last step again, with `hf/`."""
    with new_run(tmp_path) as run:
        save(run, 1, content=b"a" * 20)

        def replaced(operation: str, name: str) -> None:
            if name.endswith("policy/weights"):
                storage.before = lambda operation, name: None
                save(run, 1, content=b"b" * 20)

        storage.before = replaced
        mirror = mirror_of(run)
        mirror.pass_once()
        assert checkpoints() == set()
        mirror.pass_once()
        assert content()[f"{latest()['checkpoint']}/policy/weights"] == b"b" * 20


def test_a_storage_that_cannot_be_opened_at_the_start_is_tried_again(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some implementations of fsspec connect when they are made."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    opened, tries = fsspec.core.url_to_fs, list[str]()

    def url_to_fs(url: str, **options: Any) -> Any:
        tries.append(url)
        if len(tries) < 3:
            raise ConnectionRefusedError("no server")
        return opened(url, **options)

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        mirror.start()
        mirror.finish(within_s=60)
        assert content()["steps.jsonl"] == (run.path / "steps.jsonl").read_bytes()


def test_the_mirror_of_another_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    with new_run(tmp_path / "a", steps=1) as run:
        save(run, 1)
        mirror_of(run).pass_once()
    before = content()
    with new_run(tmp_path / "b", steps=2) as other:
        mirror = mirror_of(other)
        with pytest.raises(ConfigError, match=r"another run is mirrored there.* asyncrl resume memory://bucket/quick"):
            mirror.start()
    assert content() == before


def test_the_directory_of_a_run_is_no_mirror_and_stays_as_it_is(tmp_path: Path) -> None:
    with new_run(tmp_path / "a", steps=3) as run, new_run(tmp_path / "b", steps=1) as other:
        for found in (run, other):
            before = {path: path.read_bytes() for path in found.path.rglob("*") if path.is_file()}
            with pytest.raises(ConfigError, match="this is the directory of a run and no mirror"):
                mirror_of(other, url=f"file://{found.path}").start()
            assert {path: path.read_bytes() for path in found.path.rglob("*") if path.is_file()} == before


def test_a_process_stops_when_another_one_has_taken_the_mirror(tmp_path: Path) -> None:
    """The run was resumed on another machine, while this one was cut off from the network."""
    with new_run(tmp_path, steps=1) as run:
        old = mirror_of(run)
        old.pass_once()
        mirror_of(run).pass_once()
        train(run, range(1, 2))
        before = content()
        with pytest.raises(ConfigError, match="another process has taken the mirror"):
            old.pass_once()
        assert content() == before


def test_a_mirror_without_a_checkpoint_is_taken_and_its_old_records_are_removed(tmp_path: Path) -> None:
    """The first start has died early, so its run cannot be resumed, and has another nonce than the next start."""
    MemoryFileSystem().pipe_file("/bucket/quick/notes.txt", b"of the user")
    with new_run(tmp_path / "a", steps=3) as died, new_run(tmp_path / "b", steps=1) as run:
        old = mirror_of(died)
        old.pass_once()
        assert "samples/step-2.jsonl" in content()
        mirror_of(run).pass_once()
        found = content()
        assert [name for name in found if name.startswith("samples/")] == ["samples/step-0.jsonl"]
        assert found["run.json"] == (run.path / "run.json").read_bytes()
        assert found["notes.txt"] == b"of the user"
        with pytest.raises(ConfigError, match="another process has taken the mirror"):
            old.pass_once()
        assert content() == found


def test_records_of_another_run_that_cannot_be_deleted_refuse_the_start(storage: Storage, tmp_path: Path) -> None:
    def refused(operation: str, name: str) -> None:
        if operation == "remove":
            raise PermissionError("AccessDenied: s3:DeleteObject")

    with new_run(tmp_path / "first", steps=3) as run:
        mirror_of(run).pass_once()
        before = content()
    storage.before = refused
    with new_run(tmp_path / "second") as run:
        mirror = mirror_of(run)
        with pytest.raises(ConfigError, match=r"cannot be deleted \(AccessDenied: s3:DeleteObject\). Name another URL"):
            mirror.start()
    assert content() == before


def test_a_storage_that_keeps_what_is_deleted_is_one_that_does_not_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """s3fs raises no error for objects that S3 does not delete."""
    store = Store(URL)
    store.write("samples/step-1.jsonl", b"kept")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "rm", lambda self, path, recursive: None)
        for name in ("samples", "samples/step-1.jsonl"):
            with pytest.raises(PermissionError, match=f"{name} is still there"):
                store.remove(name)
    store.remove("samples")
    store.remove("samples")
    assert content() == {}


def test_a_process_that_was_killed_while_it_took_the_mirror_can_be_followed(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path, steps=1) as run:
        save(run, 1)
        mirror_of(run).pass_once()

        def killed(at: str, operation: str, name: str) -> None:
            if name == at:
                raise KeyboardInterrupt

        for at in ("owner.json", "steps.jsonl"):
            storage.before = partial(killed, at)
            train(run, range(1, 2))
            with pytest.raises(KeyboardInterrupt):
                mirror_of(run).pass_once()
        storage.before = lambda operation, name: None
        mirror_of(run).pass_once()
        assert content()["steps.jsonl"] == (run.path / "steps.jsonl").read_bytes()


def lose_mirror(run: RunDir, storage: Storage, *, at: str) -> None:
    """Lets another process take the mirror of the run right before the first write of `at`. From then on, `written` has
    what is written after that."""

    def taken(operation: str, name: str) -> None:
        if name.endswith(at):
            storage.before = lambda operation, name: None
            mirror_of(run)._take()
            storage.written.clear()

    storage.before = taken


@pytest.mark.parametrize(
    ("at", "whole"),
    [("manifest.json", 0), ("policy/weights", 0), (COMPLETE, 1), ("latest.json", 0), ("steps.jsonl", 0)],
)
def test_a_process_that_loses_the_mirror_in_a_pass_completes_no_other_checkpoint(
    at: str, whole: int, storage: Storage, tmp_path: Path
) -> None:
    with new_run(tmp_path, steps=1) as run:
        save(run, 1)
        mirror_of(run).pass_once()
        old = mirror_of(run, keep=1)
        old.pass_once()
        train(run, range(1, 3))
        save(run, 2)
        save(run, 3)
        lose_mirror(run, storage, at=at)
        with pytest.raises(ConfigError, match="another process has taken the mirror"):
            old.pass_once()
        parts = [name.split("/") for name in storage.written if name.startswith("checkpoints/")]
        assert len({part[1] for part in parts}) <= 1
        assert [part[-1] for part in parts].count(COMPLETE) == whole
        assert ("latest.json" in storage.written) == (at == "latest.json")


def test_a_process_that_loses_the_mirror_sends_at_most_the_bytes_between_two_looks_at_the_owner(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OWNED_BYTES", 1)
    with new_run(tmp_path, steps=1) as run:
        save(run, 1)
        old = mirror_of(run)
        lose_mirror(run, storage, at="manifest.json")
        with pytest.raises(ConfigError, match="another process has taken the mirror"):
            old.pass_once()
        assert [name.split("/")[-1] for name in storage.written] == ["manifest.json"]


def test_a_process_that_has_ended_writes_nothing_more(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path, steps=1) as run:
        save(run, 1)
        mirror = mirror_of(run)

        def ended(operation: str, name: str) -> None:
            if name.startswith("checkpoints/"):
                mirror._over.set()

        storage.before = ended
        with pytest.raises(Exception, match="the run has ended"):
            mirror.pass_once()
        assert len([name for name in storage.written if name.startswith("checkpoints/")]) == 1
        assert storage.written[-1].startswith("checkpoints/")


def test_a_mirror_that_was_emptied_gets_everything_again(tmp_path: Path) -> None:
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)
        mirror.pass_once()
        before = content()
        MemoryFileSystem.store.clear()
        mirror.pass_once()
        assert content() == before


def test_a_mirror_that_is_emptied_in_a_pass_gets_everything_in_the_next_one(storage: Storage, tmp_path: Path) -> None:
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)

        def emptied(operation: str, name: str) -> None:
            if name.endswith("manifest.json"):
                storage.before = lambda operation, name: None
                MemoryFileSystem.store.clear()

        storage.before = emptied
        with pytest.raises(Exception, match="the mirror was emptied"):
            mirror.pass_once()
        mirror.pass_once()
        assert content()["steps.jsonl"] == (run.path / "steps.jsonl").read_bytes()
        assert latest()["step"] == 2


def test_a_file_that_the_storage_lacks_is_a_failure(storage: Storage, tmp_path: Path) -> None:
    """For example a bucket that is gone. The record counts as sent only when it is there."""

    def lacking(operation: str, name: str) -> None:
        if name == "config.yaml":
            raise FileNotFoundError("NoSuchBucket")

    storage.before = lacking
    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        with pytest.raises(FileNotFoundError):
            mirror.pass_once()
        storage.before = lambda operation, name: None
        mirror.pass_once()
        assert content()["config.yaml"] == (run.path / "config.yaml").read_bytes()


def test_links_are_left_out_and_files_that_vanish_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    walk = os.walk

    def vanishing(folder: Path, **named: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for place, folders, files in walk(folder, **named):
            yield place, folders, [*files, "step-9.jsonl.tmp", "step-8.jsonl"]

    monkeypatch.setattr(os, "walk", vanishing)
    with new_run(tmp_path, steps=2) as run:
        (run.path / "samples" / "link").symlink_to("/etc/passwd")
        (run.path / "samples" / "folder").symlink_to("/etc")
        mirror = mirror_of(run)
        mirror.start()
        mirror.finish(within_s=60)
    assert {name for name in content() if "samples" in name} == {"samples/step-0.jsonl", "samples/step-1.jsonl"}
    assert caplog.records == []


def test_an_error_while_the_directory_is_compared_at_the_end_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(mirror: object) -> str:
        raise OSError("stale file handle")

    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        mirror.start()
        monkeypatch.setattr(module.Mirror, "missing", failed)
        mirror.finish(within_s=60)
    assert "it is not known whether memory://bucket/quick lacks files, because OSError: stale file ha" in caplog.text


def test_the_run_begins_before_everything_is_sent(storage: Storage, tmp_path: Path) -> None:
    """Else a directory of many gigabytes would delay the start by the whole time that it may take."""
    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        begun: dict[str, bool] = {}
        storage.before = lambda operation, name: begun.update({name: mirror._begun.is_set()})
        mirror.start()
        mirror.finish(within_s=60)
    assert begun["owner.json"] is False
    assert begun["config.yaml"] is True


def test_large_records_take_a_small_share_of_the_time(storage: Storage, tmp_path: Path) -> None:
    now_s = 0.0

    def slow(operation: str, name: str) -> None:
        nonlocal now_s
        now_s += 10 if name == "steps.jsonl" else 0

    with new_run(tmp_path, steps=1) as run:
        mirror = module.Mirror(
            module.Store(URL), run.path, nonce=run.nonce, lineage=run.lineage, keep=CheckpointSection(),
            clock=lambda: now_s,
        )  # fmt: skip
        storage.before = slow
        mirror.pass_once(due_only=True)
        sent: list[bool] = []
        for after_s, checkpoint, due_only in [
            (70, 0, True),
            (140, 0, True),
            (10, 0, True),
            (5, 2, True),
            (5, 0, False),
        ]:
            train(run, range(1))
            if checkpoint:
                save(run, checkpoint)
            now_s += after_s
            storage.written.clear()
            mirror.pass_once(due_only=due_only)
            sent.append("steps.jsonl" in storage.written)
    assert sent == [False, True, False, True, True]


def test_a_step_that_was_trained_again_counts_once_and_has_one_checkpoint(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        for step in (10, 20, 30):
            save(run, step, content=bytes([step]))
        mirror_of(run, keep=2).pass_once()
        for step in (10, 20, 30):
            shutil.rmtree(run.checkpoints / f"step-{step}")
        save(run, 30, content=b"again", incarnation=2)  # on a machine that has nothing else
        mirror_of(run, keep=2).pass_once()
        folders = sorted({name.split("/")[1] for name in content() if name.startswith("checkpoints/")})
        assert [name.rpartition("-")[0] for name in folders] == ["step-20", "step-30"]
        assert content()[f"checkpoints/{folders[1]}/policy/weights"] == b"again"


def failing(storage: Storage, error: Exception) -> threading.Event:
    """Makes the storage fail. Returns an event that is set at the second failure."""
    calls: list[str] = []
    twice = threading.Event()

    def before(operation: str, name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            twice.set()
        raise error

    storage.before = before
    return twice


def test_a_failure_is_counted_and_said_once_and_tried_again(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO)
    twice = failing(storage, TimeoutError("no answer"))
    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        metrics = LearnerMetrics(clock=lambda: 0.0)
        mirror.report_to(metrics)
        mirror.start()
        assert twice.wait(60)
        storage.before = lambda operation, name: None
        mirror.finish(within_s=60)
        assert content()["steps.jsonl"] == (run.path / "steps.jsonl").read_bytes()
    said = [record.message for record in caplog.records if "run.mirror" in record.message]
    assert "nothing can be sent to memory://bucket/quick now (TimeoutError: no answer). Training goes on" in said[0]
    assert said[1:] == ["run.mirror: memory://bucket/quick has everything again"]
    counted = metrics.registry.get_sample_value("asyncrl_mirror_failures_total")
    assert counted is not None
    assert counted >= 2
    assert metrics.registry.get_sample_value("asyncrl_mirror_behind_seconds") == 0.0, "of a clock that stands"
    assert storage.threads == {"mirror"}, "all work is in the thread of the mirror"


def test_a_checkpoint_is_sent_when_it_is_complete_and_not_with_the_next_records(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    sent = threading.Event()
    storage.before = lambda operation, name: sent.set() if name == "latest.json" else None
    with new_run(tmp_path, steps=2) as run:
        mirror = mirror_of(run)
        mirror.start()
        save(run, 2)
        assert sent.wait(30), "the next pass for records alone comes after a minute"
        mirror.finish(within_s=60)
    assert checkpoints() == {"step-2"}


def test_a_directory_that_cannot_be_read_between_two_passes_does_not_end_the_mirror(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    readable, refused = module.folders, threading.Event()

    def folders(checkpoints: Path) -> dict[int, Path]:
        if sent.is_set() and not refused.is_set():
            refused.set()
            raise OSError(5, "Input/output error")
        return readable(checkpoints)

    monkeypatch.setattr(module, "folders", folders)
    sent = threading.Event()
    with new_run(tmp_path, steps=2) as run:
        mirror = mirror_of(run)
        mirror.start()
        sent.set()
        assert refused.wait(30)
        save(run, 2)
        mirror.finish(within_s=60)
    assert checkpoints() == {"step-2"}


def test_the_wait_after_failures_grows_up_to_a_limit() -> None:
    waits = [module.wait_s(failures) for failures in range(9)]
    assert waits == [60, 5, 10, 20, 40, 80, 160, 300, 300]


def test_the_end_says_what_is_missing(storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with new_run(tmp_path, steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)
        mirror.pass_once()
        failing(storage, PermissionError("403"))
        save(run, 4)
        train(run, range(2, 3))
        mirror.start()
        mirror.finish(within_s=0.2)
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert error.startswith(
        "run.mirror: memory://bucket/quick lacks checkpoints/step-4, audit/steps-1.msgpack, samples/step-2.jsonl and 1 "
        "more, because PermissionError: 403. Everything is in "
    )


def mirrored_config(folder: Path) -> Config:
    run = {"name": "quick", "dir": str(folder), "mirror": URL, "shutdown_grace_s": 60}
    return Config.model_validate({"run": run})


def test_the_mirror_gets_the_end_of_the_run_and_the_report_while_the_directory_is_locked(
    storage: Storage, tmp_path: Path
) -> None:
    config = mirrored_config(tmp_path)
    refused: list[type[Exception]] = []

    def before(operation: str, name: str) -> None:
        if name == "report.html":
            try:
                RunDir.create(config)
            except RunLocked as error:
                refused.append(type(error))

    storage.before = before
    with reported_run(config, role="up") as run:
        run.append_step(make_step(0))
    found = content()
    assert json.loads(found["run.json"])["state"] == "finished"
    assert found["report.html"] == (run.path / "report.html").read_bytes()
    assert refused == [RunLocked]
    RunDir.create(config).close(state="stopped", reason="the lock is free again")


def test_a_run_without_a_mirror_sends_nothing(storage: Storage, tmp_path: Path) -> None:
    with reported_run(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}}), role="up") as run:
        assert run.mirror is None
    assert storage.written == []


def test_a_storage_that_hangs_lets_the_run_start_and_end(
    storage: Storage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()

    def hanging(operation: str, name: str) -> None:
        answered.wait(600)

    storage.before = hanging
    with new_run(tmp_path, steps=1) as run:
        mirror = mirror_of(run)
        mirror.start(within_s=0.05)
        mirror.finish(within_s=0.05)
    assert "because sending took longer than the 0 s that run.shutdown_grace_s left" in caplog.text
    answered.set()


def test_a_folder_as_a_mirror_never_has_a_part_of_a_file_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while a record is written again leaves the one before."""
    url = f"file://{tmp_path}/mirror"
    with new_run(tmp_path / "runs", steps=1) as run:
        mirror_of(run, url=url).pass_once()
        before = (tmp_path / "mirror" / "steps.jsonl").read_bytes()
        train(run, range(1, 2))

        def killed(source: str, target: str) -> None:
            Path(target).write_bytes(Path(source).read_bytes()[:7])
            os.sync()
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copyfile", killed)
            with pytest.raises(KeyboardInterrupt):
                mirror_of(run, url=url).pass_once()
        assert (tmp_path / "mirror" / "steps.jsonl").read_bytes() == before
        mirror_of(run, url=url).pass_once()
        assert (tmp_path / "mirror" / "steps.jsonl").read_bytes() == (run.path / "steps.jsonl").read_bytes()
