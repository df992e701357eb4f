"""The states of the processes, and the colour of each state in the report, in a terminal and in Grafana.

For the learner and the generators, green is the work of the process itself, teal, blue, violet and rose are its shorter
stages, amber is waiting for the other side, and orange and red are other waits. The report stacks the states in the
order of these tables.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Color(NamedTuple):
    """One colour under its three names: in the report's page (views/report.css), in rich, and in Grafana."""

    report: str
    terminal: str
    grafana: str


GREEN = Color("green", "green", "green")
TEAL = Color("teal", "cyan", "blue")
BLUE = Color("blue", "blue", "super-light-blue")
VIOLET = Color("violet", "magenta", "purple")
ROSE = Color("rose", "bright_magenta", "dark-purple")
AMBER = Color("amber", "yellow", "yellow")
ORANGE = Color("rose", "red", "orange")
RED = Color("red", "red", "red")
LIGHT = Color("soft", "white", "#b8b8b8")
GRAY = Color("gray", "bright_black", "#808080")

LEARNER: Mapping[str, Color] = {
    "forward_backward": GREEN,
    "optimizer": TEAL,
    "log_probs": BLUE,
    "publish": VIOLET,
    "checkpoint": ROSE,
    "waiting_for_groups": AMBER,
    "starting": LIGHT,
    "other": GRAY,
}
GENERATOR: Mapping[str, Color] = {
    "generating": GREEN,
    "waiting_for_environment": BLUE,
    "paused_for_weights": VIOLET,
    "starved_of_prompts": ORANGE,
    "blocked_on_capacity": RED,
    "blocked_on_staleness": AMBER,
    "starting": LIGHT,
    "idle": GRAY,
}
BUFFER: Mapping[str, Color] = {
    "starting": LIGHT,
    "nobody_waits": GREEN,
    "learner_waits": AMBER,
    "generators_wait": TEAL,
    "both_wait": ORANGE,
}
"""The states of the process that holds the buffer: which side waits for the buffer."""

STATES: Mapping[str, Color] = {**LEARNER, **GENERATOR, **BUFFER}
