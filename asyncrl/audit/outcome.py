"""The outcome of one check of the audit, and the errors with which a check says that it did not pass."""

from dataclasses import dataclass
from enum import StrEnum

from asyncrl.errors import RunError


class Verdict(StrEnum):
    """The result of a check. NOT_POSSIBLE: the run did not write what the check needs, or this machine cannot do it."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the check `name`. `detail` says what was checked, or has the first counterexample, or the reason
    why the check is not possible."""

    name: str
    verdict: Verdict
    detail: str

    def __str__(self) -> str:
        return f"{self.verdict.upper() if self.verdict is Verdict.FAILED else self.verdict}: {self.name}: {self.detail}"


class Counterexample(RunError):
    """A check found something that must not be."""


class NotPossible(RunError):
    """A check cannot be made."""
