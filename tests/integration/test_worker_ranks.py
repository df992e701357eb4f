"""A step and its weights are the same for one rank and for two, and equal to those of a simple loop without FSDP
(spawned processes, gloo)."""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_scenarios import (
    CUTS,
    OF_THE_STEP_CAP,
    OWN_OPTIMIZER,
    PROBE,
    SOME_CUTS,
    UPDATE_ROWS,
    matrix_batch,
    run_rank,
)
from rounding import GRADIENT, LOGPROB_NATS, LOSS, assert_reordered, assert_within, weight_spread
from tiny_groups import STEP, TEMPERATURE, make_batch, make_model, with_tops
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.algorithms.diagnostics import AVERAGED_METRICS
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.policy.flops import model_cost
from asyncrl.ranks.report import step_report, train_result

pytestmark = pytest.mark.integration

FOUR = pytest.param(4, marks=pytest.mark.campaign)

METRIC = {"rel": 4 * LOGPROB_NATS, "abs": LOGPROB_NATS}
"""Bounds for a metric. A metric is a mean of log-probs, of their exponentials or of squares of these, or a ratio of two
such means. So its relative error is at most four times the error of the log-probs."""


class Results(dict[tuple[int, int], dict[str, Any]]):
    """The results by (world size, rank). The ranks of a world run when a test first asks for their results: every
    scenario on one and two ranks, and those of the interface on four ranks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, place: tuple[int, int]) -> dict[str, Any]:
        world, _ = place
        torch.multiprocessing.start_processes(
            run_rank, args=(world, self._folder), nprocs=world, start_method="forkserver"
        )
        for rank in range(world):
            self[world, rank] = pickle.loads((self._folder / f"results-{world}-{rank}.pkl").read_bytes())
        return self[place]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return Results(folder)


def _plain_loss(model: Any) -> tuple[torch.Tensor, int]:
    """Returns the default objective of the batch and the number of its tokens, by a simple loop over unpadded samples
    without batches."""
    losses, tokens = [], 0
    for row in make_batch().make_microbatch_iterator(1):
        length, sampled = int(row["input_lengths"]), row["token_mask"][0] > 0
        output = int(sampled.sum())
        if row["sample_mask"] == 0 or output == 0:
            continue
        ids, advantage = row["input_ids"][0, :length], float(row["advantages"])
        logits = model(input_ids=ids[None]).logits[0].double() / TEMPERATURE
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]][-output:]
        behaviours = row["generation_logprobs"][0, sampled].tolist()
        for logprob, behaviour in zip(logprobs, behaviours, strict=True):
            rho = math.exp(float(logprob.detach()) - behaviour)
            # With one update in a step, u = 1 and the gradient of the surrogate is that of REINFORCE.
            surrogate = -advantage * (logprob - logprob.detach()).exp()
            losses.append((rho if 0.5 <= rho <= 5 else 0.0) * surrogate)
            tokens += 1
    return torch.stack(losses).sum() / tokens, tokens


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[float, float, int]:
    """(loss, gradient norm, tokens) of the default objective, by a simple loop without FSDP."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    loss, tokens = _plain_loss(model)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return float(loss.detach()), float(norm), tokens


@pytest.fixture(scope="module")
def plainly_centered(folder: Path) -> tuple[float, float]:
    """(loss, gradient norm) of the preset `score_centering`, by a simple loop over tokens and their most likely tokens,
    without batches."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    losses = []
    for row in with_tops(make_batch()).make_microbatch_iterator(1):
        if row["sample_mask"] == 0:
            continue
        ids = row["input_ids"][0, : int(row["input_lengths"])]
        log_p_SV = (model(input_ids=ids[None]).logits[0].double() / TEMPERATURE).log_softmax(-1)
        for place in (row["token_mask"][0] > 0).nonzero().flatten().tolist():
            log_p_V, own = log_p_SV[place - 1], int(ids[place])
            listed, log_q = row["top_ids"][0, place].tolist(), row["top_logprobs"][0, place].double()
            p, q = log_p_V[listed].exp().detach(), log_q.exp()
            rho = (1 - float(q.sum())) / (1 - float(p.sum()))
            alpha = rho * min(1 / rho, 2.0)
            expected = ((q * (p / q).clamp(max=2.0) - alpha * p) * log_p_V[listed]).sum()
            weight = min(math.exp(float(log_p_V[own].detach()) - float(row["generation_logprobs"][0, place])), 2.0)
            losses.append(-float(row["advantages"]) * (weight * log_p_V[own] - expected))
    loss = torch.stack(losses).sum() / len(losses)
    loss.backward()
    return float(loss.detach()), float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize("world_size", [1, 2])
def test_centering_gives_the_plain_loops_loss_and_gradient_on_one_and_two_ranks(
    results: Any, plainly_centered: tuple[float, float], world_size: int
) -> None:
    report = results[world_size, 0]["centered"]["report"]
    loss, grad_norm = plainly_centered
    assert report.loss == pytest.approx(loss, abs=LOSS)
    assert report.grad_norm == pytest.approx(grad_norm, rel=GRADIENT)


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_centering_does_not_depend_on_how_rows_are_cut(results: Any, world_size: int, cut: str) -> None:
    found = train_result([results[world_size, rank]["interface"][cut]["centered"] for rank in range(world_size)])
    wanted = train_result([results[1, 0]["interface"]["padded 1"]["centered"]])
    assert_within(found["loss"], wanted["loss"], bound=LOSS)


@pytest.mark.parametrize("scenario", ["micro_batch_1", "micro_batch_3", "micro_batch_all", "dynamic", "packed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_any_split_into_ranks_and_micro_batches_gives_the_plain_loops_loss_and_gradient(
    results: Any, plain: Any, world_size: int, scenario: str
) -> None:
    report = results[world_size, 0][scenario]["report"]
    loss, grad_norm, tokens = plain
    assert report.loss == pytest.approx(loss, abs=LOSS)
    assert report.grad_norm == pytest.approx(grad_norm, rel=GRADIENT)
    assert report.trained_tokens == tokens == sum(report.token_staleness)
    assert 0.1 < report.loss_metrics["gated_ratio"] < 0.9, "the case must have tokens inside and outside the band"
    assert report.updates_applied == 1
    assert not report.skipped
    if world_size == 1:
        efficiency = report.diagnostics["packing_efficiency_ratio"]
        assert (efficiency > 1) == (scenario == "packed"), "only packed rows share their group's prompt"
        assert (efficiency < 1) == (scenario not in ("packed", "micro_batch_1")), "only these two have no padding"


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_own_optimizer_makes_the_steps_of_a_plain_loop_and_goes_on_from_a_checkpoint_bit_by_bit(
    results: Any, folder: Path, world_size: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    settings = OWN_OPTIMIZER
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, **settings["options"])
    for share in (0.5, 1.0):
        loss, _ = _plain_loss(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        assert norm > settings["max_grad_norm"]
        optimizer.param_groups[0]["lr"] = share * settings["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found, again = results[world_size, 0]["resumed"]
    assert found.keys() == again.keys()
    for name, weight in wanted.items():
        assert_within(found[name], weight, bound=1e-5, name=name)
        np.testing.assert_array_equal(again[name], found[name], err_msg=name)
    start = dict(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).named_parameters())
    moved = max(float((wanted[name] - start[name].detach()).abs().max()) for name in wanted)
    assert moved > 1e-2, "the steps are large"


@pytest.mark.parametrize("scenario", ["micro_batch_1", "two_updates", "one_group", "interpolated", "counted"])
def test_two_ranks_report_what_one_rank_reports(results: Any, scenario: str) -> None:
    one, two = results[1, 0][scenario]["report"], results[2, 0][scenario]["report"]
    assert two.loss == pytest.approx(one.loss, abs=LOSS)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=GRADIENT)
    for name in ("entropy_nats", "ess", "importance_weight_mean", "importance_weight_max"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), **METRIC), name
    for name in ("trained_tokens", "trained_samples", "on_policy_tokens", "token_staleness", "updates_applied"):
        assert getattr(two, name) == getattr(one, name), name
    assert two.on_policy_parity_max_nats == pytest.approx(one.on_policy_parity_max_nats, abs=LOGPROB_NATS)
    assert two.loss_metrics == pytest.approx(one.loss_metrics, **METRIC)
    own = "packing_efficiency_ratio"  # each rank pads its own rows
    measured = {name: value for name, value in one.diagnostics.items() if name != own}
    assert {name: value for name, value in two.diagnostics.items() if name != own} == pytest.approx(measured, **METRIC)
    assert all(0 < report.diagnostics[own] <= 1 for report in (one, two))
    assert one.diagnostics["kernel_ess_ratio"] < 1 or scenario == "counted", (
        "REINFORCE has the same weight for every token"
    )


@pytest.mark.parametrize("scenario", ["own_loss", "own_loss_packed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_user_s_loss_that_asks_for_logits_gets_them_and_its_metrics_add_up(
    results: Any, plain: Any, world_size: int, scenario: str
) -> None:
    report = results[world_size, 0][scenario]["report"]
    assert report.loss == pytest.approx(plain[0], abs=LOSS)
    assert report.grad_norm == pytest.approx(plain[1], rel=GRADIENT)
    assert report.loss_metrics == {"longest_max": 13.0, "rows": 12.0}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_is_the_first_weights_and_stays_so(results: Any, plain: Any, world_size: int) -> None:
    """In the first step policy and reference are equal, so the penalty is 0. In the second step the penalty is not 0,
    and it is the same on any number of ranks."""
    found = results[world_size, 0]["reference"]
    assert found["report"].loss == pytest.approx(plain[0], abs=LOSS)
    assert found["report"].grad_norm == pytest.approx(plain[1], rel=GRADIENT)
    unpenalised = results[world_size, 0]["micro_batch_all"]["report"]
    assert found["again"].loss == pytest.approx(results[1, 0]["reference"]["again"].loss, abs=2 * LOSS)
    assert found["again"].loss > unpenalised.loss + 1e-2


def test_two_ranks_calibrate_the_gate_of_one_rank_which_takes_out_some_tokens_and_not_all(results: Any) -> None:
    """The bound is just below the statistic of the first token that exceeds the budget. Rounding in the training pass
    may move this token inside the bound, so the numbers of gated tokens may differ by one."""
    one, two = results[1, 0]["calibrated"]["report"], results[2, 0]["calibrated"]["report"]
    gated_tokens = [round(report.loss_metrics["gated_ratio"] * report.trained_tokens) for report in (one, two)]
    assert 1 < gated_tokens[0] < one.trained_tokens
    assert abs(gated_tokens[0] - gated_tokens[1]) <= 1
    assert two.trained_tokens == one.trained_tokens


def test_a_beta_that_follows_the_kl_is_equal_on_one_and_two_ranks(results: Any) -> None:
    first = results[1, 0]["controlled"]
    kl = first["report"].kl_nats["behaviour"]
    assert abs(kl / 0.48 - 1) < 0.2, "within a fifth of the target, so that every part of the KL counts"
    for world_size, rank in ((1, 0), (2, 0), (2, 1)):
        found = results[world_size, rank]["controlled"]
        assert found["report"].diagnostics["penalty_beta"] == 0.5
        assert found["again"].diagnostics["penalty_beta"] == pytest.approx(0.5 * kl / 0.48, rel=1e-6)
        assert found["again"].loss == pytest.approx(first["again"].loss, abs=2 * LOSS)


def test_both_ranks_give_the_same_report(results: Any) -> None:
    first, second = results[2, 0]["micro_batch_3"]["report"], results[2, 1]["micro_batch_3"]["report"]
    assert (first.loss, first.grad_norm, first.ess) == (second.loss, second.grad_norm, second.ess)


def test_two_updates_move_the_weights_twice_and_keep_the_step_s_proximal_policy(results: Any) -> None:
    report = results[1, 0]["two_updates"]["report"]
    assert report.updates_applied == 2
    # Both updates use the proximal policy of the step's start, so numbers that depend only on it do not change.
    once = results[1, 0]["micro_batch_all"]["report"]
    assert report.ess == pytest.approx(once.ess, **METRIC)
    assert report.kl_behaviour_k3_nats == pytest.approx(once.kl_behaviour_k3_nats, **METRIC)


def whole(results: Any, world_size: int, cut: str, column: str) -> np.ndarray:
    """Returns a column of the rows of all ranks, in the caller's order. The rows are as wide as the batch."""
    ranks = [results[world_size, rank]["interface"][cut] for rank in range(world_size)]
    index = np.concatenate([found["index"] for found in ranks])
    assert sorted(index.tolist()) == list(range(len(index)))
    values: np.ndarray = np.concatenate([found[column] for found in ranks])
    return values[index.argsort()]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_rows_give_the_same_log_probs_loss_and_weights_however_they_are_cut(
    results: Any, world_size: int, cut: str
) -> None:
    ranks = [results[world_size, rank]["interface"][cut] for rank in range(world_size)]
    first = results[1, 0]["interface"]["padded all"]
    for column in ("before", "after", "reference"):
        assert_within(
            whole(results, world_size, cut, column), whole(results, 1, "padded all", column), bound=LOGPROB_NATS
        )
    np.testing.assert_array_equal(
        whole(results, world_size, cut, "before"), whole(results, world_size, cut, "reference")
    )
    assert np.abs(whole(results, 1, "padded all", "after") - whole(results, 1, "padded all", "before")).max() > 1e-2
    trained = train_result([found["trained"] for found in ranks])
    wanted = train_result([first["trained"]])
    assert len(trained["loss"]) == 2
    assert_within(trained["loss"], wanted["loss"], bound=LOSS)
    assert_reordered(trained["grad_norm"], wanted["grad_norm"], spread=GRADIENT)
    for name, values in wanted["all_mb_metrics"].items():
        found = trained["all_mb_metrics"][name]
        if name in AVERAGED_METRICS:  # one value for each micro-batch, and the number of micro-batches differs
            assert {*found} == {*values}, name
        else:
            assert sum(found) == pytest.approx(sum(values), **METRIC), name
    for found in ranks:
        for name, weight in first["weights"].items():
            assert_within(found["weights"][name], weight, bound=weight_spread(2), name=name)


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_a_loss_of_a_user_gets_the_same_numbers_of_the_step_however_it_is_cut(
    results: Any, world_size: int, cut: str
) -> None:
    """The numbers are those of all tokens of both updates. The losses of the updates are those of a plain loop in
    float64."""
    found = train_result([results[world_size, rank]["interface"][cut]["of the step"] for rank in range(world_size)])
    data, logprobs = matrix_batch(), whole(results, 1, "padded all", "before").astype(np.float64)
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)).numpy() > 0
    advantages = np.broadcast_to(data["advantages"].numpy().reshape(len(logprobs), -1), logprobs.shape)
    ratios = np.exp(logprobs - data["generation_logprobs"].numpy())
    numbers = {name: values[trained].mean() for name, values in (("ratio", ratios), ("logprob", logprobs))}
    numbers["advantage"] = advantages[trained].mean()
    apart = (logprobs - numbers["logprob"]) * (advantages - numbers["advantage"])
    numbers["high"] = np.quantile(apart[trained], 0.8, method="inverted_cdf")
    for name, value in numbers.items():
        of_parts = found["all_mb_metrics"][f"{name}_max"]
        assert of_parts == pytest.approx([value] * len(of_parts), abs=1e-6), name
    weights = np.minimum(ratios / numbers["ratio"], OF_THE_STEP_CAP)
    assert (weights == OF_THE_STEP_CAP).any()
    for update in range(2):
        losses: list[float] = []
        for row in range(update * UPDATE_ROWS, (update + 1) * UPDATE_ROWS):
            for token in np.flatnonzero(trained[row]):
                kept = weights[row, token] if apart[row, token] <= numbers["high"] else 0.0
                losses.append(-(advantages[row, token] - numbers["advantage"]) * kept * logprobs[row, token])
        assert float(found["loss"][update]) == pytest.approx(np.mean(losses), abs=1e-6)


def hashes_of(values: Any) -> Any:
    """Two rounds of xor-shift and multiply on the bits of float32 numbers."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor) & np.uint64(2**32 - 1)
    return bits ^ bits >> np.uint64(15)


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_tokens_that_are_chosen_by_covariance_are_those_of_a_plain_loop_however_the_step_is_cut(
    results: Any, world_size: int, cut: str
) -> None:
    """The losses of both updates, in float64. The log-probs of the step's start are those of the sampler."""
    data, current = matrix_batch(), whole(results, 1, "padded all", "before").astype(np.float64)
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)).numpy() > 0
    start = data["generation_logprobs"].numpy().astype(np.float64)
    advantages = np.broadcast_to(data["advantages"].numpy().reshape(len(start), -1), start.shape).astype(np.float64)
    apart = (start - start[trained].mean()) * (advantages - advantages[trained].mean())
    ratios, (pulled, dropped) = np.exp(current - start), (np.zeros_like(trained), np.zeros_like(trained))
    for chosen, order, inside, share in (
        (pulled, apart, trained, 0.2),
        (dropped, hashes_of(start), trained & (apart >= 0.1) & (apart <= 2.0), 0.1),
    ):
        places = sorted(zip(*np.nonzero(inside), strict=True), key=order.__getitem__)
        for place in places[-int(share * trained.sum()) :]:
            chosen[place] = True
    assert 0.1 * trained.sum() - 1 < dropped.sum() < inside.sum(), "not all tokens within the bounds are dropped"
    clipped = np.maximum(-advantages * ratios, -advantages * ratios.clip(0.8, 1.2)) * ~dropped
    losses = {"kl_cov": -advantages * ratios + 0.7 * np.abs(current - start) * pulled, "clip_cov": clipped}
    for name, values in losses.items():
        found = train_result([results[world_size, rank]["interface"][cut][name] for rank in range(world_size)])
        for update in range(2):
            rows = slice(update * UPDATE_ROWS, (update + 1) * UPDATE_ROWS)
            assert float(found["loss"][update]) == pytest.approx(values[rows][trained[rows]].mean(), abs=1e-6), name


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_prompt_groups_and_good_rows_are_counted_over_a_whole_update_however_it_is_cut(
    results: Any, world_size: int, cut: str
) -> None:
    """The loss of each of two updates has two terms. The first is the mean over prompts of the mean of −A · lp over the
    tokens of a prompt. The second is ½ of the mean of −lp over the tokens of rows with a positive reward."""
    found = train_result([results[world_size, rank]["interface"][cut]["counted"] for rank in range(world_size)])
    data, logprobs = matrix_batch(), whole(results, 1, "padded all", "before")
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)).numpy() > 0
    for update in range(2):
        prompts: dict[int, list[float]] = {}
        good: list[float] = []
        for row in range(update * UPDATE_ROWS, (update + 1) * UPDATE_ROWS):
            tokens = logprobs[row][trained[row]]
            prompts.setdefault(int(data["group_ids"][row]), []).extend(-float(data["advantages"][row]) * tokens)
            good.extend(-tokens if data["rewards"][row] > 0 else [])
        means = [float(np.mean(losses)) for losses in prompts.values() if losses]
        assert float(found["loss"][update]) == pytest.approx(np.mean(means) + 0.5 * np.mean(good), rel=1e-5)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_evaluation_gives_the_loss_and_changes_nothing(results: Any, world_size: int, cut: str) -> None:
    ranks = [results[world_size, rank]["interface"][cut] for rank in range(world_size)]
    assert all(found["kept"] for found in ranks)
    evaluated, trained = (train_result([found[name] for found in ranks]) for name in ("evaluated", "trained"))
    assert {found["schedule"] for found in ranks} == {1}, (
        "training with two updates advances the schedule by one step, and evaluation does not advance it"
    )
    assert not evaluated["grad_norm"].any()
    assert evaluated["loss"][0] == pytest.approx(trained["loss"][0].item(), abs=LOSS)
    assert evaluated["loss"][1] != trained["loss"][1], "the second update of training has other weights"


def flops_of(folder: Path, data: BatchedDataDict, *, backward: bool) -> int:
    cost = model_cost(AutoConfig.from_pretrained(folder / "model"))
    assert cost is not None
    return cost.flops(data["input_lengths"].tolist(), backward=backward)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_rows_come_to_the_same_flops_however_they_are_cut_and_evaluation_to_a_third(
    results: Any, folder: Path, world_size: int, cut: str
) -> None:
    ranks = [results[world_size, rank]["interface"][cut] for rank in range(world_size)]
    trained, evaluated = (step_report([found[name] for found in ranks]) for name in ("trained", "evaluated"))
    assert trained.model_flops == flops_of(folder, matrix_batch(), backward=True)
    assert evaluated.model_flops == flops_of(folder, matrix_batch(), backward=False)
    assert trained.peak_flops_per_s is None, "the peak of a CPU is unknown"


@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_what_a_rank_without_rows_runs_for_the_others_sake_is_no_model_flop(
    results: Any, folder: Path, world_size: int
) -> None:
    ranks = [results[world_size, rank]["interface"]["uneven"]["trained"] for rank in range(world_size)]
    report = step_report(ranks)
    assert report.model_flops == flops_of(folder, make_batch().slice(0, 5), backward=True)


@pytest.mark.parametrize("world_size", [2, FOUR])
def test_a_rank_with_few_rows_or_none_keeps_step(results: Any, world_size: int) -> None:
    ranks = [results[world_size, rank]["interface"]["uneven"] for rank in range(world_size)]
    first = results[1, 0]["interface"]["uneven"]
    trained, wanted = train_result([found["trained"] for found in ranks]), train_result([first["trained"]])
    assert_within(trained["loss"], wanted["loss"], bound=LOSS)
    for name, weight in first["weights"].items():
        assert_within(ranks[-1]["weights"][name], weight, bound=weight_spread(1), name=name)


@pytest.mark.parametrize("world_size", [1, 2, FOUR])
def test_a_bare_call_on_rows_without_advantages_trains(results: Any, world_size: int) -> None:
    ranks = [results[world_size, rank]["interface"]["bare"] for rank in range(world_size)]
    trained, wanted = train_result(ranks), train_result([results[1, 0]["interface"]["bare"]])
    assert wanted["grad_norm"] > 0
    assert_within(trained["loss"], wanted["loss"], bound=LOSS)
    assert_reordered(trained["grad_norm"], wanted["grad_norm"], spread=GRADIENT)


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1)])
def test_a_rank_knows_the_version_of_its_weights(results: Any, key: Any) -> None:
    assert results[key]["micro_batch_1"]["trained_step"] == STEP + 1
    assert results[key]["two_updates"]["trained_step"] == STEP + 1
    assert results[key]["nonfinite"]["trained_step"] is None, "no update was applied"


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.fault("F21")
def test_all_ranks_skip_the_update_when_one_rank_is_not_finite(results: Any, key: Any) -> None:
    outcome, original = results[key]["nonfinite"], results[key]["weights"]["gathered"]
    assert outcome["report"].skipped
    assert outcome["report"].updates_applied == 0
    assert outcome["report"].updates_nonfinite == 1
    assert all(np.array_equal(outcome["weights"][name], original[name]) for name in original)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_token_without_a_number_is_left_out_as_if_it_were_masked_and_counted(results: Any, world_size: int) -> None:
    found, masked = (results[world_size, 0][name]["report"] for name in ("with_nan", "without_it"))
    assert (found.trained_tokens, found.updates_applied) == (masked.trained_tokens, 1)
    assert (found.loss, found.grad_norm) == (masked.loss, masked.grad_norm), "the sums and their order are the same"
    assert (found.diagnostics["nonfinite_tokens"], masked.diagnostics["nonfinite_tokens"]) == (1.0, 0.0)
    assert sum(found.token_staleness) == found.trained_tokens


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_an_interpolated_policy_without_versions_is_refused_on_every_rank(results: Any, key: Any) -> None:
    assert "the loss reads staleness, but" in results[key]["interface"].get("refused", "")


@pytest.mark.parametrize("key", [(1, 0), (2, 0)])
@pytest.mark.fault("F24")
def test_a_step_without_a_trained_token_changes_nothing_and_divides_by_nothing(results: Any, key: Any) -> None:
    outcome, original = results[key]["untrained"], results[key]["weights"]["gathered"]
    report = outcome["report"]
    assert (report.trained_tokens, report.updates_applied, report.skipped) == (0, 0, False)
    assert report.model_flops == 0, "no row went through the model"
    assert (report.loss, report.grad_norm, report.entropy_nats) == (0.0, 0.0, 0.0)
    assert math.isnan(report.ess), "there was no token to measure"
    assert report.token_staleness == ()
    assert all(np.array_equal(outcome["weights"][name], original[name]) for name in original)


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1)])
def test_gathered_weights_are_the_loaded_ones_on_every_rank_and_a_snapshot(
    results: Any, folder: Path, key: Any
) -> None:
    found = results[key]["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    expected = {name: p.detach().numpy() for name, p in model.named_parameters(remove_duplicate=False)}
    assert found["types"] == {"DTensor"}, "the model is not sharded by FSDP2"
    assert list(found["gathered"]) == list(expected) == [spec.name for spec in found["specs"]]
    assert all(np.array_equal(found["gathered"][name], expected[name]) for name in expected)
    assert found["after_probe"]
    assert found["moved"]
    assert found["snapshot_unchanged"]
    for spec in found["specs"]:
        array = found["gathered"][spec.name]
        assert (spec.shape, spec.dtype, spec.nbytes) == (array.shape, str(array.dtype), array.nbytes)


def test_a_tied_head_is_sent_under_both_names(results: Any) -> None:
    gathered = results[2, 0]["weights"]["gathered"]
    assert np.array_equal(gathered["lm_head.weight"], gathered["model.embed_tokens.weight"])


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1)])
def test_probe_is_at_temperature_1_and_logprobs_at_the_sampler_s(results: Any, folder: Path, key: Any) -> None:
    found = results[key]["weights"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    def expected(tokens: list[int], temperature: float) -> np.ndarray:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
        return logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()

    for tokens, scored in zip(PROBE, found["probe"], strict=True):
        assert_within(scored, expected(tokens, 1.0), bound=LOGPROB_NATS)
    own = PROBE[:2] if key[1] == 0 else []
    for tokens, scored in zip(own, found["logprobs"], strict=True):
        assert scored[0] == 0.0
        assert_within(scored[1 : len(tokens)], expected(tokens, TEMPERATURE), bound=LOGPROB_NATS)
        assert not scored[len(tokens) :].any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_saved_model_loads_with_its_own_class_and_the_trained_weights(
    results: Any, folder: Path, world_size: int
) -> None:
    path = folder / f"saved-{world_size}"
    model = AutoModelForCausalLM.from_pretrained(path)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    saved = results[world_size, 0]["weights"]["saved"]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert np.array_equal(parameter.detach().numpy(), saved[name]), name
    assert AutoTokenizer.from_pretrained(path).pad_token == "t0"


@pytest.mark.parametrize("key", [(1, 0), (2, 0), (2, 1)])
def test_training_goes_on_from_what_was_offloaded_as_if_it_had_stayed(results: Any, key: Any) -> None:
    found = results[key]["offloaded"]
    assert found["gradients"] == 0
    assert found["before"] == ["train"], "while the optimizer is offloaded, weights can still be read and sent"
    assert found["after"] == ["train", "evaluate", "score", "gather"]
    assert found["outdated"], "a refit that mixes weights of two steps must be refused"
    stayed, returned = found["on the device"], found["offloaded"]
    assert all(np.array_equal(stayed[name], returned[name]) for name in stayed)
