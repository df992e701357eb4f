"""The order in which the prompts of a mixture are issued."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.prompts import PromptSource, Task, interleaved, mixture_pattern
from asyncrl.errors import DatasetError

SIZES = {"words": 7, "sums": 5}
WEIGHTS = {"words": 3, "sums": 1}


def tasks_of(**sizes: int) -> list[Task]:
    return [
        Task(question=f"{name} {i}", prompt=f"{name} {i}", answer="", part=name)
        for name, size in sizes.items()
        for i in range(size)
    ]


def source(**settings: object) -> PromptSource:
    return PromptSource(tasks_of(**SIZES), **({"seed": 1, "weights": WEIGHTS} | settings))  # type: ignore[arg-type]


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=5), start=st.integers(0, 60), count=st.integers(1, 60))
def test_any_stretch_of_the_pattern_has_the_proportion_of_the_weights(
    weights: list[int], start: int, count: int
) -> None:
    block = mixture_pattern(weights)
    assert Counter(block) == dict(enumerate(weights))
    found = Counter(block[number % len(block)] for number in range(start, start + count))
    for part, weight in enumerate(weights):
        assert abs(found[part] - count * weight / sum(weights)) < 2, "at most one prompt early or late at either end"


def test_each_part_has_its_own_epochs() -> None:
    issuing = source()
    issued = [issuing.next() for _ in range(4 * 35)]
    assert issued == [issuing.task(number) for number in range(4 * 35)]
    for name, size in SIZES.items():
        own = [task.question for task in issued if task is not None and task.part == name]
        assert len(own) == 35 * WEIGHTS[name]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == [f"{name} {i}" for i in range(size)]
    firsts = [task.question for task in issued[: 4 * 7] if task is not None and task.part == "sums"]
    assert firsts[:5] != firsts[5:] + firsts[:3], "the second epoch has another order"


def test_a_restored_mixture_goes_on_in_place() -> None:
    issuing, restored = source(), source()
    for _ in range(23):
        issuing.next()
    restored.restore(issuing.state())
    assert [restored.next() for _ in range(40)] == [issuing.next() for _ in range(40)]


def test_it_ends_before_one_part_begins_an_epoch_too_many() -> None:
    issuing = source(epochs=2)
    issued = []
    while (task := issuing.next()) is not None:
        issued.append(task)
    found = Counter(task.part for task in issued)
    assert found["words"] == 14, "both epochs of the part that ends first"
    assert found["sums"] == 5, "14 of the pattern 3:1 end with a prompt of the other part"
    assert max(Counter(task.question for task in issued).values()) == 2


def test_the_cursor_of_other_weights_is_refused() -> None:
    with pytest.raises(DatasetError, match="not those of this dataset"):
        source(weights={"words": 2, "sums": 1}).restore(source().state())
    cursor = msgspec.structs.replace(source().state(), issued=3)
    source().restore(cursor)


def test_a_part_without_prompts_is_named() -> None:
    with pytest.raises(DatasetError, match=r"data\.mixture\.sums has no training prompts"):
        PromptSource(tasks_of(words=3), seed=0, weights=WEIGHTS)


def test_held_out_tasks_of_all_parts_are_mixed_until_none_is_left() -> None:
    words, sums = tasks_of(words=5), tasks_of(sums=4)
    mixed = interleaved([words, sums], [3, 1])
    assert [task.part for task in mixed[:4]] == ["words", "words", "sums", "words"]
    assert sorted(task.question for task in mixed) == sorted(task.question for task in words + sums)
    assert interleaved([words], [1]) == words
    assert interleaved([[], []], [1, 1]) == []


def test_a_row_that_moves_to_another_part_makes_another_dataset() -> None:
    def of(*parts: str) -> list[Task]:
        return [Task(question=str(i), prompt=str(i), answer="", part=part) for i, part in enumerate(parts)]

    here = PromptSource(of("words", "words", "sums"), seed=0, weights=WEIGHTS).state()
    there = PromptSource(of("words", "sums", "sums"), seed=0, weights=WEIGHTS)
    with pytest.raises(DatasetError, match="not those of this dataset"):
        there.restore(here)


def test_the_total_is_the_number_of_issued_prompts() -> None:
    issuing = source(epochs=1)
    assert issuing.total == sum(1 for _ in iter(issuing.next, None))
    assert source().total is None
