"""Packers place every sequence once, respect capacity and requested counts, and give known bins for small examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.data.packing import get_packer

ALGORITHMS = (
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing",
    "neighbours_together",
)  # fmt: skip
CHOOSES_FROM = ("concatenative", "modified_first_fit_decreasing")
"""The rules of which `neighbours_together` chooses one."""
CAPACITY = 60
LENGTHS = st.lists(st.integers(0, CAPACITY), max_size=40)


def first_fit_by_scanning(order: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Implements the definition of first fit, bin by bin."""
    bins: list[list[int]] = []
    for i in order:
        for content in bins:
            if sum(lengths[j] for j in content) + lengths[i] <= capacity:
                content.append(i)
                break
        else:
            bins.append([i])
    return bins


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Finds the smallest number of bins by trying all placements."""
    best = len(lengths)

    def place(i: int, loads: list[int]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if i == len(lengths):
            best = len(loads)
            return
        for b in range(len(loads)):
            if loads[b] + lengths[i] <= capacity:
                place(i + 1, [*loads[:b], loads[b] + lengths[i], *loads[b + 1 :]])
        place(i + 1, [*loads, lengths[i]])

    place(0, [])
    return best


@given(algorithm=st.sampled_from(ALGORITHMS), lengths=LENGTHS, minimum=st.integers(0, 6), multiple=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_every_sequence_is_in_one_bin_and_bins_keep_to_capacity_minimum_and_multiple(
    algorithm: str, lengths: list[int], minimum: int, multiple: int
) -> None:
    rules = CHOOSES_FROM if algorithm == "neighbours_together" else (algorithm,)
    counts = {}  # by the number of bins that the lengths need
    for rule in rules:
        needed = len(get_packer(rule, CAPACITY).pack(lengths))
        counts[needed] = -(-max(needed, minimum) // multiple) * multiple
    packer = get_packer(algorithm, CAPACITY, True, minimum, multiple)
    if max(counts.values()) > len(lengths):
        with pytest.raises(ValueError, match=f"{len(lengths)} sequences cannot fill {max(counts.values())} bins"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert all(bins)
    assert sorted(i for content in bins for i in content) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in content) <= CAPACITY for content in bins)
    assert packer.metrics is not None
    assert packer.metrics.bins == len(bins)
    assert counts[len(bins) - packer.metrics.bins_added] == len(bins)


@given(lengths=LENGTHS)
@settings(max_examples=40, deadline=None)
def test_first_fit_decreasing_is_first_fit_over_the_sequences_longest_first(lengths: list[int]) -> None:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    expected = first_fit_by_scanning(order, lengths, CAPACITY)
    assert get_packer("first_fit_decreasing", CAPACITY).pack(lengths) == expected


@given(lengths=LENGTHS)
@settings(max_examples=40, deadline=None)
def test_concatenated_bins_of_the_concatenative_packer_are_the_order_given_even_when_bins_are_added(
    lengths: list[int],
) -> None:
    bins = get_packer("concatenative", CAPACITY, min_bin_count=min(7, len(lengths))).pack(lengths)
    assert [i for content in bins for i in content] == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=9))
@settings(max_examples=40, deadline=None)
def test_the_decreasing_packers_stay_within_their_proved_distance_of_the_optimum(lengths: list[int]) -> None:
    optimum = fewest_bins(lengths, CAPACITY)
    # Dósa 2007: FFD ≤ 11/9 OPT + 6/9; Yue & Zhang 1995: MFFD ≤ 71/60 OPT + 1
    assert 9 * len(get_packer("first_fit_decreasing", CAPACITY).pack(lengths)) <= 11 * optimum + 6
    assert 60 * len(get_packer("modified_first_fit_decreasing", CAPACITY).pack(lengths)) <= 71 * optimum + 60


def test_the_concatenative_packer_opens_a_bin_when_the_last_is_full_and_never_goes_back() -> None:
    assert get_packer("concatenative", 10).pack([4, 6, 1, 9, 1]) == [[0, 1], [2, 3], [4]]


def test_the_modified_packer_fills_the_room_beside_large_sequences_with_what_fits_it_best() -> None:
    modified = get_packer("modified_first_fit_decreasing", 100)
    # One bin less than first_fit_decreasing: 26 beside 60 would leave room that no sequence fills; 18 and 21 leave
    # almost none.
    assert modified.pack([60, 48, 26, 26, 21, 18]) == [[0, 5, 4], [1, 2, 3]]
    assert len(get_packer("first_fit_decreasing", 100).pack([60, 48, 26, 26, 21, 18])) == 3
    # The largest medium sequence that fits is placed, starting with the largest of the large sequences.
    assert modified.pack([60, 55, 45, 40]) == [[0, 3], [1, 2]]
    # Small sequences, from the bin with the most room: the smallest, and the largest that still fits with it.
    assert modified.pack([52, 55, 18, 22, 30]) == [[1, 3], [0, 2, 4]]
    # Then all sequences that still fit, and the others into new bins, longest first.
    assert modified.pack([80, 15, 5, 1, 50, 40]) == [[0, 1, 2], [4, 5, 3]]


def test_a_shuffle_depends_on_the_seed_and_on_nothing_else() -> None:
    lengths = list(range(1, 40))
    packer = get_packer("first_fit_shuffle", CAPACITY, seed=3)
    bins = packer.pack(lengths)
    assert bins == packer.pack(lengths) == get_packer("first_fit_shuffle", CAPACITY, seed=3).pack(lengths)
    assert bins != get_packer("first_fit_shuffle", CAPACITY, seed=4).pack(lengths)
    assert [i for content in bins for i in content] != sorted(i for content in bins for i in content)


def test_bins_are_added_by_cutting_the_heaviest_in_the_middle() -> None:
    assert get_packer("concatenative", 100, min_bin_count=3).pack([50, 10, 10, 30, 5]) == [[0], [1, 2, 3], [4]]
    assert get_packer("concatenative", 100, bin_count_multiple=2).pack([30, 20, 20, 30]) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["CONCATENATIVE", "First_Fit_Decreasing", *ALGORITHMS])
def test_names_are_found_in_any_case(name: str) -> None:
    assert get_packer(name, 2).pack([1, 2]) in ([[0], [1]], [[1], [0]])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("length", [11, -1])
def test_a_sequence_that_no_bin_holds_is_a_value_error_with_its_place_and_the_limit(
    algorithm: str, length: int
) -> None:
    with pytest.raises(ValueError, match=f"sequence 1 has {length} tokens, but a bin holds 0 to 10"):
        get_packer(algorithm, 10).pack([1, length])


def test_an_unknown_name_is_a_value_error_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown packing algorithm 'best'; use one of concatenative, first_fit_decr"):
        get_packer("best", 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bin_capacity": 0}, "bin_capacity is 0, but must be at least 1"),
        ({"bin_capacity": -5}, "bin_capacity is -5"),
        ({"min_bin_count": -1}, "min_bin_count is -1, but must be at least 0"),
        ({"bin_count_multiple": -2}, "bin_count_multiple is -2, but must be at least 1"),
        ({"bin_count_multiple": 0}, "bin_count_multiple is 0"),
    ],
)
def test_a_bin_argument_below_its_least_value_is_a_value_error(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_packer("concatenative", **{"bin_capacity": 10, **arguments})


def test_metrics_are_summed_over_calls_and_absent_unless_collected() -> None:
    assert get_packer("concatenative", 10).metrics is None
    packer = get_packer("concatenative", 10, collect_metrics=True, bin_count_multiple=2)
    metrics = packer.metrics
    assert metrics is not None
    packer.pack([6, 6])
    packer.pack([2, 3, 1])
    assert (metrics.calls, metrics.sequences, metrics.tokens, metrics.bins, metrics.bins_added) == (2, 5, 18, 4, 1)
    assert metrics.capacity_tokens == 40


@given(lengths=LENGTHS, ranks=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_neighbours_are_together_unless_that_needs_over_an_eighth_more_bins(lengths: list[int], ranks: int) -> None:
    def pack(algorithm: str) -> list[list[int]]:
        return get_packer(algorithm, CAPACITY, bin_count_multiple=ranks).pack(lengths)

    try:
        in_order, tight = map(pack, CHOOSES_FROM)
    except ValueError:  # too few sequences for a multiple of the ranks
        return
    if 8 * len(in_order) <= 9 * len(tight):
        assert pack("neighbours_together") == in_order
    else:
        assert len(pack("neighbours_together")) == len(tight)


def test_a_bin_more_that_the_ranks_need_anyway_keeps_groups_together() -> None:
    lengths = [40, 30] * 4
    assert get_packer("neighbours_together", 60, bin_count_multiple=4).pack(lengths) == [[i] for i in range(8)]
    assert get_packer("neighbours_together", 60, bin_count_multiple=3).pack(lengths) != [[i] for i in range(8)]


def test_groups_stay_together_where_sorting_by_length_scatters_them() -> None:
    lengths = [20 + (7 * i) % 8 for i in range(64)]
    assert get_packer("neighbours_together", 200).pack(lengths) == [list(range(i, i + 8)) for i in range(0, 64, 8)]
    # the given order needs 8 bins here, because 40 and 30 do not fit into one
    assert get_packer("neighbours_together", 60).pack([40, 30] * 4) == [[0], [2], [4], [6], [1, 3], [5, 7]]
