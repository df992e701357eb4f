"""Makes the live view of a run from its metrics endpoints only. Each view is made from two scrapes.

Gauges, such as the number of groups in the buffer, come from the newer scrape. Speeds, shares of time and staleness
come from the growth of counters between the two.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.errors import RunEnded, RunError
from asyncrl.metrics.scrape import Scrape, read_targets, scrape
from asyncrl.views.headline import RunFacts, headline
from asyncrl.views.live import LiveView
from asyncrl.views.run_facts import RECENT_STEPS, Setting, setting_at

LEARNER_SECONDS, GENERATOR_SECONDS = "asyncrl_learner_state_seconds_total", "asyncrl_generator_state_seconds_total"
WINDOW_S = 30.0
"""Speeds and shares cover this many seconds. A step can take several seconds, so between two scrapes in a row the
learner may be in one stage only."""
ANSWER_S = 2.0
"""Time limit for the answer of an endpoint, seconds."""


def watch(run_dir: Path, *, every_s: float, sleep: Callable[[float], None] = time.sleep) -> Iterator[LiveView]:
    """Yields a view every `every_s` seconds, which covers the last `WINDOW_S` seconds or the time since the start.

    Raises RunEnded when the run lists no endpoints any more. Raises RunError when no endpoint answers: the run was
    killed, or its endpoints cannot be reached from this machine.
    """
    top, looks = TopView(_name(run_dir), setting=setting_at(run_dir)), deque([_look(run_dir)])
    while True:
        sleep(every_s)
        looks.append(_look(run_dir))
        while len(looks) > 2 and looks[-1].at_s - looks[1].at_s >= WINDOW_S:
            looks.popleft()
        yield top.view(looks[0], looks[-1])


def _look(run_dir: Path) -> Scrape:
    """Reads the endpoints of the run once. Raises RunEnded or RunError as `watch` does."""
    name, path = _name(run_dir), run_dir / "metrics" / "targets.json"
    targets = read_targets(path)
    if not targets:
        raise RunEnded(f"run {name} has ended: {path} lists no endpoints any more")
    found = scrape(targets, run=name, timeout_s=ANSWER_S)
    if len(found.silent) + len(found.foreign) == len(targets):
        strangers = "".join(f"; {line}" for line in found.strangers())
        raise RunError(
            f"none of the {len(targets)} endpoints in {path} answered for run {name} within {ANSWER_S:g} s: the run "
            "was killed, or metrics.host binds the endpoints to addresses that this machine cannot reach"
            f"{strangers}"
        )
    return found


def _name(run_dir: Path) -> str:
    """Returns the name of the run, which is the name of its directory.

    When the directory of an ended run was renamed, no endpoint has its new name, so the view cannot show another run.
    """
    return run_dir.resolve().name


class TopView:
    """Makes the views of one run.

    It keeps the reward and the share of equal rewards of each step, because an endpoint has only those of the last
    step.
    """

    def __init__(self, name: str, *, setting: Setting) -> None:
        self._name = name
        self._setting = setting
        self._rewards: dict[int, float] = {}
        self._equal: dict[int, tuple[float, float]] = {}
        self._heldout: list[float] = []

    def view(self, before: Scrape, now: Scrape, *, unix_s: float | None = None) -> LiveView:
        """Returns the view for the time between two scrapes. `unix_s` is the present Unix time."""
        unix_s = time.time() if unix_s is None else unix_s
        grown = now.since(before)
        started_s = now.last("process_start_time_seconds", role="learner")
        step = _whole(now.last("asyncrl_learner_policy_version")) or 0
        groups = now.sums("asyncrl_buffer_groups", by="state")
        versions = now.sums("asyncrl_generator_policy_version", by="replica")
        self._remember(now, step)
        return LiveView(
            name=self._name,
            phase=_endpoints(now),
            elapsed_s=max(0.0, unix_s - started_s) if started_s is not None and started_s > 0 else None,
            total_steps=None,
            staleness_limit=_whole(now.last("asyncrl_staleness_limit_versions")),
            step=step,
            rewards=list(self._rewards.values()),
            heldout=self._heldout,
            oldest_token_versions=_largest(grown, "asyncrl_token_staleness_versions"),
            ess_ratio=_ratio(now.last("asyncrl_learner_ess_ratio")),
            samples_per_s=_rate(grown, "asyncrl_generator_samples_total", outcome="accepted"),
            tokens_per_s=_rate(grown, "asyncrl_learner_tokens_total"),
            buffer_groups=_all_whole(groups) or None,
            buffer_capacity_groups=_whole(now.last("asyncrl_buffer_capacity_groups")),
            published_version=_whole(now.last("asyncrl_published_policy_version")),
            replica_versions=_all_whole(versions),
            learner_shares=grown.shares(LEARNER_SECONDS, by="state"),
            generator_shares=grown.shares(GENERATOR_SECONDS, by="state"),
            headline=headline(facts_of_scrapes(now, grown, setting=self._setting, equal=list(self._equal.values()))),
        )

    def _remember(self, now: Scrape, step: int) -> None:
        reward, heldout = now.last("asyncrl_learner_reward_mean"), now.last("asyncrl_learner_heldout_reward_mean")
        if reward is not None:
            self._rewards[step] = reward
        if heldout is not None and self._heldout[-1:] != [heldout]:
            self._heldout.append(heldout)
        if step and (equal := equal_rewards(now)) is not None:
            self._equal[step] = equal


def equal_rewards(now: Scrape) -> tuple[float, float] | None:
    """Returns the share of the last step's groups with equal rewards, and the share with equal rewards above 0."""
    equal, above = (_ratio(now.last(f"asyncrl_learner_{name}_ratio")) for name in ("zero_variance", "all_right"))
    return None if equal is None else (equal, above or 0.0)


def facts_of_scrapes(now: Scrape, grown: Scrape, *, setting: Setting, equal: Sequence[tuple[float, float]]) -> RunFacts:
    """Returns the facts from scrapes: gauges from `now`, counts and shares of time from the growth `grown`.

    `equal` has the results of `equal_rewards` for each step so far.
    """
    last = equal[-RECENT_STEPS:]
    steps = now.sums("asyncrl_learner_steps_total", by="outcome")
    known = bool(last) and not setting.equal_rewards_teach
    return RunFacts(
        steps_trained=_whole(steps.get("trained", 0.0)),
        steps_skipped=_whole(steps.get("skipped", 0.0)),
        equal_rewards_ratio=sum(ratio for ratio, _ in last) / len(last) if known else None,
        equal_above_zero_ratio=sum(ratio for _, ratio in last) / len(last) if known else None,
        equal_rewards_steps=len(last),
        groups=grown.sums("asyncrl_ledger_groups_total", by="fate"),
        failures=grown.sums("asyncrl_rollout_failures_total", by="reason"),
        parity_nats=max(now.sums("asyncrl_weight_parity_nats", by="replica").values(), default=None),
        parity_limit_nats=now.last("asyncrl_weight_parity_limit_nats"),
        ess_ratio=_ratio(now.last("asyncrl_learner_ess_ratio")),
        learner_shares=grown.shares(LEARNER_SECONDS, by="state"),
        generator_shares=grown.shares(GENERATOR_SECONDS, by="state"),
        room=setting.room,
    )


def _endpoints(now: Scrape) -> str:
    """Returns the number of answering endpoints by role, and the endpoints without an answer, as text.

    >>> from asyncrl.metrics.discovery import Target
    >>> learner = frozenset({("role", "learner"), ("replica", "learner")})
    >>> gone = Target(role="generator", replica="g-1", address="a:1")
    >>> _endpoints(Scrape(at_s=0, values={"asyncrl_heartbeat_timestamp_seconds": {learner: 1.0}}, silent=(gone,)))
    '1 learner; no answer from g-1'
    """
    answering = now.values.get("asyncrl_heartbeat_timestamp_seconds", {})
    roles = Counter(dict(labels).get("role", "") for labels in answering)
    parts = [f"{count} {role}{'s' if count > 1 else ''}" for role, count in sorted(roles.items(), reverse=True)]
    silent = ", ".join(target.replica for target in now.silent)
    return "; ".join(
        part for part in (", ".join(parts), f"no answer from {silent}" if silent else "", *now.strangers()) if part
    )


def _rate(grown: Scrape, name: str, **where: str) -> float | None:
    """Returns the growth of a counter per second, summed over all processes; None when no process has the counter or
    the growth is negative."""
    by_role = grown.sums(name, by="role", **where)
    total = sum(by_role.values())
    return total / grown.at_s if by_role and total >= 0 and grown.at_s > 0 else None


def _largest(grown: Scrape, histogram: str) -> int | None:
    """Returns the upper bound of the highest bucket of a histogram that grew.

    Returns None when no bucket grew, or when only the bucket without an upper bound grew.
    """
    buckets = sorted((float(le), count) for le, count in grown.sums(f"{histogram}_bucket", by="le").items())
    total = buckets[-1][1] if buckets else 0.0
    return next((_whole(le) for le, count in buckets if count == total), None) if total else None


def _whole(value: float | None) -> int | None:
    """Returns a count or version as an int; None when it is missing, negative, or above 2**53, where floats are
    inexact.

    >>> [_whole(value) for value in (3.0, None, -5.0, float("inf"))]
    [3, None, None, None]
    """
    return int(value) if value is not None and 0 <= value <= 2**53 else None


def _ratio(value: float | None) -> float | None:
    """Returns a share; None when it is missing, below 0, or would be shown as more than 100 %."""
    return value if value is not None and 0 <= value < 1.005 else None


def _all_whole(values: Mapping[str, float]) -> dict[str, int]:
    """Returns the values that are counts or versions, as ints."""
    return {label: count for label, value in values.items() if (count := _whole(value)) is not None}
