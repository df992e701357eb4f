"""The run's log: how the learner passes its records to the deployment, which writes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.learner.audit_records import Record
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """Writes the records of steps and evaluations. `write_samples` gets a step and the samples that it logs.
    `append_audit` gets a record for the audit."""

    append_step: Callable[[StepRecord], None]
    append_eval: Callable[[EvalRecord], None]
    write_samples: Callable[[int, Sequence[SampleRecord]], None]
    append_audit: Callable[[Record], None]
