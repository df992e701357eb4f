"""Renders the live view of `asyncrl up` and `asyncrl top`: a panel in a terminal, plain lines elsewhere.

`LiveView` has the run and its present phase. `render` makes a panel from it, and `plain_line` a line of text; both are
pure functions. `LiveDisplay` writes the panel or the lines to the console.
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
from asyncrl.common.concern import Concern
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.metrics.state_colors import STATES
from asyncrl.shown_text import shown
from asyncrl.views.headline import Headline, headline
from asyncrl.views.quantities import duration, number
from asyncrl.views.run_view import RunView

BAR_CELLS = 30
SPARKS = "▁▂▃▄▅▆▇█"

UNKNOWN_STATE = "white"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """A run at one moment, as the live view shows it. `phase` is free text about the run's present activity."""

    config: Config
    phase: str
    elapsed_s: float
    run: RunView = field(default_factory=RunView)

    @property
    def headline(self) -> Headline | None:
        """The sentence below the numbers."""
        return headline(self.run)


def render(view: LiveView) -> RenderableType:
    """Returns the panel of the live view."""
    run, found = view.run, view.headline
    others = [Text(f"{note.fact}{note.since}", style="yellow") for note in run.notes[1:]]
    title = Text.assemble((view.config.run.name, "bold"), "  ", (f"{view.phase}, {duration(view.elapsed_s)}", "dim"))
    sentence = [] if found is None else [Text(found.sentence, style=_style(found)), *others]
    if run.step == 0:
        return Panel(Group(Text(f"{view.phase} …"), *sentence), title=title, title_align="left", border_style="dim")
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    rows.add_row("step", _progress(view))
    rows.add_row("reward", Text.assemble(_last(run.rewards), "  ", (sparkline(run.rewards), "cyan"), _heldout(run)))
    if run.completion_tokens_mean is not None:
        rows.add_row("samples", Text(_samples(run)))
    rows.add_row("data", _data(run, limit=view.config.staleness.max_versions))
    rows.add_row("speed", Text(_speed(run)))
    if run.buffer_groups is not None:
        rows.add_row("buffer", Text(_buffer(run.buffer_groups, limits_of(view.config).capacity_groups)))
    if run.replica_versions:
        rows.add_row("weights", Text(_weights(run)))
    if run.learner_activity is not None and run.quiet_s is not None:
        rows.add_row("now", Text(f"learner {run.learner_activity}, last progress {duration(run.quiet_s)} ago"))
    if run.learner_shares:
        rows.add_row("learner", share_bar(run.learner_shares))
    if run.generator_shares:
        rows.add_row("generators", share_bar(run.generator_shares))
    return Panel(Group(rows, *sentence), title=title, title_align="left", border_style="dim")


def plain_line(view: LiveView) -> str:
    """Returns the view as one line, for logs and pipes."""
    run = view.run
    parts = [f"step {run.step}/{view.config.learner.total_steps}", f"reward {_last(run.rewards)}"]
    if run.oldest_token_versions is not None:
        parts.append(f"staleness {run.oldest_token_versions} of {view.config.staleness.max_versions}")
    if run.ess_ratio is not None:
        parts.append(f"effective sample size {run.ess_ratio * 100:.0f} %")
    parts.append(_speed(run))
    if run.eta_s is not None:
        parts.append(f"{duration(run.eta_s)} left")
    return ", ".join(part for part in parts if part)


def phase_line(view: LiveView) -> str:
    """Returns the phase of the run and the elapsed time as one line.

    >>> phase_line(LiveView(config=Config(), phase="loading the model", elapsed_s=8))
    'loading the model (8.0 s)'
    """
    return f"{view.phase} ({duration(view.elapsed_s)})"


def sparkline(values: Sequence[float], *, cells: int = BAR_CELLS) -> str:
    """Returns `values` as a line of at most `cells` bars, whose heights go from the smallest value to the largest.

    If there are more values than cells, each bar is the mean of a part of the values.

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


def _style(found: Headline) -> str:
    return "bold yellow" if found.warns else "italic"


def _progress(view: LiveView) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    left = f"{duration(view.run.eta_s)} left" if view.run.eta_s is not None else ""
    total_steps = view.config.learner.total_steps
    bar = ProgressBar(total=total_steps, completed=view.run.step, width=BAR_CELLS)
    row.add_row(bar, f"{view.run.step} of {total_steps}", Text(left, style="dim"))
    return row


def _heldout(run: RunView) -> Text:
    """Returns the first and the last reward of each held-out set, and the step of the last one."""
    parts = []
    for name, evaluations in run.heldout.items():
        ends = [evaluations[0], evaluations[-1]] if len(evaluations) > 1 else evaluations
        values = " → ".join(f"{each.reward:.2f}" for each in ends)
        parts.append(f"  {'held out' if name == HELDOUT else name} {values} (step {evaluations[-1].version})")
    return Text("".join(parts))


def _data(run: RunView, *, limit: int) -> Text:
    text = Text()
    if run.oldest_token_versions is not None:
        text.append(f"at most {run.oldest_token_versions} versions old, limit {limit}")
    if run.ess_ratio is not None:
        text.append(f"{'; ' if text else ''}effective sample size {run.ess_ratio:.0%}")
    return text


def _samples(run: RunView) -> str:
    """Returns the mean length of completions, the share of truncated ones, and the share of groups with equal rewards,
    as text.

    >>> _samples(RunView(completion_tokens_mean=41.5, truncated_ratio=0.25, zero_variance_ratio=0.5))
    'mean length 41.5 tokens, 25 % truncated; all rewards equal in 50 % of groups'
    """
    cut = "" if run.truncated_ratio is None else f", {run.truncated_ratio * 100:.0f} % truncated"
    equal = run.zero_variance_ratio
    groups = "" if equal is None else f"; all rewards equal in {equal * 100:.0f} % of groups"
    return f"mean length {number(run.completion_tokens_mean or 0.0)} tokens{cut}{groups}"


def _speed(run: RunView) -> str:
    speeds = (("samples/s", run.samples_per_s), ("tokens/s", run.tokens_per_s))
    parts = [f"{number(value)} {unit}" for unit, value in speeds if value is not None]
    if run.training is not None:
        parts.append(f"effective training time {run.training.ratio:.0%}")
    return ", ".join(parts)


def _buffer(groups: Mapping[str, int], capacity: int) -> str:
    states = ", ".join(f"{count} {state}" for state, count in groups.items())
    return f"{states}; {sum(groups.values())} of {capacity} slots"


def _weights(run: RunView) -> str:
    """Returns the published version and the number of replicas at each version, as text.

    >>> _weights(RunView(published_version=7, replica_versions={"a": 7, "b": 6, "c": 6}))
    'published 7; 1 replica at 7, 2 at 6'
    """
    counts = sorted(Counter(run.replica_versions.values()).items(), reverse=True)
    (newest, at_newest), *others = counts
    first = f"{at_newest} {'replica' if at_newest == 1 else 'replicas'} at {newest}"
    published = "" if run.published_version is None else f"published {run.published_version}; "
    return published + ", ".join([first, *(f"{count} at {version}" for version, count in others)])


def _last(rewards: Sequence[float]) -> str:
    return f"{rewards[-1]:.3f}" if rewards else "–"


class LiveDisplay:
    """Shows views on a console.

    On a terminal it shows a live panel; text that is written to a terminal's stderr appears above the panel. Elsewhere
    it prints a line for each phase, one every `every_steps` steps, one for the first and the last step and for the step
    before a new phase, and one for each new kind of warning.

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
        step, total_steps = view.run.step, view.config.learner.total_steps
        new_phase = view.phase != self._phase
        due = step // self._every_steps > self._printed_steps // self._every_steps
        if step not in (0, self._printed_steps) and (new_phase or due or step in (1, total_steps)):
            self._print(plain_line(view))
            self._printed_steps = step
        if new_phase:
            self._print(phase_line(view))
            self._phase = view.phase
        for note in view.run.notes:
            if note.concern not in self._warned:
                self._print(f"warning: {note.sentence}")
                self._warned.add(note.concern)

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
