"""Runs the checks of `asyncrl audit` on a run's directory."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.audit.books import exactly_once, ledger_closes, versions_in_bounds
from asyncrl.audit.chain import chain_holds
from asyncrl.audit.comparisons import PlainComputation
from asyncrl.audit.history import Counterexample, History, NotPossible, Outcome, Verdict, read_history
from asyncrl.audit.replay import steps_replay
from asyncrl.audit.witnessed import steps_witnessed

CHECKS: dict[str, Callable[[History], str]] = {
    "1 exactly once": exactly_once,
    "2 ledger": ledger_closes,
    "3 versions": versions_in_bounds,
    "4 weights": chain_holds,
}


def audit(directory: Path, *, trust: bool = False) -> Iterator[Outcome]:
    """Yields the outcome of checks 1 to 5 of the run in `directory`, as soon as it is known. Raises RunError if the run
    has no records. Code that the run's config names is imported only with `trust`."""
    yield from outcomes_of(read_history(directory), trust=trust)


def outcomes_of(
    history: History,
    *,
    trust: bool = False,
    witness_steps: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Outcome]:
    """Yields the outcome of each check, as soon as it is known. Code that the run's config names is imported only with
    `trust`. If `witness_steps` is above 0, check 6 computes this number of steps again by a plain path, and calls
    `progress` with a line of text before each of them."""
    checks: dict[str, Callable[[History], str | PlainComputation]] = {
        **CHECKS,
        "5 replay": partial(steps_replay, trust=trust),
    }
    if witness_steps:
        checks["6 witness"] = partial(steps_witnessed, steps=witness_steps, progress=progress, trust=trust)
    for name, check in checks.items():
        yield checked(name, check, history)


def checked(name: str, check: Callable[[History], str | PlainComputation], history: History) -> Outcome:
    """Calls a check with the history of a run, and returns its outcome: failed with the counterexample, not possible
    with the reason, or passed with the text that the check returned. Check 6 returns comparisons instead of a text, and
    fails if one of them failed. If records are damaged, the outcome is failed without a call; if no step was trained
    yet, it is not possible."""
    try:
        history.require_steps()
        found = check(history)
    except Counterexample as counterexample:
        return Outcome(name, Verdict.FAILED, str(counterexample))
    except NotPossible as why:
        return Outcome(name, Verdict.NOT_POSSIBLE, str(why))
    if isinstance(found, str):
        return Outcome(name, Verdict.PASSED, found)
    failure = found.failure
    return Outcome(name, Verdict.PASSED if failure is None else Verdict.FAILED, failure or str(found), witnessed=found)
