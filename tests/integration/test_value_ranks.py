"""A critic's values, steps and weights are the same for any number of ranks and any way of cutting rows, and equal to
those of a simple loop without FSDP (spawned processes, gloo)."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_scenarios import SOME_CUTS, UPDATE_ROWS
from rounding import GRADIENT, OUTPUT, assert_reordered, assert_within, spread, weight_spread
from tiny_groups import make_model, rows_of
from value_scenarios import OPTIMIZER, run_rank, value_batch

from asyncrl.ranks.report import step_report, train_result
from asyncrl.value.model import load_value_model, model_values

pytestmark = pytest.mark.integration

WORLDS = (1, 2, 4)
LOSS = 2 * OUTPUT
"""Relative bound for a loss. The loss is half the mean square of V − R. The relative error of V is `OUTPUT`, and V is
not larger than the root of that mean."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs every scenario on one, two and four ranks at the same time."""
    folder = tmp_path_factory.mktemp("critics")
    make_model(folder / "model")
    contexts = [
        torch.multiprocessing.start_processes(
            _start, args=(world_size, folder), nprocs=world_size, join=False, start_method="forkserver"
        )
        for world_size in WORLDS
    ]
    for context in contexts:
        while not context.join():
            pass
    return folder


def _start(rank: int, world_size: int, folder: Path) -> None:
    run_rank(rank, world_size, folder)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The results of the ranks, by the number of ranks."""
    return {
        world: [pickle.loads((folder / f"values-{world}-{rank}.pkl").read_bytes()) for rank in range(world)]
        for world in WORLDS
    }


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """Two updates by a simple loop over unpadded rows: losses, gradient norms, and the values and weights
    afterwards."""
    model = load_value_model(str(folder / "model"), packed=False).train(False)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER["learning_rate"],
        betas=OPTIMIZER["betas"],
        eps=OPTIMIZER["eps"],
        weight_decay=0,
    )
    data, losses, norms = value_batch(), [], []
    for start in range(0, data.size, UPDATE_ROWS):
        batch = data.slice(start, start + UPDATE_ROWS)
        terms = []
        for row in batch.make_microbatch_iterator(1):
            length = int(row["input_lengths"])
            values = model_values(model, rows_of(row["input_ids"][:, :length]))[0]
            for t in range(1, length):
                if row["token_mask"][0, t] and row["sample_mask"][0]:
                    goal, old = row["returns"][0, t], row["values"][0, t]
                    near = values[t].clamp(old - 0.2, old + 0.2)
                    terms.append(torch.maximum((values[t] - goal) ** 2, (near - goal) ** 2) / 2)
        loss = torch.stack(terms).sum() / len(terms)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        values_BS = model_values(model, rows_of(data["input_ids"]))
        values_BS *= torch.arange(values_BS.shape[1]) < data["input_lengths"].unsqueeze(1)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"loss": losses, "grad_norm": norms, "values": values_BS.numpy(), "weights": weights}


def whole(ranks: list[dict[str, Any]], cut: str, column: str) -> np.ndarray:
    """Returns a column of the rows of all ranks, in the caller's order."""
    index = np.concatenate([rank[cut]["index"] for rank in ranks])
    assert sorted(index.tolist()) == list(range(len(index)))
    values: np.ndarray = np.concatenate([rank[cut][column] for rank in ranks])
    return values[index.argsort()]


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_give_the_plain_loop_s_values_losses_gradients_and_weights(
    results: Any, plain: Any, world: int, cut: str
) -> None:
    ranks = results[world]
    trained = train_result([rank[cut]["trained"] for rank in ranks])
    assert_reordered(trained["loss"], plain["loss"], spread=LOSS)
    assert_reordered(trained["grad_norm"], plain["grad_norm"], spread=GRADIENT)
    assert not whole(ranks, cut, "before").any(), "a new critic must predict 0"
    assert_reordered(whole(ranks, cut, "after"), plain["values"], spread=OUTPUT)
    assert np.abs(plain["values"]).max() > 0.1
    for rank in ranks:
        assert rank[cut]["types"] == {"DTensor"}, "the model is not sharded by FSDP2"
        assert list(rank[cut]["weights"]) == list(plain["weights"])
        for name, weight in plain["weights"].items():
            assert_within(rank[cut]["weights"][name], weight, bound=weight_spread(2), name=name)


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_evaluation_gives_the_loss_and_changes_nothing(results: Any, world: int, cut: str) -> None:
    ranks = results[world]
    assert all(rank[cut]["kept"] for rank in ranks)
    evaluated, trained, again = (
        train_result([rank[cut][name] for rank in ranks]) for name in ("evaluated", "trained", "again")
    )
    assert {rank[cut]["schedule"] for rank in ranks} == {1}, (
        "a call with two updates must advance the schedule by one step"
    )
    assert not evaluated["grad_norm"].any()
    assert evaluated["loss"][0] == pytest.approx(trained["loss"][0].item(), rel=LOSS)
    assert evaluated["loss"][1] != trained["loss"][1], "the second update of training has other weights"
    assert again["loss"].sum() < evaluated["loss"].sum(), "the loss must fall"


@pytest.mark.parametrize("cut", SOME_CUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_mean_over_sequences_is_the_same_however_rows_are_cut(results: Any, world: int, cut: str) -> None:
    """Compares the loss of a new critic, whose values are 0, with a simple loop over sequences. The loop takes the mean
    over the tokens of each sequence."""
    data, expected = value_batch(), []
    for start in range(0, data.size, UPDATE_ROWS):
        means = []
        for i in range(start, start + UPDATE_ROWS):
            if data["sample_mask"][i] > 0:
                trained = data["token_mask"][i, 1:] > 0
                columns = (data[name][i, 1:][trained].tolist() for name in ("returns", "values"))
                pairs = list(zip(*columns, strict=True))
                squares = [max(r**2, (min(max(0, v - 0.2), v + 0.2) - r) ** 2) for r, v in pairs]
                means.append(sum(squares) / len(squares) if squares else 0.0)
        expected.append(sum(means) / len(means) / 2)
    found = train_result([rank[cut]["by sequence"] for rank in results[world]])["loss"]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found[0] != pytest.approx(train_result([rank[cut]["evaluated"] for rank in results[world]])["loss"][0])


@pytest.mark.parametrize("world", WORLDS)
def test_the_report_has_the_loss_s_metrics_per_trained_token(results: Any, world: int) -> None:
    """Checks the metrics of an evaluation of a new critic: V is 0, so the error is −R. They are means over the tokens
    of each update, and then over the updates."""
    records = [rank["padded 1"]["evaluated"] for rank in results[world]]
    report = step_report(records)
    data = value_batch()
    trained = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) > 0
    starts = range(0, data.size, UPDATE_ROWS)
    updates = [
        data["returns"][start : start + UPDATE_ROWS][trained[start : start + UPDATE_ROWS]].double() for start in starts
    ]
    assert report.trained_tokens == sum(len(returns) for returns in updates)
    for name, sign, power in (("return_mean", 1, 1), ("value_error_mean", -1, 1), ("return_square_mean", 1, 2)):
        terms = [sign * returns**power for returns in updates]
        bound = max(spread(len(part)) * float(part.abs().mean()) for part in terms)
        wanted = sum(float(part.mean()) for part in terms) / len(terms)
        assert report.loss_metrics[name] == pytest.approx(wanted, abs=bound), name
    assert 0 < report.loss_metrics["value_clipped_ratio"] < 1


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_with_few_rows_or_none_keeps_step(results: Any, world: int) -> None:
    ranks, [first] = results[world], results[1]
    trained = train_result([rank["uneven"]["trained"] for rank in ranks])
    wanted = train_result([first["uneven"]["trained"]])
    assert_reordered(trained["loss"], wanted["loss"], spread=LOSS)
    assert_reordered(trained["grad_norm"], wanted["grad_norm"], spread=GRADIENT)
    for name, weight in first["uneven"]["weights"].items():
        assert_within(ranks[-1]["uneven"]["weights"][name], weight, bound=weight_spread(1), name=name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.fault("F21")
def test_all_ranks_skip_the_update_when_one_rank_is_not_finite(results: Any, world: int) -> None:
    for rank in results[world]:
        found = rank["poisoned"]
        assert [outcome.finite for outcome in found["trained"].outcomes] == [False]
        assert all(np.array_equal(found["weights"][name], found["first"][name]) for name in found["first"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.fault("F24")
def test_a_step_without_a_trained_token_changes_nothing(results: Any, world: int) -> None:
    for rank in results[world]:
        found = rank["untrained"]
        assert found["trained"].outcomes == ()
        assert all(np.array_equal(found["weights"][name], found["first"][name]) for name in found["first"])


@pytest.mark.parametrize("world", WORLDS)
def test_a_column_that_is_missing_is_refused_by_all_ranks_before_a_pass(
    results: dict[int, list[dict[str, Any]]], world: int
) -> None:
    """Ranks without rows, such as the last of four ranks, raise the error too."""
    [said] = {rank["without returns"] for rank in results[world]}
    assert said.startswith("the loss reads returns, but the rows do not have them; they have ")
