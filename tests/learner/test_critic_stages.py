"""A step with a critic: the order of its stages, its warm-up, and its end when rows are lost or numbers not finite."""

from typing import Any

import pytest
from learner_scenes import FakeCritic, Scene, judged, skipped, trained

from asyncrl.algorithms.baselines import CriticBased, RewardKL
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.buffer.ledger import Fate
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import ConfigError, NonFiniteError, RowsLost
from asyncrl.learner.penalty_control import first_loss
from asyncrl.learner.step import Stages
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace

PPO = {"loss": "ppo", "overrides": {"weight": {"lo": 0.5, "hi": 5.0, "outside": "zero"}}}
STAGES = ["values", "advantages", "train critic", "train"]


def scene(*, critic: dict[str, Any] | None = None, **settings: Any) -> tuple[Scene, FakeCritic]:
    made = Scene(**{"algorithm": PPO, "critic": critic or {}, **settings})
    assert made.critic is not None
    return made, made.critic


@pytest.mark.asyncio
async def test_a_step_has_the_critic_s_stages_in_order_and_each_model_fetches_only_what_it_reads() -> None:
    run, critic = scene()
    await run.run()
    assert run.trainer.stages == STAGES * 3
    assert critic.gbs == run.trainer.gbs == [4] * 3
    for fields in critic.fields:
        assert fields == {*GENERATED_FIELDS, "sample_mask", "rewards", "values", "advantages", "returns"}
    for fields in run.trainer.fields:
        assert fields == {*GENERATED_FIELDS, "sample_mask", "advantages"}
    assert not run.trainer.kept, "a critic's columns are dropped with their rows"


@pytest.mark.asyncio
async def test_the_settings_reach_the_estimator() -> None:
    for section, expected in (
        ({"gamma": 0.9, "lam": 0.8}, GAE(gamma=0.9, lam=0.8, value_lam=0.8)),
        ({"value_lam": 1.0, "length_alpha": 0.05}, GAE(gamma=1.0, lam=0.95, value_lam=1.0, length_alpha=0.05)),
    ):
        run, critic = scene(critic=section)
        await run.run()
        assert critic.estimators == [expected] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("section", "value_lam", "length_alpha"),
    [
        ({}, 1.0, 0.05),
        ({"value_lam": 0.9}, 0.9, 0.05),
        ({"length_alpha": 0.2}, 1.0, 0.2),
        ({"length_alpha": 0.0, "value_lam": None}, 1.0, None),
    ],
)
async def test_vapo_has_its_papers_lambdas_where_none_are_set(
    section: dict[str, Any], value_lam: float, length_alpha: float | None
) -> None:
    """VAPO (arXiv 2504.05118): λ of the value is 1, and λ of the policy is 1 − 1/(0.05 · length)."""
    vapo = {**PPO, "loss": "vapo"}
    run, critic = scene(critic=section, algorithm=vapo)
    await run.run()
    assert critic.estimators == [GAE(gamma=1.0, lam=0.95, value_lam=value_lam, length_alpha=length_alpha)] * 3
    # The published values belong to VAPO's own estimator: with another one they are not used.
    other, _ = scene(critic=section, algorithm={**vapo, "advantage": "vtrace"})
    assert isinstance(other.loop.stages._by_token, VTrace)


@pytest.mark.asyncio
async def test_the_options_of_an_advantage_and_the_aggregation_reach_the_ranks() -> None:
    advantage = {"name": "gae", "whiten": "samples", "keep_mean": True}
    run, critic = scene(critic={"aggregation": "sequence_mean"}, algorithm={**PPO, "advantage": advantage})
    await run.run()
    whitening = CriticBased(whiten="samples", keep_mean=True)
    assert critic.estimators == [GAE(gamma=1.0, lam=0.95, value_lam=0.95, whitening=whitening)] * 3
    assert [loss.aggregation for loss in critic.losses if isinstance(loss, ClippedValueLoss)] == ["sequence_mean"] * 3
    run, critic = scene(algorithm={"loss": "vtrace", "advantage": {"name": "vtrace", "whiten": "none"}})
    await run.run()
    assert critic.estimators == [VTrace(gamma=1.0, whitening=CriticBased(whiten="none"))] * 3
    assert [loss.aggregation for loss in critic.losses if isinstance(loss, ClippedValueLoss)] == ["token_mean"] * 3


@pytest.mark.asyncio
async def test_v_trace_has_the_log_probs_of_the_step_s_start_before_its_advantages() -> None:
    run, critic = scene(algorithm={"loss": "vtrace"}, critic={"gamma": 0.9})
    await run.run()
    assert run.trainer.stages == ["values", "log-probs", "advantages", "train critic", "train"] * 3
    assert critic.estimators == [VTrace(gamma=0.9)] * 3


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["gae", "vtrace"])
async def test_a_kl_in_the_reward_has_the_reference_and_the_log_probs_before_the_advantages(name: str) -> None:
    advantage = {"name": name, "kl": {"beta": 0.1, "kind": "k3"}}
    algorithm = {**PPO, "advantage": advantage} if name == "gae" else {"loss": "vtrace", "advantage": advantage}
    run, critic = scene(algorithm=algorithm)
    await run.run()
    assert run.trainer.stages == ["values", "reference", "log-probs", "advantages", "train critic", "train"] * 3
    assert [getattr(estimator, "kl", None) for estimator in critic.estimators] == [RewardKL(beta=0.1, kind="k3")] * 3
    assert not run.trainer.estimators, "the critic's ranks compute the advantages"


@pytest.mark.asyncio
async def test_in_the_warm_up_only_the_critic_learns_and_the_steps_count() -> None:
    run, _ = scene(critic={"warmup_steps": 2})
    phases: list[str] = []

    def looked_at(_: KVBatchMeta) -> StepReport:
        phases.append(run.loop.phase)
        return trained()

    run.trainer.answers = [looked_at] * 3
    await run.run()
    alone = "training only the critic (critic.warmup_steps)"
    assert phases == [alone, alone, "training"]
    waiting = [*STAGES[:3], "evaluate"]
    assert run.trainer.stages == [*waiting, *waiting, *STAGES]
    assert [record.step for record in run.log.steps if record.trained] == [0, 1, 2]
    assert (await run.status()).version.step == 3


@pytest.mark.asyncio
async def test_updates_are_shared_by_the_critic_s_own_ranks() -> None:
    run, critic = scene(critic={"ranks": 2}, learner={"updates_per_step": 2, "groups_per_step": 2})
    await run.run()
    assert critic.gbs == [2] * 3
    run, critic = scene(critic={"ranks": 3}, learner={"updates_per_step": 1})
    await run.run()
    assert critic.gbs == [4] * 3, "with one update per step it has all four rows, also with three ranks"


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", ["get_values_from_meta", "get_advantages_from_meta", "train_from_meta"])
@pytest.mark.fault("F37")
async def test_rows_lost_in_any_of_its_stages_give_the_lease_back_before_the_policy_is_trained(
    stage: str,
) -> None:
    run, critic = scene()
    do, lost = getattr(critic, stage), []

    def lose_one(meta: Any, *args: Any, **options: Any) -> Any:
        if not lost:
            lost.append(meta.sample_ids[0])
            raise RowsLost("a node is gone", sample_ids=meta.sample_ids[:1])
        return do(meta, *args, **options)

    setattr(critic, stage, lose_one)
    await run.run()
    assert run.trainer.stages.index("train") > 0
    assert [step for step, _ in run.trainer.asked] == [0, 1, 2], "no step trained the policy twice"
    account = (await run.status()).account
    assert account.fates[Fate.ROWS_LOST].groups == 1
    assert account.closed
    assert not run.trainer.kept


@pytest.mark.asyncio
async def test_its_numbers_are_shown_and_recorded_and_a_rollout_s_advantage_is_the_mean_of_its_tokens() -> None:
    run, _ = scene()
    await run.run()
    for name, value in (("value_loss", 0.0625), ("explained_variance", 0.75), ("value_clipped_ratio", 0.1)):
        assert run.metrics.registry.get_sample_value(f"asyncrl_learner_{name}") == pytest.approx(value)
        assert run.log.steps[-1].diagnostics[name] == pytest.approx(value)
    assert {sample.reward: sample.advantage for sample in run.log.samples[0]} == {0.0: 0.0, 1.0: 1.0}


@pytest.mark.asyncio
async def test_its_seconds_are_stages_like_the_policy_s() -> None:
    run, _ = scene()
    await run.run()
    seconds = run.log.steps[-1].learner_state_s
    assert seconds["forward_backward"] == pytest.approx(3 * 2 * 0.5)
    assert seconds["optimizer"] == pytest.approx(3 * 2 * 0.25)
    assert sum(seconds.values()) == pytest.approx(run.clock.now_s)


@pytest.mark.asyncio
async def test_a_step_without_a_trained_token_says_nothing_of_the_critic() -> None:
    run, critic = scene(learner={"total_steps": 1})
    critic.answers = [trained(updates_applied=0, loss_metrics={})]
    await run.run()
    assert "value_loss" not in run.log.steps[-1].diagnostics


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_critic_without_numbers_leaves_the_step_trained_and_ends_the_run_when_it_goes_on() -> None:
    run, critic = scene(learner={"max_nonfinite_steps": 2, "total_steps": 5})
    broken = judged(skipped=True, updates_applied=0, loss=float("nan"))
    critic.answers = [broken, judged(), broken, broken]
    with pytest.raises(NonFiniteError, match="2 steps in a row"):
        await run.run()
    assert [record.trained for record in run.log.steps] == [True] * 4
    assert run.log.steps[0].diagnostics["value_loss"] is None
    run, critic = scene(learner={"max_nonfinite_steps": 2, "total_steps": 5})
    critic.answers, run.trainer.answers = [broken], [trained(), skipped()]
    with pytest.raises(NonFiniteError):
        await run.run()


def test_a_critic_that_the_configuration_does_not_have_is_refused() -> None:
    run = Scene()
    made = FakeCritic(run.trainer, run.clock)
    with pytest.raises(ConfigError, match="no section"):
        Stages(
            config=run.config,
            policy=run.trainer,
            critic=made,
            states=run.states,
            loss=first_loss(run.config),
            clock=run.clock,
        )
