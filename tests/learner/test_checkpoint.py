"""Checkpoints during a run and at its end: the newest are kept, and a failed save does not end the run."""

import math
import shutil
from pathlib import Path

import pytest
from learner_scenes import Scene, skipped

from asyncrl.complete_directory import COMPLETE, unfinished
from asyncrl.coordinator.snapshot import RunSnapshot
from asyncrl.errors import CheckpointError, CollectiveError, RowsLost
from asyncrl.learner.records import StepRecord


def scene(*, every_steps: int, keep: int = 2, total_steps: int = 5) -> Scene:
    return Scene(
        checkpoint={"every_steps": every_steps, "keep": keep}, learner={"total_steps": total_steps}, eval={"prompts": 0}
    )


def left(run: Scene) -> list[str]:
    return sorted(path.name for path in Path(run.folder.name).iterdir())


def shown(run: Scene, name: str, **labels: str) -> float | None:
    return run.metrics.registry.get_sample_value(f"asyncrl_checkpoint{name}", labels)


@pytest.mark.asyncio
async def test_one_is_written_every_so_many_steps_and_at_the_end_and_the_newest_stay() -> None:
    run = scene(every_steps=2)
    run.trainer.save_s = 2.0
    await run.run()
    assert run.trainer.saved == ["step-2", "step-4", "step-5"]
    assert left(run) == ["step-4", "step-5"]
    assert shown(run, "s_total", outcome="saved") == shown(run, "_duration_seconds_count") == 3
    assert shown(run, "_duration_seconds_sum") == 6.0
    assert (shown(run, "_policy_version"), shown(run, "_interval_versions")) == (5, 2)
    states = run.metrics.registry.get_sample_value("asyncrl_learner_state_seconds_total", {"state": "checkpoint"})
    assert states == 6.0


@pytest.mark.asyncio
async def test_the_phase_is_that_of_the_save_while_it_lasts() -> None:
    run = scene(every_steps=2, total_steps=3)
    phases: list[str] = []
    save, write = run.checkpoints._write, run.log.append_step

    def checkpoint(path: Path, snapshot: RunSnapshot) -> None:
        phases.append(run.loop.phase)
        save(path, snapshot)

    def append_step(record: StepRecord) -> None:
        phases.append(run.loop.phase)
        write(record)

    run.checkpoints._write, run.log.append_step = checkpoint, append_step  # type: ignore[method-assign]
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

    run.checkpoints._saved = 0  # as in a new learner that has joined the run and has trained no step yet
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

    def full(path: Path, snapshot: RunSnapshot) -> None:
        unfinished(path).mkdir(parents=True)
        (unfinished(path) / "model.safetensors").write_bytes(b"as much as fits")
        raise DISK_FULL

    run.checkpoints._write = full
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
async def test_before_the_first_one_there_is_no_time_of_a_success() -> None:
    run = scene(every_steps=5, total_steps=1)
    run.trainer.save_answers = [DISK_FULL]
    await run.run()
    assert run.checkpoints.unsaved is DISK_FULL
    assert math.isnan(shown(run, "_last_success_timestamp_seconds") or 0.0)
    assert shown(run, "_policy_version") == 0


@pytest.mark.asyncio
async def test_ranks_that_are_gone_end_the_run() -> None:
    run = scene(every_steps=1)
    run.trainer.save_answers = [CollectiveError("rank 1 is gone")]
    with pytest.raises(CollectiveError):
        await run.run()
    assert len(run.trainer.asked) == 1


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

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        await run.run()
    assert left(run) == ["step-2.tmp", "step-4.tmp", "step-5"], "a folder with another name is no checkpoint"
    run.checkpoints._drop_old()
    assert left(run) == ["step-5"]


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_looked_at_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = scene(every_steps=0)
    run.checkpoints._write = lambda path, snapshot: run.folder.cleanup()
    await run.run()
    assert "old checkpoints in" in caplog.text


@pytest.mark.asyncio
@pytest.mark.fault("F8")
async def test_the_snapshot_is_of_the_moment_after_the_step() -> None:
    run = scene(every_steps=2, total_steps=4)
    taken: list[RunSnapshot] = []
    save = run.checkpoints._write

    def checkpoint(path: Path, snapshot: RunSnapshot) -> None:
        taken.append(snapshot)
        save(path, snapshot)

    run.checkpoints._write = checkpoint
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
