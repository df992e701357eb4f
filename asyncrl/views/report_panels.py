"""Makes the report's sections Learning and Flow. Each section has charts made from the step records.

Long runs are drawn as means over bins, because a chart is too narrow to show more than `CURVE_POINTS` points.
"""

from collections.abc import Callable, Mapping, Sequence

from asyncrl.learner.records import EvalRecord, StepRecord, mean, state_shares
from asyncrl.views.charts import Series, line_chart, share_chart
from asyncrl.views.report_page import section

CURVE_POINTS = 300
SHARE_POINTS = 60

LEARNER_COLORS = {
    "forward_backward": "green",
    "optimizer": "teal",
    "log_probs": "blue",
    "publish": "violet",
    "checkpoint": "rose",
    "waiting_for_groups": "amber",
    "starting": "soft",
    "other": "gray",
}
GENERATOR_COLORS = {
    "generating": "green",
    "paused_for_weights": "violet",
    "starved_of_prompts": "rose",
    "blocked_on_capacity": "red",
    "blocked_on_staleness": "amber",
    "starting": "soft",
    "idle": "gray",
}

Steps = Sequence[StepRecord]
Values = list[float | None]


def learning(steps: Steps, evals: Sequence[EvalRecord]) -> str:
    """Returns the section on rewards, lengths and training: does the run learn?"""
    bins = bins_of(steps, CURVE_POINTS)
    xs = last_steps(bins)

    def curve(read: Callable[[StepRecord], float | None]) -> Values:
        return [mean([read(record) for record in chunk]) for chunk in bins]

    def chart(title: str, unit: str, read: Callable[[StepRecord], float | None]) -> str:
        return line_chart(title, xs, [Series(name=title.lower(), ys=curve(read), color="blue")], unit=unit)

    rewards = curve(lambda record: record.reward_mean)
    reward_lines = [
        Series(name="mean of a step", ys=rewards, color="blue", style="faint"),
        Series(name="training", ys=smooth(rewards), color="blue"),
    ]
    if evals:
        reward_lines.append(Series(name="held out", ys=_at_versions(evals, xs), color="amber", style="dots"))
    spread = [
        Series(name=name, ys=curve(read), color=color)
        for name, color, read in (
            ("standard deviation", "blue", lambda record: record.reward_std),
            ("groups with equal rewards", "rose", lambda record: record.zero_variance_ratio),
        )
    ]
    lengths = [
        Series(name="mean", ys=curve(lambda record: record.completion_tokens_mean), color="blue"),
        Series(name="longest", ys=curve(lambda record: record.completion_tokens_max), color="gray"),
    ]
    truncated = Series(name="truncated", ys=curve(lambda record: record.truncated_ratio), color="rose")
    ess = Series(name="effective samples", ys=curve(lambda record: record.ess_ratio), color="blue")
    figures = [
        line_chart("Reward", xs, reward_lines),
        line_chart("Spread of rewards", xs, spread, unit="reward; share of groups", include=(0,)),
        line_chart("Completion length", xs, lengths, unit="tokens", include=(0,)),
        line_chart("Truncated completions", xs, [truncated], unit="share of samples", include=(0, 1)),
        line_chart("Effective sample size", xs, [ess], unit="share of tokens", include=(0, 1)),
        chart("Loss", "", lambda record: record.loss),
        chart("Entropy", "nats per token", lambda record: record.entropy_nats),
        chart("Gradient norm", "before clipping", lambda record: record.grad_norm),
        chart("Learning rate", "", lambda record: record.learning_rate),
    ]
    if any("kl_to_reference_nats" in record.diagnostics for record in steps):
        kl = chart("KL to the reference", "nats", lambda record: record.diagnostics.get("kl_to_reference_nats"))
        figures.append(kl)
    if any("value_loss" in record.diagnostics for record in steps):
        explained = curve(lambda record: record.diagnostics.get("explained_variance"))
        figures += [
            line_chart(
                "Critic: explained variance",
                xs,
                [Series(name="explained variance", ys=explained, color="blue")],
                unit="share of the returns' variance",
                include=(0, 1),
            ),
            chart("Critic: loss", "", lambda record: record.diagnostics.get("value_loss")),
        ]
    note = (
        "The orange dots are mean rewards of greedy answers to questions that are not used for training. A falling "
        "effective sample size means that samples are too old: lower staleness.max_versions. A group whose rewards are "
        "all equal has no gradient."
    )
    return section("Learning", note, chart_grid(figures))


def flow(steps: Steps) -> str:
    """Returns the section on time and speed: which side waits for the other, and how fast is the run?"""
    windows = windows_of(steps, SHARE_POINTS)
    xs = last_steps(windows)

    def states(title: str, field: str, colors: Mapping[str, str]) -> str:
        shares = [state_shares(window, field) for window in windows]
        return share_chart(title, xs, shares, colors=colors, unit="share of time")

    def rates(name: str, color: str, read: Callable[[Steps], float]) -> Series:
        spans = [window[-1].wall_s - window[0].wall_s for window in windows]
        ys = [read(window) / span if span > 0 else None for window, span in zip(windows, spans, strict=True)]
        return Series(name=name, ys=ys, color=color)

    def means(name: str, color: str, read: Callable[[StepRecord], float]) -> Series:
        return Series(name=name, ys=[mean([read(record) for record in window[1:]]) for window in windows], color=color)

    def buffered(state: str, color: str) -> Series:
        return means(state, color, lambda record: record.buffer_groups.get(state, 0))

    figures = [
        states("Learner", "learner_state_s", LEARNER_COLORS),
        states("Generators", "generator_state_s", GENERATOR_COLORS),
        line_chart(
            "Samples",
            xs,
            [
                rates("generated", "green", lambda window: window[-1].generated_samples - window[0].generated_samples),
                rates("trained", "blue", lambda window: sum(record.trained_samples for record in window[1:])),
            ],
            unit="per second",
            include=(0,),
        ),
        line_chart(
            "Tokens",
            xs,
            [
                rates("generated", "green", lambda window: window[-1].generated_tokens - window[0].generated_tokens),
                rates("trained", "blue", lambda window: sum(record.trained_tokens for record in window[1:])),
            ],
            unit="per second",
            include=(0,),
        ),
        line_chart(
            "Groups in the buffer",
            xs,
            [buffered("reserved", "violet"), buffered("ready", "green")],
            unit="right after a step",
            include=(0,),
        ),
        line_chart(
            "Step", xs, [means("duration", "blue", lambda record: record.duration_s)], unit="seconds", include=(0,)
        ),
    ]
    note = (
        "Amber: the learner waits for groups, or generators wait for the learner's next version. Gray: “other” is the "
        "learner's work without a state of its own (transfer of rows, records, evaluation); “idle” is the time of "
        "free generator slots that do not ask for work (before the first weights, in evaluations, at the end)."
    )
    return section("Flow: which side waits for the other", note, chart_grid(figures))


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


def last_steps(bins: Sequence[Steps]) -> list[float]:
    """Returns the number of the last step of each bin, which is the bin's place on the x axis."""
    return [float(chunk[-1].step) for chunk in bins]


def smooth(values: Values) -> Values:
    """Returns trailing means over a 25th of the length of the curve."""
    window = max(1, len(values) // 25)
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def chart_grid(figures: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _at_versions(evals: Sequence[EvalRecord], xs: Sequence[float]) -> Values:
    """Returns the rewards of evaluations at the nearest drawn steps, because evaluations are between steps.

    When two evaluations have the same nearest step, the later one is drawn.
    """
    ys: Values = [None] * len(xs)
    for record in evals:
        nearest = min(range(len(xs)), key=lambda index: abs(xs[index] - record.version))
        ys[nearest] = record.reward_mean
    return ys
