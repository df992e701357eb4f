"""Numbers over many records of a run: its summary, and what views show of several steps."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.config.schema import HELDOUT
from asyncrl.errors import RunError
from asyncrl.learner.records import EvalRecord, HeldoutEnds, RunTotals, StepRecord, Summary


def build_summary(
    records: Sequence[StepRecord],
    evals: Sequence[EvalRecord],
    totals: RunTotals,
    *,
    staleness_limit: int,
    restarts: int = 0,
    lost: Sequence[StepRecord] = (),
) -> Summary:
    """Returns the summary of a run that was resumed `restarts` times and has `lost` the records of `LOST_STEPS`. Raises
    RunError when no step was trained."""
    steps = [record for record in records if record.trained]
    if not steps:
        raise RunError("there is no summary, because the run trained no step: look at its logs for the cause")
    window = edge_window(len(steps))
    parity_max_nats = largest([totals.parity_max_nats, *(record.parity_nats for record in steps)])
    learner_shares = state_shares(steps, "learner_state_s")
    ess_mean, ess_lowest = ess_of_steps(steps)
    ends = heldout_ends(evals)
    own = ends.pop(HELDOUT, HeldoutEnds())
    return Summary(
        **msgspec.structs.asdict(totals) | {"parity_max_nats": parity_max_nats},
        steps=len(steps),
        time_to_first_step_s=steps[0].wall_s,
        samples_per_s=_samples_per_s(steps),
        reward_first=mean([record.reward_mean for record in steps[:window]]),
        reward_last=mean([record.reward_mean for record in steps[-window:]]),
        heldout_first=own.first,
        heldout_last=own.last,
        heldout_prompts=own.prompts,
        heldout_failed=own.failed,
        heldout_sets=ends,
        staleness_limit=staleness_limit,
        max_group_staleness=max(max(record.group_staleness, default=0) for record in steps),
        max_token_staleness=max(max(record.token_staleness, default=0) for record in steps),
        ess_ratio_mean=ess_mean,
        ess_ratio_lowest=ess_lowest,
        generator_busy_ratio=state_shares(steps, "generator_state_s").get("generating", 0.0),
        learner_busy_ratio=sum(
            share for state, share in learner_shares.items() if state not in ("waiting_for_groups", "other")
        ),
        trained_tokens=sum(record.trained_tokens for record in steps),
        restarts=restarts,
        lost_steps=sum(record.trained for record in lost),
    )


def heldout_ends(evals: Sequence[EvalRecord]) -> dict[str, HeldoutEnds]:
    """Returns the first and the last evaluation of each held-out set, by name."""
    found: dict[str, HeldoutEnds] = {}
    for name in dict.fromkeys(record.name for record in evals):
        of_set = [record for record in evals if record.name == name]
        found[name] = HeldoutEnds(
            first=of_set[0].reward_mean,
            last=of_set[-1].reward_mean if len(of_set) > 1 else None,
            prompts=of_set[-1].prompts,
            failed=of_set[-1].failed,
        )
    return found


def ess_of_steps(records: Sequence[StepRecord]) -> tuple[float | None, float | None]:
    """Returns the mean and the lowest effective sample size (`ess_ratio`) of the trained steps; None if none has one.

    docs/tuning-staleness.md has limits for these two numbers.
    """
    sizes = _present([record.ess_ratio for record in records if record.trained])
    return mean(sizes), min(sizes, default=None)


def edge_window(steps: int) -> int:
    """Returns over how many steps `reward_first` and `reward_last` are averaged: 5 %, at least 1, at most 10."""
    return min(10, max(1, steps // 20))


def state_shares(steps: Sequence[StepRecord], field: str) -> dict[str, float]:
    """Returns the shares of time by state between the first and the last of `steps`. The shares add up to 1.

    `field` is `learner_state_s` or `generator_state_s`. With one step, the shares cover the time before it, too. The
    state `starting` is left out: a restarted run would else look slower than it was. Returns an empty dict when there
    is no step, or when no time has passed.
    """
    if not steps:
        return {}
    end: dict[str, float] = getattr(steps[-1], field)
    start: dict[str, float] = getattr(steps[0], field) if len(steps) > 1 else {}
    return shares_of({state: max(0.0, total - start.get(state, 0.0)) for state, total in end.items()})


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each state's share of the seconds without those of the state `starting`; empty if no such time has
    passed."""
    started = {state: part for state, part in seconds.items() if state != "starting"}
    total = sum(started.values())
    return {state: part / total for state, part in started.items()} if total > 0 else {}


def running_s(steps: Sequence[StepRecord]) -> float:
    """Returns the seconds between the first and the last of `steps` in which the run was not starting (again)."""
    first, last = steps[0], steps[-1]
    starting_s = last.learner_state_s.get("starting", 0.0) - first.learner_state_s.get("starting", 0.0)
    return last.wall_s - first.wall_s - starting_s


def _samples_per_s(steps: Sequence[StepRecord]) -> float:
    """Returns trained samples per second of the time in which the run was not starting.

    The first step's samples and the time until its end are left out, because this time contains the start of the run. A
    run with one step has nothing else to count.
    """
    if len(steps) == 1:
        return steps[0].trained_samples / max(steps[0].wall_s, 1e-9)
    samples = sum(record.trained_samples for record in steps[1:])
    return samples / max(running_s(steps), 1e-9)


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the finite values; None when there are none."""
    present = _present(values)
    return sum(present) / len(present) if present else None


def largest(values: Sequence[float | None]) -> float | None:
    """Returns the largest finite value; None when there is none."""
    return max(_present(values), default=None)


def _present(values: Sequence[float | None]) -> list[float]:
    """Returns the finite values. A record in memory may have NaN where its file has null."""
    return [value for value in values if value is not None and math.isfinite(value)]
