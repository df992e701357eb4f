"""The learner's loop: every lease ends, errors end the run with their cause, and the last version is published."""

import asyncio
import logging
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from learner_scenes import GROUPS_PER_STEP, Scene, skipped, trained
from made_up_run import make_step

from asyncrl.algorithms.token_estimators import resolve_estimators
from asyncrl.buffer.ledger import Event, Fate
from asyncrl.buffer.records import Ticket
from asyncrl.common.roles import RunState
from asyncrl.common.version import Version
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import ActorGone, CallTimeout, NonFiniteError, ParityError, RowsLost, RunError, StallError
from asyncrl.learner.audit_records import Ended, Record, TrainedStep
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.ranks.report import StepReport

DEADLINE_S = 120.0


async def groups_by_fate(scene: Scene) -> dict[Fate, int]:
    account = (await scene.status()).account
    assert account.closed
    return {fate: amount.groups for fate, amount in account.fates.items() if amount.groups}


@pytest.mark.asyncio
async def test_a_run_trains_its_steps_and_accounts_for_every_group() -> None:
    scene = Scene()
    totals = await scene.run()
    assert [step for step, _ in scene.trainer.asked] == [0, 1, 2]
    keys = [key for _, keys in scene.trainer.asked for key in keys]
    assert len(set(keys)) == len(keys) == 3 * GROUPS_PER_STEP
    fates = await groups_by_fate(scene)
    assert fates[Fate.TRAINED] == 3 * GROUPS_PER_STEP
    assert Fate.LEASED not in fates
    assert not set(keys) & scene.trainer.kept, "rows of what was trained are dropped"
    assert totals.rows_outstanding == scene.metrics.registry.get_sample_value("asyncrl_rows_outstanding") == 0
    assert (totals.ledger_closed, totals.groups_discarded) == (True, 0)
    assert totals.mid_sequence_updates == 3 * GROUPS_PER_STEP
    assert [record.step for record in scene.log.steps if record.trained] == [0, 1, 2]
    status = await scene.status()
    assert status.state is RunState.CLOSING, "from this state on, a run without progress is not a stall"
    assert status.account.events[Event.LEASE_GIVEN_BACK] == status.account.events[Event.LEASE_CALL_REFUSED] == 0


@pytest.mark.asyncio
async def test_an_error_of_a_step_is_not_replaced_by_one_of_the_end_of_the_step_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError("clearing the rows")

    scene = Scene()
    scene.trainer.client.clear_samples = refuse  # type: ignore[method-assign]
    scene.trainer.answers = [trained(), RunError("the second step")]
    with pytest.raises(RunError, match="the second step"):
        await scene.run()
    assert "clearing the rows" in caplog.text


@pytest.mark.asyncio
async def test_seconds_of_the_loop_add_up_and_the_ranks_own_stages_are_theirs() -> None:
    scene = Scene()
    await scene.run()
    seconds = scene.log.steps[-1].learner_state_s
    assert seconds["forward_backward"] == pytest.approx(3 * 0.5)
    assert seconds["optimizer"] == pytest.approx(3 * 0.25)
    assert sum(seconds.values()) == pytest.approx(scene.clock.now_s)


@pytest.mark.asyncio
async def test_what_came_before_the_loop_is_the_start_and_nothing_after_it_is() -> None:
    scene = Scene()
    scene.clock.now_s = 40.0
    prepare_step = scene.trainer.prepare_step

    def slow(*arguments: Any) -> None:
        scene.clock.now_s += 5.0
        prepare_step(*arguments)

    scene.trainer.prepare_step = slow  # type: ignore[method-assign]
    await scene.run()
    first, last = (scene.log.steps[place].learner_state_s for place in (0, -1))
    assert first["starting"] == last["starting"] == 40.0
    assert sum(last.values()) == pytest.approx(scene.clock.now_s)


@pytest.mark.asyncio
async def test_state_seconds_add_up_and_an_evaluation_is_no_wait_for_groups() -> None:
    scene = Scene()
    evaluate = scene.evaluate

    async def slow(*arguments: Any, **options: Any) -> Any:
        scene.clock.now_s += 10.0
        return await evaluate(*arguments, **options)

    scene.evaluate = slow  # type: ignore[method-assign]
    await scene.run()
    read = scene.metrics.registry.get_sample_value
    seconds = {state: read("asyncrl_learner_state_seconds_total", {"state": state}) for state in LEARNER_STATES}
    assert sum(value or 0.0 for value in seconds.values()) == pytest.approx(scene.clock.now_s)
    assert seconds["waiting_for_groups"] == 0
    assert (seconds["other"] or 0.0) >= 20.0


@pytest.mark.asyncio
async def test_time_until_a_lease_is_waiting_for_groups_and_time_after_it_is_not() -> None:
    scene, waits = Scene(), []
    generate, write = scene.generate, scene.trainer.write_to_dataplane

    async def slow_generators(wait_s: float) -> None:
        waits.append(wait_s)
        scene.clock.now_s += 7.0
        await generate(wait_s)

    def slow_write(meta: KVBatchMeta, fields: Mapping[str, Any]) -> None:
        scene.clock.now_s += 3.0
        write(meta, fields)

    scene.client.waiting = slow_generators
    scene.trainer.write_to_dataplane = slow_write  # type: ignore[method-assign]
    await scene.run()
    seconds = scene.log.steps[-1].learner_state_s
    assert waits
    assert seconds["waiting_for_groups"] == 7.0 * len(waits)
    assert seconds["other"] == pytest.approx(3 * (3.0 + 0.25)), "a call takes 1 s, of which the ranks report 0.75 s"


@pytest.mark.asyncio
async def test_the_last_version_is_published_and_evaluated_before_the_run_ends() -> None:
    scene = Scene(weights={"publish_every_steps": 2})
    await scene.run()
    assert scene.publisher.history[0] == Version(1, 0)
    assert scene.publisher.history[-1] == Version(1, 3) == scene.loaded
    assert scene.publisher.history == sorted(set(scene.publisher.history)), "no version twice, and in rising order"
    assert [(record.version, record.prompts, record.reward_mean) for record in scene.log.evals] == [
        (0, 4, 0.25),
        (3, 4, 0.25),
    ]
    assert scene.asked == [(Version(1, 0), 4), (Version(1, 3), 4)]


@pytest.mark.asyncio
async def test_a_stopped_run_ends_after_its_step_without_another_version() -> None:
    scene = Scene(learner={"total_steps": 50})

    def stop_now(meta: KVBatchMeta) -> StepReport:
        scene.stop.set()
        return trained()

    scene.trainer.answers = [trained(), stop_now]
    await scene.run()
    fates = await groups_by_fate(scene)
    assert fates[Fate.TRAINED] == 2 * GROUPS_PER_STEP, "the running step was completed"
    assert Fate.LEASED not in fates
    assert [record.version for record in scene.log.evals] == [0]


def stopped_in_its_second_step(**sections: Any) -> Scene:
    scene = Scene(learner={"total_steps": 50}, **sections)

    def stop_now(meta: KVBatchMeta) -> StepReport:
        scene.stop.set()
        return trained()

    scene.trainer.answers = [trained(), stop_now]
    return scene


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("publish_every_steps", [1, 4])
async def test_a_stopped_run_saves_its_last_weights_then_evaluates_them_and_then_records_its_end(
    publish_every_steps: int,
) -> None:
    scene = stopped_in_its_second_step(weights={"publish_every_steps": publish_every_steps})
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    happened, evaluate, write = list[str](), scene.evaluate, scene.trainer.write

    async def noted(*arguments: Any, **options: Any) -> Any:
        paused = " while admission is paused" if scene.coordinator.buffer.paused else ""
        happened.append(f"evaluates step {scene.loaded and scene.loaded.step}{paused}")
        return await evaluate(*arguments, **options)

    def noted_save(path: Path, *arguments: Any, **options: Any) -> None:
        happened.append(f"saves {path.name}")
        write(path, *arguments, **options)

    async def stop() -> None:
        happened.append("publishes nothing any more")

    def append_audit(record: Record) -> None:
        if isinstance(record, Ended):
            happened.append(f"ends at {record.version}")

    scene.evaluate, scene.trainer.write = noted, noted_save  # type: ignore[method-assign]
    scene.publisher.stop, scene.loop.step_end.append_audit = stop, append_audit  # type: ignore[method-assign]
    await scene.run()
    assert happened[1:6] == [
        "saves step-2",
        "evaluates step 2 while admission is paused",
        "publishes nothing any more",
        "ends at 1.2",
        "publishes nothing any more",
    ]
    assert [(record.version, record.reward_mean) for record in scene.log.evals] == [(0, 0.25), (2, 0.25)]
    assert scene.publisher.history[-1] == Version(1, 2) == scene.loaded
    await groups_by_fate(scene)


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_weights_that_were_evaluated_before_the_stop_are_not_evaluated_again() -> None:
    scene = stopped_in_its_second_step(eval={"every_steps": 2})
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    save = scene.checkpoints.save_last

    async def slow_save(snapshot: RunSnapshot) -> None:
        await scene.publisher.settle()  # the replica loads the last version, and the evaluation beside training ends
        await scene.heldout.settle()
        await save(snapshot)

    scene.checkpoints.save_last = slow_save  # type: ignore[method-assign]
    await scene.run()
    assert [record.version for record in scene.log.evals] == [0, 2]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_resumed_run_that_is_stopped_before_its_first_step_evaluates_nothing() -> None:
    scene = Scene(before=make_step(0))
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    scene.stop.set()
    await scene.run()
    assert (scene.trainer.saved, scene.log.evals) == ([], [])


async def stopped_while(waits: asyncio.Event, scene: Scene) -> None:
    """Runs the scene, and asks it to end as soon as it `waits`."""
    async with asyncio.timeout(DEADLINE_S):
        run = asyncio.create_task(scene.run())
        await waits.wait()
        scene.stop.set()
        await run


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_stop_while_the_last_evaluation_beside_training_runs_delays_no_save() -> None:
    scene, waits = Scene(eval={"every_steps": 1}, learner={"total_steps": 3}), asyncio.Event()
    evaluate, settle = scene.evaluate, scene.heldout.settle

    async def endless(actor: str, tasks: Any, *, name: str, share: float = 1.0) -> Any:
        if scene.loaded == Version(1, 0):
            return await evaluate(actor, tasks, name=name, share=share)
        return await asyncio.Event().wait()

    async def noted() -> None:
        waits.set()
        await settle()

    scene.evaluate, scene.heldout.settle = endless, noted  # type: ignore[method-assign]
    await stopped_while(waits, scene)
    assert scene.trainer.saved == ["step-3"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_stop_while_the_last_weights_are_delivered_delays_no_save() -> None:
    scene, waits = Scene(), asyncio.Event()
    settle = scene.publisher.settle

    async def endless() -> None:
        if scene.publisher.published != Version(1, 3):
            return await settle()
        waits.set()
        return await asyncio.Event().wait()

    scene.publisher.settle = endless  # type: ignore[method-assign]
    await stopped_while(waits, scene)
    assert scene.trainer.saved == ["step-3"]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_a_run_that_is_stopped_before_its_first_step_admits_no_group() -> None:
    scene, calls = Scene(), list[str]()
    evaluate, call = scene.evaluate, scene.client.call

    async def stopping(*arguments: Any, **options: Any) -> Any:
        scene.stop.set()
        return await evaluate(*arguments, **options)

    async def noted(method: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(method.__name__)
        return await call(method, *arguments, **options)

    scene.evaluate, scene.client.call = stopping, noted  # type: ignore[method-assign]
    await scene.run()
    assert "pause" in calls
    assert "resume" not in calls
    assert scene.trainer.saved == []


async def told(scene: Scene, caplog: pytest.LogCaptureFixture) -> str:
    """Runs the scene, whose last weights are saved and not evaluated. Returns the reason in its log."""
    async with asyncio.timeout(DEADLINE_S):
        await scene.run()
    assert scene.trainer.saved == ["step-2"]
    assert [record.version for record in scene.log.evals] == [0]
    assert isinstance(scene.log.audit[-1], Ended)
    (why,) = [text for text in caplog.messages if text.startswith("held-out evaluation of step 2 is left out: ")]
    return why.partition("left out: ")[2]


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    ("mirror", "why"),
    [
        (None, "run.shutdown_grace_s = 20 s leaves no time for it"),
        ("memory://a", "run.shutdown_grace_s = 20 s leaves no time for it, because run.mirror gets all of it"),
    ],
)
async def test_a_stopped_run_without_time_evaluates_nothing_and_says_why(
    mirror: str | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = stopped_in_its_second_step(run={"mirror": mirror})
    assert await told(scene, caplog) == why


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_the_evaluation_of_a_stopped_run_ends_with_its_time(caplog: pytest.LogCaptureFixture) -> None:
    scene = stopped_in_its_second_step()
    scene.heldout.grace_left_s = lambda: 0.01
    evaluate = scene.evaluate

    async def endless(*arguments: Any, **options: Any) -> Any:
        return await (asyncio.Event().wait() if scene.log.steps else evaluate(*arguments, **options))

    scene.evaluate = endless  # type: ignore[method-assign]
    limit = "it took longer than the 0.0 s that were left for it of run.shutdown_grace_s"
    assert await told(scene, caplog) == limit


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (CallTimeout("the buffer's replica_at took longer than 30 s"), "the buffer's replica_at took longer than 30 s"),
        (StallError("no live replica"), "no live replica"),
        (ValueError("a bug"), "ValueError: a bug"),
    ],
)
async def test_an_error_of_the_evaluation_of_a_stopped_run_is_named_and_does_not_end_it(
    error: Exception, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = stopped_in_its_second_step()
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    replica_at = scene.heldout.replica_at

    async def failing(version: Version) -> str:
        if version.step:
            raise error
        return await replica_at(version)

    scene.heldout.replica_at = failing  # type: ignore[method-assign]
    assert await told(scene, caplog) == why


@pytest.mark.asyncio
@pytest.mark.fault("F29")
@pytest.mark.parametrize("dies", [False, True], ids=["it left the run", "its process dies during the evaluation"])
async def test_a_stopped_run_does_not_wait_for_a_generator_if_none_is_left(
    dies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scene = stopped_in_its_second_step()
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    save, ask = scene.checkpoints.save_last, scene.coordinator.replica_at

    async def ask_for_a_while(version: Version, *, other_than: Collection[str], wait_s: float) -> str | None:
        return await ask(version, other_than=other_than, wait_s=0.0)

    async def save_alone(snapshot: RunSnapshot) -> None:
        await save(snapshot)
        if dies:
            scene.ended = {"a"}
        else:
            await scene.publisher.settle()
            await scene.coordinator.leave("a")

    scene.coordinator.replica_at = ask_for_a_while  # type: ignore[method-assign]
    scene.checkpoints.save_last = save_alone  # type: ignore[method-assign]
    assert await told(scene, caplog) == "no generator is left"


@pytest.mark.asyncio
@pytest.mark.fault("F29")
async def test_the_evaluation_after_a_stop_may_reach_the_reward_that_finishes_the_run() -> None:
    scene = stopped_in_its_second_step(run={"stop_when": {"reward": 0.25}}, eval={"every_steps": 100})
    scene.heldout.grace_left_s = lambda: DEADLINE_S
    totals = await scene.run()
    assert totals.stop_reason is not None
    assert totals.stop_reason.startswith("ended after step 2 of 50, because the evaluation")


@pytest.mark.asyncio
async def test_a_lease_is_given_back_when_the_trainer_raises() -> None:
    scene = Scene()
    scene.trainer.answers = [RuntimeError("rank 1 died")]
    with pytest.raises(RuntimeError, match="rank 1 died"):
        await scene.run()
    fates = await groups_by_fate(scene)
    assert fates[Fate.READY] >= GROUPS_PER_STEP
    assert Fate.LEASED not in fates
    assert Fate.TRAINED not in fates
    assert set(scene.trainer.asked[0][1]) <= scene.trainer.kept, "the next lease needs these rows"
    assert scene.log.steps == []


@pytest.mark.asyncio
async def test_a_lease_is_given_back_when_the_loop_is_cancelled_in_a_step() -> None:
    scene = Scene()
    loop, training, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def never(meta: KVBatchMeta) -> StepReport:
        loop.call_soon_threadsafe(training.set)
        release.wait()
        return trained()

    scene.trainer.answers = [never]
    run = asyncio.create_task(scene.run())
    await training.wait()
    assert (await groups_by_fate(scene))[Fate.LEASED] == GROUPS_PER_STEP
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    release.set()
    fates = await groups_by_fate(scene)
    assert Fate.LEASED not in fates
    assert fates[Fate.READY] >= GROUPS_PER_STEP


@pytest.mark.asyncio
async def test_what_fails_after_the_ack_leaves_the_groups_trained() -> None:
    scene = Scene()
    scene.publisher.fails_at = 1
    with pytest.raises(OSError, match=r"version 1\.1"):
        await scene.run()
    fates = await groups_by_fate(scene)
    assert fates[Fate.TRAINED] == GROUPS_PER_STEP
    assert Fate.LEASED not in fates
    status = await scene.status()
    assert status.version == Version(1, 1)
    assert status.account.events[Event.LEASE_GIVEN_BACK] == 0


@pytest.mark.asyncio
@pytest.mark.fault("F37")
async def test_lost_rows_give_the_lease_back_and_the_step_is_trained_with_what_replaces_them() -> None:
    scene = Scene()

    def lose_one(meta: KVBatchMeta) -> StepReport:
        raise RowsLost("a node is gone", sample_ids=meta.sample_ids[:1])

    scene.trainer.answers = [lose_one]
    await scene.run()
    (first, before), (again, after) = scene.trainer.asked[:2]
    assert (first, again) == (0, 0)
    assert before[0] not in after, "the lost group is replaced"
    assert before[1] in after, "the other group is leased again"
    assert not scene.trainer.kept, "the remaining rows of the lost group are dropped"
    fates = await groups_by_fate(scene)
    assert fates[Fate.ROWS_LOST] == 1
    assert fates[Fate.TRAINED] == 3 * GROUPS_PER_STEP
    assert [(record.step, record.trained) for record in scene.log.steps] == [(0, True), (1, True), (2, True)]
    assert scene.metrics.registry.get_sample_value("asyncrl_learner_steps_total", {"outcome": "skipped"}) == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("settings", "stages", "gbs"),
    [
        ({}, ["train"], 4),
        ({"learner": {"updates_per_step": 2}}, ["log-probs", "train"], 2),
        ({"algorithm": {"loss": "m2po"}}, ["log-probs", "train"], 4),
        ({"algorithm": {"loss": "a3po"}, "learner": {"updates_per_step": 2}}, ["train"], 2),
        (
            {"algorithm": {"overrides": {"penalties": [{"kind": "k3", "beta": 0.1, "q": "reference"}]}}},
            ["reference", "train"],
            4,
        ),
    ],
)
async def test_only_the_log_probs_that_the_objective_needs_are_asked_for(
    settings: dict[str, Any], stages: list[str], gbs: int
) -> None:
    scene = Scene(**settings)
    await scene.run()
    assert scene.trainer.stages == stages * 3
    assert scene.trainer.gbs == [gbs] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("advantage", "made_of", "outcomes"),
    [
        ({"kl": {"beta": 0.1, "kind": "k2"}, "gamma": 0.9}, ["reference", "log-probs"], [0.0, 1.0] * 2),
        ({"name": "reinforce_pp_baseline", "kl": {"beta": 0.1}}, ["reference", "log-probs"], [-0.5, 0.5] * 2),
        ({"gamma": 0.9}, [], [0.0, 1.0] * 2),
    ],
)
async def test_token_advantages_are_made_on_the_ranks_after_what_they_are_made_of(
    advantage: dict[str, Any], made_of: list[str], outcomes: list[float]
) -> None:
    section = {"name": "reinforce_pp", **advantage}
    scene = Scene(algorithm={"advantage": section})
    await scene.run()
    assert scene.trainer.stages == [*made_of, "advantages", "train"] * 3
    assert scene.trainer.outcomes == [outcomes] * 3, "the driver computes these from the rewards 0 and 1 of every group"
    assert scene.trainer.estimators == [resolve_estimators(section)[1]] * 3
    for fields in scene.trainer.fields:
        assert fields == {*GENERATED_FIELDS, "sample_mask", "advantages"}, (
            "training does not fetch `outcome_advantages`"
        )
    assert not scene.trainer.kept
    logged = {sample.reward: sample.advantage for sample in scene.log.samples[0]}
    assert logged == {0.0: outcomes[0], 1.0: outcomes[1]}


@pytest.mark.asyncio
@pytest.mark.fault("F37")
async def test_rows_lost_while_token_advantages_are_made_give_the_lease_back() -> None:
    scene = Scene(algorithm={"advantage": {"name": "reinforce_pp", "kl": {"beta": 0.1}}})
    make, lost = scene.trainer.get_advantages_from_meta, []

    def lose_one(meta: KVBatchMeta, estimator: Any) -> None:
        if not lost:
            lost.append(meta.sample_ids[0])
            raise RowsLost("a node is gone", sample_ids=meta.sample_ids[:1])
        make(meta, estimator)

    scene.trainer.get_advantages_from_meta = lose_one  # type: ignore[method-assign]
    await scene.run()
    assert [step for step, _ in scene.trainer.asked] == [0, 1, 2]
    assert (await groups_by_fate(scene))[Fate.ROWS_LOST] == 1


@pytest.mark.asyncio
@pytest.mark.parametrize(("drop_last", "steps", "gbs"), [(False, 2, [4, 2]), (True, 1, [4])])
async def test_when_prompts_run_out_a_short_step_ends_the_run_or_is_dropped_and_no_row_stays(
    drop_last: bool, steps: int, gbs: list[int]
) -> None:
    scene = Scene(prompts=3, data={"epochs": 1, "drop_last": drop_last})
    totals = await scene.run()
    assert scene.trainer.gbs == gbs
    assert len(scene.log.steps) == steps
    assert totals.rows_outstanding == 0
    assert not scene.trainer.kept


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_skipped_step_ends_its_lease_by_skip_and_leaves_the_version() -> None:
    scene = Scene()
    scene.trainer.answers = [trained(), skipped()]
    await scene.run()
    assert [step for step, _ in scene.trainer.asked] == [0, 1, 1, 2]
    assert not set(scene.trainer.asked[1][1]) & set(scene.trainer.asked[2][1]), "other prompts took their places"
    assert not set(scene.trainer.asked[1][1]) & scene.trainer.kept
    fates = await groups_by_fate(scene)
    assert (fates[Fate.SKIPPED], fates[Fate.TRAINED]) == (GROUPS_PER_STEP, 3 * GROUPS_PER_STEP)
    assert Version(1, 1) in scene.publisher.history
    assert scene.publisher.history == sorted(set(scene.publisher.history)), "nothing new was published for it"


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_so_many_skipped_steps_in_a_row_stop_the_run_and_name_their_groups() -> None:
    scene = Scene(learner={"max_nonfinite_steps": 3})
    scene.trainer.answers = [trained(), skipped(), skipped(), skipped()]
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*learner\.max_nonfinite_steps") as stopped:
        await scene.run()
    for key in scene.trainer.asked[-1][1]:
        assert key in str(stopped.value)
    fates = await groups_by_fate(scene)
    assert fates[Fate.SKIPPED] == 3 * GROUPS_PER_STEP
    assert Fate.LEASED not in fates
    assert [record.trained for record in scene.log.steps] == [True, False, False, False], "the last one is recorded"


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_trained_step_starts_the_count_of_skipped_ones_anew() -> None:
    scene = Scene(learner={"max_nonfinite_steps": 2})
    scene.trainer.answers = [skipped(), trained(), skipped(), trained(), skipped(), trained()]
    await scene.run()
    assert [record.trained for record in scene.log.steps] == [False, True] * 3


@pytest.mark.asyncio
async def test_the_parity_of_a_step_is_judged_at_the_temperature_of_the_sampler() -> None:
    scene = Scene(weights={"on_parity_failure": "stop"}, generator={"temperature": 0.25})
    scene.trainer.answers = [trained(on_policy_tokens=5, on_policy_parity_max_nats=3.9e-4)] * 3
    await scene.run()
    assert len(scene.log.steps) == 3


@pytest.mark.asyncio
async def test_tokens_beyond_the_parity_tolerance_stop_the_run_before_the_ack() -> None:
    scene = Scene(weights={"on_parity_failure": "stop"})
    scene.trainer.answers = [trained(on_policy_tokens=5, on_policy_parity_max_nats=0.5)]
    with pytest.raises(ParityError, match=r"step 0.* is 0\.5 nats.*weights\.parity_tolerance_nats = 0\.0001"):
        await scene.run()
    fates = await groups_by_fate(scene)
    assert Fate.TRAINED not in fates
    assert Fate.LEASED not in fates
    assert (await scene.status()).version == Version(1, 0)
    assert scene.publisher.history == [Version(1, 0)]


@pytest.mark.asyncio
async def test_an_alarm_about_parity_is_logged_and_shown_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(weights={"on_parity_failure": "alarm"})
    scene.trainer.answers = [trained(), trained(), trained(on_policy_tokens=5, on_policy_parity_max_nats=0.5)]
    with caplog.at_level(logging.ERROR, logger="asyncrl.learner.step_checks"):
        await scene.run()
    assert [record for record in caplog.messages if "is 0.5 nats" in record]
    assert scene.metrics.registry.get_sample_value("asyncrl_weight_parity_nats") == 0.5
    assert scene.metrics.registry.get_sample_value("asyncrl_weight_parity_ratio") == 5000
    assert [record.diagnostics["parity_ratio"] for record in scene.log.steps] == pytest.approx([0.01, 0.01, 5000])
    assert (await groups_by_fate(scene))[Fate.TRAINED] == 3 * GROUPS_PER_STEP


@pytest.mark.asyncio
@pytest.mark.fault("F5")
async def test_a_run_that_stands_still_stops_and_names_both_sides() -> None:
    scene = Scene(run={"stall_timeout_s": 60.0})
    scene.client.waiting = scene.hang
    with pytest.raises(StallError, match=r"stall_timeout_s = 60\).*learner waits \(not_enough_ready\); .*a at step 0,"):
        await scene.run()
    assert 60.0 < scene.clock.now_s < 70.0


@pytest.mark.asyncio
async def test_a_learner_that_waits_for_groups_ends_when_the_index_of_the_data_plane_has_died() -> None:
    scene = Scene(run={"stall_timeout_s": 60.0})
    rows = scene.trainer.client.rows_outstanding

    def died() -> dict[str, int]:
        if scene.states.state != "waiting_for_groups":
            return rows()
        raise ActorGone("the index has died")

    scene.client.waiting = scene.hang
    scene.trainer.client.rows_outstanding = died  # type: ignore[method-assign]
    with pytest.raises(ActorGone, match="the index has died"):
        await scene.run()
    assert scene.clock.now_s < 20.0


@pytest.mark.asyncio
@pytest.mark.fault("F5")
async def test_without_any_generator_the_error_says_how_to_start_one() -> None:
    scene = Scene(eval={"prompts": 0})
    scene.client.waiting = scene.hang

    async def delivered(version: Version) -> None:
        scene.coordinator.published(version)

    scene.publisher.delivered = delivered
    with pytest.raises(StallError, match=r"no generator has joined: start one with `asyncrl generator`"):
        await scene.run()


@pytest.mark.asyncio
async def test_prompts_that_nobody_can_answer_stop_the_run_and_name_the_reason() -> None:
    scene = Scene(generator={"max_data_failures": 3})
    scene.client.waiting = scene.fail
    with pytest.raises(
        RunError, match=r"3 times in a row \(generator\.max_data_failures = 3\): the prompt is too long"
    ):
        await scene.run()


@pytest.mark.asyncio
async def test_the_first_cause_is_raised_although_the_lease_could_not_be_given_back() -> None:
    scene = Scene()
    scene.trainer.answers = [RuntimeError("rank 1 died")]
    call = scene.client.call

    async def dead(method: Any, /, *arguments: Any, **options: Any) -> Any:
        if method is Coordinator.give_back:
            raise ActorGone("the buffer is gone")
        return await call(method, *arguments, **options)

    scene.client.call = dead  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rank 1 died"):
        await scene.run()


@pytest.mark.asyncio
@pytest.mark.parametrize("waits_for", ["a replica", "its answer"])
@pytest.mark.fault("F29")
async def test_a_stop_does_not_wait_for_an_evaluation(waits_for: str) -> None:
    scene = Scene()
    waiting = asyncio.Event()

    async def never(*_: Any, **__: Any) -> Any:
        waiting.set()
        await asyncio.Event().wait()

    if waits_for == "a replica":
        scene.heldout.replica_at = never  # type: ignore[method-assign]
    else:
        scene.heldout.evaluate = never  # type: ignore[method-assign]
    run = asyncio.create_task(scene.run())
    await waiting.wait()
    scene.stop.set()
    await run
    assert scene.trainer.asked == []
    assert scene.log.evals == []


@pytest.mark.asyncio
@pytest.mark.fault("F37")
@pytest.mark.parametrize(
    "error", [RowsLost("a node is gone", sample_ids=["0.0_g0"]), TimeoutError("the index is late"), KeyError("0.0_g0")]
)
async def test_samples_that_cannot_be_read_are_not_logged_and_the_run_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()
    read, asked = scene.trainer.client.get_data, [0]

    def read_all_but_those_of_step_1(meta: KVBatchMeta, select_fields: Any) -> Any:
        asked[0] += 1
        if asked[0] == 2:
            raise error
        return read(meta, select_fields)

    scene.trainer.client.get_data = read_all_but_those_of_step_1  # type: ignore[method-assign]
    await scene.run()
    assert asked[0] == 3, "each step reads its samples"
    assert sorted(scene.log.samples) == [0, 2]
    assert [record.step for record in scene.log.audit if isinstance(record, TrainedStep)] == [0, 1, 2]
    assert [record.step for record in scene.log.steps] == [0, 1, 2]
    assert not scene.trainer.kept, "the rows of the step are cleared"
    assert f"the samples of step 1 were not logged: {type(error).__name__}: " in caplog.text


@pytest.mark.asyncio
async def test_weights_that_the_generators_need_are_published_while_the_learner_waits() -> None:
    """D19: a replica is refused for staleness after the ack, so that the gate did not know it then."""
    scene = Scene(weights={"publish_every_steps": 2})
    history: list[list[Version]] = []
    held: list[Ticket] = []

    async def generate_slowly(wait_s: float) -> None:
        scene.clock.now_s += wait_s
        history.append(list(scene.publisher.history))
        await scene.publisher.settle()
        if len(history) == 2:
            while tickets := (await scene.coordinator.reserve("a", Version(1, 0), 1, wait_s=0.0)).tickets:
                held.extend(tickets)
                await scene.heartbeat()  # it has more slots than it got tickets
        elif len(history) == 4:
            await scene.commit(held)
        elif len(history) != 3:
            assert scene.loaded is not None
            reservation = await scene.coordinator.reserve("a", scene.loaded, GROUPS_PER_STEP, wait_s=0.0)
            await scene.commit(reservation.tickets)

    scene.client.waiting = generate_slowly
    await scene.run()
    assert history[1] == [Version(1, 0)], "the ack does not publish"
    assert history[2] == [Version(1, 0), Version(1, 1)], "published while the groups of the next step are generated"


@pytest.mark.asyncio
async def test_published_weights_that_hardly_change_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 0}
    scene = Scene(learner={"total_steps": 5, "optimizer": optimizer}, model={"dtype": "bfloat16"})
    scene.trainer.answers = [
        trained(weights_after=1, learning_rate=4e-4),  # the schedule's rate is low
        trained(),  # the weights did not move
        *[trained(weights_after=1)] * 3,
    ]
    scene.publisher.changed = 0.0005
    await scene.run()
    [words] = [message for message in caplog.messages if "have other bits than before" in message]
    assert words.startswith("step 2: 0.05 % of the published weights")
    assert "model.dtype = bfloat16" in words
    assert "learner.optimizer.learning_rate (0.001)" in words
    assert [step.diagnostics["published_bits_ratio"] for step in scene.log.steps] == [0.0005] * 5


@pytest.mark.asyncio
async def test_published_weights_that_change_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(learner={"total_steps": 2})
    scene.trainer.answers = [trained(weights_after=1)] * 2
    scene.publisher.changed = 0.01
    await scene.run()
    assert "have other bits" not in caplog.text
