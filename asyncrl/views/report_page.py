"""The page of `report.html`: a Jinja template, a style sheet and a script, which become one file.

The page needs no external files. It can be printed. A print is always on white paper and shows the configuration, which
is folded on the screen. tests/views/test_report_in_chromium.py checks all of this in a real browser.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.views import charts
from asyncrl.views.quantities import moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of text. `numeric` columns are aligned right; `verbatim` columns keep all white space."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()
    verbatim: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page: charts, then tables. Several tables are side by side."""

    title: str
    note: str
    figures: Sequence[str] = ()
    tables: Sequence[Table] = ()


def page(**values: object) -> str:
    """Returns the whole document. `report.html.j2` names the values."""
    environment = Environment(
        loader=PackageLoader("asyncrl.views", ""),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["moment"] = moment
    margins = f"{charts.LEFT} {charts.RIGHT} {charts.TOP} {charts.BOTTOM}"
    return environment.get_template("report.html.j2").render(margins=margins, **values)
