"""The report of a step: sums are added before divisions, and a step is skipped only if nothing was applied. Also runs
the doctests of the policy."""

import dataclasses
import doctest
from collections.abc import Mapping, Sequence

import pytest
import torch

from asyncrl.algorithms import advantages, presets
from asyncrl.algorithms.diagnostics import MetricSums
from asyncrl.config.schema import OptimizerSection
from asyncrl.ranks import actor, out_of_memory, schedule
from asyncrl.ranks.report import (
    RankRecord,
    StepReport,
    UpdateOutcome,
    UpdatePlan,
    global_plan,
    step_report,
    train_result,
)
from asyncrl.ranks.schedule import learning_rate
from asyncrl.ranks.worker import gpu_memory_bytes


@pytest.mark.parametrize("module", [advantages, presets, schedule, actor, out_of_memory])
def test_examples_in_docstrings_are_true(module: object) -> None:
    results = doctest.testmod(module)  # type: ignore[arg-type]
    assert results.attempted > 0
    assert results.failed == 0


def outcome(*, loss: float = 0.0, grad_norm: float = 1.0, finite: bool = True, tokens: int = 0) -> UpdateOutcome:
    of_tokens = {"importance_weight_mean": 2.0, "importance_weight_squared": 4.0, "entropy_nats": 0.5} if tokens else {}
    sums = MetricSums({name: (each * tokens, float(tokens)) for name, each in of_tokens.items()})
    return UpdateOutcome(
        loss=loss,
        grad_norm=grad_norm,
        finite=finite,
        sums=sums + MetricSums({"silent_ratio": (1.0, 4.0)}),
        micro_batch_metrics=({"share": 2.0, "own": 5.0, "ratio_max": 7.0}, {"share": 1.0}),
    )


def plan(tokens: int, samples: int, micro_batches: int) -> UpdatePlan:
    """Returns a plan whose masks are one half, so that sums of masks differ from counts."""
    return UpdatePlan(
        tokens=tokens, samples=samples, valid_toks=tokens / 2, valid_seqs=samples / 2, micro_batches=micro_batches
    )


def record(
    outcomes: Sequence[UpdateOutcome], *, plans: Sequence[UpdatePlan] = (), staleness: Mapping[int, int] = {}
) -> RankRecord:
    return RankRecord(
        plans=tuple(plans),
        outcomes=tuple(outcomes),
        staleness=staleness,
        learning_rate=0.1,
        weight_decay=0.2,
        seconds={"optimizer": 1.0},
        nonfinite_tokens=sum(staleness.values()),
        real_tokens=3 * len(outcomes),
        passed_tokens=4 * len(outcomes),
    )


def report(ranks: list[list[UpdateOutcome]], plans: list[UpdatePlan]) -> StepReport:
    return step_report(
        [record(outcomes, plans=plans, staleness={0: 2, 3: rank + 1}) for rank, outcomes in enumerate(ranks)],
    )


def test_losses_add_over_ranks_and_average_over_updates() -> None:
    plans = [plan(3, 1, 1), plan(7, 4, 2)]
    found = report(
        [[outcome(loss=1.0), outcome(loss=2.0, grad_norm=3.0)], [outcome(loss=4.0), outcome(loss=1.0, grad_norm=3.0)]],
        plans,
    )
    assert (found.loss, found.grad_norm, found.updates_applied) == (4.0, 2.0, 2)
    assert (found.trained_tokens, found.trained_samples) == (10, 5)
    # 3 for `share` and 5 for `own` on each of two ranks, averaged over two updates; the loss itself has divided them
    assert found.loss_metrics == {"share": 6.0, "own": 10.0, "ratio_max": 7.0}
    assert found.token_staleness == (4, 0, 0, 3)
    assert found.diagnostics == {
        "silent_ratio": 0.25,
        "nonfinite_tokens": 7.0,
        "packing_efficiency_ratio": 0.75,
    }, "without tokens, there are no measures of log-ratios"


def test_flops_of_the_ranks_add_up_unless_one_is_not_known() -> None:
    def found(*ranks: tuple[int | None, float | None]) -> tuple[int | None, float | None]:
        records = [dataclasses.replace(record([]), model_flops=own, peak_flops_per_s=peak) for own, peak in ranks]
        report = step_report(records)
        return report.model_flops, report.peak_flops_per_s

    assert found((7, 2e12), (0, 3e12)) == (7, 5e12), "the device of a rank without rows counts"
    assert found((7, None), (2, 3e12)) == (9, None)
    assert found((None, 2e12), (2, 3e12)) == (None, 5e12)


def test_the_memory_is_that_of_the_fullest_gpu_and_is_left_out_on_cpus() -> None:
    def found(*ranks: int | None) -> float | None:
        records = [dataclasses.replace(record([]), gpu_memory_bytes=nbytes) for nbytes in ranks]
        return step_report(records).diagnostics.get("gpu_memory_allocated_max_gib")

    assert found(3 * 2**30, 5 * 2**29) == 3.0
    assert found(None, None) is None


def test_a_rank_measures_the_memory_since_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's peak counts from the start of the process until it is reset."""
    peaks = [7]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[-1])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.append(2))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [gpu_memory_bytes(device) for device in (gpu, gpu, cpu)] == [7, 2, None]


def test_a_result_has_losses_of_all_ranks_by_update_and_every_micro_batchs_metrics() -> None:
    plans = [
        plan(3, 1, 2),
        plan(0, 1, 1),  # has no trained token, so there is no outcome
        plan(7, 4, 2),
    ]
    ranks = [
        record([outcome(loss=1.0), outcome(loss=2.0, grad_norm=3.0)], plans=plans),
        record([outcome(loss=4.0), outcome(loss=1.0, grad_norm=3.0)], plans=plans),
    ]
    found = train_result(ranks)
    assert (found["loss"].tolist(), found["grad_norm"].tolist()) == ([5.0, 3.0], [1.0, 3.0])
    assert found["all_mb_metrics"] == {
        "share": [1.0, 0.5] * 4,
        "own": [2.5] * 4,
        "ratio_max": [7.0] * 4,
        "lr": [0.1] * 8,
        "wd": [0.2] * 8,
        "global_valid_seqs": [0.5, 0.5, 2.0, 2.0] * 2,
        "global_valid_toks": [1.5, 1.5, 3.5, 3.5] * 2,
    }
    assert sum(found["all_mb_metrics"]["own"]) == step_report(ranks).loss_metrics["own"]


def test_a_loss_without_metrics_still_has_those_of_its_update() -> None:
    plain = dataclasses.replace(outcome(), micro_batch_metrics=())
    found = train_result([record([plain], plans=[plan(3, 2, 1)])])["all_mb_metrics"]
    assert found == {"lr": [0.1], "wd": [0.2], "global_valid_seqs": [1.0], "global_valid_toks": [1.5]}


def test_means_weigh_ranks_by_their_tokens() -> None:
    found = report([[outcome(tokens=1)], [outcome(tokens=3)]], [plan(4, 1, 1)])
    assert (found.entropy_nats, found.importance_weight_mean, found.ess) == (0.5, 2.0, 1.0)


@pytest.mark.parametrize(
    ("finite", "skipped", "applied"),
    [([True], False, 1), ([False], True, 0), ([False, True], False, 1), ([], False, 0)],
)
@pytest.mark.fault("F21")
def test_a_step_is_skipped_when_no_update_was_applied(finite: list[bool], skipped: bool, applied: int) -> None:
    found = report([[outcome(finite=each) for each in finite]], [])
    assert (found.skipped, found.updates_applied, found.updates_nonfinite) == (skipped, applied, finite.count(False))


def test_the_rank_with_the_most_micro_batches_sets_their_number() -> None:
    plans = [plan(3, 1, 1), plan(7, 4, 2)]
    assert global_plan(plans) == plan(10, 5, 2)


@pytest.mark.parametrize("schedule_name", ["constant", "linear", "cosine"])
def test_the_schedule_starts_at_the_peak_and_ends_at_its_fraction(schedule_name: str) -> None:
    section = OptimizerSection.model_validate(
        {"learning_rate": 2.0, "schedule": schedule_name, "final_fraction": 0.25, "warmup_steps": 4}
    )
    rates = [learning_rate(section, step=step, total_steps=20) for step in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0
    assert rates[-1] == pytest.approx(2.0 if schedule_name == "constant" else 0.5)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize("schedule_name", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_has_a_rate(schedule_name: str) -> None:
    section = OptimizerSection.model_validate({"learning_rate": 2.0, "schedule": schedule_name})
    assert learning_rate(section, step=0, total_steps=1) == 2.0


def test_digests_of_the_ranks_add_up_modulo_two_to_the_64() -> None:
    parts = [(2**64 - 1, 5, 7), (3, 2**64 - 2, 2**64 - 1)]
    ranks = [
        dataclasses.replace(
            record([]),
            weights_before=before,
            weights_after=after,
            weights_before_by_kind={"xxh3": other},
            digest_kind="multilinear",
        )
        for before, after, other in parts
    ]
    report = step_report(ranks)
    assert (report.weights_before, report.weights_after) == (2, 3)
    assert (report.weights_before_by_kind, report.digest_kind) == ({"xxh3": 6}, "multilinear")
