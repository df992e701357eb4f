"""The audit passes on runs that are as they should be: whole, killed and resumed, living, and torn."""

import asyncio
import os
import struct
import threading
from pathlib import Path

import pytest
from audited_run import FAILED_GROUP, AuditedRun, Killed, record, record_killed_run
from typer.testing import CliRunner

from asyncrl.audit.audit import audit
from asyncrl.audit.history import read_history
from asyncrl.audit.outcome import Verdict
from asyncrl.buffer.ledger import Fate
from asyncrl.cli.main import app
from asyncrl.common.version import Version
from asyncrl.coordinator.snapshot import RunSnapshot
from asyncrl.errors import RunError
from asyncrl.learner.audit_records import records_path


def verdicts(directory: Path) -> set[Verdict]:
    return {outcome.verdict for outcome in audit(directory)}


@pytest.mark.asyncio
async def test_a_run_that_was_killed_and_resumed_passes_and_its_lost_steps_do_not_count(tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path)
    history = read_history(directory)
    assert [(step.incarnation, step.step) for step in history.steps] == [(1, 0), (1, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    assert [(step.incarnation, step.step) for step in history.lost] == [(1, 2)]
    fates = {ended.fate for step in history.steps for ended in step.ledger.ended}
    assert {Fate.TRAINED, Fate.SKIPPED, Fate.FAILED} <= fates, "the run has all of these fates, or it shows little"
    assert history.end is not None
    assert history.end.ledger.prompts > FAILED_GROUP
    outcomes = list(audit(directory))
    assert [outcome.verdict for outcome in outcomes] == [Verdict.PASSED] * 4 + [Verdict.NOT_POSSIBLE], "\n".join(
        map(str, outcomes)
    )
    assert "1 lost steps" in outcomes[0].detail
    assert "8 publications and 3 checkpoints" in outcomes[3].detail


@pytest.mark.asyncio
async def test_the_command_prints_a_line_a_check_and_exits_by_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # the command sets it, which must not outlive this test
    directory = await record(tmp_path)
    passed = CliRunner().invoke(app, ["audit", str(directory)])
    assert passed.exit_code == 0, passed.output
    assert [line.split(":")[0] for line in passed.output.splitlines()] == ["passed"] * 4 + ["not possible"], (
        passed.output
    )
    records = records_path(directory, 1)
    data = bytearray(records.read_bytes())
    data[-100] ^= 1
    records.write_bytes(data)
    damaged = CliRunner().invoke(app, ["audit", str(directory)])
    assert damaged.exit_code == 1
    assert "does not match its checksum" in damaged.output


@pytest.mark.asyncio
async def test_a_torn_last_record_is_ignored(tmp_path: Path) -> None:
    directory = await record(tmp_path, killed_at=3)
    records = records_path(directory, 1)
    whole = records.read_bytes()
    for torn in (whole[:-1], whole + struct.pack("<I", 9), whole[: len(whole) - len(whole) // 8]):
        records.write_bytes(torn)
        assert verdicts(directory) == {Verdict.PASSED, Verdict.NOT_POSSIBLE}
    records.write_bytes(whole)
    assert len(read_history(directory).steps) == 3


@pytest.mark.asyncio
async def test_a_run_without_a_trained_step_cannot_be_audited_yet(tmp_path: Path) -> None:
    directory = await record(tmp_path, killed_at=0)
    assert verdicts(directory) == {Verdict.NOT_POSSIBLE}
    records_path(directory, 1).unlink()
    with pytest.raises(RunError, match="no records for the audit"):
        list(audit(directory))


@pytest.mark.asyncio
async def test_an_incarnation_without_a_step_leaves_the_ancestors_steps(tmp_path: Path) -> None:
    await record(tmp_path, killed_at=3)
    directory = await record(tmp_path, killed_at=2)
    history = read_history(directory)
    assert history.lineage.branches == (Version(1, 2),)
    assert [step.step for step in history.steps] == [0, 1]
    assert verdicts(directory) == {Verdict.PASSED, Verdict.NOT_POSSIBLE}


@pytest.mark.asyncio
async def test_a_step_is_on_the_disk_before_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = AuditedRun(tmp_path)
    await run.start()
    written, on_disk, began_with = run.audit_file._path, [0], list[tuple[int, int]]()
    stage, sync = run.trainer.stage_checkpoint, os.fsync

    def noted(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), written.stat()):
            on_disk[0] = written.stat().st_size
        sync(descriptor)

    def staged() -> None:
        began_with.append((len(read_history(run.run_dir.path).steps), written.stat().st_size - on_disk[0]))
        stage()

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(run.trainer, "stage_checkpoint", staged)
    with run.run_dir:
        await run.run()
    assert began_with == [(2, 0), (4, 0), (6, 0)], "steps with a record, and bytes of records that are not on the disk"


@pytest.mark.asyncio
async def test_weights_that_are_kept_wait_for_a_save_because_the_ranks_have_one_copy_to_write_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = AuditedRun(tmp_path, keep_weights=True)
    await run.start()
    run.slow_saves = True
    began, go_on, writing, overwritten = threading.Event(), threading.Event(), [False], list[bool]()
    write, keep = run.trainer.write_checkpoint, run.trainer.save_checkpoint
    begin, settle = run.checkpoints.begin, run.checkpoints.settle

    def slow(weights_path: Path, optimizer_path: Path | None = None) -> None:
        writing[0] = optimizer_path is not None
        if writing[0]:
            began.set()
            go_on.wait()
        write(weights_path, optimizer_path)
        writing[0] = False

    def kept(weights_path: Path, optimizer_path: Path | None = None) -> None:
        overwritten.append(writing[0])
        go_on.set()
        keep(weights_path, optimizer_path)

    async def begun(snapshot: RunSnapshot, *, last_step: bool) -> None:
        began.clear()
        go_on.clear()
        await begin(snapshot, last_step=last_step)
        await asyncio.to_thread(began.wait)

    async def settled() -> None:
        go_on.set()
        await settle()

    monkeypatch.setattr(run.trainer, "write_checkpoint", slow)
    monkeypatch.setattr(run.trainer, "save_checkpoint", kept)
    monkeypatch.setattr(run.checkpoints, "begin", begun)
    monkeypatch.setattr(run.checkpoints, "settle", settled)
    with run.run_dir:
        await run.run()
    assert overwritten == [False] * 7, "the first weights, and those of six steps"


@pytest.mark.asyncio
async def test_the_killed_step_is_not_recorded(tmp_path: Path) -> None:
    run = AuditedRun(tmp_path)
    run.trainer.killed_at = 2
    await run.start()
    with pytest.raises(Killed), run.run_dir:
        await run.run()
    assert len(read_history(run.run_dir.path).steps) == 2
