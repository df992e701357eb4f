"""Runs the checks of `asyncrl audit` on a run's directory."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.audit.books import exactly_once, ledger_closes, versions_in_bounds
from asyncrl.audit.chain import chain_holds
from asyncrl.audit.history import Counterexample, History, NotPossible, Outcome, Verdict, read_history
from asyncrl.audit.replay import steps_replay

CHECKS: dict[str, Callable[[History], str]] = {
    "1 exactly once": exactly_once,
    "2 ledger": ledger_closes,
    "3 versions": versions_in_bounds,
    "4 weights": chain_holds,
}


def audit(directory: Path, *, trust: bool = False) -> Iterator[Outcome]:
    """Yields the outcome of each check, as soon as it is known. Code that the run's config names is imported only with
    `trust`. Raises RunError if the run has no records."""
    history = read_history(directory)
    replay: Callable[[History], str] = partial(steps_replay, trust=trust)
    for name, check in {**CHECKS, "5 replay": replay}.items():
        yield checked(name, check, history)


def checked(name: str, check: Callable[[History], str], history: History) -> Outcome:
    """Runs a check of a run's history, which returns what it checked, and returns its outcome."""
    try:
        history.require_steps()
        return Outcome(name, Verdict.PASSED, check(history))
    except Counterexample as found:
        return Outcome(name, Verdict.FAILED, str(found))
    except NotPossible as why:
        return Outcome(name, Verdict.NOT_POSSIBLE, str(why))
