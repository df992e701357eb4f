"""Every declared metric has a recording method that sets it, and no recording method raises."""

import inspect
import logging
import math
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client import generate_latest

import asyncrl
from asyncrl.buffer.fleet import Cause
from asyncrl.buffer.ledger import Account, Amount, Event, Fate
from asyncrl.buffer.records import Counts, GroupMeta
from asyncrl.buffer.staleness import limits_of
from asyncrl.common.concern import Concern
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.config.load import flat_config
from asyncrl.config.schema import Config
from asyncrl.metrics.catalogue import CATALOGUE, DEADLINES, MAX_OPEN_VALUES
from asyncrl.metrics.numbers import NUMBERS
from asyncrl.metrics.recorders import BufferMetrics, GeneratorMetrics, LearnerMetrics, ProcessMetrics

CONFIG = Config.model_validate(
    {
        "run": {"name": "tried"},
        "model": {"path": "models/tiny"},
        "algorithm": {"loss": "tis"},
        "metrics": {"objective_steps_per_hour": 60, "objective_training_ratio": 0.8},
    }
)
GROUP = GroupMeta(
    group=0,
    attempt=1,
    incarnation=1,
    replica="generator-0",
    row_bytes=400,
    prompt_tokens=6,
    completion_tokens=(4, 5, 9),
    rewards=(0.0, 1.0, 1.0),
    truncated=(False, False, False),
    oldest=3,
    newest=3,
)
COUNTS = Counts(reserved=16, ready=8, leased=16, waiting=0, booked_bytes=4096, oldest_group_age_s=1.5, lease_wait=None)
ACCOUNT = Account(
    issued=Amount(groups=45),
    fates={Fate.RESERVED: Amount(groups=40), Fate.TRAINED: Amount(groups=3, tokens=900), Fate.FAILED: Amount(groups=1)},
    events={Event.TICKET_EXPIRED: 2, Event.COMMIT_DUPLICATE: 1, Event.TOKENS_CONTINUED: 30, Event.TOKENS_DROPPED: 4},
)


def learner() -> LearnerMetrics:
    metrics = LearnerMetrics()
    metrics.run_info(CONFIG)
    metrics.heartbeat()
    metrics.states_from(lambda: {"forward_backward": 2.5})
    metrics.limits(CONFIG)
    metrics.incarnation(3, nonce="ab12", restarts=2, resumed_unix_s=1.7e9)
    metrics.step(outcome="trained", duration_s=0.3, tokens=640, model_flops=6_000_000, peak_flops_per_s=989e12)
    metrics.rewards(components={"right": 0.5}, parts={"sums": 0.25})
    metrics.numbers({number.name: 0.9 for number in NUMBERS})
    metrics.staleness(groups={0: 10, 2: 6}, tokens={0: 500, 1: 100, 2: 40}, in_flight={1: 6}, in_buffer={0: 12, 1: 4})
    metrics.rows_outstanding(3)
    metrics.heldout("heldout", 0.41)
    metrics.health([Concern.CUT])
    metrics.effective_training_time(0.9)
    metrics.device_time([DeviceTime(pool=Pool.LEARNER, device=Device.GPU, starting_s=1.0, working_s=4.0)])
    metrics.checkpoint_saved(step=10, duration_s=4.0)
    metrics.checkpoint_staged(0.5)
    metrics.checkpoint_missed(outcome="postponed")
    metrics.mirrored()
    metrics.mirror_failed()
    metrics.checkpoint_missed(outcome="failed")
    metrics.parity(3e-6, ratio=0.03)
    metrics.versions(learner=12, published=11)
    metrics.weight_delivery(outcome="failed")
    metrics.published(bytes=1_200_000, whole_bytes=2_400_000, phase_seconds={"snapshot": 0.02, "deliver": 0.1})
    return metrics


def generator() -> GeneratorMetrics:
    metrics = GeneratorMetrics(environment="reasoning_gym")
    metrics.run_info(CONFIG)
    metrics.heartbeat()
    metrics.states_from(lambda: {"generating": 7.0, "idle": 1.0})
    metrics.inflight(5)
    metrics.policy_version(11)
    metrics.rollout(GROUP, duration_s=0.4, scoring_s=0.02)
    metrics.samples(8, outcome="accepted")
    metrics.rollout_failed(failure_class="data", reason="reward_raised")
    metrics.rewards((0.0, 1.0, 1.0))
    metrics.agents(
        turns=[2, 3],
        tool_calls=3,
        tool_seconds=[0.1],
        forks={"edited": 1},
        tokens={"sampled": 9, "environment": 20, "template": 4},
    )
    metrics.sessions([0.5, 2.5])
    metrics.reward_failed(reason="reward_timeout", samples=3)
    metrics.weight_update(outcome="applied", phase_seconds={"fetch": 0.01, "apply": 0.05})
    metrics.broadcast(outcome="received", bytes=1_200_000, duration_s=0.2)
    metrics.parity(7e-7, ratio=0.007)
    return metrics


def buffer() -> BufferMetrics:
    metrics = BufferMetrics()
    metrics.run_info(CONFIG)
    metrics.heartbeat()
    metrics.states_from(lambda: {"learner_waits": 3.0, "nobody_waits": 1.0})
    metrics.limits(limits_of(CONFIG))
    metrics.fill(COUNTS)
    metrics.replicas({"generating": 2, "silent": 1}, wanted=4)
    metrics.causes(quarantines={Cause.ENGINE_DIED: 2}, restarts={Cause.ENGINE_DIED: 1})
    metrics.account(ACCOUNT)
    metrics.reserve_waited(0.01)
    metrics.lease_waited(0.2)
    return metrics


RECORDED = {"learner": learner, "generator": generator, "buffer": buffer}


def value(metrics: ProcessMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


@pytest.mark.parametrize("role", RECORDED)
def test_every_metric_of_a_process_has_a_method_that_sets_it(role: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = RECORDED[role]()
    assert not caplog.records, "a method failed"
    nonzero = {
        family.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.value and not math.isnan(sample.value) and not sample.name.endswith("_created")
    }
    declared = {metric.name.removesuffix("_total") for metric in CATALOGUE if role in metric.roles}
    assert nonzero == declared


@pytest.mark.parametrize("kind", [LearnerMetrics, GeneratorMetrics, BufferMetrics])
def test_every_public_method_is_guarded(kind: type[ProcessMetrics]) -> None:
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            assert hasattr(method, "__wrapped__"), name


@pytest.mark.parametrize("role", RECORDED)
def test_the_run_is_described_alike_by_every_process(role: str) -> None:
    labels = {
        "run_name": "tried", "version": asyncrl.__version__, "model": "models/tiny", "environment": "reasoning_gym",
        "loss": "tis",
    }  # fmt: skip
    assert value(RECORDED[role](), "asyncrl_run_info", **labels) == 1


def test_values_arrive_under_their_names_and_labels() -> None:
    recorded = generator()
    assert value(recorded, "asyncrl_generator_tokens_total", kind="prompt") == 6
    assert value(recorded, "asyncrl_generator_tokens_total", kind="completion") == 18
    assert value(recorded, "asyncrl_completion_tokens_count", environment="reasoning_gym") == 3
    assert value(recorded, "asyncrl_generator_samples_total", outcome="accepted") == 8
    assert value(recorded, "asyncrl_generator_samples_total", outcome="failed") == 0, "present before the first one"
    assert value(recorded, "asyncrl_rollout_failures_total", **{"class": "data", "reason": "reward_raised"}) == 1
    assert value(buffer(), "asyncrl_buffer_groups", state="leased") == 16
    assert value(buffer(), "asyncrl_ledger_unaccounted_groups") == 1
    assert value(buffer(), "asyncrl_replicas", state="waiting") == 0
    assert value(learner(), "asyncrl_group_staleness_max_versions") == 2


def test_a_counted_histogram_is_what_one_by_one_would_give() -> None:
    recorded = learner()
    name = "asyncrl_token_staleness_versions"
    assert value(recorded, f"{name}_count") == 640
    assert value(recorded, f"{name}_sum") == 100 * 1 + 40 * 2
    assert value(recorded, f"{name}_bucket", le="0.0") == 500
    assert value(recorded, f"{name}_bucket", le="1.0") == 600
    assert value(recorded, f"{name}_bucket", le="+Inf") == 640
    recorded.staleness(groups={}, tokens={1000: 5}, in_flight={}, in_buffer={})
    assert value(recorded, f"{name}_bucket", le="64.0") == 640
    assert value(recorded, f"{name}_bucket", le="+Inf") == 645
    text = generate_latest(recorded.registry).decode()
    assert "# TYPE asyncrl_token_staleness_versions histogram" in text


def test_state_seconds_are_read_at_the_scrape_so_that_a_wait_shows_while_it_lasts() -> None:
    seconds = {"waiting_for_groups": 1.0}
    recorded = LearnerMetrics()
    recorded.states_from(lambda: seconds)
    name = "asyncrl_learner_state_seconds_total"
    assert value(recorded, name, state="waiting_for_groups") == 1.0
    seconds["waiting_for_groups"] = 61.0
    assert value(recorded, name, state="waiting_for_groups") == 61.0
    assert value(recorded, name, state="publish") == 0.0


def test_ages_are_read_at_the_scrape_from_the_clock_of_the_process() -> None:
    now_s = [100.0]
    recorded = LearnerMetrics(clock=lambda: now_s[0])
    recorded.heartbeat()
    recorded.mirrored()
    now_s[0] += 61.0
    recorded.mirrored()
    now_s[0] += 4.0
    assert value(recorded, "asyncrl_heartbeat_age_seconds") == 65.0
    assert value(recorded, "asyncrl_mirror_behind_seconds") == 4.0
    assert math.isnan(value(recorded, "asyncrl_checkpoint_age_seconds") or 0.0), "before the first checkpoint"


def test_a_scrape_survives_a_reader_that_raises_and_counters_never_fall() -> None:
    recorded = LearnerMetrics()
    recorded.states_from(lambda: {"publish": 4.0})
    assert value(recorded, "asyncrl_learner_state_seconds_total", state="publish") == 4.0
    recorded.states_from(lambda: {}["no such state"])
    assert value(recorded, "asyncrl_learner_state_seconds_total", state="publish") == 4.0


def test_every_timeout_of_the_configuration_is_shown_by_its_key() -> None:
    settings = flat_config(Config.model_validate({"critic": {}, "model": {"tiny": {}}}))
    # at the end of this wait a generator leaves, without an error, and only its own command has the value
    others = {"generator.wait_for_learner_s"}
    assert {key for key in settings if key.endswith("_s") and not key.endswith("_per_s")} - others == {*DEADLINES}
    metrics = LearnerMetrics()
    changed = {"generator": {"rollout_timeout_s": 77.0}, "run": {"shutdown_grace_s": 7}}
    metrics.limits(Config.model_validate(changed))
    shown = {key: value(metrics, "asyncrl_deadline_seconds", deadline=key) for key in DEADLINES}
    assert shown["generator.rollout_timeout_s"] == 77.0
    assert shown["run.shutdown_grace_s"] == 7.0
    assert shown["eval.timeout_s"] == settings["eval.timeout_s"]
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in shown.values())


def test_the_alerts_on_objectives_get_the_objectives_and_no_number_without_them() -> None:
    metrics = LearnerMetrics()
    metrics.limits(Config())
    assert math.isnan(value(metrics, "asyncrl_objective_steps_per_hour") or 0.0)
    assert math.isnan(value(metrics, "asyncrl_objective_training_ratio") or 0.0)
    assert value(metrics, "asyncrl_learner_steps_total", outcome="trained") == 0.0, "no step counts as no step"
    objectives = {"objective_steps_per_hour": 60, "objective_training_ratio": 0.8}
    metrics.limits(Config.model_validate({"metrics": objectives}))
    assert value(metrics, "asyncrl_objective_steps_per_hour") == 60.0
    assert value(metrics, "asyncrl_objective_training_ratio") == 0.8


def test_totals_are_raised_to_and_a_learner_that_goes_back_lowers_none() -> None:
    recorded = BufferMetrics()
    for total in (3, 3, 7, 2, 6):
        recorded.account(msgspec.structs.replace(ACCOUNT, events={Event.RETRY: total}))
    assert value(recorded, "asyncrl_buffer_events_total", event="retry") == 7 + 4


@pytest.mark.parametrize(
    "record",
    [
        lambda m: m.samples(1, outcome="no such outcome"),
        lambda m: m.samples(float("nan"), outcome="accepted"),
        lambda m: m.samples(-1, outcome="accepted"),
        lambda m: m.rewards((float("inf"),)),
        lambda m: m.rewards(None),
        lambda m: m.policy_version("not a number"),
        lambda m: m.parity(),
    ],
)
def test_recording_nonsense_never_raises_logs_once_and_leaves_the_metric_usable(
    record: Callable[[GeneratorMetrics], None], caplog: pytest.LogCaptureFixture
) -> None:
    metrics = GeneratorMetrics(environment="math")
    with caplog.at_level(logging.WARNING):
        record(metrics)
        record(metrics)
    assert len(caplog.records) == 1
    metrics.samples(2, outcome="accepted")
    assert value(metrics, "asyncrl_generator_samples_total", outcome="accepted") == 2


def test_the_gauge_of_a_check_keeps_the_value_of_the_last_witnessed_step() -> None:
    metrics = LearnerMetrics()
    metrics.numbers({"witness_rows_ratio": 0.5, "entropy_nats": 1.0})
    metrics.numbers({})
    assert value(metrics, "asyncrl_learner_witness_rows_ratio") == 0.5
    assert math.isnan(value(metrics, "asyncrl_learner_entropy_nats"))


def test_a_nan_gauge_is_shown_as_such() -> None:
    metrics = LearnerMetrics()
    metrics.parity(float("nan"), ratio=0.0)
    assert b"asyncrl_weight_parity_nats NaN" in generate_latest(metrics.registry)


def test_flops_add_up_and_what_is_not_known_of_them_is_no_number() -> None:
    metrics = LearnerMetrics()

    def step(*, model_flops: int | None, peak_flops_per_s: float | None) -> None:
        metrics.step(
            outcome="trained", duration_s=0.3, tokens=9, model_flops=model_flops, peak_flops_per_s=peak_flops_per_s
        )

    step(model_flops=4, peak_flops_per_s=1e12)
    step(model_flops=2, peak_flops_per_s=None)
    assert value(metrics, "asyncrl_learner_model_flops_total") == 6
    assert math.isnan(value(metrics, "asyncrl_learner_peak_flops_per_second") or 0.0)
    step(model_flops=None, peak_flops_per_s=1e12)
    assert value(metrics, "asyncrl_learner_model_flops_total") == 6
    assert value(metrics, "asyncrl_learner_peak_flops_per_second") == 1e12


def test_an_open_label_is_capped() -> None:
    metrics = GeneratorMetrics(environment="math")
    for number in range(3 * MAX_OPEN_VALUES):
        metrics.rollout_failed(failure_class="infra", reason=f"reason {number}")
    metrics.rollout_failed(failure_class="infra", reason="reason 0")
    name, infra = "asyncrl_rollout_failures_total", {"class": "infra"}
    assert value(metrics, name, reason="reason 0", **infra) == 2
    assert value(metrics, name, reason="other", **infra) == 2 * MAX_OPEN_VALUES


def test_two_processes_worth_of_metrics_live_side_by_side() -> None:
    first, second = LearnerMetrics(), LearnerMetrics()
    first.parity(1.0, ratio=2.0)
    assert math.isnan(value(second, "asyncrl_weight_parity_nats") or 0.0)


@pytest.mark.parametrize("kind", [LearnerMetrics, GeneratorMetrics, BufferMetrics])
def test_what_was_never_measured_is_nan_for_gauges_and_0_for_counters(kind: type[ProcessMetrics]) -> None:
    metrics = kind(environment="math") if kind is GeneratorMetrics else kind()
    for family in metrics.registry.collect():
        for sample in family.samples:
            if family.type == "gauge" and not sample.name.endswith("_created"):
                assert math.isnan(sample.value), f"{sample} would read as measured, and an alert might hold for it"
            elif family.type == "counter" and not sample.name.endswith("_created"):
                assert sample.value == 0, sample
