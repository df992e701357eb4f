"""Evaluations while a run trains: training does not wait for them, and their errors do not end the run."""

import asyncio
from collections.abc import Sequence

import pytest
from learner_scenes import Scene

from asyncrl.buffer.failure_records import Failure
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task
from asyncrl.errors import ActorGone, FailureClass
from asyncrl.generation.evaluation import Answer


async def loads(scene: Scene, version: Version) -> None:
    """A replica reports that it has loaded a version."""
    scene.loaded = version
    await scene._heartbeat()


FAILURE = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="a bug")


@pytest.mark.asyncio
async def test_every_second_version_is_evaluated_with_a_share_of_the_slots_and_the_ends_with_all() -> None:
    scene, shares = Scene(eval={"every_steps": 2, "share": 0.5}, learner={"total_steps": 6}), list[float]()
    evaluate = scene.evaluate

    async def noted(actor: str, tasks: Sequence[Task], *, share: float = 1.0) -> tuple[Version | None, list[Answer]]:
        shares.append(share)
        return await evaluate(actor, tasks, share=share)

    scene.evaluate = noted  # type: ignore[method-assign]
    await scene.run()
    assert [record.version for record in scene.log.evals] == [0, 2, 4, 6]
    assert shares == [1.0, 0.5, 0.5, 1.0]


@pytest.mark.asyncio
async def test_training_goes_on_during_an_evaluation_and_the_next_one_is_left_out_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, may_end, asked = Scene(eval={"every_steps": 1}, learner={"total_steps": 5}), asyncio.Event(), list[Version]()

    async def slow(actor: str, tasks: Sequence[Task], *, share: float = 1.0) -> tuple[Version | None, list[Answer]]:
        version = scene.loaded
        assert version is not None
        asked.append(version)
        if share < 1.0:
            await may_end.wait()
        return version, [(0.5,)] * len(tasks)

    scene.evaluate = slow  # type: ignore[method-assign]
    train = scene.trainer.train_from_meta

    def trains(*arguments: object, **options: object) -> dict[str, object]:
        if len(scene.log.steps) == 3:
            may_end.set()
        return train(*arguments, **options)  # type: ignore[arg-type]

    scene.trainer.train_from_meta = trains  # type: ignore[method-assign, assignment]
    await scene.run()
    assert len(scene.log.steps) == 5
    assert any("because the last one still runs" in entry.getMessage() for entry in caplog.records)
    assert [record.version for record in scene.log.evals] == [version.step for version in asked]
    assert asked[1].step < 4, "the evaluation began before the fourth step, which ended it"


@pytest.mark.asyncio
async def test_the_version_is_the_one_that_the_replica_has() -> None:
    scene = Scene()
    await loads(scene, Version(1, 3))
    await scene.heldout.evaluate_beside(Version(1, 2))
    assert [record.version for record in scene.log.evals] == [3]


@pytest.mark.asyncio
@pytest.mark.parametrize("trouble", ["gone", "late", "no weights", "all fail"])
async def test_an_evaluation_that_fails_is_left_out_and_named(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(eval={"timeout_s": 0.1})
    await loads(scene, Version(1, 2))

    async def evaluate(actor: str, tasks: Sequence[Task], *, share: float = 1.0) -> tuple[Version | None, list[Answer]]:
        match trouble:
            case "gone":
                raise ActorGone("replica a has ended")
            case "late":
                await asyncio.sleep(60)
            case "no weights":
                return None, []
        return Version(1, 2), [FAILURE] * len(tasks)

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate_beside(Version(1, 2))
    [entry] = [entry.getMessage() for entry in caplog.records if entry.levelname in ("ERROR", "WARNING")]
    assert entry.startswith("held-out evaluation of step 2")
    assert [record.reward_mean for record in scene.log.evals] == ([None] if trouble == "all fail" else [])


@pytest.mark.asyncio
async def test_several_samples_have_a_pass_rate() -> None:
    scene = Scene(eval={"samples": 2, "pass_reward": 0.5})
    await scene.deliver(Version(1, 0))

    async def evaluate(actor: str, tasks: Sequence[Task], *, share: float = 1.0) -> tuple[Version | None, list[Answer]]:
        return Version(1, 0), [(0.5, 0.0), (0.0, 0.0)]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate_beside(Version(1, 0))
    [record] = scene.log.evals
    assert (record.reward_mean, record.samples, record.pass_at) == (0.125, 2, {1: 0.25, 2: 0.5})
    assert record.reward_stderr == pytest.approx(0.125)
