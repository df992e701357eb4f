"""Renders the live view of `asyncrl up` and `asyncrl top`: a panel in a terminal, plain lines elsewhere.

`LiveView` has the data of the view. `render` makes a panel from it and `plain_line` a line of text; both are pure.
`LiveDisplay` writes them to the console.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.buffer.staleness import limits_of
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.metrics.state_colors import STATES
from asyncrl.shown_text import shown
from asyncrl.views.headline import Concern, Headline
from asyncrl.views.quantities import duration, number

BAR_CELLS = 30
SPARKS = "▁▂▃▄▅▆▇█"

UNKNOWN_STATE = "white"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """The state of a run at one moment. Values that are not known yet are None or empty.

    `phase` is free text about the run's present activity. `rewards` are the mean rewards of the steps so far, oldest
    first; of many steps, some of them. `oldest_token_versions` is the largest staleness of a token in the last step.
    `heldout` maps each held-out set to the rewards of its evaluations so far.
    `replica_versions` maps each replica to the step of its weights. `activity` is what the learner does at this moment.
    `learner_shares` and `generator_shares` are shares of recent time by state, which add up to 1. `headline` is the
    sentence below the numbers.
    """

    config: Config
    phase: str
    elapsed_s: float
    step: int = 0
    eta_s: float | None = None
    rewards: Sequence[float] = ()
    heldout: Mapping[str, Sequence[float]] = field(default_factory=dict)
    oldest_token_versions: int | None = None
    ess_ratio: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    zero_variance_ratio: float | None = None
    completion_tokens_mean: float | None = None
    truncated_ratio: float | None = None
    buffer_groups: Mapping[str, int] | None = None
    published_version: int | None = None
    replica_versions: Mapping[str, int] = field(default_factory=dict)
    activity: str | None = None
    learner_shares: Mapping[str, float] | None = None
    generator_shares: Mapping[str, float] | None = None
    headline: Headline | None = None


def render(view: LiveView) -> RenderableType:
    """Returns the panel of the live view."""
    title = Text.assemble((view.config.run.name, "bold"), "  ", (f"{view.phase}, {duration(view.elapsed_s)}", "dim"))
    sentence = [] if view.headline is None else [Text(view.headline.sentence, style=_style(view.headline))]
    if view.step == 0:
        return Panel(Group(Text(f"{view.phase} …"), *sentence), title=title, title_align="left", border_style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    rows.add_row("step", _progress(view))
    rows.add_row("reward", Text.assemble(_last(view.rewards), "  ", (sparkline(view.rewards), "cyan"), _heldout(view)))
    if view.completion_tokens_mean is not None:
        rows.add_row("samples", Text(_samples(view)))
    rows.add_row("data", _data(view))
    rows.add_row("speed", Text(_speed(view)))
    if view.buffer_groups is not None:
        rows.add_row("buffer", Text(_buffer(view.buffer_groups, limits_of(view.config).capacity_groups)))
    if view.replica_versions:
        rows.add_row("weights", Text(_weights(view)))
    if view.activity:
        rows.add_row("now", Text(view.activity))
    if view.learner_shares:
        rows.add_row("learner", share_bar(view.learner_shares))
    if view.generator_shares:
        rows.add_row("generators", share_bar(view.generator_shares))
    return Panel(Group(rows, *sentence), title=title, title_align="left", border_style="dim")


def plain_line(view: LiveView) -> str:
    """Returns the view as one line, for logs and pipes."""
    parts = [f"step {view.step}/{view.config.learner.total_steps}", f"reward {_last(view.rewards)}"]
    if view.oldest_token_versions is not None:
        parts.append(f"staleness {view.oldest_token_versions} of {view.config.staleness.max_versions}")
    if view.ess_ratio is not None:
        parts.append(f"effective sample size {view.ess_ratio * 100:.0f} %")
    parts.append(_speed(view))
    if view.eta_s is not None:
        parts.append(f"{duration(view.eta_s)} left")
    return ", ".join(part for part in parts if part)


def phase_line(view: LiveView) -> str:
    """Returns the phase of the run and the elapsed time as one line.

    >>> phase_line(LiveView(config=Config(), phase="loading the model", elapsed_s=8))
    'loading the model (8.0 s)'
    """
    return f"{view.phase} ({duration(view.elapsed_s)})"


def sparkline(values: Sequence[float], *, cells: int = BAR_CELLS) -> str:
    """Returns `values` as a line of at most `cells` bars between their smallest and largest value.

    More values than cells are averaged in parts of equal length.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
    '▁▂▃▄▅▆▇█'
    """
    if not values:
        return ""
    count = min(cells, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] for mean in means)


def share_bar(shares: Mapping[str, float], *, cells: int = BAR_CELLS) -> Text:
    """Returns a bar of `cells` characters that is divided by share, and the shares of at least 5 % in words.

    The largest share is first.
    """
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    bar, filled, total = Text(), 0, 0.0
    for state, share in ordered:
        total += share
        # The running total is rounded, not each part: else the parts might not add up to the length of the bar.
        end = round(min(total, 1.0) * cells)
        bar.append("█" * (end - filled), style=_color(state))
        filled = end
    bar.append("░" * (cells - filled), style="bright_black")
    for state, share in ordered:
        if share >= 0.05:
            bar.append(f"  {state.replace('_', ' ')} ", style=_color(state))
            bar.append(f"{share:.0%}")
    return bar


def _color(state: str) -> str:
    return STATES[state].terminal if state in STATES else UNKNOWN_STATE


def _style(headline: Headline) -> str:
    return "bold yellow" if headline.warns else "italic"


def _progress(view: LiveView) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    left = f"{duration(view.eta_s)} left" if view.eta_s is not None else ""
    total_steps = view.config.learner.total_steps
    bar = ProgressBar(total=total_steps, completed=view.step, width=BAR_CELLS)
    row.add_row(bar, f"{view.step} of {total_steps}", Text(left, style="dim"))
    return row


def _heldout(view: LiveView) -> Text:
    """Returns the first and the last reward of each held-out set."""
    parts = []
    for name, rewards in view.heldout.items():
        ends = [rewards[0], rewards[-1]] if len(rewards) > 1 else rewards
        values = " → ".join(f"{value:.2f}" for value in ends)
        start = " at the start" if len(rewards) == 1 else ""
        parts.append(f"  {'held out' if name == HELDOUT else name} {values}{start}")
    return Text("".join(parts))


def _data(view: LiveView) -> Text:
    text = Text()
    if view.oldest_token_versions is not None:
        limit = view.config.staleness.max_versions
        text.append(f"at most {view.oldest_token_versions} versions old, limit {limit}")
    if view.ess_ratio is not None:
        text.append(f"{'; ' if text else ''}effective sample size {view.ess_ratio:.0%}")
    return text


def _samples(view: LiveView) -> str:
    """Returns the lengths of completions and the share of groups without a gradient, as text.

    >>> _samples(LiveView(config=Config(), phase="", elapsed_s=0,
    ...     completion_tokens_mean=41.5, truncated_ratio=0.25, zero_variance_ratio=0.5))
    'mean length 41.5 tokens, 25 % truncated; all rewards equal in 50 % of groups'
    """
    cut = "" if view.truncated_ratio is None else f", {view.truncated_ratio * 100:.0f} % truncated"
    equal = view.zero_variance_ratio
    groups = "" if equal is None else f"; all rewards equal in {equal * 100:.0f} % of groups"
    return f"mean length {number(view.completion_tokens_mean or 0.0)} tokens{cut}{groups}"


def _speed(view: LiveView) -> str:
    speeds = (("samples/s", view.samples_per_s), ("tokens/s", view.tokens_per_s))
    return ", ".join(f"{number(value)} {unit}" for unit, value in speeds if value is not None)


def _buffer(groups: Mapping[str, int], capacity: int) -> str:
    states = ", ".join(f"{count} {state}" for state, count in groups.items())
    return f"{states}; {sum(groups.values())} of {capacity} slots"


def _weights(view: LiveView) -> str:
    """Returns the published version and the number of replicas at each version, as text.

    >>> _weights(LiveView(config=Config(), phase="", elapsed_s=0, published_version=7,
    ...     replica_versions={"a": 7, "b": 6, "c": 6}))
    'published 7; 1 replica at 7, 2 at 6'
    """
    counts = sorted(Counter(view.replica_versions.values()).items(), reverse=True)
    (newest, at_newest), *others = counts
    first = f"{at_newest} {'replica' if at_newest == 1 else 'replicas'} at {newest}"
    published = "" if view.published_version is None else f"published {view.published_version}; "
    return published + ", ".join([first, *(f"{count} at {version}" for version, count in others)])


def _last(rewards: Sequence[float]) -> str:
    return f"{rewards[-1]:.3f}" if rewards else "–"


class LiveDisplay:
    """Shows views on a console.

    On a terminal it shows a live panel; text that is written to a terminal's stderr appears above the panel. Elsewhere
    it prints a line for each phase, one every `every_steps` steps, and one for each new kind of warning.

    >>> with LiveDisplay(Console(), every_steps=10) as display:
    ...     display.update(LiveView(config=Config(), phase="starting", elapsed_s=0))
    starting (0.0 s)
    """

    def __init__(self, console: Console, *, every_steps: int) -> None:
        self._console = console
        self._every_steps = every_steps
        self._live: Live | None = None
        if console.is_terminal:
            # An stderr that is redirected to a file must not be redirected again to the panel.
            self._live = Live(console=console, refresh_per_second=4, redirect_stderr=sys.stderr.isatty())
        self._phase = ""
        self._warned: set[Concern] = set()
        self._printed_steps = 0

    def update(self, view: LiveView) -> None:
        """Shows `view`. Without a terminal, prints only the lines that are new."""
        if self._live is not None:
            self._live.update(render(view))
            return
        total_steps = view.config.learner.total_steps
        new_phase = view.phase != self._phase
        due = view.step // self._every_steps > self._printed_steps // self._every_steps
        if view.step not in (0, self._printed_steps) and (new_phase or due or view.step in (1, total_steps)):
            self._print(plain_line(view))
            self._printed_steps = view.step
        if new_phase:
            self._print(phase_line(view))
            self._phase = view.phase
        if view.headline is not None and view.headline.warns and view.headline.concern not in self._warned:
            self._print(f"warning: {view.headline.sentence}")
            self._warned.add(view.headline.concern)

    def _print(self, line: str) -> None:
        # With soft_wrap, rich does not wrap the line: without a terminal, its width is only a guess.
        self._console.print(shown(line), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "LiveDisplay":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
