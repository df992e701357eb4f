"""Makes `report.html`: one self-contained page with a run's curves and totals, from its records only.

The page is made of Jinja templates (`report.html.j2` in the frame `page.html.j2`), a style sheet and a script, which
become one file without external files. It can be printed: a print is always on white paper. The print shows the
configuration, which is folded on the screen, and those samples that are open on the screen.
tests/views/test_report_in_chromium.py checks this in a real browser.

The report can be made at any time, also while the run is running or after it was killed; it then leaves out what is not
recorded. All text that comes from a run (samples, names, reasons) is escaped, so that markup in a completion stays
text.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.buffer.records import FailureCount
from asyncrl.config.schema import Config
from asyncrl.errors import FileRefused, RunError
from asyncrl.learner.costs import costs
from asyncrl.learner.records import (
    LOST_STEPS,
    EvalRecord,
    RunInfo,
    RunTotals,
    SampleRecord,
    StepRecord,
    Summary,
    build_summary,
    groups_by_reason,
    read_config,
    read_lines,
)
from asyncrl.learner.training_time import training_time
from asyncrl.run_files import UNREADABLE, read
from asyncrl.views.headline import Headline, headline
from asyncrl.views.page_templates import TEMPLATES
from asyncrl.views.report_panels import evaluations, flow, learning, restart_marks
from asyncrl.views.report_samples import shown_samples, some_samples
from asyncrl.views.report_staleness import limit_to_draw, staleness
from asyncrl.views.run_view import RunView, run_view
from asyncrl.views.samples import BANDS, SUBJECTS, facts
from asyncrl.views.setting import Setting, setting_at


@dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run. `wall_s` is the time since its first start, until its end or until they were read; for a
    run of another host whose end is not recorded, until the last record. `lost` has the records of steps that were lost
    when the run was resumed from an earlier checkpoint. `samples` has the samples of a few steps, by step, and
    `steps_with_samples` is the number of steps whose samples are recorded."""

    info: RunInfo
    config: Config
    config_text: str
    setting: Setting
    wall_s: float
    steps: Sequence[StepRecord]
    lost: Sequence[StepRecord]
    evals: Sequence[EvalRecord]
    summary: Summary | None
    samples: Mapping[int, Sequence[SampleRecord]]
    steps_with_samples: int
    failures: Sequence[FailureCount]

    @cached_property
    def view(self) -> RunView:
        """The view of the whole run, with its health notes."""
        failures = groups_by_reason(self.failures)
        training = training_time(self.steps, lost=self.lost, wall_s=self.wall_s)
        return run_view(
            self.steps,
            recent=False,
            evals=self.evals,
            setting=self.setting,
            failures=failures,
            training=training,
            costs=costs(self.steps, lost=self.lost),
        )

    @property
    def headline(self) -> Headline | None:
        """The headline of the whole run."""
        return headline(self.view)

    @property
    def totals(self) -> Summary | None:
        """The summary. For a run that is still running or has failed, it is computed from the records so far. None
        without a trained step. Its effective training time ratio and its costs are those of `view` in both cases: the
        run writes its summary some seconds before it has ended."""
        found = self.summary or _summary_so_far(self)
        if found is None or self.view.training is None:
            return found
        return msgspec.structs.replace(
            found, effective_training_time_ratio=self.view.training.ratio, costs=tuple(self.view.costs)
        )


def read_run(path: Path, *, info: RunInfo | None = None) -> RunRecords:
    """Returns the records of a run directory. `info` replaces the content of the directory's run.json. Pass it for
    a run that was killed: its run.json still has the state `running`.

    Raises RunError when `path` is not a run directory. Raises ConfigError or RunError when another version of asyncrl
    wrote its files.
    """
    if not os.path.lexists(path / "run.json"):
        raise RunError(f"{path} is not a run directory: it has no run.json; give a folder such as runs/quickstart")
    try:
        written = msgspec.json.decode(read(path / "run.json"), type=RunInfo)
        summary_path = path / "summary.json"
        summary = msgspec.json.decode(read(summary_path), type=Summary) if os.path.lexists(summary_path) else None
        failures_path = path / "failures.json"
        kept = read(failures_path) if os.path.lexists(failures_path) else b"[]"
        failures = msgspec.json.decode(kept, type=list[FailureCount])
    except FileRefused:
        raise
    except UNREADABLE as error:
        raise RunError(
            f"{path}: run.json, summary.json or failures.json was not written by this version of asyncrl ({error}): "
            "make the report with the version that ran it"
        ) from error
    samples, steps_with_samples = some_samples(path)
    info = info or written
    steps, evals = read_lines(path / "steps.jsonl", StepRecord), read_lines(path / "evals.jsonl", EvalRecord)
    return RunRecords(
        info=info,
        wall_s=info.wall_s(_last_known_s(info, steps, evals)),
        config=read_config(path),
        config_text=read(path / "config.yaml").decode(),
        setting=setting_at(path),
        steps=steps,
        lost=read_lines(path / LOST_STEPS, StepRecord),
        evals=evals,
        summary=summary,
        samples=samples,
        steps_with_samples=steps_with_samples,
        failures=failures,
    )


def _last_known_s(info: RunInfo, steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> float:
    """Returns the Unix time until which it is known that the run went on: now, or, for a run of another host, the time
    of its last record. That host may be lost, and then run.json has the state `running` for ever.

    In a resumed run, the `wall_s` of the records goes on from that of the checkpoint. The time since the last start is
    therefore the difference of the two.
    """
    if info.host == socket.gethostname():
        return time.time()
    if not info.resumed:
        began_s, before_s = datetime.fromisoformat(info.started).timestamp(), 0.0
    else:
        began_s = info.resumed[-1].unix_time_s
        before_s = max((record.wall_s for record in steps if record.step < info.resumed[-1].step), default=0.0)
    last_s = max([record.wall_s for record in steps] + [record.wall_s for record in evals], default=0.0)
    return min(time.time(), began_s + max(0.0, last_s - before_s))


def write_report(path: Path, *, output: Path | None = None, info: RunInfo | None = None) -> Path:
    """Writes the report of the run directory `path` to `output`, by default to its report.html, and returns the path of
    the report. `info` is used instead of the content of run.json."""
    target = output or path / "report.html"
    write_atomically(target, report_html(read_run(path, info=info)).encode())
    return target


def report_html(run: RunRecords) -> str:
    """Returns the report as HTML. The template `report.html.j2` has its texts and tables."""
    drawn_limit = limit_to_draw(run.steps, limit=run.config.staleness.max_versions)
    marks = restart_marks(run.info.resumed)
    return TEMPLATES.get_template("report.html.j2").render(
        run=run,
        summary=run.totals,
        headline=run.headline,
        notes=run.view.notes,
        learning=learning(run.steps, run.evals, marks=marks) if run.steps else [],
        evaluations=evaluations(run.evals) if run.steps else None,
        flow=flow(run.steps, marks=marks) if run.steps else [],
        staleness=staleness(run.steps, limit=drawn_limit, marks=marks) if run.steps else [],
        drawn_limit=drawn_limit,
        samples=shown_samples(run.samples, recorded_steps=run.steps_with_samples),
        color_by=SUBJECTS,
        bands=BANDS,
        facts=facts,
    )


def _summary_so_far(run: RunRecords) -> Summary | None:
    if not any(record.trained for record in run.steps):
        return None
    last = run.steps[-1]
    totals = RunTotals(
        wall_s=last.wall_s,
        generated_tokens=last.generated_tokens,
        groups_discarded=0,
        groups_failed={},
        ledger_closed=False,
        rows_outstanding=0,
        weight_updates=last.weight_updates,
        mid_sequence_updates=last.mid_sequence_updates,
        parity_max_nats=None,
    )
    return build_summary(
        run.steps,
        run.evals,
        totals,
        staleness_limit=run.config.staleness.max_versions,
        restarts=len(run.info.resumed),
        lost=run.lost,
    )
