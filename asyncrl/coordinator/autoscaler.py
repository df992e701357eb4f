"""The autoscaler decides how many generator replicas a run should have (`generator.autoscale`), by who waits for whom.

    the learner waits for groups, and no generator waits for a ticket        one replica more
    the learner does not wait, and the staleness limit or a full buffer
    blocks as many slots as more than one replica has                        one replica fewer
    both wait: all groups that the buffer admits are in flight               no change; a further replica gets no groups

Both sides are measured in replicas. If the learner waits for the share w of the time, a pool of n replicas generates
the share 1 − w of what the learner could train, so n · w ÷ (1 − w) replicas are lacking. If slots are blocked for the
share b of their time, n · b replicas are to spare.

These rules keep the number from swinging:

- A decision is about a window of whole steps that lasts at least `dwell_s`. A new window begins after each change, and
  again when the new replicas generate. So there is at most one change in `dwell_s`.
- The loads at which the pool grows and shrinks are more than one replica apart.
- The pool does not shrink if a smaller pool could not feed the learner, by the speed at which a replica made groups in
  the last window without blocked slots. The number of blocked slots alone would mislead, because an engine with fewer
  groups at a time makes each of them faster. This speed is forgotten after `KNOWN_WINDOWS`, because the length of
  answers may change meanwhile.
- A removal that was wrong makes the next one slower (`PATIENCE`).

Pure: `Autoscaler.decide` gets the run's totals, and returns a decision. tests/coordinator/test_autoscaler.py simulates
500 runs.
"""

from dataclasses import dataclass

from asyncrl.config.schema import AutoscaleSection

LACKING = 0.3
"""The pool grows if more replicas than this are lacking, and shrinks only if no more are. Below it, the learner of a
pool of one waits for less than a quarter of the time, and that of a pool of ten for less than 3 %."""
SPARE = 1.3
"""The pool shrinks if at least so many replicas are to spare, so that some room is left after the removal."""
KNOWN_WINDOWS = 60
"""Number of windows for which it is remembered how many groups a replica makes: 2 h with the default `dwell_s`."""
PATIENCE = 2
"""Number of windows in a row in which a replica must be to spare before the pool shrinks. If the learner waits after a
removal, this number grows fourfold, at most to `MOST_PATIENCE`: a window of few steps of uneven length is a bad
measure."""
MOST_PATIENCE = 32
MISSED = 0.5
"""The pool does not grow if more replicas than this did not live, on average over a window."""
BLOCKED = 0.05
"""Share of blocked slots up to which a window counts as one without blocked slots."""
WINDOW_STEPS = 2
"""Least number of steps in a window. In one step, learner and generators may wait one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The totals of a run at one moment, and the clock (`at_s`), seconds. `step` is the step of the learner. A step
    takes `groups_per_step` groups, and `groups` were made: they are trained, leased or ready.

    `learner_waits_s`: the learner waited for groups, and no generator waited for a ticket. `both_wait_s`: both waited.
    `replica_s` is the time of all replicas, without their starts, and `blocked_s` the part of it in which the staleness
    limit or a full buffer kept their slots empty, averaged over the slots of a replica.
    """

    at_s: float
    step: int
    groups_per_step: int
    groups: float
    learner_waits_s: float
    both_wait_s: float
    replica_s: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """The new number of replicas, and the reason in words."""

    replicas: int
    because: str


@dataclass(frozen=True, slots=True)
class Window:
    """The steps between two loads, of a run that should have `replicas` replicas.

    >>> zero = dict(groups_per_step=8, both_wait_s=0, blocked_s=0)
    >>> begin = Load(at_s=0, step=0, groups=0, learner_waits_s=0, replica_s=0, **zero)
    >>> end = Load(at_s=100, step=9, groups=72, learner_waits_s=25, replica_s=300, **zero)
    >>> window = Window(begin, end, replicas=3)
    >>> window.lacking  # three replicas make the groups that the learner trains in 75 of 100 seconds
    1.0
    >>> window.demand, window.made_by_one  # groups a second
    (0.96, 0.24)
    """

    begin: Load
    end: Load
    replicas: int

    @property
    def seconds(self) -> float:
        return self.end.at_s - self.begin.at_s

    @property
    def learner_waits(self) -> float:
        """Share of the time in which the learner waited for groups and no generator for a ticket."""
        return (self.end.learner_waits_s - self.begin.learner_waits_s) / self.seconds

    @property
    def learner_waits_in_all(self) -> float:
        """Share of the time in which the learner waited for groups."""
        return self.learner_waits + (self.end.both_wait_s - self.begin.both_wait_s) / self.seconds

    @property
    def lacking(self) -> float:
        """Number of replicas that are lacking, by the time in which the learner waited and no generator did."""
        return self._lacking(self.learner_waits)

    @property
    def lacking_at_most(self) -> float:
        """Number of replicas that are lacking, by all of the time in which the learner waited."""
        return self._lacking(self.learner_waits_in_all)

    @property
    def live(self) -> float:
        """Mean number of replicas that lived."""
        return (self.end.replica_s - self.begin.replica_s) / self.seconds

    @property
    def busy(self) -> float:
        """Number of replicas whose slots were not blocked."""
        return self.live - (self.end.blocked_s - self.begin.blocked_s) / self.seconds

    @property
    def demand(self) -> float:
        """Groups a second that the learner takes between its waits."""
        groups = (self.end.step - self.begin.step) * self.end.groups_per_step
        return groups / self.seconds / max(1e-9, 1.0 - self.learner_waits_in_all)

    @property
    def made_by_one(self) -> float | None:
        """Groups a second that a replica makes; None if slots were blocked, or if no replica has reported."""
        if self.live <= 0 or self.live - self.busy > BLOCKED * self.live:
            return None
        return (self.end.groups - self.begin.groups) / self.seconds / self.live

    def _lacking(self, share: float) -> float:
        return self.replicas * share / max(1e-9, 1.0 - share)


class Autoscaler:
    """Decides about the number of replicas of one run, within `limits`."""

    def __init__(self, limits: AutoscaleSection) -> None:
        self._limits = limits
        self._begin: Load | None = None  # the begin of the window
        self._step: int | None = None
        self._replicas: int | None = None
        self._settling = True  # whether the pool has changed, and not all of its replicas have generated since then
        self._made_by_one: float | None = None  # groups a second, in the last window without blocked slots
        self._age = 0  # windows since that window
        self._spare_windows = 0  # windows in a row in which a replica was to spare
        self._patience = PATIENCE
        self._removed = False  # whether the last change was a removal

    def forget(self) -> None:
        """Begins a new window with the next step, because the run does not train now."""
        self._begin = None

    def decide(self, load: Load, *, replicas: int, live: int) -> Change | None:
        """Returns the change of the number of replicas that should follow now; None for no change.

        The call comes every second. The run should have `replicas` replicas, of which `live` generate.
        """
        self._look_at(replicas, all_live=live == replicas)
        stepped, self._step = self._step is not None and load.step != self._step, load.step
        if not stepped:
            return None
        begin = self._begin
        if begin is None:
            self._begin = load
            return None
        if load.at_s - begin.at_s < self._limits.dwell_s or load.step - begin.step < WINDOW_STEPS:
            return None
        self._begin = load
        return self._change(Window(begin, load, replicas))

    def _look_at(self, replicas: int, *, all_live: bool) -> None:
        """Begins a new window if the number of replicas has changed, and again when all of them then generate. A
        replica that fails and comes back later begins no new window: in a large pool, some replica nearly always
        does."""
        if replicas != self._replicas:
            self._replicas, self._settling = replicas, True
            self.forget()
        if self._settling and all_live:
            self._settling = False
            self.forget()

    def _change(self, window: Window) -> Change | None:
        replicas, least, most = window.replicas, self._limits.min, self._limits.max
        if not least <= replicas <= most:
            return _changed(replicas, min(most, max(least, replicas)), "these are the limits")
        self._learn(window)
        # A pool that misses a replica waits for it, and does not get a further one.
        misses_one = replicas - window.live > MISSED
        if not misses_one and replicas < most and window.lacking > LACKING:
            if self._removed:
                self._patience = min(4 * self._patience, MOST_PATIENCE)
            self._removed = False
            return _changed(
                replicas,
                replicas + 1,
                f"the learner waited for groups in {window.learner_waits:.0%} of the last {window.seconds:.0f} s, and "
                "no generator waited for a ticket meanwhile",
            )
        needed = max(window.busy, window.demand / self._made_by_one if self._made_by_one else 0.0)
        spare = replicas - needed if window.lacking_at_most <= LACKING else 0.0
        self._spare_windows = self._spare_windows + 1 if spare >= SPARE else 0
        # With one more replica to spare, there is no doubt that one can be removed.
        patience = self._patience if spare < SPARE + 1 else PATIENCE
        if replicas > least and self._spare_windows >= patience:
            self._removed, self._spare_windows = True, 0
            return _changed(
                replicas,
                replicas - 1,
                f"the staleness limit or a full buffer blocked as many slots as {replicas - window.busy:.1f} replicas "
                f"have for the last {window.seconds:.0f} s, and the learner waited for groups in "
                f"{window.learner_waits_in_all:.0%} of this time",
            )
        return None

    def _learn(self, window: Window) -> None:
        """Notes how many groups a replica makes, if no slots were blocked."""
        made_by_one, self._age = window.made_by_one, self._age + 1
        if made_by_one is not None or self._age > KNOWN_WINDOWS:
            self._made_by_one, self._age = made_by_one, 0


def _changed(before: int, after: int, why: str) -> Change:
    return Change(after, f"generator.autoscale: from {before} to {after} replicas, because {why}")
