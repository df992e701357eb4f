"""Makes `report.html`: one self-contained page with a run's curves and totals, from its records only.

The report can be made at any time, also while the run goes on or after it was killed; it then leaves out what is not
recorded. All text that comes from a run (samples, names, reasons) is escaped, so that markup in a completion stays
text.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.buffer.records import FailureCount
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.learner.failures import groups_by_reason
from asyncrl.learner.records import (
    EvalRecord,
    RunInfo,
    RunTotals,
    SampleRecord,
    StepRecord,
    Summary,
    build_summary,
    read_lines,
)
from asyncrl.views.headline import Headline, headline
from asyncrl.views.quantities import duration, number
from asyncrl.views.report_page import Section, Table, page
from asyncrl.views.report_panels import flow, learning
from asyncrl.views.report_staleness import staleness
from asyncrl.views.run_facts import Setting, facts_of_steps, setting_at

SAMPLE_CHARACTERS = 20_000
"""Longest text of a sample in the report, so that a browser can open the page. The folder samples/ has the whole
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """The records of a run. `samples` has the samples of a few steps, by step."""

    info: RunInfo
    config: str
    facts: str
    """The main values of the configuration, in one line."""
    staleness_limit: int
    setting: Setting
    steps: Sequence[StepRecord]
    evals: Sequence[EvalRecord]
    summary: Summary | None
    samples: dict[int, list[SampleRecord]]
    failures: Sequence[FailureCount]

    @property
    def headline(self) -> Headline | None:
        """The headline of the whole run."""
        failures = groups_by_reason(self.failures)
        return headline(facts_of_steps(self.steps, setting=self.setting, failures=failures, recent=False))


def read_run(path: Path) -> RunRecords:
    """Returns the records of a run directory.

    Raises RunError when `path` is not a run directory. Raises ConfigError or RunError when another version of asyncrl
    wrote its files.
    """
    if not (path / "run.json").exists():
        raise RunError(f"{path} is not a run directory: it has no run.json; give a folder such as runs/quickstart")
    try:
        info = msgspec.json.decode((path / "run.json").read_bytes(), type=RunInfo)
        summary_path = path / "summary.json"
        summary = msgspec.json.decode(summary_path.read_bytes(), type=Summary) if summary_path.exists() else None
        failures_path = path / "failures.json"
        kept = failures_path.read_bytes() if failures_path.exists() else b"[]"
        failures = msgspec.json.decode(kept, type=list[FailureCount])
    except msgspec.MsgspecError as error:
        raise RunError(
            f"{path}: run.json, summary.json or failures.json was not written by this version of asyncrl ({error}): "
            "make the report with the version that ran it"
        ) from error
    config_path = path / "config.yaml"
    config = load_config([config_path], [])
    return RunRecords(
        info=info,
        config=config_path.read_text(encoding="utf-8"),
        facts=_facts(config),
        staleness_limit=config.staleness.max_versions,
        setting=setting_at(path),
        steps=read_lines(path / "steps.jsonl", StepRecord),
        evals=read_lines(path / "evals.jsonl", EvalRecord),
        summary=summary,
        samples=_some_samples(path / "samples"),
        failures=failures,
    )


def _facts(config: Config) -> str:
    """Returns the main values of the configuration in one line.

    >>> _facts(Config())
    'models/tiny-speller · reasoning_gym · decoupled_icepop · 16 × 8 samples per step · at most 2 versions old'
    """
    own, task = config.data.dataset == "environment", config.environment.options.get("task")
    loss = config.algorithm.loss
    return " · ".join(
        [
            config.model.path,
            config.environment.name + (f" ({task})" if isinstance(task, str) else "") if own else config.data.dataset,
            loss if isinstance(loss, str) else "custom objective",
            f"{config.learner.groups_per_step} × {config.learner.group_size} samples per step",
            f"at most {config.staleness.max_versions} versions old",
        ]
    )


def _some_samples(folder: Path) -> dict[int, list[SampleRecord]]:
    """Returns the samples of the first, the middle and the last step with a sample file, by step."""
    numbers = [path.stem.removeprefix("step-") for path in folder.glob("step-*.jsonl")]
    steps = sorted(int(text) for text in numbers if text.isdecimal())
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return {step: read_lines(folder / f"step-{step}.jsonl", SampleRecord) for step in chosen}


def write_report(path: Path, *, output: Path | None = None, info: RunInfo | None = None) -> Path:
    """Writes the report of the run directory `path` and returns its path. `info` is shown instead of run.json."""
    target, run = output or path / "report.html", read_run(path)
    if info is not None:
        run = dataclasses.replace(run, info=info)
    write_atomically(target, report_html(run).encode())
    return target


def report_html(run: RunRecords) -> str:
    """Returns the report as HTML."""
    summary = run.summary or _summary_so_far(run)
    sections = [_failures(run.failures)]
    if run.steps:
        sections += [
            learning(run.steps, run.evals),
            flow(run.steps),
            staleness(run.steps, limit=run.staleness_limit),
            _totals(run.steps),
        ]
    sections.append(_samples(run.samples))
    return page(
        info=run.info,
        facts=run.facts,
        headline=run.headline,
        tiles=_tiles(summary, ended=run.summary is not None) if summary is not None else [],
        sections=[section for section in sections if section.figures or any(table.rows for table in section.tables)],
        config=run.config,
    )


def _summary_so_far(run: RunRecords) -> Summary | None:
    """Returns the summary of the records so far, for a run that goes on or failed; None without a trained step."""
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
        probe_parity_max_nats=None,
    )
    return build_summary(run.steps, run.evals, totals, staleness_limit=run.staleness_limit)


def _tiles(summary: Summary, *, ended: bool) -> list[tuple[str, str, str]]:
    """Returns (name, value, note) of the tiles with the main numbers.

    Discarded groups are known only when the run has `ended` normally.
    """
    first_step = f"in {duration(summary.wall_s)}, the first after {duration(summary.time_to_first_step_s)}"
    oldest = f"{summary.max_group_staleness} of {summary.staleness_limit}"
    entries = [
        ("Reward", _arrow(summary.reward_first, summary.reward_last), "mean, first to last steps"),
        ("Held-out reward", _arrow(summary.heldout_first, summary.heldout_last), "greedy, on untrained questions"),
        ("Steps", f"{summary.steps:,}", first_step),
        ("Throughput", f"{number(summary.samples_per_s)}/s", "trained samples"),
        ("Oldest data", oldest, "versions, largest trained of allowed"),
        ("Busy", f"{summary.learner_busy_ratio:.0%}", f"learner; generators {summary.generator_busy_ratio:.0%}"),
        ("Log-prob parity", _number(summary.parity_max_nats), "nats, largest difference of a token"),
    ]
    if ended:
        fate = "groups; " + ("all groups are accounted for" if summary.ledger_closed else "NOT all accounted for")
        entries.append(("Discarded", f"{summary.groups_discarded:,}", fate))
    return entries


def _failures(failures: Sequence[FailureCount]) -> Section:
    """Returns the section with the failed rollouts by reason, and the first failure of each in full."""
    rows = [
        (
            count.first.reason,
            f"{count.rollouts:,}",
            f"{count.groups:,}",
            count.first.message,
            count.first.prompt,
            count.first.completion,
        )
        for count in failures
    ]
    head = ("reason", "rollouts", "groups lost", "first message", "prompt", "completion")
    note = "Failed rollouts by reason, with the first failure of each reason. A lost group was not trained."
    table = Table(head=head, rows=rows, numeric=frozenset({1, 2}), verbatim=frozenset({3, 4, 5}))
    return Section(title="Failures", note=note, tables=[table])


def _totals(steps: Sequence[StepRecord]) -> Section:
    """Returns the section with the groups by fate at the last step, and the totals of generated and trained data."""
    last = steps[-1]
    fates = [(fate.replace("_", " "), f"{groups:,}") for fate, groups in last.ledger_groups.items() if groups]
    totals = {
        "samples generated": last.generated_samples,
        "samples trained": sum(record.trained_samples for record in steps),
        "tokens generated": last.generated_tokens,
        "tokens trained": sum(record.trained_tokens for record in steps),
        "weight updates loaded": last.weight_updates,
        "weight updates in the middle of a sequence": last.mid_sequence_updates,
        "steps skipped": sum(not record.trained for record in steps),
    }
    rows = [(name, f"{total:,}") for name, total in totals.items()]
    tables = [
        Table(head=("fate of issued groups", "groups"), rows=fates, numeric=frozenset({1})),
        Table(head=("total", "number"), rows=rows, numeric=frozenset({1})),
    ]
    return Section(title="Totals", note="As of the last recorded step.", tables=tables)


def _samples(samples: dict[int, list[SampleRecord]]) -> Section:
    """Returns the section with the rollouts of a few steps."""
    rows = [
        (
            f"{step}",
            _shortened(sample.prompt),
            _shortened(sample.completion) + (" … (truncated)" if sample.truncated else ""),
            _shortened(sample.answer),
            _number(sample.reward),
            _number(sample.advantage),
            ", ".join(f"{version} × {tokens}" for version, tokens in sample.version_spans)
            + f" ({sample.staleness_versions} old)",
        )
        for step, records in samples.items()
        for sample in records
    ]
    head = ("step", "prompt", "completion", "answer", "reward", "advantage", "weights")
    note = (
        "All samples of a few groups, from the first, the middle and the last step with logged samples. In the column "
        "weights, “92 × 4 (2 old)” means that the weights after 92 steps generated four tokens, and that the oldest "
        "token of the sample was two versions old when it was trained."
    )
    table = Table(head=head, rows=rows, numeric=frozenset({0, 4, 5}), verbatim=frozenset({1, 2, 3}))
    return Section(title="Samples", note=note, tables=[table])


def _shortened(text: str) -> str:
    """Returns the first `SAMPLE_CHARACTERS` characters of a text, and how many more there are.

    >>> _shortened("x" * 20_003)[-30:]
    'xxxxxxxx … (3 more characters)'
    """
    more = len(text) - SAMPLE_CHARACTERS
    return text if more <= 0 else f"{text[:SAMPLE_CHARACTERS]} … ({more:,} more characters)"


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _arrow(first: float | None, last: float | None) -> str:
    if first is None:
        return "–"
    return f"{first:.2f} at the start" if last is None else f"{first:.2f} → {last:.2f}"
