"""Makes the report's sections Learning and Flow. Each section has charts made from the step records.

Long runs are drawn as means over bins, because a chart is too narrow to show more than `CURVE_POINTS` points.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle

from asyncrl.config.schema import HELDOUT
from asyncrl.learner.records import EvalRecord, Resumption, StepRecord, mean, state_shares
from asyncrl.metrics import state_colors
from asyncrl.metrics.numbers import charts
from asyncrl.metrics.state_colors import Color
from asyncrl.views.charts import Mark, Series, line_chart, share_chart
from asyncrl.views.quantities import held_out_number, number

CURVE_POINTS = 300
COLORS = ("blue", "green", "amber", "violet", "red")
"""Colours of the lines of a chart whose lines are named by the user, such as the components of a reward."""
SET_COLORS = ("amber", "green", "violet", "red")
"""Colours of held-out sets. The training curve beside them is blue."""
SHARE_POINTS = 60
EVALUATIONS_SHOWN = 10
"""The table of evaluations has, for each held-out set, the first evaluation and the last ones, together at most this
many."""

Steps = Sequence[StepRecord]
Values = list[float | None]


def learning(steps: Steps, evals: Sequence[EvalRecord], *, marks: Sequence[Mark] = ()) -> Iterator[str]:
    """Yields the charts of rewards, lengths and training: does the run learn? `marks` are drawn in all of them.

    The first charts are those of rewards. `asyncrl.metrics.numbers` declares the others. A chart is left out if no step
    has its numbers.
    """
    bins = bins_of(steps, CURVE_POINTS)
    xs = last_steps(bins)
    draw = partial(line_chart, marks=marks)
    reward_of = mean_of("reward_mean")
    rewards = [reward_of(chunk) for chunk in bins]
    reward_lines = [
        Series(name="mean of a step", ys=rewards, color="blue", style="faint"),
        Series(name="training", ys=smooth(rewards), color="blue"),
    ]
    for name, color in zip(dict.fromkeys(record.name for record in evals), cycle(SET_COLORS), strict=False):
        of_set = [record for record in evals if record.name == name]
        shown = "held out" if name == HELDOUT else f"held out: {name}"
        reward_lines.append(Series(name=shown, ys=_at_versions(of_set, xs), color=color, style="dots"))
    yield draw("Reward", xs, reward_lines)
    for title, field in (("Reward by part", "reward_parts"), ("Reward by component", "reward_components")):
        names = dict.fromkeys(name for record in steps for name in getattr(record, field))
        if names:
            colored = zip(names, cycle(COLORS), strict=False)
            curves = [curve(name, color, bins, partial(_mean_of, field, name)) for name, color in colored]
            yield draw(title, xs, curves)
    recorded = {*StepRecord.__struct_fields__, *(name for record in steps for name in record.diagnostics)}
    for chart, lines in charts().items():
        series = [
            curve(line.legend, line.color, bins, mean_of(number.name))
            for number, line in lines
            if number.name in recorded
        ]
        if series:
            yield draw(chart.title, xs, series, unit=chart.unit, include=chart.include)


def _mean_of(field: str, name: str, chunk: Steps) -> float | None:
    return mean([getattr(record, field).get(name) for record in chunk])


def flow(steps: Steps, *, marks: Sequence[Mark] = ()) -> Sequence[str]:
    """Returns the charts of time and speed: which side waits for the other, and how fast is the run? `marks` are drawn
    in all of them."""
    windows = windows_of(steps, SHARE_POINTS)
    xs = last_steps(windows)
    draw = partial(line_chart, marks=marks)

    def states(title: str, field: str, colors: Mapping[str, Color]) -> str:
        shares = [state_shares(window, field) for window in windows]
        css = {state: color.report for state, color in colors.items()}
        return share_chart(title, xs, shares, colors=css, unit="share of time", marks=marks)

    def means(name: str, color: str, read: Callable[[StepRecord], float]) -> Series:
        return curve(name, color, windows, lambda window: mean([read(record) for record in window[1:]]))

    def speed(what: str) -> list[Series]:
        def generated_of(window: Steps) -> float | None:
            first, last = (getattr(record, f"generated_{what}") for record in (window[0], window[-1]))
            return per_second(window, last - first)

        return [
            curve("generated", "green", windows, generated_of),
            curve("trained", "blue", windows, trained_per_second(what)),
        ]

    buffered = [
        means("reserved", "violet", lambda record: record.buffer_groups.get("reserved", 0)),
        means("ready", "green", lambda record: record.buffer_groups.get("ready", 0)),
    ]
    duration = [means("duration", "blue", lambda record: record.duration_s)]
    return [
        states("Learner", "learner_state_s", state_colors.LEARNER),
        states("Generators", "generator_state_s", state_colors.GENERATOR),
        draw("Samples", xs, speed("samples"), unit="per second", include=(0,)),
        draw("Tokens", xs, speed("tokens"), unit="per second", include=(0,)),
        draw("Groups in the buffer", xs, buffered, unit="right after a step", include=(0,)),
        draw("Step", xs, duration, unit="seconds", include=(0,)),
    ]


def restart_marks(restarts: Sequence[Resumption]) -> list[Mark]:
    """Returns a mark at the first step of each incarnation, in the order of the steps.

    If the run later went back to step k, incarnations that began at step k or later are left out, because their steps
    were lost.
    """
    marks: list[Mark] = []
    for restart in restarts:
        marks = [mark for mark in marks if mark.at < restart.step]
        marks.append(Mark(restart.step, f"incarnation {restart.incarnation} began at step {restart.step}"))
    return marks


def curve(name: str, color: str, chunks: Sequence[Steps], read: Callable[[Steps], float | None]) -> Series:
    """Returns the line with one value of `read` for each chunk of steps."""
    return Series(name=name, ys=[read(chunk) for chunk in chunks], color=color)


def bins_of(steps: Steps, most: int) -> list[Steps]:
    """Returns consecutive steps in at most `most` chunks, whose sizes differ by at most one step.

    A last chunk with only a few steps would have a noisier mean than the others, and would stand out in a curve.
    """
    count = min(most, len(steps))
    return [steps[index * len(steps) // count : (index + 1) * len(steps) // count] for index in range(count)]


def windows_of(steps: Steps, most: int) -> list[Steps]:
    """Returns bins that begin with the record before their first step, so that totals can be subtracted.

    The first record is only used as the start of the first window, because the time until its end contains the start of
    the run. A run of one step is one window.
    """
    if len(steps) == 1:
        return [steps]
    windows: list[Steps] = []
    before = steps[0]
    for chunk in bins_of(steps[1:], most):
        windows.append([before, *chunk])
        before = chunk[-1]
    return windows


def mean_of(name: str) -> Callable[[Steps], float | None]:
    """Returns a function that takes steps and returns the mean over them of the number `name` of
    `asyncrl.metrics.numbers`."""
    return lambda steps: mean([record.number(name) for record in steps])


def trained_per_second(what: str) -> Callable[[Steps], float | None]:
    """Returns a function that takes a window of steps and returns its trained samples or tokens per second. `what` is
    `samples` or `tokens`."""
    return lambda window: per_second(window, sum(getattr(record, f"trained_{what}") for record in window[1:]))


def per_second(window: Steps, amount: float) -> float | None:
    """Returns `amount` for each second between the first and the last record of a window; None without time."""
    span_s = window[-1].wall_s - window[0].wall_s
    return amount / span_s if span_s > 0 else None


def last_steps(bins: Sequence[Steps]) -> list[float]:
    """Returns the number of the last step of each bin, which is the bin's place on the x axis."""
    return [float(chunk[-1].step) for chunk in bins]


def evaluations(evals: Sequence[EvalRecord]) -> tuple[list[str], list[list[str]]] | None:
    """Returns the head and the rows of the table of held-out evaluations (`EVALUATIONS_SHOWN` of a set); None if there
    is none. A row has the set, the number of steps that trained the weights, the number of prompts, and a column for
    each number of an evaluation."""
    if not evals:
        return None
    of_sets = {
        name: [each for each in evals if each.name == name] for name in dict.fromkeys(each.name for each in evals)
    }
    shown = [record for found in of_sets.values() for record in (found[:1] + found[1:][1 - EVALUATIONS_SHOWN :])]
    known = dict.fromkeys(name for each in shown for name in each.numbers())
    rows = []
    for record in shown:
        values = {name: number(value) for name, value in record.numbers().items()}
        if record.reward_mean is not None and record.reward_stderr is not None:
            values["mean"] += f" ± {number(record.reward_stderr)}"
        prompts = f"{record.prompts} of {record.prompts + record.failed}" if record.failed else f"{record.prompts}"
        rows.append([record.name, f"{record.version}", prompts, *(values.get(name, "–") for name in known)])
    return ["set", "step", "prompts", *map(held_out_number, known)], rows


def smooth(values: Values) -> Values:
    """Returns trailing means over a 25th of the length of the curve."""
    window = max(1, len(values) // 25)
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _at_versions(evals: Sequence[EvalRecord], xs: Sequence[float]) -> Values:
    """Returns the rewards of evaluations at the nearest of the drawn steps `xs`, because a chart does not draw all
    steps.

    When two evaluations have the same nearest step, the later one is drawn.
    """
    ys: Values = [None] * len(xs)
    for record in evals:
        nearest = min(range(len(xs)), key=lambda index: abs(xs[index] - record.version))
        ys[nearest] = record.reward_mean
    return ys
