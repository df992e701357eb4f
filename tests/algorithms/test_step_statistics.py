"""Numbers of a whole step: each reduction against NumPy, equal for every split over ranks, and its errors."""

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from asyncrl.algorithms.step_statistics import (
    Reduce,
    Reduction,
    StepStatistic,
    StepTokens,
    effective_share,
    largest,
    mean,
    quantile,
    smallest,
    statistics_of,
    step_numbers,
    total,
)
from asyncrl.errors import CallRefused


def by_numpy(q: float) -> Callable[[Any], Any]:
    return lambda values: np.quantile(values, q, method="inverted_cdf")


REDUCTIONS: dict[str, tuple[Reduction, Callable[[Any], Any]]] = {
    "total": (total, np.sum),
    "mean": (mean, np.mean),
    "smallest": (smallest, np.min),
    "largest": (largest, np.max),
    "effective_share": (effective_share, lambda values: np.sum(values) ** 2 / (len(values) * np.sum(values**2))),
    **{f"quantile {q}": (quantile(q), by_numpy(q)) for q in (0.0, 0.1, 0.25, 0.5, 0.9, 0.998, 1.0)},
}


def tokens_of(values: Sequence[float]) -> StepTokens:
    column = torch.tensor(values, dtype=torch.float64)
    return StepTokens(sources={"current": column}, advantages=torch.zeros(len(column)))


def current(tokens: StepTokens) -> torch.Tensor:
    return tokens.sources["current"]


def alone(sums: torch.Tensor) -> torch.Tensor:
    return sums


def on_ranks(parts: Sequence[Sequence[float]], run: Callable[[StepTokens, Reduce], Any]) -> list[Any]:
    """Runs `run` on one thread for each rank, with a sum over the threads."""
    barrier, slots, found = threading.Barrier(len(parts)), [torch.zeros(0)] * len(parts), [None] * len(parts)

    def on_rank(rank: int) -> None:
        def reduce(sums: torch.Tensor) -> torch.Tensor:
            slots[rank] = sums
            barrier.wait(60)
            added = torch.stack(slots).sum(0)
            barrier.wait(60)
            return added

        found[rank] = run(tokens_of(parts[rank]), reduce)

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


VALUES = {
    "normal": np.random.default_rng(0).normal(size=1000).tolist(),
    "equal": [2.5] * 10,
    "of all sizes": [-1e300, -1.0, -1e-300, -0.0, 0.0, 5e-324, 1.0, 3.0, 3.0, 1e300],
    "one": [-7.25],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_each_reduction_is_that_of_numpy_on_one_rank_and_on_three(name: str, values: list[float]) -> None:
    reduction, plain = REDUCTIONS[name]
    if name in (
        "total",
        "mean",
        "effective_share",
    ):  # a sum of numbers of all sizes has no digit in common with another
        values = [value for value in values if abs(value) < 1e100]
    expected = pytest.approx(float(plain(np.array(values))), rel=1e-12, abs=1e-12)
    declared = {"number": StepStatistic(current, reduction)}
    one = step_numbers(declared, tokens=tokens_of(values), reduce=alone)["number"]
    assert one == expected
    half = len(values) // 2
    three = on_ranks(
        [values[half:], [], values[:half]], lambda own, reduce: step_numbers(declared, tokens=own, reduce=reduce)
    )
    assert three[0] == three[1] == three[2] == {"number": expected}


def test_a_quantile_is_the_value_of_a_token_to_the_last_bit() -> None:
    values = torch.rand(501, generator=torch.Generator().manual_seed(1)).tolist()
    for rank in (1, 2, 250, 500, 501):
        found = quantile(rank / 501)(torch.tensor(values, dtype=torch.float64), alone)
        assert found == sorted(values)[rank - 1]


def test_a_step_without_a_token_has_numbers_too() -> None:
    found = {name: reduction(torch.zeros(0, dtype=torch.float64), alone) for name, (reduction, _) in REDUCTIONS.items()}
    assert found.pop("effective_share") == 1.0
    assert set(found.values()) == {0.0}


def test_a_rank_without_a_token_does_not_call_the_functions() -> None:
    declared = {"largest": StepStatistic(lambda tokens: current(tokens) / current(tokens).max(), mean)}
    found = on_ranks([[1.0, 4.0], []], lambda own, reduce: step_numbers(declared, tokens=own, reduce=reduce))
    assert found[0] == found[1] == {"largest": pytest.approx(0.625)}


def test_a_reduction_without_its_option_is_refused() -> None:
    with pytest.raises(CallRefused, match=r"the reduction of the statistic 'x' failed: TypeError: .*quantile"):
        step_numbers({"x": StepStatistic(current, quantile)}, tokens=tokens_of([1.0]), reduce=alone)  # type: ignore[arg-type]


def test_a_statistic_reads_the_numbers_that_were_declared_before_it() -> None:
    declared = {
        "centre": StepStatistic(current, mean),
        "variance": StepStatistic(lambda tokens: (current(tokens) - tokens.statistics["centre"]).square(), mean),
    }
    found = on_ranks([[1.0, 2.0], [6.0]], lambda own, reduce: step_numbers(declared, tokens=own, reduce=reduce))
    assert found[0] == found[1] == {"centre": 3.0, "variance": pytest.approx(14 / 3)}


def test_statistics_of_a_loss_can_be_sent_to_ranks() -> None:
    sent = pickle.loads(pickle.dumps(StepStatistic(current, quantile(0.5))))
    assert step_numbers({"x": sent}, tokens=tokens_of([1.0, 5.0, 9.0]), reduce=alone) == {"x": 5.0}


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda tokens: tokens.sources["behaviour"], "failed: KeyError: 'behaviour' ("),
        (lambda tokens: current(tokens) / 0, r"returned [2] values, of which 2 are not finite, for 2 trained tokens"),
        (lambda tokens: current(tokens).sum(), "returned [] values"),
        (lambda tokens: torch.ones(3), "returned [3] values, of which 0 are not finite, for 2 trained tokens"),
    ],
)
def test_a_function_that_fails_or_returns_something_else_is_refused(of: Any, words: str) -> None:
    with pytest.raises(CallRefused) as caught:
        step_numbers({"x": StepStatistic(of, mean)}, tokens=tokens_of([1.0, 2.0]), reduce=alone)
    assert words in str(caught.value)
    assert "the statistic 'x' of the loss" in str(caught.value)


def test_something_else_than_statistics_is_refused() -> None:
    class Wrong:
        statistics: ClassVar = {"x": mean}

    with pytest.raises(TypeError, match="they must be a mapping of names to StepStatistic"):
        statistics_of(Wrong())
    assert statistics_of(object()) == {}
    with pytest.raises(ValueError, match=r"q is 1\.5"):
        quantile(1.5)
