"""Checkpoints during a run and at its end: training goes on while they are written and when they fail, and the newest
are kept."""

import asyncio
import logging
import math
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from buffer_scenes import everything_else_runs
from learner_scenes import Scene, skipped

from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.errors import CheckpointError, CollectiveError, RowsLost
from asyncrl.learner.audit_records import TrainedStep
from asyncrl.learner.records import StepRecord


def scene(*, every_steps: int, keep: int = 2, keep_every: int = 0, total_steps: int = 5) -> Scene:
    return Scene(
        checkpoint={"every_steps": every_steps, "keep": keep, "keep_every": keep_every},
        learner={"total_steps": total_steps},
        eval={"prompts": 0},
    )


def left(run: Scene) -> list[str]:
    return sorted(path.name for path in Path(run.folder.name).iterdir())


def shown(run: Scene, name: str, **labels: str) -> float | None:
    return run.metrics.registry.get_sample_value(f"asyncrl_checkpoint{name}", labels)


@pytest.mark.asyncio
async def test_one_is_written_every_so_many_steps_and_at_the_end_and_the_newest_stay() -> None:
    run = scene(every_steps=2)
    run.trainer.stage_s, run.trainer.save_s = 0.5, 2.0
    await run.run()
    assert run.trainer.saved == ["step-2", "step-4", "step-5"]
    assert left(run) == ["step-4", "step-5"]
    assert shown(run, "s_total", outcome="saved") == shown(run, "_duration_seconds_count") == 3
    assert shown(run, "_duration_seconds_sum") == 7.5
    assert (shown(run, "_wait_seconds_sum"), shown(run, "_wait_seconds_count")) == (1.5, 3)
    assert (shown(run, "_policy_version"), shown(run, "_interval_versions")) == (5, 2)
    states = run.metrics.registry.get_sample_value("asyncrl_learner_state_seconds_total", {"state": "checkpoint"})
    assert states == 3 * 0.5 + 2.0, "training waits for the copies, and the end of the run for the last file"


@pytest.mark.asyncio
async def test_the_best_ones_stay_besides_the_newest() -> None:
    run, asked = scene(every_steps=1, keep=1), list[list[int]]()

    def best(steps: Sequence[int]) -> set[int]:
        asked.append(list(steps))
        return {1, 2} if len(asked) < 4 else {2}

    run.checkpoints.best = best
    await run.run()
    assert asked == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [2, 4, 5]], "from the fourth on, 1 and 3 are not kept"
    assert left(run) == ["step-2", "step-5"]


@pytest.mark.asyncio
async def test_the_time_of_the_saves_at_the_end_is_that_of_the_last_save() -> None:
    run = scene(every_steps=2)
    run.trainer.stage_s, run.trainer.save_s = 0.5, 2.0
    expected: list[float | None] = []
    run.log.append_step = lambda _: expected.append(run.checkpoints.expected_end_s())  # type: ignore[method-assign]
    await run.run()
    assert expected[:2] == [None, None]
    assert run.checkpoints.expected_end_s() == 2.5
    begun_s = run.clock.now_s - 1.0  # a save runs since a second
    run.checkpoints._begun_s = begun_s
    run.checkpoints._running = asyncio.create_task(asyncio.sleep(60))
    assert run.checkpoints.expected_end_s() == 2.5 + 1.5
    run.checkpoints._running.cancel()


@pytest.mark.asyncio
async def test_the_phase_is_that_of_the_save_while_training_waits_for_it() -> None:
    run = scene(every_steps=2, total_steps=3)
    phases: list[str] = []
    stage, write = run.trainer.stage, run.log.append_step

    def staged() -> None:
        phases.append(run.loop.phase)
        stage()

    def append_step(record: StepRecord) -> None:
        phases.append(run.loop.phase)
        write(record)

    run.trainer.stage, run.log.append_step = staged, append_step  # type: ignore[method-assign]
    await run.run()
    saving = "saving the weights of step {}"
    assert phases == ["training", "training", saving.format(2), "training", saving.format(3)]
    assert run.loop.phase == "closing"


@pytest.mark.asyncio
async def test_what_is_due_at_the_end_is_written_once() -> None:
    run = scene(every_steps=5)
    await run.run()
    assert run.trainer.saved == ["step-5"]


@pytest.mark.asyncio
async def test_with_zero_there_is_one_at_the_end() -> None:
    run = scene(every_steps=0)
    await run.run()
    assert run.trainer.saved == ["step-5"]


@pytest.mark.asyncio
async def test_a_run_that_is_stopped_saves_what_it_has_trained() -> None:
    run = scene(every_steps=0)
    train = run.trainer.train_from_meta

    def last_step(*arguments: object, **options: object) -> dict[str, object]:
        run.stop.set()
        return train(*arguments, **options)  # type: ignore[arg-type]

    run.trainer.train_from_meta = last_step  # type: ignore[method-assign, assignment]
    await run.run()
    assert run.trainer.saved == ["step-1"]

    run.checkpoints._saved = run.checkpoints._begun = 0  # as in a new learner, which has trained no step yet
    await run.run()
    assert run.trainer.saved == ["step-1"]


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_step_that_was_skipped_is_no_step_of_a_checkpoint() -> None:
    run = scene(every_steps=1, total_steps=2)
    run.trainer.answers = [skipped()]
    await run.run()
    assert run.trainer.saved == ["step-1", "step-2"]


@pytest.mark.asyncio
async def test_without_a_trained_step_there_is_none() -> None:
    run = scene(every_steps=1)
    run.stop.set()
    await run.run()
    assert run.trainer.saved == []


DISK_FULL = CheckpointError("rank 0: OSError: No space left on device")


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_one_that_cannot_be_written_is_counted_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = scene(every_steps=2, keep=1)
    run.trainer.save_answers = [None, DISK_FULL]
    totals = await run.run()
    assert totals.ledger_closed
    assert run.trainer.saved == ["step-2", "step-5"]
    assert (shown(run, "s_total", outcome="saved"), shown(run, "s_total", outcome="failed")) == (2, 1)
    assert "the checkpoint of step 4 was not written: rank 0: OSError: No space left on device" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_there_is_none_without_the_records_of_its_steps_except_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = scene(every_steps=2, keep=1)
    run.log.sync_answers = [None, DISK_FULL, DISK_FULL]
    await run.run()
    assert run.trainer.saved == ["step-2", "step-5"]
    assert shown(run, "s_total", outcome="failed") == 1
    assert "the checkpoint of step 4 was not written" in caplog.text
    assert "may lack records: rank 0: OSError: No space left on device" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_what_could_not_be_written_on_the_way_is_tried_again_at_the_end() -> None:
    run = scene(every_steps=5)
    run.trainer.save_answers = [DISK_FULL]
    await run.run()
    assert run.trainer.saved == ["step-5"]


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_the_last_one_stays_and_is_the_one_that_is_shown_when_none_can_be_written_after_it() -> None:
    run = scene(every_steps=2, keep=1)
    run.trainer.save_answers = [None, DISK_FULL, DISK_FULL]
    await run.run()
    assert run.checkpoints.unsaved is DISK_FULL
    assert left(run) == ["step-2"]
    assert shown(run, "_policy_version") == 2


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_one_that_cannot_be_written_leaves_no_folder_and_gives_its_room_back() -> None:
    run = scene(every_steps=1, total_steps=2)

    def full(path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        unfinished(path).mkdir(parents=True)
        (unfinished(path) / "model.safetensors").write_bytes(b"as much as fits")
        raise DISK_FULL

    run.trainer.write = full  # type: ignore[method-assign]
    await run.run()
    assert left(run) == []


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_the_user_hears_in_time_what_a_full_disk_will_cost(caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=2)
    run.trainer.save_answers = [DISK_FULL]
    await run.run()
    assert "cannot be written at its end either, they are lost: free space on the disk" in caplog.text


@pytest.mark.asyncio
async def test_before_the_first_one_there_is_no_age() -> None:
    run = scene(every_steps=5, total_steps=1)
    run.trainer.save_answers = [DISK_FULL]
    await run.run()
    assert run.checkpoints.unsaved is DISK_FULL
    assert math.isnan(shown(run, "_age_seconds") or 0.0)
    assert shown(run, "_policy_version") == 0


@pytest.mark.asyncio
async def test_ranks_that_are_gone_end_the_run() -> None:
    run = scene(every_steps=1)
    run.trainer.stage_answers = [CollectiveError("rank 1 is gone")]
    with pytest.raises(CollectiveError):
        await run.run()
    assert len(run.trainer.asked) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [OSError("the disk is gone"), ValueError("a bug"), CollectiveError("rank 1 is gone")])
async def test_no_error_of_writing_ends_the_run(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=2)
    run.trainer.save_answers = [error]
    await run.run()
    assert run.trainer.saved == ["step-4", "step-5"]
    [record] = [record for record in caplog.records if "step 2 was not written" in record.message]
    assert bool(record.exc_info) == isinstance(error, ValueError), "an unexpected error is logged with its traceback"


@pytest.mark.asyncio
async def test_without_memory_for_the_copies_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=2)
    run.trainer.stage_answers = [CheckpointError("rank 0: RuntimeError: can't allocate memory")]
    await run.run()
    assert run.trainer.saved == ["step-4", "step-5"]
    assert shown(run, "s_total", outcome="failed") == 1
    assert "the checkpoint of step 2 was not written: rank 0: RuntimeError: can't allocate memory" in caplog.text


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_written_ends_the_run_before_its_first_step() -> None:
    run = scene(every_steps=2)

    def refused(folder: Path) -> None:
        raise CheckpointError(f"checkpoints cannot be written to {folder}")

    run.trainer.check_folder = refused  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="cannot be written to"):
        await run.run()
    assert run.trainer.asked == []


@pytest.mark.asyncio
@pytest.mark.parametrize("every_steps", [2, 5])
@pytest.mark.parametrize("hf", [True, False])
async def test_weights_for_other_programs_are_in_every_checkpoint_or_only_in_the_last(
    hf: bool, every_steps: int
) -> None:
    run = Scene(checkpoint={"every_steps": every_steps, "hf": hf}, learner={"total_steps": 5}, eval={"prompts": 0})
    await run.run()
    assert run.trainer.saved == (["step-2", "step-4", "step-5"] if every_steps == 2 else ["step-5"])
    assert run.trainer.hf == [*[hf] * (len(run.trainer.saved) - 1), True]


@pytest.mark.asyncio
async def test_a_run_that_ends_early_adds_the_weights_for_other_programs_to_its_last_checkpoint() -> None:
    run = Scene(checkpoint={"every_steps": 1, "hf": False}, learner={"total_steps": 5}, eval={"prompts": 0})
    train = run.trainer.train_from_meta

    def last_step(*arguments: object, **options: object) -> dict[str, object]:
        run.stop.set()
        return train(*arguments, **options)  # type: ignore[arg-type]

    run.trainer.train_from_meta = last_step  # type: ignore[method-assign, assignment]
    await run.run()
    assert list(zip(run.trainer.saved, run.trainer.hf, strict=True)) == [("step-1", False), ("step-1", True)]


class SlowDisk:
    """Makes the saves of a scene slow. A save waits before it has read its rows and before its last file, until the
    `rows_at`-th and the `files_at`-th training call."""

    def __init__(self, run: Scene, *, rows_at: int, files_at: int) -> None:
        run.slow_saves = True
        self.run, self.rows_at, self.files_at = run, rows_at, files_at
        self.rows, self.files = threading.Event(), threading.Event()
        self.read: list[bool] = []
        self.kept: list[set[str]] = []
        self.snapshots: list[set[str]] = []
        self._train, self._write = run.trainer.train_from_meta, run.trainer.write
        run.trainer.train_from_meta = self.train  # type: ignore[method-assign, assignment]
        run.trainer.write = self.write  # type: ignore[method-assign]
        self.rows_read = threading.Event()
        self._loop = asyncio.get_running_loop()

    def train(self, *arguments: object, **options: object) -> dict[str, object]:
        self.kept.append(self.run.trainer.kept)
        trained = len(self.kept)
        if trained == self.rows_at:
            self.rows.set()
            self.rows_read.wait()
        if trained == self.files_at:
            self.files.set()
            self.run.slow_saves = False
            asyncio.run_coroutine_threadsafe(self.run.checkpoints.settle(), self._loop).result()
        return self._train(*arguments, **options)  # type: ignore[arg-type]

    def write(self, path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        keys = {group.ticket.key for group in snapshot.buffer.open if group.meta is not None}
        self.snapshots.append(keys)
        self.rows.wait()
        self.read.append(keys <= self.run.trainer.kept)
        self.rows_read.set()
        self.files.wait()
        self._write(path, snapshot, hf=hf)


@pytest.mark.asyncio
async def test_a_save_of_many_steps_ends_nothing_and_postpones_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=2, total_steps=12)
    SlowDisk(run, rows_at=3, files_at=9)
    totals = await run.run()
    assert totals.ledger_closed
    assert len(run.log.steps) == 12
    assert run.trainer.saved == ["step-2", "step-9", "step-10", "step-12"], "9 is the first step after the slow save"
    postponed = [record for record in caplog.records if "is postponed" in record.message]
    assert [record.levelno for record in postponed] == [logging.WARNING], "one line for all that were due meanwhile"
    assert "the checkpoint of step 4 is postponed, because that of step 2 is still being written" in caplog.text
    assert (shown(run, "s_total", outcome="postponed"), shown(run, "s_total", outcome="saved")) == (1, 4)


@pytest.mark.asyncio
async def test_rows_that_a_checkpoint_needs_stay_until_a_newer_one_is_complete() -> None:
    run = scene(every_steps=3, total_steps=9)
    disk = SlowDisk(run, rows_at=6, files_at=8)
    totals = await run.run()
    assert len(disk.snapshots[0]) == 2
    assert disk.read[0], "the rows of the groups that were ready must be there when the save reads them"
    trained = [set(groups) for _, groups in run.trainer.asked]
    assert trained[3] == disk.snapshots[0], "the next step trains the groups that were ready at the snapshot"
    for kept in disk.kept[4:]:
        assert trained[3] <= kept, "a learner that goes back to the checkpoint of step 3 trains them again"
    assert not trained[4] & disk.kept[6], "rows with newer tokens are cleared during the next step"
    assert run.trainer.saved == ["step-3", "step-8", "step-9"], "8 is the first step after the slow save"
    assert totals.rows_outstanding == 0


@pytest.mark.asyncio
async def test_rows_of_groups_that_are_dropped_at_the_end_stay_until_the_running_save_has_read_them() -> None:
    run = Scene(prompts=3, checkpoint={"every_steps": 1}, data={"epochs": 1, "drop_last": True}, eval={"prompts": 0})
    disk = SlowDisk(run, rows_at=99, files_at=99)
    settle = run.checkpoints.settle

    async def answers_at_the_end() -> None:
        await everything_else_runs()
        disk.rows.set()
        disk.files.set()
        await settle()

    run.checkpoints.settle = answers_at_the_end  # type: ignore[method-assign]
    totals = await run.run()
    assert len(disk.snapshots[0]) == 1, "the third group was ready at the snapshot of the only step"
    assert disk.read == [True]
    assert run.trainer.saved == ["step-1"]
    assert totals.rows_outstanding == 0


@pytest.mark.asyncio
async def test_rows_that_only_failed_saves_needed_do_not_pile_up() -> None:
    run = scene(every_steps=1, total_steps=12)
    run.trainer.save_answers = [DISK_FULL] * 13
    train = run.trainer.train_from_meta
    kept: list[set[str]] = []

    def noted(*arguments: object, **options: object) -> dict[str, object]:
        kept.append(run.trainer.kept)
        return train(*arguments, **options)  # type: ignore[arg-type]

    run.trainer.train_from_meta = noted  # type: ignore[method-assign, assignment]
    totals = await run.run()
    assert len(run.log.steps) == 12
    assert max(map(len, kept)) <= max(map(len, kept[:5])), "the number of rows stays the same, step after step"
    assert totals.rows_outstanding == 0


@pytest.mark.asyncio
async def test_the_end_of_a_run_waits_for_the_running_save_and_then_saves_its_last_step() -> None:
    run = scene(every_steps=2)
    disk = SlowDisk(run, rows_at=3, files_at=99)
    train, stage, settle = run.trainer.train_from_meta, run.trainer.stage, run.checkpoints.settle
    staged: list[list[str]] = []

    def stops(*arguments: object, **options: object) -> dict[str, object]:
        if len(disk.kept) == 2:
            run.stop.set()
        return train(*arguments, **options)  # type: ignore[arg-type]

    def stage_noted() -> None:
        staged.append(list(run.trainer.saved))
        stage()

    async def waited_for() -> None:
        disk.files.set()  # the disk answers only now
        await settle()

    run.trainer.train_from_meta, run.trainer.stage = stops, stage_noted  # type: ignore[method-assign, assignment]
    run.checkpoints.settle = waited_for  # type: ignore[method-assign]
    await run.run()
    assert staged == [[], ["step-2"]], "the copies of the running save must not be replaced"
    assert run.trainer.saved == ["step-2", "step-3"]
    assert run.checkpoints.unsaved is None


@pytest.mark.asyncio
async def test_by_time_one_is_due_after_so_many_minutes_whatever_began_the_last_one() -> None:
    run = Scene(
        checkpoint={"every_steps": 6, "every_minutes": 0.05},  # 3 s; a step takes 1 s
        learner={"total_steps": 12},
        eval={"prompts": 0},
    )
    await run.run()
    assert run.trainer.saved == ["step-3", "step-6", "step-9", "step-12"]


@pytest.mark.asyncio
async def test_by_time_one_is_saved_once_while_the_learner_waits_for_groups() -> None:
    run = Scene(
        checkpoint={"every_steps": 0, "every_minutes": 1.0},
        learner={"total_steps": 4},
        eval={"prompts": 0},
        run={"stall_timeout_s": 1e6},
    )
    waits: list[list[str]] = []

    async def slow(wait_s: float) -> None:
        run.clock.now_s += 70.0
        waits.append(list(run.trainer.saved))
        if len(run.log.steps) != 2 or len(waits) == 5:
            await run.generate(wait_s)

    run.client.waiting = slow
    await run.run()
    assert run.trainer.saved == ["step-1", "step-2", "step-3", "step-4"]
    assert waits == [[], ["step-1"], *[["step-1", "step-2"]] * 3], "a step that is saved is not saved again"


@pytest.mark.asyncio
async def test_the_records_for_the_audit_are_on_the_disk_before_each_save_also_one_that_no_ack_begins() -> None:
    run = Scene(
        checkpoint={"every_steps": 3, "every_minutes": 1.0}, learner={"total_steps": 4}, run={"stall_timeout_s": 1e6}
    )
    stage, begun = run.trainer.stage, list[tuple[int, int]]()

    async def slow(wait_s: float) -> None:
        run.clock.now_s += 70.0 if (await run.status()).version.step == 2 else 0.0
        await run.generate(wait_s)

    def staged() -> None:
        steps = [index for index, record in enumerate(run.log.audit) if isinstance(record, TrainedStep)]
        begun.append((len(steps), sum(index < run.log.synced for index in steps)))
        stage()

    run.client.waiting = slow
    run.trainer.stage = staged  # type: ignore[method-assign]
    await run.run()
    assert [recorded for recorded, _ in begun] == [2, 3, 4], "by time, by steps, at the end"
    assert all(on_disk == recorded for recorded, on_disk in begun)


@pytest.mark.asyncio
async def test_those_of_each_multiple_stay_besides_the_newest() -> None:
    run = scene(every_steps=1, keep=1, keep_every=2)
    await run.run()
    assert left(run) == ["step-2", "step-4", "step-5"]


@pytest.mark.asyncio
@pytest.mark.fault("F7")
async def test_what_a_killed_save_left_takes_no_whole_one_s_place() -> None:
    run = scene(every_steps=5, keep=2)
    folder = Path(run.folder.name)
    for step, marker in ((1, True), (2, True), (3, False)):
        (folder / f"step-{step}").mkdir(parents=True)
        if marker:
            (folder / f"step-{step}" / COMPLETE).touch()
    (folder / "notes").mkdir()
    await run.run()
    assert left(run) == ["notes", "step-2", "step-5"]


@pytest.mark.asyncio
@pytest.mark.fault("F7")
async def test_an_old_one_whose_removal_does_not_end_is_not_half_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run = scene(every_steps=2, keep=1)

    rmtree = shutil.rmtree

    def interrupted(path: Path, ignore_errors: bool = False, **options: object) -> None:
        if not ignore_errors and Path(path).is_relative_to(run.folder.name):
            raise OSError("interrupted")
        rmtree(path, ignore_errors, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        await run.run()
    assert left(run) == ["step-2.tmp", "step-4.tmp", "step-5"], "a folder with another name is no checkpoint"
    run.checkpoints._drop_old()
    assert left(run) == ["step-5"]


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_looked_at_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=0)
    run.trainer.write = lambda path, snapshot, *, hf: run.folder.cleanup()  # type: ignore[method-assign]
    await run.run()
    assert "old checkpoints in" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F8")
async def test_the_snapshot_is_of_the_moment_after_the_step() -> None:
    run = scene(every_steps=2, total_steps=4)
    taken: list[RunSnapshot] = []
    save = run.trainer.write

    def checkpoint(path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        taken.append(snapshot)
        save(path, snapshot, hf=hf)

    run.trainer.write = checkpoint  # type: ignore[method-assign]
    await run.run()
    assert [snapshot.version.step for snapshot in taken] == [2, 4]
    trained = [snapshot.buffer.ledger.final["trained"].groups for snapshot in taken]
    assert trained == [4, 8]


@pytest.mark.asyncio
@pytest.mark.fault("F27")
async def test_a_checkpoint_whose_rows_are_lost_is_left_out_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = scene(every_steps=2)
    run.trainer.save_answers = [RowsLost("a store ended", sample_ids=("0.0_g0",))]
    await run.run()
    assert run.trainer.saved == ["step-4", "step-5"]
    assert "the checkpoint of step 2 was not written: a store ended" in caplog.text
