"""The records of trained and skipped steps, as the report, the summary and the live view read them."""

import dataclasses
import math
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from learner_scenes import Scene, judged, skipped, trained
from made_up_run import make_step
from stacks import functions_of_asyncrl

from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.records import FailedTicket, Failure, FilteredGroup
from asyncrl.common.device_time import Device, Devices, DeviceTime, Pool
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.registry import ReplicaReport, mean_states
from asyncrl.coordinator.status import GeneratorTotals
from asyncrl.deployment.run_dir import RecordFile, RunDir
from asyncrl.errors import FailureClass
from asyncrl.learner.audit_records import Began, Machine
from asyncrl.learner.recording import EndedStep, StepRecorder
from asyncrl.learner.records import StepRecord, build_summary
from asyncrl.metrics.catalogue import CATALOGUE, Kind, Role
from asyncrl.metrics.numbers import AGENT_NUMBERS, GAUGES, NUMBERS, WITNESSED
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.views.report import read_run, write_report
from asyncrl.views.run_view import REWARDS, RunView, run_view
from asyncrl.views.setting import setting_of


@pytest.mark.asyncio
async def test_a_trained_step_is_recorded_with_what_it_trained() -> None:
    scene = Scene()
    await scene.run()
    first, last = scene.log.steps[0], scene.log.steps[-1]
    assert (first.step, first.version_after, first.duration_s) == (0, 1, 1.0)
    assert (first.loss, first.grad_norm, first.learning_rate, first.parity_nats) == (0.5, 2.0, 1e-3, 1e-6)
    assert first.reward_mean == 0.5, "rewards of a group are 0 and 1"
    assert (first.reward_std, first.reward_min, first.reward_max) == (0.5, 0.0, 1.0)
    assert first.zero_variance_ratio == 0.0, "the headline of every screen reads it"
    assert (first.completion_tokens_mean, first.completion_tokens_max) == (1.5, 2), "completions of one and two tokens"
    assert (first.trained_samples, first.trained_tokens) == (4, 6)
    assert first.group_staleness == {0: 2}
    assert first.token_staleness == {0: 4, 1: 2}
    assert first.ledger_groups["trained"] == 2
    assert (last.published_version, last.mid_sequence_updates) == (3, 6)
    read = scene.metrics.registry.get_sample_value
    assert read("asyncrl_learner_steps_total", {"outcome": "trained"}) == 3
    assert read("asyncrl_learner_policy_version") == 3
    assert read("asyncrl_learner_loss") == 0.5
    assert read("asyncrl_group_staleness_max_versions") == max(last.group_staleness)
    assert read("asyncrl_stall_timeout_seconds") == scene.config.run.stall_timeout_s
    assert read("asyncrl_weight_sync_timeout_seconds") == scene.config.weights.load_timeout_s
    assert read("asyncrl_weight_lag_limit_versions") == 1


NOT_OF_A_STEP = {
    "weight_sent_ratio",
    *("objective_steps_per_hour", "objective_training_ratio"),
    *("run_info", "stall_timeout_seconds", "weight_sync_timeout_seconds", "weight_lag_limit_versions"),
    "learner_health_note",  # only while something is wrong
    "learner_reward_component_mean",  # only if rewards have components
    "learner_reward_part_mean",  # only with a mixture
    *(f"learner_{GAUGES[name].removeprefix('asyncrl_learner_')}" for name in AGENT_NUMBERS),  # only with agents
    *(f"learner_witness_{check}_ratio" for check in WITNESSED),  # only in steps that are witnessed
    *("weight_parity_ratio", "weight_parity_nats", "rows_outstanding", "learner_heldout_reward_mean"),
    *("checkpoint_interval_versions", "checkpoint_policy_version", "checkpoint_age_seconds"),
    "mirror_behind_seconds",
    *("heartbeat_age_seconds", "deadline_seconds"),
    *("run_incarnation", "run_restarts", "run_resumed_timestamp_seconds"),
    "run_effective_training_time_ratio",  # twice a second, so that it falls while no step ends
}
"""Gauges of the learner that are not set at the end of a trained step."""


OF_THE_REPORT = (
    *("kernel_ess_ratio", "silent_ratio", "exp_abs_log_rho_mean", "abs_log_rho_max_nats", "nonfinite_tokens"),
    *(f"{name}_{sign}_ratio" for name in ("clipped", "gated") for sign in ("positive", "negative")),
    *("kl_to_reference_nats", "packing_efficiency_ratio", "gpu_memory_allocated_max_gib", "penalty_beta"),
)
"""Declared numbers that a step report has in its `diagnostics`."""


async def an_ended_step() -> EndedStep:
    """Returns the second step of a scene, as the recorder gets it."""
    scene = Scene()
    ended: list[EndedStep] = []
    scene.loop.step_end.recorder.record = ended.append  # type: ignore[method-assign]
    await scene.run()
    return ended[1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("turns", "calls", "failed", "means"),
    [((2, 2, 5, 3), 6, 3, (3.0, 1.5, 0.75)), ((1, 1, 1, 1), 0, 0, (1.0, 0.0, 0.0)), ((), 0, 0, None)],
)
async def test_the_record_has_the_means_over_the_episodes_of_agents(
    turns: tuple[int, ...], calls: int, failed: int, means: tuple[float, ...] | None
) -> None:
    step = await an_ended_step()
    first, *others = step.lease.groups
    meta = msgspec.structs.replace(first.meta, turns=turns, tool_calls=calls, failed_tool_calls=failed)
    groups = (msgspec.structs.replace(first, meta=meta), *others)  # the other groups have no agent
    step = dataclasses.replace(step, lease=msgspec.structs.replace(step.lease, groups=groups))
    record = StepRecorder(metrics=LearnerMetrics(), elapsed_s=lambda: 1.0, state_seconds=dict).record(step)
    found = {name: value for name, value in record.diagnostics.items() if name in AGENT_NUMBERS}
    assert found == ({} if means is None else dict(zip(AGENT_NUMBERS, means, strict=True)))


@pytest.mark.asyncio
async def test_every_gauge_of_a_trained_step_shows_the_number_that_bears_its_name() -> None:
    step = await an_ended_step()
    numbers = count(1)  # each gauge gets a different number, so that a swap of two gauges fails the test
    measured = {name: next(numbers) / 64 for name in OF_THE_REPORT}
    fields = ("loss", "grad_norm", "entropy_nats", "learning_rate")
    same: dict[str, Any] = {
        name: next(numbers) / 64 for name in (*fields, "importance_weight_mean", "importance_weight_max")
    }
    of_samples: dict[str, Any] = {
        name: next(numbers) / 64 for name in ("zero_variance_ratio", "all_right_ratio", "all_wrong_ratio")
    }
    of_loss = {"clipped_ratio": next(numbers) / 64, "gated_ratio": next(numbers) / 64}
    ess, k1, k3, peak, overlong, masked, failed, value_loss, parity = (next(numbers) / 64 for _ in range(9))
    report = dataclasses.replace(
        step.report, **same, ess=ess, kl_behaviour_k1_nats=k1, kl_behaviour_k3_nats=k3, peak_flops_per_s=peak,
        on_policy_parity_mean_nats=parity, loss_metrics=of_loss, diagnostics=measured,
    )  # fmt: skip
    of_samples |= {"stale_tokens": 111, "stale_samples": 112}
    ratios = {"truncated_ratio": overlong, "masked_samples_ratio": masked, "failed_samples_ratio": failed}
    samples = dataclasses.replace(step.samples, numbers=of_samples | ratios)
    filtered = (FilteredGroup(reward=0.5, samples=4), FilteredGroup(reward=0.5, samples=4))
    lease = msgspec.structs.replace(step.lease, filtered=filtered)
    step = dataclasses.replace(
        step,
        lease=lease,
        report=report,
        samples=samples,
        critic_report=judged(loss=value_loss),
        published=Version(1, 40),
    )
    metrics = LearnerMetrics()
    recorder = StepRecorder(metrics=metrics, elapsed_s=lambda: 1.0, state_seconds=dict)
    record = recorder.record(step)
    declared = {number.name for number in NUMBERS}
    assert record.diagnostics.keys() - of_loss.keys() - measured.keys() <= declared, "declare it in metrics/numbers.py"
    expected = measured | same | of_samples | of_loss
    expected |= {"ess_ratio": ess, "kl_to_behaviour_nats": k3, "overlong_ratio": overlong, "value_loss": value_loss}
    expected |= {
        "masked_samples_ratio": masked,
        "failed_samples_ratio": failed,
        "reward_mean": 0.5,
        "peak_flops_per_second": peak,
        "parity_mean_nats": parity,
    }
    expected["filtered_groups"] = 2
    expected |= {"explained_variance": 0.75, "value_clipped_ratio": 0.1, "policy_version": step.status.version.step}
    shown = {f"asyncrl_learner_{name}": value for name, value in expected.items()} | {
        "asyncrl_published_policy_version": 40,
        "asyncrl_group_staleness_max_versions": 1,
        "asyncrl_learner_length_ratio": 1.0,
    }
    read = metrics.registry.get_sample_value
    assert {name: read(name) for name in shown} == pytest.approx(shown)
    gauges = {metric.name for metric in CATALOGUE if metric.kind is Kind.GAUGE and Role.LEARNER in metric.roles}
    assert gauges - {f"asyncrl_{name}" for name in NOT_OF_A_STEP} == shown.keys(), (
        "a new gauge needs a line in `expected`, or in NOT_OF_A_STEP if not every step sets it"
    )


@pytest.mark.asyncio
async def test_a_step_s_flops_are_recorded_and_their_share_of_what_the_devices_could_do() -> None:
    scene = Scene()
    scene.trainer.answers = [
        trained(model_flops=3 * 10**12, peak_flops_per_s=1e13),
        trained(model_flops=10**12),
        trained(peak_flops_per_s=1e13),
    ]
    await scene.run()
    assert [(step.model_flops, step.mfu_ratio) for step in scene.log.steps] == [
        (3 * 10**12, 0.3),  # in a second
        (10**12, None),
        (None, None),
    ]
    assert scene.log.steps[0].numbers(None)["speed/mfu_ratio"] == 0.3
    assert scene.metrics.registry.get_sample_value("asyncrl_learner_model_flops_total") == 4e12


@pytest.mark.asyncio
async def test_a_step_without_an_on_policy_token_has_no_parity() -> None:
    scene = Scene()
    scene.trainer.answers = [trained(), trained(on_policy_tokens=0, on_policy_parity_max_nats=0.0)]
    await scene.run()
    compared, none = scene.log.steps[:2]
    assert (compared.parity_nats, compared.diagnostics["parity_tokens"]) == (1e-6, 4)
    assert none.parity_nats is None
    assert none.diagnostics["parity_tokens"] == 0
    assert none.diagnostics.get("parity_ratio") is none.diagnostics["parity_mean_nats"] is None


@pytest.mark.asyncio
@pytest.mark.parametrize("compared", [0, 1, 7])
@pytest.mark.parametrize(("replicas", "probe"), [(1, 3e-5), (3, 0.25), (2, 0.0)])
async def test_the_largest_difference_of_the_probes_is_recorded_whether_tokens_were_compared_or_not(
    replicas: int, probe: float, compared: int
) -> None:
    scene = Scene()
    step = await an_ended_step()
    totals = msgspec.structs.replace(step.status.totals, replicas=replicas, parity_max_nats=probe)
    ended = dataclasses.replace(
        step,
        status=msgspec.structs.replace(step.status, totals=totals),
        report=dataclasses.replace(step.report, on_policy_tokens=compared, on_policy_parity_max_nats=1e-6),
    )
    record = StepRecorder(metrics=scene.metrics, elapsed_s=lambda: 1.0, state_seconds=dict).record(ended)
    assert (record.diagnostics["parity_probe_nats"], record.diagnostics["parity_tokens"]) == (probe, compared)
    assert record.parity_nats == (1e-6 if compared else None)


@pytest.mark.asyncio
async def test_the_share_of_cached_prompt_tokens_is_recorded() -> None:
    step = await an_ended_step()
    totals = msgspec.structs.replace(step.status.totals, prompt_tokens=64, cached_prompt_tokens=40)
    recorder = StepRecorder(metrics=Scene().metrics, elapsed_s=lambda: 1.0, state_seconds=dict)
    record = recorder.record(dataclasses.replace(step, status=msgspec.structs.replace(step.status, totals=totals)))
    assert record.diagnostics["cached_prompt_ratio"] == 40 / 64


@pytest.mark.asyncio
async def test_a_record_has_the_device_time_of_all_pools_since_the_run_began() -> None:
    step, metrics = await an_ended_step(), LearnerMetrics()
    generators = DeviceTime(pool=Pool.GENERATORS, device=Device.GPU, waiting_s=1.0, working_s=8.0)
    before = DeviceTime(pool=Pool.LEARNER, device=Device.PROCESS, starting_s=2.0, waiting_s=3.0, working_s=4.0)
    totals = GeneratorTotals(device_time=(generators,))
    step = dataclasses.replace(step, status=msgspec.structs.replace(step.status, generators=totals))
    states = {"starting": 1.0, "waiting_for_groups": 0.5, "optimizer": 2.0}
    recorder = StepRecorder(
        metrics=metrics,
        elapsed_s=lambda: 1.0,
        state_seconds=lambda: states,
        ranks={Pool.LEARNER: Devices.of(gpus=0.0, processes=2)},
        earlier=(before,),
    )
    own = DeviceTime(pool=Pool.LEARNER, device=Device.PROCESS, starting_s=4.0, waiting_s=4.0, working_s=8.0)
    assert recorder.record(step).device_time == (own, generators)
    read = metrics.registry.get_sample_value
    labels = {"pool": "learner", "device": "process", "part": "waiting"}
    assert read("asyncrl_device_seconds_total", labels) == 4.0
    assert read("asyncrl_device_seconds_total", labels | {"pool": "generators", "device": "gpu"}) == 1.0
    recorder.earlier = None
    assert recorder.record(step).device_time == (), "sums without the earlier time would be wrong"


@pytest.mark.asyncio
async def test_a_resumed_learner_adds_its_seconds_to_the_last_record_but_not_those_of_generators() -> None:
    step = await an_ended_step()
    totals = GeneratorTotals(samples=50, weight_updates=8, state_seconds={"generating": 60.0, "idle": 1.0})
    step = dataclasses.replace(step, status=msgspec.structs.replace(step.status, generators=totals))
    before = make_step(
        0,
        generated_samples=40,
        weight_updates=6,
        generator_state_s={"generating": 45.0},
        learner_state_s={"starting": 3.0, "optimizer": 4.0},
    )
    states = {"starting": 1.0, "other": 2.0}
    recorder = StepRecorder(
        metrics=LearnerMetrics(), elapsed_s=lambda: 1.0, state_seconds=lambda: states, before=before
    )
    record = recorder.record(step)
    assert record.learner_state_s == {"starting": 4.0, "optimizer": 4.0, "other": 2.0}
    assert (record.generated_samples, record.weight_updates) == (50, 8)
    assert record.generator_state_s == {"generating": 60.0, "idle": 1.0}


@pytest.mark.asyncio
async def test_samples_are_those_of_whole_groups_with_step_and_staleness() -> None:
    scene = Scene(learner={"groups_logged": 1})
    await scene.run()
    for step, logged in scene.log.samples.items():
        group = int(scene.trainer.asked[step][1][0].split(".")[0])
        assert [(sample.step, sample.group, sample.completion, sample.reward) for sample in logged] == [
            (step, group, "10", 0.0),
            (step, group, "10 11", 1.0),
        ]
        assert logged[1].version_spans[0] == (step - logged[1].staleness_versions, 2)
        assert logged[1].generation_logprobs is None, "log-probs only where they are asked for"
        assert logged[1].trained_spans == ((True, 2),)


@pytest.mark.asyncio
async def test_samples_have_the_log_probs_of_their_completions_when_they_are_asked_for() -> None:
    scene = Scene(learner={"groups_logged": 2, "logprobs_logged": True})
    await scene.run()
    logged = scene.log.samples[0]
    assert len(logged) == 4
    assert {sample.rendered_prompt for sample in logged} == {"[1 2 3]"}, "as the model got it, special tokens included"
    for sample in logged:
        assert sample.generation_logprobs is not None
        assert len(sample.generation_logprobs) == len(sample.completion.split())


@pytest.mark.asyncio
async def test_a_tracker_gets_groups_of_names_and_speeds_since_the_step_before() -> None:
    scene = Scene()
    await scene.run()
    first, second = scene.log.steps[:2]
    alone, after = first.numbers(None), second.numbers(first)
    assert {name.partition("/")[0] for name in alone} <= {
        *("reward", "length", "train", "staleness", "speed", "diagnostics", "critic", "witness")
    }
    assert not [name for name in alone if name.startswith(("time/", "speed/trained"))], "nothing to subtract from"
    span_s = second.wall_s - first.wall_s
    assert after["speed/trained_tokens_per_s"] == pytest.approx(second.trained_tokens / span_s)
    spent = [value for name, value in after.items() if name.startswith("time/learner_")]
    assert sum(value or 0.0 for value in spent) == pytest.approx(
        sum(second.learner_state_s.values()) - sum(first.learner_state_s.values())
    )


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_a_skipped_step_is_recorded_without_anything_trained() -> None:
    scene = Scene()
    scene.trainer.answers = [trained(), skipped()]
    await scene.run()
    record = scene.log.steps[1]
    assert (record.trained, record.step, record.version_after) == (False, 1, 1)
    assert (record.trained_samples, record.trained_tokens) == (0, 0)
    assert (record.group_staleness, record.token_staleness) == ({}, {})
    assert (record.loss, record.grad_norm) == (0.25, None), "finite measurements stay, the others are null"
    assert record.ledger_groups["skipped"] == 2
    assert record.published_version == 1
    assert record.duration_s == 1.0
    assert scene.log.steps[2].mid_sequence_updates == 4, "a skipped step's updates trained nothing"
    read = scene.metrics.registry.get_sample_value
    assert read("asyncrl_learner_steps_total", {"outcome": "skipped"}) == 1
    assert read("asyncrl_learner_step_duration_seconds_sum") == 4.0
    assert read("asyncrl_learner_tokens_total") == 18


@pytest.mark.asyncio
async def test_few_functions_are_between_the_end_of_a_step_and_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    found: list[list[str]] = []
    append = RecordFile.append

    def noted(file: RecordFile, record: bytes) -> None:
        found.append([*functions_of_asyncrl(), RecordFile.append.__qualname__])
        append(file, record)

    monkeypatch.setattr(RecordFile, "append", noted)
    with RunDir.create(config) as run:
        machine = Machine(processor="", ranks=1, threads=1, packages={})
        audit = run.begin_audit(Began(lineage=run.lineage, settings={}, machine=machine))
        await Scene(sinks=[run], append_audit=audit).run()
    of_steps = [functions for functions in found if functions[0] == "StepEnd._end"]
    assert len(of_steps) == 6, "three steps have a line in steps.jsonl and a record for the audit"
    assert max(map(len, of_steps)) <= 3, of_steps


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_skipped_steps_are_counted_by_the_report_and_are_no_steps_of_the_summary(tmp_path: Path) -> None:
    run = RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}}))
    scene = Scene(sinks=[run])
    scene.trainer.answers = [skipped(), trained(), skipped(), trained(), trained()]
    totals = await scene.run()
    records = read_run(run.path)
    assert [(record.step, record.trained) for record in records.steps] == [
        (0, False), (0, True), (1, False), (1, True), (2, True),
    ]  # fmt: skip
    summary = build_summary(records.steps, records.evals, totals, staleness_limit=1)
    assert (summary.steps, summary.trained_tokens) == (3, 18)
    assert summary.groups_discarded == 4, "the groups of two skipped steps"
    assert summary.time_to_first_step_s == 2.0, "the first step that was trained"
    assert summary.samples_per_s == pytest.approx(2 * 4 / 3.0), "a skipped step is time lost"
    assert summary.max_token_staleness == 1
    run.write_summary(summary)
    page = write_report(run.path).read_text()
    run.close(state="finished", reason="done")
    words = re.sub(r"<[^>]*>", " ", page).split()
    totals_in_words = " ".join(words[words.index("Totals") :])
    assert "steps skipped 2" in totals_in_words
    assert "samples trained 12" in totals_in_words


@pytest.mark.asyncio
@pytest.mark.fault("F21")
async def test_the_live_view_counts_versions_and_not_records() -> None:
    scene = Scene(learner={"total_steps": 4})
    scene.trainer.answers = [skipped(), trained(), trained(), skipped(), skipped()]
    await scene.run()

    def view_of(steps: Sequence[StepRecord]) -> RunView:
        return run_view(steps, recent=True, setting=setting_of(scene.config, cores=None))

    def view_after(records: int) -> tuple[int, int | None]:
        view = view_of(scene.log.steps[:records])
        return view.step, view.oldest_token_versions

    assert view_after(1) == (0, None), "nothing was trained yet"
    assert view_after(2) == (1, 1)
    assert view_after(4) == (2, 1), "the age of what was trained last"
    late = view_of(scene.log.steps[:4])
    assert late.eta_s == pytest.approx(2 * 3.0 / 2), "two versions took three seconds"
    assert late.samples_per_s == pytest.approx(8 / 3.0)
    last = scene.log.steps[3]
    starting = last.learner_state_s | {"starting": last.learner_state_s.get("starting", 0.0) + 40.0}
    restarted = msgspec.structs.replace(last, wall_s=last.wall_s + 40.0, learner_state_s=starting)
    after = view_of([*scene.log.steps[:3], restarted])
    assert (after.eta_s, after.samples_per_s) == (late.eta_s, late.samples_per_s), "a restart is not the run's speed"


@pytest.mark.asyncio
async def test_the_live_view_of_many_steps_has_some_of_their_rewards_and_the_newest_one() -> None:
    scene = Scene(learner={"total_steps": 1})
    await scene.run()
    [record] = scene.log.steps
    steps = [
        msgspec.structs.replace(record, step=step, wall_s=float(step), reward_mean=float(step))
        for step in range(10 * REWARDS)
    ]
    view = run_view(steps, recent=True)
    assert len(view.rewards) <= REWARDS
    assert (view.rewards[-1], view.step) == (10 * REWARDS - 1, 10 * REWARDS)
    assert view.rewards == sorted(view.rewards)


@pytest.mark.asyncio
async def test_what_was_not_measured_reads_as_such_and_not_as_healthy() -> None:
    scene = Scene()
    scene.trainer.answers = [trained(diagnostics={"silent_ratio": 0.25})]
    await scene.run()
    read = scene.metrics.registry.get_sample_value
    assert "kernel_ess_ratio" not in scene.log.steps[0].diagnostics
    assert scene.log.steps[0].diagnostics["silent_ratio"] == 0.25
    assert scene.log.steps[0].diagnostics["all_right_ratio"] == 0.0, "rewards of a group are 0 and 1"
    assert scene.log.steps[0].diagnostics["masked_samples_ratio"] == 0.0, "a number without a key of its own"
    for name in ("kernel_ess_ratio", "silent_ratio", "clipped_ratio", "clipped_positive_ratio", "nonfinite_tokens"):
        value = read(f"asyncrl_learner_{name}")
        assert value is not None
        assert math.isnan(value), name


@pytest.mark.asyncio
@pytest.mark.fault("F19")
async def test_rewards_that_failed_are_in_no_mean_of_a_step_and_their_share_is_recorded() -> None:
    scene = Scene(group={"rewards": (None, 0.75)}, learner={"groups_logged": 1})
    await scene.run()
    step = scene.log.steps[0]
    assert (step.reward_mean, step.reward_std, step.reward_min, step.reward_max) == (0.75, 0.0, 0.75, 0.75)
    assert step.diagnostics["failed_samples_ratio"] == 0.5
    assert scene.metrics.registry.get_sample_value("asyncrl_learner_failed_samples_ratio") == 0.5
    assert [sample.reward for sample in scene.log.samples[0]] == [None, 0.75]


@pytest.mark.asyncio
async def test_groups_that_failed_are_told_apart_by_reason_and_those_that_expired_are_among_them() -> None:
    scene = Scene()
    tickets = await scene.tickets()
    for ticket in tickets[:3]:
        failure = Failure(failure_class=FailureClass.DATA, reason="reward_raised", message="m")
        await scene.coordinator.fail([FailedTicket(key=ticket.key, incarnation=1, failure=failure)])
    for replica in ["a", *(f"b{number}" for number in range(1, scene.config.buffer.max_attempts))]:
        await scene.tickets(replica)
        await scene.coordinator.leave(replica)
    status = await scene.status()
    assert status.account.fates[Fate.FAILED].groups == 3 + 4
    totals = scene.loop.step_end.recorder.run_totals(status, rows_outstanding=0)
    assert totals.groups_failed == {"reward_raised": 3, "expired": 4}
    assert totals.groups_discarded == 7


def test_seconds_by_state_are_means_over_the_replicas_that_have_reported() -> None:
    def report(**seconds: float) -> ReplicaReport:
        return ReplicaReport(
            actor="a", deployment="d", metrics_address="", state_seconds=seconds, slots=1, running_groups=0, samples=0,
            completion_tokens=0, weight_updates=0, parity_max_nats=0.0,
        )  # fmt: skip

    assert mean_states([report(generating=3.0), report(generating=1.0, idle=4.0)]) == {"generating": 2.0, "idle": 2.0}
    assert mean_states([]) == {}
