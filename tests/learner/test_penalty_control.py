"""The β of a penalty follows the recorded KL of the trained steps, also over a restart, and the witness computes it
again."""

from typing import Any

import msgspec
import pytest
from learner_scenes import Scene, skipped, trained

from asyncrl.algorithms.calibration import after_step
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.errors import WitnessFailed
from asyncrl.learner.records import StepRecord
from asyncrl.ranks.report import StepReport

ALGORITHM = {"overrides": {"penalties": [{"kind": "k3", "beta": 0.1, "control": {"target": 0.02, "gain": 0.5}}]}}
KL = (0.0, 0.05, 0.021, 0.02, 0.019, 0.1, 0.0, 0.03)


def reached(kl: float, **changed: Any) -> StepReport:
    return trained(diagnostics={"kl_to_reference_nats": kl}, **changed)


def scene_of(*answers: StepReport, **settings: Any) -> Scene:
    steps = sum(not report.skipped for report in answers)
    scene = Scene(algorithm=ALGORITHM, learner={"total_steps": steps}, **settings)
    scene.trainer.answers = list(answers)
    return scene


def betas(scene: Scene) -> list[float | None]:
    return [step.number("penalty_beta") for step in scene.log.steps]


def followed(kl_nats: list[float]) -> list[float]:
    found = [0.1]
    for kl in kl_nats:
        found.append(found[-1] * (1 + 0.5 * max(-0.2, min(0.2, (kl - 0.02) / 0.02))))
    return found[:-1]


@pytest.mark.asyncio
async def test_the_beta_of_a_step_follows_from_the_kl_of_the_steps_before() -> None:
    scene = scene_of(*map(reached, KL))
    await scene.run()
    assert betas(scene) == pytest.approx(followed(list(KL)), rel=1e-12)
    assert [step.diagnostics["witness_bounds_ratio"] for step in scene.log.steps] == pytest.approx([0.0] * 8, abs=1e-6)


@pytest.mark.asyncio
async def test_a_step_that_is_skipped_or_has_no_finite_kl_leaves_beta_as_it_is() -> None:
    scene = scene_of(reached(0.0), skipped(), reached(float("nan")), trained(), reached(0.1), reached(0.02))
    await scene.run()
    first, after, last = 0.1, 0.1 * 0.9, 0.1 * 0.9 * 1.1
    assert betas(scene) == pytest.approx([first, after, after, after, after, last], rel=1e-12)


@pytest.mark.asyncio
async def test_steps_that_train_only_the_critic_leave_beta_as_it_is() -> None:
    algorithm = {"loss": "ppo", "overrides": {"penalties": ALGORITHM["overrides"]["penalties"]}, "advantage": "gae"}
    scene = Scene(
        algorithm=algorithm, critic={"warmup_steps": 2}, staleness={"max_versions": 0}, learner={"total_steps": 4}
    )
    scene.trainer.answers = [reached(kl) for kl in (0.0, 0.0, 0.0, 0.02)]
    await scene.run()
    assert betas(scene) == pytest.approx([0.1, 0.1, 0.1, 0.09], rel=1e-12)


@pytest.mark.asyncio
@pytest.mark.parametrize("trained_steps", [1, 3, 5])
async def test_a_resumed_run_goes_on_with_the_beta_of_its_records(trained_steps: int) -> None:
    """The records are read from JSON, and the numbers are equal to the last bit."""
    whole = scene_of(*map(reached, KL))
    await whole.run()
    before = msgspec.json.decode(msgspec.json.encode(whole.log.steps[trained_steps - 1]), type=StepRecord)
    resumed = scene_of(*map(reached, KL[trained_steps:]), before=before)
    await resumed.run()
    assert betas(resumed) == betas(whole)[trained_steps:]
    assert not any(step.diagnostics["witness_bounds_ratio"] for step in resumed.log.steps[:1])


@pytest.mark.asyncio
async def test_a_run_that_is_resumed_after_a_skipped_step_keeps_its_beta() -> None:
    first = scene_of(reached(0.0), skipped(), reached(0.02))
    await first.run()
    resumed = scene_of(reached(0.02), before=first.log.steps[1])
    await resumed.run()
    assert betas(resumed) == pytest.approx([0.09], rel=1e-12)


@pytest.mark.asyncio
async def test_a_run_that_gets_a_control_when_it_is_resumed_begins_with_the_configured_beta() -> None:
    before = Scene(learner={"total_steps": 1})
    await before.run()
    resumed = scene_of(reached(0.0), reached(0.02), before=before.log.steps[0])
    await resumed.run()
    assert betas(resumed) == pytest.approx([0.1, 0.09], rel=1e-12)


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [0, 2])
async def test_the_witness_finds_a_beta_that_is_not_updated_or_updated_twice(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(loss: Any, kl_nats: Any, **_: Any) -> Any:
        for _ in range(times):
            loss = ObjectiveLoss(after_step(loss.objective, kl_nats))
        return loss

    monkeypatch.setattr("asyncrl.learner.step.next_loss", wrong)
    scene = scene_of(*map(reached, KL), witness={"every_steps": 0, "on_failure": "stop"})
    found = {0: "0.1", 2: "0.081"}[times]
    words = f"step 1: .*`bounds` found: a penalty had β = {found}, and the KL of the steps before gives 0.09;"
    with pytest.raises(WitnessFailed, match=words):
        await scene.run()


@pytest.mark.asyncio
async def test_ranks_that_report_no_beta_are_found() -> None:
    scene = scene_of(reached(0.02), witness={"every_steps": 0, "on_failure": "stop"})
    scene.trainer.reports_beta = False
    with pytest.raises(WitnessFailed, match=r"a penalty had β = nan, and the KL of the steps before gives 0\.1"):
        await scene.run()


@pytest.mark.asyncio
async def test_a_run_without_a_control_has_no_beta_and_no_check_of_it() -> None:
    scene = Scene(learner={"total_steps": 1})
    await scene.run()
    [step] = scene.log.steps
    assert "penalty_beta" not in step.diagnostics
    assert "witness_bounds_ratio" not in step.diagnostics
