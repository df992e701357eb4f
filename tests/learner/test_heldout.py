"""Held-out rewards are recorded for the version that produced them, and the wait for a replica has a limit."""

import logging
from collections.abc import Collection, Sequence

import msgspec
import pytest
from learner_scenes import Scene

from asyncrl.buffer.records import Failure
from asyncrl.common.version import Version
from asyncrl.data.prompts import Task
from asyncrl.errors import ActorUnreachable, CallTimeout, FailureClass, RunError, StallError, WitnessFailed
from asyncrl.generation.evaluation import Answer, Rewards
from asyncrl.generation.rollout import AnswerNumbers
from asyncrl.learner.heldout import EVALUATIONS
from asyncrl.learner.records import EvalRecord, best_first


@pytest.mark.asyncio
async def test_rewards_of_another_version_are_refused() -> None:
    scene = Scene()
    await scene.deliver(Version(1, 0))
    with pytest.raises(RunError, match=r"replica a evaluated step 0 instead of step 1"):
        await scene.heldout.evaluate(Version(1, 1), actor="a")
    assert scene.log.evals == []


@pytest.mark.asyncio
async def test_only_a_replica_that_has_loaded_the_version_is_asked() -> None:
    scene = Scene(run={"stall_timeout_s": 60.0})
    await scene.deliver(Version(1, 0))
    assert await scene.heldout.replica_at(Version(1, 0)) == "a"

    ask = scene.coordinator.replica_at

    async def ask_for_a_while(version: Version, *, other_than: Collection[str], wait_s: float) -> str | None:
        assert wait_s == 5.0, "the call waits for the replica"
        scene.clock.now_s += 61.0
        return await ask(version, other_than=other_than, wait_s=0.0)

    scene.coordinator.replica_at = ask_for_a_while  # type: ignore[method-assign]
    with pytest.raises(
        StallError, match=r"loaded the weights of step 1 within.*= 60 s; .*a at step 0.*, no heartbeats"
    ):
        await scene.heldout.replica_at(Version(1, 1))


@pytest.mark.asyncio
async def test_without_heldout_prompts_nothing_is_asked_and_nothing_recorded() -> None:
    scene = Scene(eval={"prompts": 0})
    await scene.run()
    assert scene.asked == []
    assert scene.log.evals == []
    assert len(scene.log.steps) == 3


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_a_replica_that_ends_before_it_has_answered_is_replaced_by_another() -> None:
    scene = Scene()
    await scene.deliver(Version(1, 0))
    await scene.deliver(Version(1, 0), replica="b")
    scene.ended = {"a"}
    await scene.heldout.evaluate(Version(1, 0), actor=await scene.heldout.replica_at(Version(1, 0)))
    assert [record.reward_mean for record in scene.log.evals] == [0.25]
    assert await scene.heldout.replica_at(Version(1, 0)) == "b", "an ended replica is not asked again"


ENGINE = Failure(failure_class=FailureClass.INFRA, reason="engine", message="the engine failed: killed")


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_an_evaluation_whose_engine_dies_is_repeated_and_the_run_goes_on() -> None:
    scene = await scene_with([1.0, ENGINE], [ENGINE, ENGINE], [1.0, 0.5])
    await scene.heldout.evaluate(Version(1, 0), actor="a")
    [record] = scene.log.evals
    assert (record.reward_mean, record.failed) == (0.75, 0)


@pytest.mark.asyncio
@pytest.mark.fault("F2")
async def test_an_evaluation_is_repeated_on_another_replica_than_the_one_that_failed_it() -> None:
    scene, asked = Scene(), list[str]()
    for replica in ("a", "b"):
        await scene.deliver(Version(1, 0), replica=replica)

    async def evaluate(actor: str, tasks: Sequence[Task], *, name: str) -> tuple[Version | None, list[Answer]]:
        asked.append(actor)
        if len(asked) == 2:
            raise ActorUnreachable("the replica cannot be reached at the moment")
        return Version(1, 0), [ENGINE if actor == "a" else Rewards((1.0,))]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate(Version(1, 0), actor="a")
    assert asked == ["a", "b", "a", "b"]
    assert [record.reward_mean for record in scene.log.evals] == [1.0]


@pytest.mark.asyncio
async def test_an_evaluation_that_fails_on_every_replica_is_recorded_as_it_is_in_the_end() -> None:
    scene = await scene_with(*[[1.0, ENGINE]] * EVALUATIONS)
    await scene.heldout.evaluate(Version(1, 0), actor="a")
    [record] = scene.log.evals
    assert (record.reward_mean, record.failed) == (1.0, 1)


FAILURE = Failure(
    failure_class=FailureClass.DATA,
    reason="reward_raised",
    message="environment.reward = tasks:judge raised KeyError: 'KEY' (tasks.py:30)",
    prompt="0+3=",
    completion="4",
)


async def scene_with(*answers: list[float | Failure]) -> Scene:
    """Returns a scene whose evaluations have these answers, in this order."""
    scene, left = Scene(), list(answers)
    await scene.deliver(Version(1, 0))

    async def evaluate(actor: str, tasks: Sequence[Task], *, name: str) -> tuple[Version | None, list[Answer]]:
        return Version(1, 0), [each if isinstance(each, Failure) else Rewards((each,)) for each in left.pop(0)]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    return scene


@pytest.mark.asyncio
async def test_rollouts_that_failed_are_left_out_of_the_mean_and_reported_with_the_first_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = await scene_with([0.5, FAILURE, 1.0, FAILURE], [FAILURE] * 4)
    for _ in range(2):
        await scene.heldout.evaluate(Version(1, 0), actor="a")
    records = [(record.prompts, record.failed, record.reward_mean) for record in scene.log.evals]
    assert records == [(2, 2, 0.75), (0, 4, None)], "a later evaluation does not end the run"
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert "held-out evaluation of step 0: 2 of 4 prompts got no reward" in warnings[0]
    assert "KeyError: 'KEY' (tasks.py:30) for prompt '0+3=' and completion '4'" in warnings[0]
    assert len(warnings) == 2


@pytest.mark.asyncio
async def test_a_run_whose_first_evaluation_got_not_one_reward_ends_before_it_trains() -> None:
    scene = await scene_with([FAILURE] * 4)
    with pytest.raises(RunError) as raised:
        await scene.run()
    assert str(raised.value) == (
        "held-out evaluation of step 0: 4 of 4 prompts got no reward, so training did not start. The first cause: "
        "environment.reward = tasks:judge raised KeyError: 'KEY' (tasks.py:30) for prompt '0+3=' and completion '4'. "
        "Fix the cause and start again."
    )
    assert scene.log.steps == []
    assert scene.log.evals == []


@pytest.mark.asyncio
async def test_a_first_evaluation_that_takes_too_long_ends_the_run_and_a_later_one_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = await scene_with([1.0, 1.0])
    evaluate = scene.evaluate

    async def late(actor: str, tasks: Sequence[Task], *, name: str) -> tuple[Version | None, list[Answer]]:
        raise CallTimeout("held-out evaluation took longer than 120 s")

    scene.evaluate = late  # type: ignore[method-assign]
    with pytest.raises(RunError) as raised:
        await scene.heldout.evaluate(Version(1, 0), actor="a")
    assert (
        "held-out evaluation of step 0: 4 prompts (eval.prompts) × 1 completions (eval.samples) took longer than "
        "eval.timeout_s = 120 s"
    ) in str(raised.value)
    assert "environment.score_workers" in str(raised.value)
    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate(Version(1, 0), actor="a")
    scene.evaluate = late  # type: ignore[method-assign]
    await scene.heldout.evaluate(Version(1, 0), actor="a")
    assert [record.reward_mean for record in scene.log.evals] == [1.0]
    [error] = [entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR"]
    assert error.endswith("eval.timeout_s = 120 s; it is left out")


@pytest.mark.asyncio
@pytest.mark.parametrize("answer", ["late", "failed"])
async def test_the_first_evaluation_of_a_resumed_run_does_not_end_it(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene()

    async def evaluate(actor: str, tasks: Sequence[Task], *, name: str) -> tuple[Version | None, list[Answer]]:
        if answer == "late":
            raise CallTimeout("held-out evaluation took longer than 120 s")
        return Version(1, 5), [FAILURE] * 4

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate(Version(1, 5), actor="a")
    assert [record.reward_mean for record in scene.log.evals] == ([] if answer == "late" else [None])
    [entry] = [entry.getMessage() for entry in caplog.records]
    assert entry.startswith("held-out evaluation of step 5: 4 ")


@pytest.mark.asyncio
async def test_a_last_evaluation_without_a_replica_is_left_out_and_the_weights_are_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    replica_at = scene.heldout.replica_at

    async def none_at_the_end(version: Version) -> str:
        if version.step == 3:
            raise StallError("no live replica has loaded the weights of step 3")
        return await replica_at(version)

    scene.heldout.replica_at = none_at_the_end  # type: ignore[method-assign]
    await scene.run()
    assert [record.version for record in scene.log.evals] == [0]
    assert scene.trainer.saved == ["step-3"]
    assert "held-out evaluation of step 3 is left out: no live replica" in caplog.text


SUMS = [Task(question=f"s{index}", prompt=f"s{index}", answer="a") for index in range(9)]


def numbers_of(place: int) -> AnswerNumbers:
    components = {"right": place / 2} | ({"even": 1.0} if place % 2 == 0 else {})
    return AnswerNumbers(
        components=components, completion_tokens=10 + place, truncated=float(place == 0), turns=2.0 + place
    )


@pytest.mark.asyncio
async def test_every_set_is_evaluated_each_time_as_it_says() -> None:
    sets = {"sums": {"environment": {"reward": "math_verify"}, "prompts": 3, "samples": 2, "pass_reward": 0.5}}
    scene = Scene(sets={"sums": SUMS}, eval={"every_steps": 2, "sets": sets}, learner={"total_steps": 4})
    asked = list[tuple[str, int, float]]()

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        asked.append((name, len(tasks), share))
        if name == "sums":
            return scene.loaded, [Rewards((0.5, 0.0), None, numbers_of(place)) for place, _ in enumerate(tasks)]
        return scene.loaded, [Rewards((0.25,)) for _ in tasks]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.run()
    assert asked == [
        (name, prompts, share) for share in (1, 0.25, 1) for name, prompts in (("heldout", 4), ("sums", 3))
    ]
    assert [(record.name, record.step) for record in scene.log.evals] == [
        (name, step) for step in (0, 2, 4) for name in ("heldout", "sums")
    ]
    assert [record.asked for record in scene.log.evals[:2]] == [4, 3]
    own, sums = scene.log.evals[:2]
    assert (own.reward_mean, own.samples, own.pass_at) == (0.25, 1, {})
    assert (sums.reward_mean, sums.samples, sums.pass_at, sums.prompts) == (0.25, 2, {1: 0.5, 2: 1.0}, 3)
    assert (sums.reward_components, sums.completion_tokens_mean) == ({"right": 0.5, "even": 1.0}, 11.0)
    assert (sums.truncated_ratio, sums.turns_mean) == (1 / 3, 3.0)
    assert own.numbers() == {"mean": 0.25}, "nothing else was measured"
    value = scene.metrics.registry.get_sample_value
    assert [value("asyncrl_learner_heldout_reward_mean", {"set": name}) for name in ("heldout", "sums")] == [0.25] * 2


@pytest.mark.asyncio
async def test_a_set_that_fails_is_named_and_the_others_are_evaluated(caplog: pytest.LogCaptureFixture) -> None:
    sets = {"sums": {"environment": {"reward": "math_verify"}}}
    scene = Scene(sets={"sums": SUMS}, eval={"sets": sets})
    scene.loaded = Version(1, 2)
    await scene.heartbeat()

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        if name == "heldout":
            raise CallTimeout("it took longer than 120 s")
        return Version(1, 2), [FAILURE, *[Rewards((1.0,))] * (len(tasks) - 1)]

    scene.evaluate = evaluate  # type: ignore[method-assign]
    await scene.heldout.evaluate_beside(Version(1, 2))
    assert [(record.name, record.prompts, record.failed) for record in scene.log.evals] == [("sums", 3, 1)]
    warned = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    late, some = [entry.getMessage() for entry in warned if entry.name == "asyncrl.learner.heldout"]
    assert late.startswith("held-out evaluation of step 2 is left out")
    assert some.startswith("evaluation on the set sums of step 2: 1 of 4 prompts got no reward")


@pytest.mark.asyncio
async def test_a_named_set_alone_is_evaluated_too_and_may_end_the_run() -> None:
    sets = {"sums": {"environment": {"reward": "math_verify"}, "prompts": 3}}
    scene = Scene(
        sets={"sums": SUMS},
        eval={"prompts": 0, "every_steps": 2, "sets": sets},
        learner={"total_steps": 50},
        run={"stop_when": {"eval": "sums", "reward": 0.25}},
    )
    totals = await scene.run()
    assert {record.name for record in scene.log.evals} == {"sums"}
    assert "because the evaluation sums of step" in (totals.stop_reason or "")


@pytest.mark.asyncio
async def test_the_reward_of_another_set_does_not_end_the_run() -> None:
    sets = {"sums": {"environment": {"reward": "math_verify"}}}
    scene = Scene(
        sets={"sums": SUMS},
        eval={"every_steps": 2, "sets": sets},
        learner={"total_steps": 5},
        run={"stop_when": {"eval": "sums", "reward": 0.5}},
    )

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        return scene.loaded, [Rewards((0.25 if name == "sums" else 1.0,))] * len(tasks)

    scene.evaluate = evaluate  # type: ignore[method-assign]
    totals = await scene.run()
    assert (len(scene.log.steps), totals.stop_reason) == (5, None)


@pytest.mark.asyncio
async def test_an_evaluation_beside_training_whose_engine_failed_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(run={"stop_when": {"reward": 0.5}}, eval={"every_steps": 2}, learner={"total_steps": 50})
    scene.loaded = Version(1, 2)
    await scene.heartbeat()

    async def evaluate(actor: str, tasks: Sequence[Task], **_: object) -> tuple[Version | None, list[Answer]]:
        lost = msgspec.structs.replace(FAILURE, failure_class=FailureClass.INFRA)
        return Version(1, 2), [Rewards((1.0,)), *[lost] * (len(tasks) - 1)]

    scene.evaluate = evaluate  # type: ignore[assignment]
    await scene.heldout.evaluate_beside(Version(1, 2))
    assert not scene.log.evals
    assert scene.heldout.reached is None
    assert "rollouts failed" in caplog.text


def answers_with(scene: Scene, *non_greedy_tokens: int | None) -> None:
    """Makes the answers of each evaluation have these numbers of tokens that are not the most probable ones."""

    async def evaluate(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        return scene.loaded, [Rewards((0.5,), count) for count in non_greedy_tokens]

    scene.evaluate = evaluate  # type: ignore[method-assign]


@pytest.mark.asyncio
@pytest.mark.parametrize(("counts", "recorded"), [((0, 0, 0, 0), 0), ((None, None, None, None), None)])
async def test_greedy_answers_and_those_that_were_sampled_on_purpose_are_no_finding(
    counts: tuple[int | None, ...], recorded: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(witness={"on_failure": "stop"})
    answers_with(scene, *counts)
    await scene.run()
    assert [record.non_greedy_tokens for record in scene.log.evals] == [recorded] * 2
    assert not [entry for entry in caplog.records if entry.levelno >= logging.ERROR]


@pytest.mark.asyncio
async def test_an_evaluation_that_must_be_greedy_and_is_not_is_an_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene()
    answers_with(scene, 2, 0, 3, 0)
    await scene.run()
    assert [record.non_greedy_tokens for record in scene.log.evals] == [5, 5], "the run goes on"
    first, _ = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.ERROR]
    assert first.startswith(
        "held-out evaluation of step 0: it is not the one that the configuration describes. The witness's check "
        "`greedy` found: 5 tokens are not the most probable ones, in 2 of 4 answers;"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize(("at", "trained"), [(0, 0), (2, 2), (4, 4)])
async def test_it_ends_the_run_if_that_is_wanted_and_the_last_weights_are_saved(at: int, trained: int) -> None:
    scene = Scene(witness={"on_failure": "stop"}, eval={"every_steps": 2}, learner={"total_steps": 4})
    evaluate = scene.evaluate

    async def sampled_once(
        actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        version, answers = await evaluate(actor, tasks, name=name, share=share)
        assert version is not None
        return version, [Rewards((0.5,), 1)] * len(tasks) if version.step == at else answers

    scene.evaluate = sampled_once  # type: ignore[method-assign]
    with pytest.raises(WitnessFailed, match=rf"evaluation of step {at}: .* found: 4 tokens are not the most probable"):
        await scene.run()
    assert trained <= len(scene.log.steps) <= trained + (at == 2), "a step may have begun beside the evaluation"
    assert scene.trainer.saved == (["step-4"] if at == 4 else [])


@pytest.mark.parametrize(("failed", "covers"), [(0, True), (1, True), (2, False)])
def test_a_mean_over_too_few_prompts_is_not_used(failed: int, covers: bool) -> None:
    record = EvalRecord(version=3, wall_s=1.0, prompts=10 - failed, failed=failed, reward_mean=1.0)
    assert record.covers == covers
    assert bool(best_first([record], {3})) == covers
