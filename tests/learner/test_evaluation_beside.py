"""Evaluations while a run trains: training does not wait for them, and their errors do not end the run."""

import asyncio
from collections.abc import Sequence

import pytest
from learner_scenes import Scene, skipped, trained

from asyncrl.buffer.records import Failure
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task
from asyncrl.errors import ActorGone, FailureClass
from asyncrl.generation.evaluation import Answer, Rewards


async def loads(scene: Scene, version: Version) -> None:
    """A replica reports that it has loaded a version."""
    scene.loaded = version
    await scene.heartbeat()


FAILURE = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="a bug")


@pytest.mark.asyncio
async def test_every_second_version_is_evaluated_with_a_share_of_the_slots_and_the_ends_with_all() -> None:
    scene, shares = Scene(eval={"every_steps": 2, "share": 0.5}, learner={"total_steps": 6}), list[float]()
    evaluate = scene.evaluate

    async def noted(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        shares.append(share)
        return await evaluate(actor, tasks, name=name, share=share)

    scene.evaluate = noted  # type: ignore[method-assign]
    await scene.run()
    assert [record.version for record in scene.log.evals] == [0, 2, 4, 6]
    assert shares == [1.0, 0.5, 0.5, 1.0]


@pytest.mark.asyncio
async def test_training_goes_on_during_an_evaluation_and_the_next_one_is_left_out_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene, may_end, asked = Scene(eval={"every_steps": 1}, learner={"total_steps": 5}), asyncio.Event(), list[Version]()

    async def slow(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        version = scene.loaded
        assert version is not None
        asked.append(version)
        if share < 1.0:
            await may_end.wait()
        return version, [Rewards((0.5,))] * len(tasks)

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
async def test_a_version_is_evaluated_once_if_the_step_after_it_is_skipped() -> None:
    scene = Scene(eval={"every_steps": 2}, learner={"total_steps": 4})
    scene.trainer.answers = [skipped(), trained(), trained(), skipped()]
    await scene.run()
    assert [record.version for record in scene.log.evals] == [0, 2, 4]


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

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
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

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        return Version(1, 0), [Rewards((0.5, 0.0)), Rewards((0.0, 0.0))]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate_beside(Version(1, 0))
    [record] = scene.log.evals
    assert (record.reward_mean, record.samples, record.pass_at) == (0.125, 2, {1: 0.25, 2: 0.5})
    assert record.reward_stderr == pytest.approx(0.125)


def improves(scene: Scene, *, reward_at: dict[int, float]) -> None:
    """Gives an evaluation of step s the last reward of `reward_at` that is not of a later step."""

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        version = scene.loaded
        assert version is not None
        reward = next(reward for step, reward in sorted(reward_at.items(), reverse=True) if step <= version.step)
        return version, [Rewards((reward,))] * len(tasks)

    scene.evaluate = evaluate  # type: ignore[method-assign]


@pytest.mark.asyncio
async def test_a_run_ends_in_order_at_the_first_evaluation_that_reaches_the_reward() -> None:
    scene = Scene(run={"stop_when": {"reward": 0.75}}, eval={"every_steps": 2}, learner={"total_steps": 50})
    improves(scene, reward_at={0: 0.9, 1: 0.5, 4: 0.75})
    totals = await scene.run()
    last = len(scene.log.steps)
    assert 4 <= last < 10, "the first version does not count, and the run ends soon after the fourth"
    first, *beside, end = scene.log.evals
    assert (first.version, first.reward_mean) == (0, 0.9)
    assert beside[0].reward_mean == 0.5
    assert end.version == last, "the last version is evaluated as after the last step"
    assert len({record.version for record in scene.log.evals}) == len(scene.log.evals), "each version once"
    assert scene.trainer.saved[-1] == f"step-{last}"
    [reached] = [record for record in scene.log.evals if record.version and (record.reward_mean or 0) >= 0.75][:1]
    assert totals.stop_reason == (
        f"ended after step {last} of 50, because the evaluation heldout of step {reached.version} has the reward 0.750 "
        "(run.stop_when.reward = 0.75)"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("reward", [0.75, 0.76])
async def test_a_run_that_trains_all_steps_has_no_other_reason_to_end(reward: float) -> None:
    scene = Scene(run={"stop_when": {"reward": reward}}, eval={"every_steps": 2}, learner={"total_steps": 5})
    improves(scene, reward_at={0: 0.0, 5: 0.75})
    totals = await scene.run()
    assert (len(scene.log.steps), totals.stop_reason) == (5, None)


@pytest.mark.asyncio
async def test_an_evaluation_of_newer_weights_says_after_which_step_it_was_due() -> None:
    scene = Scene()
    await loads(scene, Version(1, 3))
    await scene.heldout.evaluate_beside(Version(1, 2))
    await scene.heldout.evaluate_beside(Version(1, 3))
    assert [(record.version, record.due, record.step) for record in scene.log.evals] == [(3, 2, 2), (3, None, 3)]


@pytest.mark.asyncio
async def test_the_step_of_the_evaluation_that_runs_is_known_while_it_runs() -> None:
    scene, may_end = Scene(eval={"every_steps": 2}, learner={"total_steps": 5}), asyncio.Event()
    await loads(scene, Version(1, 2))

    async def slow(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        await may_end.wait()
        return Version(1, 2), [Rewards((0.5,))] * len(tasks)

    scene.evaluate = slow  # type: ignore[method-assign]
    assert scene.heldout.running_step is None
    scene.heldout.begin(Version(1, 2))
    assert scene.heldout.running_step == 2
    may_end.set()
    await scene.heldout.settle()
    assert scene.heldout.running_step is None
