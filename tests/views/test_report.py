"""The report is one self-contained page for every state of a run, and text of a run never becomes markup."""

import dataclasses
import json
import re
import tomllib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from html_page import Page
from made_up_run import TOTALS, make_step
from typer.testing import CliRunner
from written_runs import HOSTILE, killed_and_resumed, lively_step, write_run

from asyncrl.buffer.records import Failure, FailureCount
from asyncrl.cli.main import app
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import FailureClass, RunError
from asyncrl.learner.records import EvalRecord, ForkPoint, Resumption, state_shares
from asyncrl.views import report, report_staleness
from asyncrl.views.charts import Series
from asyncrl.views.report import read_run, report_html, write_report
from asyncrl.views.report_panels import bins_of, evaluations, restart_marks, smooth, windows_of

pytestmark = pytest.mark.slow


def test_a_finished_run_is_one_well_formed_page_with_all_its_parts(tmp_path: Path) -> None:
    path = write_run(tmp_path, [make_step(step) for step in range(40)])
    target = write_report(path)
    assert target == path / "report.html"
    page = Page(target.read_text())
    for words in (
        "Learning", "Reward", "held out", "Effective sample size", "Spread of rewards",
        "Completion length", "Truncated and failed completions", "Loss", "Entropy", "Gradient norm",
        "which side waits for the other", "Learner", "Generators", "Samples", "Tokens", "Groups in the buffer",
        "Age when trained", "limit 2", "Log-prob parity",
        "models/tiny-speller · reasoning_gym · decoupled_icepop · 16 × 8 samples per step · at most 2 versions old",
        "Totals", "fate of issued groups", "640", "Configuration", "max_versions: 2", "0.50 → 0.69",
    ):  # fmt: skip
        assert words in page.text, words
    assert page.tags.count("figure") == page.tags.count("svg") == 20
    assert "prompt of step 0" in page.text
    assert "prompt of step 39" in page.text


def test_every_held_out_set_has_its_own_dots_and_its_own_tile(tmp_path: Path) -> None:
    steps = [make_step(step) for step in range(9)]
    run = read_run(write_run(tmp_path, steps, finish=False, evals=False))
    evals = [
        EvalRecord(name=name, version=version, wall_s=9, prompts=8, reward_mean=reward)
        for name, version, reward in (("heldout", 0, 0.25), ("sums", 0, 0.125), ("heldout", 9, 0.5), ("sums", 9, 0.75))
    ]
    page = report_html(dataclasses.replace(run, evals=evals))
    dots = [each.count("<circle") for each in (page, report_html(dataclasses.replace(run, evals=evals[::2])))]
    assert dots[0] == dots[1] + 2, "two evaluations of each set are two dots"
    words = " ".join(Page(page).text.split())
    assert "held out: sums" in words
    assert "Held-out reward 0.25 → 0.50 on untrained questions, at steps 0 and 9" in words
    assert "Held-out reward: sums 0.12 → 0.75 on the set of this name, at steps 0 and 9" in words


def test_the_table_of_evaluations_has_the_first_and_the_last_ones_with_their_numbers() -> None:
    assert evaluations([]) is None
    evals = [
        EvalRecord(
            version=step, wall_s=9, prompts=7, failed=1, reward_mean=None if step == 20 else 0.5, reward_stderr=0.01,
            truncated_ratio=0.25, reward_components={"right": step / 100} if step == 19 else {},
        )
        for step in range(21)
    ]  # fmt: skip
    head, rows = evaluations(evals) or ([], [])
    assert head == ["set", "step", "prompts", "reward", "share of truncated completions", "component right"]
    assert [row[1] for row in rows] == ["0", *map(str, range(12, 21))]
    assert rows[-2:] == [
        ["heldout", "19", "7 of 8", "0.5 ± 0.01", "0.25", "0.19"],
        ["heldout", "20", "7 of 8", "–", "0.25", "–"],
    ]


@pytest.mark.parametrize("finish", [True, False])
def test_the_totals_of_an_ended_run_are_those_of_its_summary(finish: bool, tmp_path: Path) -> None:
    steps = [make_step(step, weight_updates=step, generated_tokens=7_000_000 + step) for step in range(9)]
    run = read_run(write_run(tmp_path, steps, finish=finish))
    words = " ".join(Page(report_html(run)).text.split())
    shown = run.summary or steps[-1]
    assert shown.weight_updates == (TOTALS.weight_updates if finish else 8)
    assert f"weight updates loaded {shown.weight_updates} " in words
    assert f"tokens generated {shown.generated_tokens:,} " in words
    assert ("as of the end of the run." in words) is finish


def test_the_totals_have_the_mean_and_the_lowest_effective_sample_size(tmp_path: Path) -> None:
    steps = [make_step(step, ess_ratio=size) for step, size in enumerate((1.0, 0.75, 0.5))]
    words = " ".join(Page(report_html(read_run(write_run(tmp_path, steps)))).text.split())
    assert "effective sample size, mean of the steps 0.750 effective sample size, lowest step 0.500 " in words
    unmeasured = [make_step(step, ess_ratio=None) for step in range(3)]
    assert "effective sample size, " not in report_html(read_run(write_run(tmp_path / "none", unmeasured)))


@pytest.mark.parametrize("resumed", [True, False])
def test_the_time_of_a_run_whose_machine_was_lost_ends_at_its_last_record(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, info = killed_and_resumed(tmp_path)
    now_s = datetime.fromisoformat(info.started).timestamp() + 9999.0
    monkeypatch.setattr(report, "time", SimpleNamespace(time=lambda: now_s))
    there = msgspec.structs.replace(info, state="running", host="elsewhere", finished=None)
    if not resumed:
        there = msgspec.structs.replace(there, resumed=[])
    found = read_run(path, info=there)
    assert found.wall_s == (400.0 + 258.0 if resumed else found.steps[-1].wall_s)
    assert read_run(path, info=msgspec.structs.replace(there, host=info.host)).wall_s == 9999.0


def test_the_effective_training_time_of_a_run_that_was_killed_and_resumed_is_of_its_records(tmp_path: Path) -> None:
    path, info = killed_and_resumed(tmp_path)
    run = read_run(path, info=info)
    assert run.totals is not None
    assert run.totals.effective_training_time_ratio == 396 / 670
    words = " ".join(Page(report_html(run)).text.split())
    assert (
        "Effective training time 59% of 11 min 10 s since the first start; 2 min 40 s starts, 1 min 8 s steps trained "
        "again, 46.0 s other"
    ) in words


def test_the_report_shows_what_each_pool_has_cost_from_the_records(tmp_path: Path) -> None:
    time = DeviceTime(pool=Pool.GENERATORS, device=Device.GPU, starting_s=30.0, waiting_s=30.0, working_s=240.0)
    run = read_run(write_run(tmp_path, [make_step(0, device_time=(time,))]))
    words = " ".join(Page(report_html(run)).text.split())
    assert "Device time: generators 300 300 GPU-seconds, 0.5 for each trained token; 10% starts, 10% waiting" in words
    old = read_run(write_run(tmp_path, [make_step(0)], name="old"))
    assert "Device time" not in Page(report_html(old)).text


def test_only_a_run_that_looks_at_a_reference_shows_the_distance_to_it(tmp_path: Path) -> None:
    for name, diagnostics in (("plain", {}), ("reference", {"kl_to_reference_nats": 0.25})):
        steps = [make_step(step, diagnostics=diagnostics) for step in range(5)]
        page = Page(report_html(read_run(write_run(tmp_path / name, steps))))
        assert ("KL to the reference" in page.text) == bool(diagnostics)


FAILURE = FailureCount(
    rollouts=2001,
    groups=1999,
    samples=3001,
    first=Failure(
        failure_class=FailureClass.DATA,
        reason="reward_raised",
        message="KeyError: 'KEY' (tasks.py:30)",
        prompt="0+3=",
        completion=HOSTILE,
    ),
)


def test_failures_are_shown_with_the_first_of_each_reason_also_of_a_run_without_steps(tmp_path: Path) -> None:
    failed = RunDir.create(Config.model_validate({"run": {"name": "failed", "dir": str(tmp_path)}}))
    failed.write_failures([FAILURE])
    failed.close(state="failed", reason="RunError: your reward failed")
    page = Page(report_html(read_run(failed.path)))
    for words in (
        "Failures",
        "reward_raised",
        "2,001",
        "1,999",
        "3,001",
        "KeyError: 'KEY' (tasks.py:30)",
        "0+3=",
        HOSTILE,
    ):
        assert words in page.text, words
    assert "No step was recorded." in page.text
    assert "Failures" not in Page(report_html(read_run(write_run(tmp_path, [make_step(0)])))).text


def test_a_warning_is_the_first_sentence_of_the_page(tmp_path: Path) -> None:
    flat = [make_step(step, zero_variance_ratio=1.0) for step in range(3)]
    page = report_html(read_run(write_run(tmp_path, flat)))
    assert '<p class="lead warns">In 100 % of the groups of the last 3 steps all rewards are equal' in page
    healthy = report_html(read_run(write_run(tmp_path / "healthy", [make_step(step) for step in range(3)])))
    assert '<p class="lead">The learner waits for groups' in healthy


def test_only_a_run_with_a_critic_shows_what_it_learns(tmp_path: Path) -> None:
    critic = {"value_loss": 0.25, "explained_variance": 0.5, "value_clipped_ratio": 0.0}
    steps = [
        make_step(step, diagnostics=critic | {"explained_variance": None} if step == 0 else critic) for step in range(5)
    ]
    page = Page(report_html(read_run(write_run(tmp_path / "ppo", steps))))
    assert "Critic: explained variance" in page.text
    assert "Critic: loss" in page.text
    assert page.tags.count("svg") == 22
    without = Page(report_html(read_run(write_run(tmp_path / "grpo", [make_step(step) for step in range(5)]))))
    assert "Critic" not in without.text


def test_an_end_without_an_error_is_said_once_and_times_are_for_people(tmp_path: Path) -> None:
    run = RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}}))
    run.close(state="finished", reason="done")
    text = Page(report_html(read_run(run.path))).text
    assert "(done)" not in text
    assert re.search(r"Started \d{4}-\d\d-\d\d \d\d:\d\d UTC on \S+, finished \d{4}-\d\d-\d\d \d\d:\d\d UTC\.", text)


def test_a_run_that_was_asked_to_end_is_no_finished_one_and_its_first_evaluation_no_last_one(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [make_step(0)], finish=False))
    info = msgspec.structs.replace(run.info, state="stopped", exit_reason="asked to end by a signal, after step 1 of 9")
    page = report_html(dataclasses.replace(run, info=info))
    assert '<span class="badge stopped">stopped</span>' in page
    assert "asked to end by a signal, after step 1 of 9" in page
    assert "0.25 at the start" in page


def test_a_report_shows_the_end_that_it_is_given_in_the_place_of_the_one_that_run_json_has(tmp_path: Path) -> None:
    path = write_run(tmp_path, [make_step(0)], finish=False, end=None)
    info = msgspec.structs.replace(
        read_run(path).info, state="died", finished="2026-11-20T16:50:00+00:00", exit_reason="ended without a word"
    )
    page = write_report(path, info=info).read_text()
    assert '<span class="badge died">died</span>' in page
    assert ", died 2026-11-20 16:50 UTC." in page
    assert "ended without a word" in page


def test_what_the_colors_and_the_bottom_of_a_chart_mean_is_said(tmp_path: Path) -> None:
    text = Page(report_html(read_run(write_run(tmp_path, [make_step(0), make_step(1)])))).text
    for words in ("“other” is", "“idle” is", "0 is drawn at the bottom"):
        assert words in text


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, [make_step(0), make_step(1)])).read_text()
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_files_of_the_page_are_installed_with_the_package() -> None:
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["asyncrl"]
    installed = {path for pattern in patterns for path in (root / "asyncrl").glob(pattern)}
    there = {path for path in (root / "asyncrl" / "views").iterdir() if path.is_file() and path.suffix != ".py"}
    templates = {f"{name}.html.j2" for name in ("page", "report", "compare", "samples", "tables", "chart")}
    assert {path.name for path in there} == {"report.css", "charts.js", "health.md.j2", "compare.svg.j2"} | templates
    assert there <= installed


def test_nothing_of_a_run_is_markup(tmp_path: Path) -> None:
    text = report_html(read_run(write_run(tmp_path, [make_step(0)])))
    assert HOSTILE not in text
    assert "onerror" in Page(text).text, "the page has it as text"
    assert not [name for name, _ in Page(text).attributes if name and name.startswith("on")]


def test_a_run_that_goes_on_or_died_early_has_a_report_of_what_there_is(tmp_path: Path) -> None:
    none = Page(report_html(read_run(write_run(tmp_path / "none", [], finish=False, evals=False))))
    assert "No step was recorded." in none.text
    one = Page(report_html(read_run(write_run(tmp_path / "one", [make_step(0)], finish=False, evals=False))))
    assert "Learning" in one.text
    assert "Oldest data" in one.text
    assert "Discarded" not in one.text, "discarded groups are known only at the end"


def test_steps_without_numbers_leave_gaps(tmp_path: Path) -> None:
    empty = {
        "reward_mean": None, "loss": float("nan"), "grad_norm": float("inf"), "entropy_nats": None, "ess_ratio": None,
        "parity_nats": None, "group_staleness": {}, "token_staleness": {}, "learner_state_s": {},
        "generator_state_s": {}, "buffer_groups": {}, "ledger_groups": {}, "trained": False,
    }  # fmt: skip
    Page(report_html(read_run(write_run(tmp_path / "some", [make_step(0), make_step(1, **empty), make_step(1)]))))
    none_trained = write_run(tmp_path / "none", [make_step(0, **empty)], finish=False)
    assert "steps skipped 1" in " ".join(Page(report_html(read_run(none_trained))).text.split())


@pytest.mark.fault("F21")
def test_a_skipped_step_has_no_age_and_lags_behind_the_version_that_it_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, list[float | None]] = {}

    def capture(title: str, xs: Sequence[float], series: Sequence[Series], **_: object) -> str:
        drawn.update({f"{title}: {each.name}": list(each.ys) for each in series})
        return ""

    monkeypatch.setattr(report_staleness, "line_chart", capture)
    report_staleness.staleness(
        [
            make_step(0, published_version=1, oldest_replica_version=None),
            make_step(
                1, published_version=1, oldest_replica_version=0, trained=False, group_staleness={}, token_staleness={}
            ),
        ],
        limit=2,
    )
    assert drawn["Age of tokens over time: oldest"] == [1, None]
    assert drawn["Lag behind the learner: published"] == [0, 0]
    assert drawn["Lag behind the learner: slowest replica"] == [None, 1], "no replica had weights after the first step"


def test_a_limit_that_is_far_off_is_told_and_does_not_flatten_the_charts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_step(step) for step in range(4)], limit=1_000_000)
    page = report_html(read_run(run))
    assert len(page) < 200_000
    assert "The limit of 1,000,000 versions is outside the range of the charts." in page
    assert "0 versions" in page
    near = report_html(read_run(write_run(tmp_path / "near", [make_step(0)], limit=60)))
    assert "limit 60" in near
    assert "outside the range of the charts" not in near


def test_numbers_whose_difference_overflows_are_gaps(tmp_path: Path) -> None:
    losses = [0.1, 1e308, -1e308, 0.2]
    run = write_run(tmp_path, [make_step(step, loss=loss) for step, loss in enumerate(losses)])
    Page(report_html(read_run(run)))


def test_a_sample_that_nobody_reads_to_its_end_is_cut(tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_step(0)])
    samples = run / "samples" / "step-0.jsonl"
    samples.write_text(samples.read_text().replace("prompt of step 0", "y" * 1_000_000))
    page = report_html(read_run(run))
    assert len(page) < 200_000
    assert "(980,006 characters left out)" in page


def test_a_long_run_is_drawn_with_few_points(tmp_path: Path) -> None:
    steps = [make_step(step) for step in range(5000)]
    assert len(bins_of(steps, 300)) <= 300
    assert sum(len(chunk) for chunk in bins_of(steps, 300)) == 5000
    assert [len(chunk) for chunk in bins_of(steps[:10], 4)] == [2, 3, 2, 3], (
        "the last chunk is not shorter than the others"
    )
    run = read_run(write_run(tmp_path, steps[:2]))
    text = report_html(dataclasses.replace(run, steps=steps))
    assert len(text) < 400_000


def test_windows_start_at_the_record_before_so_that_totals_can_be_subtracted() -> None:
    steps = [make_step(step) for step in range(10)]
    windows = windows_of(steps, 3)
    assert [[record.step for record in window] for window in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert state_shares(windows[1], "learner_state_s")["waiting_for_groups"] == pytest.approx(0.25)
    assert windows_of(steps[:1], 3) == [steps[:1]]


def test_the_drift_of_what_was_trained_is_drawn_by_age_from_fresh_to_old(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        report_staleness,
        "line_chart",
        lambda title, _, series, **__: names.extend(f"{title}: {s.name}" for s in series),
    )
    drift = {f"abs_log_rho_nats_staleness_{ages}": 0.1 for ages in ("16_to_more", "8_to_15", "1", "0")}
    report_staleness.staleness([make_step(0, diagnostics=drift)], limit=2)
    assert [name for name in names if name.startswith("Drift")] == [
        f"Drift by age: {ages}" for ages in ("0 versions", "1 version", "8 to 15 versions", "16 or more versions")
    ]


def test_tokens_of_every_age_have_their_share_of_a_step() -> None:
    page = "".join(report_staleness.staleness([make_step(0, token_staleness={0: 30, 2: 10})], limit=2))
    data = next(json.loads(found) for found in re.findall(r"json\">(.*?)</script>", page) if "0 versions" in found)
    assert {one["name"]: one["ys"] for one in data["series"]} == {"0 versions": [0.75], "2 versions": [0.25]}


def test_smoothing_is_a_trailing_mean_that_skips_gaps() -> None:
    values: list[float | None] = [float(index) for index in range(50)]
    assert smooth(values)[:3] == [0.0, 0.5, 1.5]
    assert smooth([1.0, None, 3.0]) == [1.0, None, 3.0]


def test_the_command_prints_where_the_page_is(tmp_path: Path) -> None:
    path = write_run(tmp_path, [make_step(0)])
    result = CliRunner().invoke(app, ["report", str(path), "--output", str(tmp_path / "other.html")])
    assert result.exit_code == 0
    assert result.output.strip() == str(tmp_path / "other.html")
    Page((tmp_path / "other.html").read_text())


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run directory.*run\.json"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match=r"not written by this version"):
        write_report(tmp_path)


def restarts(*steps: int) -> list[Resumption]:
    return [
        Resumption(at=f"2026-01-0{n}T00:00:00+00:00", step=at, incarnation=n) for n, at in enumerate(steps, start=2)
    ]


@pytest.mark.parametrize(
    ("began", "marked"),
    [
        ([], []),
        ([4, 9], ["incarnation 2 began at step 4", "incarnation 3 began at step 9"]),
        ([4, 4, 9], ["incarnation 3 began at step 4", "incarnation 4 began at step 9"]),
        ([8, 3], ["incarnation 3 began at step 3"]),
    ],
    ids=["new", "twice", "one left no step", "went back"],
)
def test_the_surviving_incarnations_are_marked_where_they_began(began: list[int], marked: list[str]) -> None:
    marks = restart_marks(restarts(*began))
    assert [mark.label for mark in marks] == marked
    assert all(mark.label.endswith(f"step {mark.at:.0f}") for mark in marks)


def test_every_curve_over_steps_marks_the_restarts(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path, [lively_step(step) for step in range(12)]))
    plain = report_html(records)
    page = report_html(dataclasses.replace(records, info=msgspec.structs.replace(records.info, resumed=restarts(4, 9))))
    over_steps = plain.count(">step</text>")
    assert over_steps > 12
    for label in ("incarnation 2 began at step 4", "incarnation 3 began at step 9"):
        assert page.count(f"<title>{label}</title>") == over_steps
    assert "resumed 2 times (dotted lines in the curves)" in " ".join(page.split())
    assert "resumed" not in plain.partition("</header>")[0]


def test_the_page_of_a_fork_names_the_checkpoint_with_which_it_began(tmp_path: Path) -> None:
    records = read_run(write_run(tmp_path, [make_step(0)]))
    assert "with the weights of" not in report_html(records)
    point = ForkPoint(run=HOSTILE, nonce="9e", directory="/runs/base", version=Version(1, 50))
    page = report_html(dataclasses.replace(records, info=msgspec.structs.replace(records.info, forked_from=point)))
    assert "with the weights of step-50 of run " in page
    assert HOSTILE in " ".join(Page(page).text.split())
