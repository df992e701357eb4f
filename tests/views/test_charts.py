"""Charts are well-formed, stay inside their frame, and draw the right numbers."""

import doctest
import itertools
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.views import charts, headline, quantities, report_samples, report_staleness
from asyncrl.views.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Mark,
    Series,
    line_chart,
    nice_ticks,
    share_chart,
    version_bars,
)

numbers = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False)


@pytest.mark.parametrize("module", [charts, headline, quantities, report_samples, report_staleness])
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def parsed(figure: str) -> ElementTree.Element:
    """Returns the figure as a tree. Raises an error when it is not well-formed."""
    return ElementTree.fromstring(re.sub(r"<script.*?</script>", "", figure))


def path_points(figure: str, css: str = "line") -> list[list[tuple[float, float]]]:
    (path,) = [node for node in parsed(figure).iter("path") if node.get("class") == css]
    runs = (path.get("d") or "").split("M")[1:]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in run.split("L"))] for run in runs]


@given(low=numbers, span=st.floats(min_value=1e-6, max_value=1e9))
def test_ticks_cover_the_range_evenly_and_are_few(low: float, span: float) -> None:
    high = low + span
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= high - 1e-6 * step
    assert 2 <= len(ticks) <= 7
    assert all(math.isclose(b - a, step, rel_tol=1e-3) for a, b in itertools.pairwise(ticks))


def test_ticks_of_a_constant_are_still_a_range() -> None:
    for low, high in ((0.0, 0.0), (5.0, 5.0), (-0.001, -0.001), (0.8, 0.8000000000000003)):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low <= high <= ticks[-1]
        assert ticks[0] < ticks[-1]


@given(
    ys=st.lists(st.one_of(st.none(), st.just(math.nan), st.just(math.inf), numbers), min_size=1, max_size=30),
    log=st.booleans(),
)
@example(ys=[5e-324], log=True)
@example(ys=[0.0, sys.float_info.min], log=True)
@example(ys=[sys.float_info.min], log=True)
def test_a_line_chart_stays_in_its_frame_whatever_was_recorded(ys: list[float | None], log: bool) -> None:
    series = [Series(name="a <b> & c", ys=ys, color="blue"), Series(name="dots", ys=ys, color="amber", style="dots")]
    figure = line_chart("A & B", list(range(len(ys))), series, log=log, limit=("limit", 2.0))
    tree = parsed(figure)
    for node in tree.iter("circle"):
        assert LEFT - 0.1 <= float(node.get("cx", "nan")) <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= float(node.get("cy", "nan")) <= HEIGHT - BOTTOM + 0.1
    assert "nan" not in figure.lower().replace("nan-", "")


def test_a_line_goes_where_its_values_say_and_breaks_at_gaps() -> None:
    figure = line_chart("x", [0, 1, 2, 3, 4], [Series(name="y", ys=[0, 1, None, 0.5, 1], color="blue")])
    (first, second) = path_points(figure)
    assert first == [(LEFT, HEIGHT - BOTTOM), (LEFT + (WIDTH - LEFT - RIGHT) / 4, TOP)]
    middle = TOP + (HEIGHT - BOTTOM - TOP) / 2
    assert second[0] == (LEFT + (WIDTH - LEFT - RIGHT) * 3 / 4, middle)


def test_lines_with_places_of_their_own_share_an_axis_that_covers_all_of_them() -> None:
    short = Series(name="short", xs=[2, 4], ys=[0.0, 1.0], color="blue")
    figure = line_chart("x", [], [short, Series(name="long", xs=[0, 1, 10], ys=[1.0, None, 0.0], color="amber")])
    (run,) = path_points(figure)
    fifth = (WIDTH - LEFT - RIGHT) / 5
    assert run == [(LEFT + fifth, HEIGHT - BOTTOM), (LEFT + 2 * fifth, TOP)]
    assert len(list(parsed(figure).iter("circle"))) == 2, "the points beside the gap"
    data = re.search(r'<script type="application/json">(.*?)</script>', figure)
    assert data is not None
    shown = json.loads(data[1])
    assert shown["xs"] == []
    assert [(one["xs"], one["ys"]) for one in shown["series"]] == [([2, 4], [0, 1]), ([0, 1, 10], [1, None, 0])]


def test_a_log_axis_is_even_in_decades() -> None:
    figure = line_chart("x", [0, 1, 2], [Series(name="y", ys=[1e-6, 1e-5, 1e-4], color="blue")], log=True)
    ((_, low), (_, middle), (_, high)) = path_points(figure)[0]
    assert (low, high) == (HEIGHT - BOTTOM, TOP)
    assert middle == pytest.approx((low + high) / 2, abs=0.1)


def test_zeros_of_a_log_axis_lie_at_its_bottom_which_says_so() -> None:
    figure = line_chart("x", [0, 1, 2], [Series(name="y", ys=[0.0, 1e-6, 0.0], color="blue")], log=True)
    ((_, zero), (_, least), (_, again)) = path_points(figure)[0]
    assert zero == again == HEIGHT - BOTTOM
    assert least < zero, "the smallest number above 0 is above the bottom"
    assert "0" in [node.text for node in parsed(figure).iter("text") if node.get("text-anchor") == "end"]
    only_zeros = line_chart("x", [0, 1], [Series(name="y", ys=[0.0, 0.0], color="blue")], log=True)
    assert [y for _, y in path_points(only_zeros)[0]] == [HEIGHT - BOTTOM] * 2


def test_the_axis_reaches_what_it_must_include() -> None:
    figure = line_chart("x", [0, 1], [Series(name="y", ys=[0.4, 0.5], color="blue")], include=(0, 1))
    labels = [node.text for node in parsed(figure).iter("text")]
    assert {"0", "1"} <= set(labels)


def test_shares_are_stacked_to_the_top_in_the_order_of_colors() -> None:
    shares = [{"busy": 0.25, "waiting": 0.75}, {"busy": 0.5, "waiting": 0.5}]
    figure = share_chart("x", [1, 2], shares, unit="", colors={"busy": "green", "never": "red", "waiting": "amber"})
    areas = list(parsed(figure).iter("polygon"))
    assert [area.get("fill") for area in areas] == ["var(--green)", "var(--amber)"], "a state without time is left out"
    heights = [[float(pair.split(",")[1]) for pair in (area.get("points") or "").split()] for area in areas]
    assert heights[0][2:] == [HEIGHT - BOTTOM] * 2
    assert heights[1][2:] == heights[0][1::-1], "the second area starts where the first ends"
    assert heights[1][:2] == [TOP, TOP]


def test_bars_are_as_high_as_their_shares_and_the_limit_lies_beyond_its_version() -> None:
    figure = version_bars("x", [("groups", "blue", {0: 3, 2: 1})], limit=2)
    tree = parsed(figure)
    full = HEIGHT - BOTTOM - TOP
    assert [round(float(bar.get("height", "0")) / full, 3) for bar in tree.iter("rect")] == [0.75, 0.0, 0.25]
    (limit,) = [node for node in tree.iter("line") if node.get("class") == "limit"]
    last = list(tree.iter("rect"))[-1]
    assert float(limit.get("x1", "0")) > float(last.get("x", "0")) + float(last.get("width", "0"))


@pytest.mark.parametrize(
    "figure",
    [
        line_chart("x", [], []),
        line_chart("x", [1.0], [Series(name="y", ys=[None], color="blue")]),
        share_chart("x", [1.0], [{}], unit="", colors={"a": "blue"}),
        version_bars("x", [("groups", "blue", {})], limit=2),
    ],
)
def test_nothing_recorded_is_said(figure: str) -> None:
    assert "nothing" in "".join(parsed(figure).itertext())


def test_one_point_is_a_dot_and_one_share_fills_the_width() -> None:
    dot = parsed(line_chart("x", [3.0], [Series(name="y", ys=[1.0], color="blue")]))
    assert len(list(dot.iter("circle"))) == 1
    (area,) = parsed(share_chart("x", [3.0], [{"a": 1.0}], unit="", colors={"a": "blue"})).iter("polygon")
    assert f"{WIDTH - RIGHT:.1f}," in (area.get("points") or "")


def test_the_hover_data_is_json_that_cannot_end_its_script_element() -> None:
    figure = line_chart("x", [1, 2], [Series(name="</script><b>", ys=[1, math.nan], color="blue")])
    data = re.search(r'<script type="application/json">(.*?)</script>', figure)
    assert data is not None
    assert json.loads(data[1]) == {
        "x": "step",
        "xs": [1, 2],
        "percent": False,
        "series": [{"name": "</script><b>", "color": "blue", "ys": [1, None]}],
    }


def test_marks_are_lines_at_their_place_and_those_beyond_the_axis_are_left_out() -> None:
    marks = [Mark(-1, "before"), Mark(1, "a <b>"), Mark(4, "last"), Mark(5, "after")]
    lines = line_chart("x", [0, 2, 4], [Series(name="y", ys=[0, 1, 2], color="blue")], marks=marks)
    shares = share_chart("x", [0, 2, 4], [{"a": 1.0}] * 3, unit="", colors={"a": "blue"}, marks=marks)
    for figure in (lines, shares):
        found = [node for node in parsed(figure).iter("line") if node.get("class") == "mark"]
        assert [node[0].text for node in found] == ["a <b>", "last"]
        assert [float(node.get("x1", "nan")) for node in found] == [
            pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / 4, abs=0.1), WIDTH - RIGHT,
        ]  # fmt: skip
        assert all((node.get("y1"), node.get("y2")) == (str(TOP), str(HEIGHT - BOTTOM)) for node in found)
