"""The audit passes on runs that are as they should be: whole, killed and resumed, living, and torn."""

import asyncio
import itertools
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from audited_run import FAILED_GROUP, MASKED_GROUP, AuditedRun, Killed, changed, record, record_killed_run, state
from learner_scenes import ids_of, meta_of, rows_of
from typer.testing import CliRunner

from asyncrl.audit.audit import audit
from asyncrl.audit.certificate import certificate
from asyncrl.audit.history import Verdict, read_history
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.records import CommitOutcome, GroupMeta, Ticket
from asyncrl.checkpoints.directory import SCHEMA
from asyncrl.cli.main import app
from asyncrl.common.version import Version
from asyncrl.config.schema import OnDeadline
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.rows import TRAIN_PARTITION
from asyncrl.errors import RunError
from asyncrl.generation.episodes import episode_rows, single_turn, version_spans
from asyncrl.generation.interfaces import Completion
from asyncrl.learner.audit_records import TrainedStep, framed, read_records, records_path
from asyncrl.learner.records import ForkPoint, StepRecord, read_info, read_lines
from asyncrl.ranks.digest import KINDS


def verdicts(directory: Path) -> set[Verdict]:
    return {outcome.verdict for outcome in audit(directory)}


def payloads(path: Path) -> Iterator[bytes]:
    """Yields the payload of each record in a file."""
    with path.open("rb") as file:
        while head := file.read(12):
            yield file.read(struct.unpack("<IQ", head)[0])


@pytest.fixture
def ray_token_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


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
    trained = [group for step in history.steps for group in step.groups if group.group == MASKED_GROUP]
    assert [(each.reward, each.trained) for group in trained for each in group.samples] == [(None, False), (1.0, True)]
    outcomes = list(audit(directory))
    assert [outcome.verdict for outcome in outcomes] == [Verdict.PASSED] * 4 + [Verdict.NOT_POSSIBLE], "\n".join(
        map(str, outcomes)
    )
    assert "1 lost steps" in outcomes[0].detail
    assert "8 publications are in the order" in outcomes[3].detail
    assert "3 checkpoints have the weights" in outcomes[3].detail


@pytest.mark.asyncio
@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, KINDS)], ids=" then ".join)
async def test_a_run_passes_whatever_devices_it_was_trained_on(kinds: tuple[str, str], tmp_path: Path) -> None:
    """The second start has digests of another kind than the first one, as a run that is resumed on a GPU has. The audit
    computes each kind of the saved weights."""
    directory = await record_killed_run(tmp_path, keep_weights=True, kinds=kinds)
    assert [step.digest_kind for step in read_history(directory).steps] == [kinds[0]] * 2 + [kinds[1]] * 4
    weights = next(outcome for outcome in audit(directory) if outcome.name == "4 weights")
    assert weights.verdict is Verdict.PASSED, weights.detail
    assert "8 publications are" in weights.detail
    assert "3 checkpoints have" in weights.detail
    certified = json.loads(certificate(read_history(directory), list(audit(directory))))["digests"]
    assert list(certified)[:2] == [
        f"weights_before_the_first_step_{kinds[0]}_64", f"weights_after_the_last_step_{kinds[1]}_64"
    ]  # fmt: skip


@pytest.mark.asyncio
async def test_records_without_a_kind_of_digest_have_xxh3(tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path, keep_weights=True)
    for path in (records_path(directory, incarnation) for incarnation in (1, 2)):
        began, *records = (msgspec.msgpack.decode(each) for each in payloads(path))
        shortened = [each[:-2] if each[0] == "step" else each for each in records]
        assert shortened != records
        path.write_bytes(b"".join(map(framed, [began, *shortened])))
    assert {step.digest_kind for step in read_history(directory).steps} == {"xxh3"}
    assert verdicts(directory) <= {Verdict.PASSED, Verdict.NOT_POSSIBLE}


@pytest.mark.asyncio
async def test_digests_of_a_kind_that_this_version_does_not_have_are_named(tmp_path: Path) -> None:
    directory = await record(tmp_path)

    def edit(records: list[Any]) -> None:
        records[:] = [
            msgspec.structs.replace(each, digest_kind="later") if isinstance(each, TrainedStep) else each
            for each in records
        ]

    changed(directory, 1, edit)
    weights = next(outcome for outcome in audit(directory) if outcome.name == "4 weights")
    assert (weights.verdict, "of the kind 'later'" in weights.detail) == (Verdict.NOT_POSSIBLE, True), weights.detail


@pytest.mark.asyncio
async def test_a_checkpoint_of_another_version_is_no_proof_against_the_run(tmp_path: Path) -> None:
    directory = await record_killed_run(tmp_path)
    manifest = max(directory.glob("checkpoints/step-*/manifest.json"))
    text = manifest.read_text()
    manifest.write_text(text.replace(f'"schema": {SCHEMA}', '"schema": 2'))
    assert manifest.read_text() != text
    weights = next(outcome for outcome in audit(directory) if outcome.name == "4 weights")
    assert (weights.verdict, "in format 2" in weights.detail) == (Verdict.NOT_POSSIBLE, True), weights.detail


@pytest.mark.asyncio
async def test_a_run_that_filters_groups_passes_and_their_rewards_count_in_the_mean(tmp_path: Path) -> None:
    directory = await record(tmp_path, resample=True)
    history = read_history(directory)
    [step] = [step for step in history.steps if step.filtered]
    assert [(group.reward, group.samples) for group in step.filtered] == [(1.0, 1)]
    trained = [sample.reward for group in step.groups for sample in group.samples if sample.reward is not None]
    [line] = [line for line in read_lines(directory / "steps.jsonl", StepRecord) if line.step == step.step]
    assert line.reward_mean == (sum(trained) + 1.0) / (len(trained) + 1)
    ended = {each.group: each.fate for step in history.steps for each in step.ledger.ended}
    assert ended[MASKED_GROUP] is Fate.FILTERED
    assert verdicts(directory) <= {Verdict.PASSED, Verdict.NOT_POSSIBLE}


@pytest.mark.usefixtures("ray_token_mode")
@pytest.mark.asyncio
async def test_the_command_prints_a_line_a_check_and_exits_by_the_verdict(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("ray_token_mode")
@pytest.mark.asyncio
async def test_a_fork_names_the_other_run_and_the_digest_of_its_first_weights(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    point = ForkPoint(run="base", nonce="9e", directory="/runs/base", version=Version(1, 50))
    info = msgspec.structs.replace(read_info(directory), forked_from=point)
    (directory / "run.json").write_bytes(msgspec.json.encode(info))
    result = CliRunner().invoke(app, ["audit", str(directory), "--certificate", str(tmp_path / "found.json")])
    assert result.exit_code == 0, result.output
    first, *lines = result.output.splitlines()
    assert first.startswith("fork: the run began with the weights of step-50 of run base (/runs/base); audit that run")
    assert f"the fork began with the digest {read_history(directory).steps[0].before:016x}, and the digest" in lines[3]
    found = json.loads((tmp_path / "found.json").read_bytes())
    assert found["run"]["began_with_the_weights_of"] == "step-50 of run base (/runs/base), which is another run"


@pytest.mark.asyncio
async def test_records_whose_settings_name_no_mixture_pass(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    path = records_path(directory, 1)
    found = read_records(path)
    assert found.began is not None
    settings = {key: value for key, value in found.began.settings.items() if key != "data.mixture"}
    assert settings != found.began.settings
    records = (msgspec.structs.replace(found.began, settings=settings), *found.records)
    path.write_bytes(b"".join(map(framed, records)))
    assert verdicts(directory) <= {Verdict.PASSED, Verdict.NOT_POSSIBLE}


@pytest.mark.asyncio
async def test_records_without_the_prompts_of_the_groups_pass(tmp_path: Path) -> None:
    directory = await record(tmp_path)
    [outcome, *_] = audit(directory)
    assert "the trained groups had 12 different prompts, of 100 in the data" in outcome.detail, (
        "groups 0 to 12 without the failed one"
    )
    path = records_path(directory, 1)
    began, records = read_records(path).began, [*read_records(path).records]
    frames = [framed(msgspec.structs.replace(began, prompts={}))]
    for each in records:
        if isinstance(each, TrainedStep):
            raw = msgspec.msgpack.decode(msgspec.msgpack.encode(each))
            raw[8] = [group[:7] for group in raw[8]]
            frames.append(framed(raw))
        else:
            frames.append(framed(each))
    path.write_bytes(b"".join(frames))
    assert verdicts(directory) == {Verdict.PASSED, Verdict.NOT_POSSIBLE}
    assert "the prompts of the trained groups were not recorded" in next(audit(directory)).detail


@pytest.mark.asyncio
async def test_a_torn_last_record_and_zeros_of_a_power_cut_are_ignored(tmp_path: Path) -> None:
    directory = await record(tmp_path, killed_at=3)
    records = records_path(directory, 1)
    whole = records.read_bytes()
    state(directory, "running")  # a killed process does not record its end
    for torn in (whole[:-1], whole + struct.pack("<I", 9), whole[:-150], whole + bytes(100)):
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
    written, on_disk, began_with = records_path(run.run_dir.path, 1), [0], list[tuple[int, int]]()
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


class WithStragglers(AuditedRun):
    """A run in which group 2 takes two steps: its first tokens are of the weights at its start, its last one of newer
    weights."""

    async def generate(self, wait_s: float) -> None:
        await self.publisher.settle()
        for ticket in await self.tickets():
            if ticket.group == 2 and not ticket.attempt:
                self.late = ticket
                self.held = {ticket.key: 3}
            else:
                await self.finish(ticket, rows_of(ticket), meta_of(ticket))
        if self.held and self.loaded == Version(1, 2):
            self.held = {}
            tokens = [[self.late.version], [self.late.version, self.loaded]]
            completions = [
                Completion(token_ids=[10, 11][: len(each)], logprobs=[0.0] * len(each), versions=each, text="",
                truncated=False)
                for each in tokens
            ]  # fmt: skip
            spans = tuple(version_spans(each) for each in tokens)
            meta = msgspec.structs.replace(meta_of(self.late), newest=2, version_spans=spans)
            await self.finish(self.late, episode_rows([single_turn([1, 2, 3], each) for each in completions]), meta)

    async def finish(self, ticket: Ticket, rows: BatchedDataDict, meta: GroupMeta) -> None:
        self.trainer.client.put_samples(ids_of([ticket.key]), TRAIN_PARTITION, fields=rows)
        if await self.coordinator.commit([meta]) == [CommitOutcome.LATE]:
            self.trainer.client.clear_samples(ids_of([ticket.key]), TRAIN_PARTITION)


async def recorded_with_stragglers(folder: Path, policy: OnDeadline) -> Path:
    run = WithStragglers(folder, on_deadline=policy)
    await run.start()
    with run.run_dir:
        await run.run()
    run.folder.cleanup()
    return run.run_dir.path


@pytest.mark.parametrize("policy", ["requeue", "drop", "mask"])
@pytest.mark.asyncio
async def test_a_run_that_treated_a_straggler_passes(policy: OnDeadline, tmp_path: Path) -> None:
    directory = await recorded_with_stragglers(tmp_path, policy)
    assert verdicts(directory) == {Verdict.PASSED, Verdict.NOT_POSSIBLE}
    history = read_history(directory)
    trained = {group.group: group for step in history.steps for group in step.groups}
    ended = {each.group: each for step in history.steps for each in step.ledger.ended}
    if policy == "drop":
        assert 2 not in trained
        assert (ended[2].fate, ended[2].tokens) == (Fate.DROPPED, 3)
    else:
        assert trained[2].attempt == (1 if policy == "requeue" else 0)
        assert trained[2].extended == (policy == "mask")
        assert [sample.trained for sample in trained[2].samples] == [policy != "mask", True]
    outcome = list(audit(directory))[2]
    assert ("; 2 older ones were masked (staleness.on_deadline: mask)" in outcome.detail) == (policy == "mask")


@pytest.mark.asyncio
async def test_a_token_that_should_have_been_masked_but_was_trained_is_found(tmp_path: Path) -> None:
    directory = await recorded_with_stragglers(tmp_path, "mask")

    def edit(records: list[Any]) -> None:
        for place, each in enumerate(records):
            if isinstance(each, TrainedStep) and any(group.extended for group in each.groups):
                first, *others = each.token_staleness
                ages = (first - 1, *others, 0, 0)
                records[place] = msgspec.structs.replace(each, token_staleness=(*ages[:2], 1))

    changed(directory, 1, edit)
    failed = [outcome for outcome in audit(directory) if outcome.verdict is Verdict.FAILED]
    assert [outcome.name[0] for outcome in failed] == ["3"], failed
    assert "versions old by the versions of its samples, but the ranks trained" in failed[0].detail
