"""Each number of a step is declared once, and the declarations fit the records and each other."""

import doctest
import re
from collections import Counter
from pathlib import Path

from asyncrl.learner.records import StepRecord
from asyncrl.metrics import numbers, state_colors
from asyncrl.metrics.docs import markdown
from asyncrl.metrics.numbers import CRITIC, GAUGES, HARMS, LEARNS, NUMBERS, SOUND, TRACKERS, charts, panels

STYLE = (Path(numbers.__file__).parents[1] / "views" / "report.css").read_text()


def twice(names: list[str | None]) -> list[str]:
    return [name for name, count in Counter(names).items() if name is not None and count > 1]


def test_doctests() -> None:
    assert doctest.testmod(numbers).failed == 0


def test_no_two_numbers_have_a_name_in_common() -> None:
    assert not twice([number.name for number in NUMBERS])
    assert not twice([*TRACKERS.values()])
    assert not twice([*GAUGES.values()])


def test_scalars_of_a_record_are_declared_or_are_no_measurements() -> None:
    counts = {"step", "generated_samples", "generated_tokens", "published_version", "oldest_replica_version"}
    counts |= {"wall_s", "weight_updates", "mid_sequence_updates", "trained"}
    scalars = {
        name
        for name, kind in StepRecord.__annotations__.items()
        if kind in (int, float, bool, float | None, int | None)
    }
    assert scalars - counts <= {number.name for number in NUMBERS}
    assert "loss" in scalars


def test_a_panel_is_drawn_from_a_gauge() -> None:
    assert all(number.gauge is not None for number in NUMBERS if number.panel is not None)


def test_every_panel_lies_in_a_row_of_the_dashboard_and_every_chart_is_drawn_once() -> None:
    rows = [panel for row in (LEARNS, HARMS, SOUND, CRITIC) for panel in panels(row)]
    assert set(rows) == {number.panel[0] for number in NUMBERS if number.panel is not None}
    assert not twice([panel.title for panel in rows])
    assert not twice([chart.title for chart in charts()])


def test_every_color_of_a_line_or_a_state_is_a_color_of_the_page() -> None:
    page = set(re.findall(r"--([a-z0-9-]+):", STYLE))
    assert {line.color for chart in charts().values() for _, line in chart} <= page
    assert {color.report for color in state_colors.STATES.values()} <= page


def test_the_docs_have_every_number_with_its_meaning() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.* \| ([^|]+(?:\\\|[^|]+)*) \|$", markdown(), re.MULTILINE))
    assert {number.name: number.help for number in NUMBERS}.items() <= {
        name: text.replace("\\|", "|") for name, text in rows.items()
    }.items()
