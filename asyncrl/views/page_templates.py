"""The Jinja environment of the HTML pages: it escapes all values, and raises an error for a missing name."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.views.quantities import change, cost, duration, moment, number

TEMPLATES = Environment(
    loader=PackageLoader("asyncrl.views", ""),
    autoescape=True,
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)
TEMPLATES.filters |= {
    "duration": duration,
    "moment": moment,
    "number": lambda value: "–" if value is None else number(value),
    "percent": "{:.0%}".format,
    "px": "{:.1f}".format,
    "thousands": "{:,}".format,
}
TEMPLATES.globals |= {"change": change, "cost": cost}
