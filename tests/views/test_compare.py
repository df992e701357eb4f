"""Several runs on one page: every run in every chart, their totals, and the settings in which they differ."""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from html_page import Page
from made_up_run import make_step
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from typer.testing import CliRunner
from written_runs import killed_and_resumed, write_run

from asyncrl.cli.main import app
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import EvalRecord, StepRecord, heldout_ends
from asyncrl.views.compare import compare_html, compare_svg, light_colors, notes_on, settings_in_words
from asyncrl.views.compare_curves import EVERYTHING, Axis, Choice, Figure, common_places, curves, value_at
from asyncrl.views.compare_numbers import CSV_COLUMNS, all_runs, compare_csv, group_table, totals
from asyncrl.views.compare_png import BAND_OPACITY, compare_png
from asyncrl.views.compared_runs import Group, differences, read_compared
from asyncrl.views.seed_statistics import t_quantile
from asyncrl.views.short_values import run_name

pytestmark = pytest.mark.slow

runner = CliRunner()


def read(*paths: Path, by: Sequence[str] = ()) -> list[Group]:
    return read_compared(paths, info_of=lambda _: None, by=by)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: `short` has 4 steps of a second and a limit of 2, `long` has 8 steps of two minutes."""
    short = write_run(tmp_path, [make_step(step) for step in range(4)], name="short")
    slow = [make_step(step, wall_s=120.0 * (step + 1), token_staleness={3: 10}) for step in range(8)]
    return short, write_run(tmp_path, slow, name="long", limit=3, evals=False, end="finished")


@pytest.fixture
def seeds(tmp_path: Path) -> list[Path]:
    """Runs of two limits and three seeds. The rewards of limit 3 are higher by 0.10, 0.12 and 0.14. The last run of
    limit 2 was killed after 6 of 8 steps, and has no summary."""
    paths = []
    for limit, gain in ((2, 0.0), (3, 0.1)):
        for seed in range(3):
            count = 6 if (limit, seed) == (2, 2) else 8
            reward = 0.1 * seed + gain * (1 + 0.2 * seed)
            steps = [make_step(step, wall_s=10.0 + (1 + seed) * step, reward_mean=reward) for step in range(count)]
            path = write_run(tmp_path, steps, name=f"limit{limit}-s{seed}", limit=limit, finish=count == 8, seed=seed)
            paths.append(path)
    return paths


def drawn(figures: Iterable[Figure]) -> dict[str, dict[str, Any]]:
    """Returns the numbers of each chart by its title."""
    found = {}
    for figure in figures:
        title = re.search(r"<figcaption>([^<]*)", figure.markup)
        data = re.search(r'<script type="application/json">(.*?)</script>', figure.markup)
        assert title is not None
        assert data is not None
        found[title[1]] = json.loads(data[1])
    return found


def test_the_page_has_every_run_in_every_chart_and_needs_nothing_from_outside(two: tuple[Path, Path]) -> None:
    text = compare_html(read(*two))
    page = Page(text)
    for words in (
        "2 runs compared",
        "By step",
        "By trained tokens",
        "By time",
        "Settings that differ",
        "staleness.max_versions",
        "Entropy",
    ):
        assert words in page.text, words
    assert page.tags.count("svg") == 3 * 7
    assert page.words.count("short") == page.words.count("long") + 3, "the run long has no evaluation"
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_each_run_is_drawn_at_its_own_steps_and_times(two: tuple[Path, Path]) -> None:
    runs = read(*two)
    by_step, by_time = drawn(curves(runs, Axis.STEP)), drawn(curves(runs, Axis.TIME))
    assert list(by_step) == [
        "Reward", "Held-out reward", "Trained samples", "Trained tokens", "Age of trained tokens",
        "Effective sample size", "Entropy",
    ]  # fmt: skip
    assert by_step.keys() == by_time.keys()
    short, long = by_step["Reward"]["series"]
    assert (short["name"], short["xs"]) == ("short", [0, 1, 2, 3])
    assert (long["name"], long["xs"]) == ("long", list(range(8)))
    assert short["ys"][0] == 0.5
    assert short["color"] != long["color"]
    short, long = by_time["Reward"]["series"]
    assert by_time["Reward"]["x"] == "minutes since the first step"
    assert short["xs"] == pytest.approx([0, 1 / 60, 2 / 60, 3 / 60], rel=1e-3)
    assert long["xs"] == [0, 2, 4, 6, 8, 10, 12, 14]
    speeds = {one["name"]: one["ys"] for one in by_step["Trained samples"]["series"]}
    assert speeds == {"short": [128.0] * 3, "long": pytest.approx([128 / 120] * 7, rel=1e-3)}
    ages = {one["name"]: one["ys"][0] for one in by_step["Age of trained tokens"]["series"]}
    assert ages == {"short": pytest.approx(100 / 600, rel=1e-3), "long": 3}
    [heldout] = by_step["Held-out reward"]["series"]
    assert (heldout["name"], heldout["xs"], heldout["ys"]) == ("short", [0], [0.25])


def test_each_held_out_set_has_its_own_curve_and_its_own_total(two: tuple[Path, Path]) -> None:
    runs = read(*two)
    hard = [
        EvalRecord(name="hard", version=n, wall_s=20 + n, prompts=4, reward_mean=n / 4, pass_at={2: n / 2})
        for n in range(3)
    ]
    [long] = runs[1].runs
    records = dataclasses.replace(long.records, evals=hard)
    summary = msgspec.structs.replace(long.summary, heldout_sets=heldout_ends(hard))
    runs[1] = dataclasses.replace(runs[1], runs=[dataclasses.replace(long, records=records, summary=summary)])
    figures = drawn(curves(runs, Axis.STEP))
    assert list(figures)[:3] == ["Reward", "Held-out reward", "Held-out reward: hard"]
    [line] = figures["Held-out reward: hard"]["series"]
    assert (line["name"], line["xs"], line["ys"]) == ("long", [0, 1, 2], [0, 0.25, 0.5])
    rows = {row.name: list(row.values) for row in totals(all_runs(runs))}
    assert rows["held-out reward: hard"] == ["–", "0.000 (step 0) → 0.500 (step 2)"]
    assert rows["held-out pass@2: hard"] == ["–", "1 (step 2)"]
    head, group_rows = group_table(runs)
    assert dict(zip(head[1:], group_rows[1].values, strict=True))["held-out pass@2: hard, last"] == "1"


def test_totals_are_those_of_the_runs_and_rows_without_news_are_left_out(two: tuple[Path, Path]) -> None:
    rows = {row.name: list(row.values) for row in totals(all_runs(read(*two)))}
    assert rows["state"] == ["failed", "finished"]
    assert rows["steps"] == ["4", "8"]
    assert rows["held-out reward"] == ["0.250 (step 0)", "–"]
    assert rows["oldest trained token, versions"] == ["1 of 2", "3 of 3"]
    assert rows["effective sample size, mean"] == ["0.95", "0.95"]
    assert "restarts" not in rows


def test_the_effective_training_time_is_compared(tmp_path: Path) -> None:
    path, info = killed_and_resumed(tmp_path)
    other = write_run(tmp_path, [make_step(0)], name="other")
    infos = {path: info, other: msgspec.structs.replace(info, name="other", finished="2026-11-30T08:00:09+00:00")}
    runs = read_compared([path, other], info_of=infos.get)
    rows = {row.name: list(row.values) for row in totals(all_runs(runs))}
    assert rows["effective training time"] == ["59%", "10%"]
    assert str(396 / 670) in compare_csv(runs)


def test_the_costs_of_each_pool_are_compared_where_they_are_known(tmp_path: Path) -> None:
    def records(device: Device) -> list[StepRecord]:
        time = DeviceTime(pool=Pool.LEARNER, device=device, waiting_s=60.0, working_s=240.0)
        return [make_step(0, device_time=(time,))]

    paths = [write_run(tmp_path, records(device), name=device.value) for device in Device]
    groups = read(*paths, write_run(tmp_path, [make_step(0)], name="old"))
    rows = {row.name: list(row.values) for row in totals(all_runs(groups))}
    assert rows["GPU-seconds of the learner"] == ["300", "–", "–"]
    assert rows["GPU-seconds of the learner for each trained token"] == ["0.5", "–", "–"]
    assert rows["process-seconds of the learner, waiting"] == ["–", "60", "–"]
    assert "GPU-seconds of the learner for each trained token,1,0.5" in compare_csv(groups)


def test_only_settings_that_differ_are_named_but_not_the_names_of_the_runs() -> None:
    one = Config.model_validate({"run": {"name": "a", "seed": 1}, "generator": {"stop": ["x"]}})
    other = Config.model_validate({"run": {"name": "b", "dir": "/x"}, "critic": {"ranks": 2}})
    rows = {row.name: tuple(row.values) for row in differences([one, other])}
    assert rows["run.seed"] == ("1", "0")
    assert rows["generator.stop"] == ('["x"]', "[]")
    assert rows["critic"] == ("unset", "–")
    assert rows["critic.ranks"] == ("–", "2")
    assert {key.partition(".")[0] for key in rows} == {"run", "generator", "critic"}
    assert not {"run.name", "run.dir"} & rows.keys()
    assert differences([one, one]) == []


def test_runs_whose_directories_have_the_same_name_are_named_by_their_paths(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / folder, [make_step(0)]) for folder in ("a", "b<i>")]
    runs = read(*paths)
    assert [run.label for run in runs] == [str(path) for path in paths]
    page = compare_html(runs)
    assert "b<i>" not in page
    assert "b<i>" in Page(page).text
    assert "All settings but the names of the runs are equal." in page


def test_what_cannot_be_compared_is_refused_with_what_to_do(tmp_path: Path) -> None:
    good = write_run(tmp_path, [make_step(0)], name="good")
    none = write_run(tmp_path, [], finish=False, name="none")
    skipped = write_run(tmp_path, [make_step(0, trained=False)], finish=False, name="skipped")
    with pytest.raises(ConfigError, match="got 1 run, but it compares two or more"):
        read(good)
    with pytest.raises(ConfigError, match=r"--by run\.sed: no run has such a setting"):
        read(good, write_run(tmp_path, [make_step(0)], name="other"), by=["run.sed"])
    with pytest.raises(ConfigError, match=r"is named twice; name each run once"):
        read(good, none, good)
    for path in (none, skipped):
        with pytest.raises(RunError, match=rf"{path} has no trained step to compare; leave this run out"):
            read(good, path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty is not a run directory: it has no run\.json"):
        read(good, tmp_path / "empty")


def test_the_command_writes_the_page_and_prints_the_totals(
    two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, ["compare", *map(str, two)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].split() == ["short", "long"]
    assert next(line.split() for line in lines if line.startswith("steps")) == ["steps", "4", "8"]
    assert lines[-2:] == ["settings that differ: staleness.max_versions", "compare.html"]
    assert "2 runs compared" in Page(Path("compare.html").read_text()).text
    result = runner.invoke(app, ["compare", *map(str, two), "-o", "absent/page.html"])
    assert result.exit_code == 1
    assert "--output absent/page.html: cannot be written" in result.stderr
    result = runner.invoke(app, ["compare", str(two[0]), "runs/absent"])
    assert result.exit_code == 1
    assert "there is no run absent in runs/" in result.stderr
    assert runner.invoke(app, ["compare"]).exit_code == 2


@pytest.mark.parametrize("width", [50, 80, 400])
def test_groups_in_a_terminal_have_the_columns_that_fit_and_name_the_others(
    width: int, seeds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["compare", "--by", "run.seed", *map(str, seeds), "--csv", "numbers.csv"]
    result = runner.invoke(app, command, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    table, _, _ = result.output.partition("minus ")
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    [row] = [re.split(r"  +", line.strip()) for line in lines if line.startswith("max_versions=2")]
    _, rows = group_table(read(*seeds, by=["run.seed"]))
    assert row[1:3] == ["3", "0.1 ± 0.248"], "what was learned is first, and a value is on one line"
    assert row == [rows[0].name, *rows[0].values][: len(row)]
    left_out = 1 + len(rows[0].values) - len(row)
    said = re.search(r"columns that do not fit here: (\d+); --csv FILE writes all numbers", " ".join(table.split()))
    assert (0 if said is None else int(said[1])) == left_out
    assert (left_out > 0) == (width < 400)
    written = csv.DictReader(io.StringIO(Path("numbers.csv").read_text()))
    numbers = {row["number"] for row in written if row["kind"] == "group"}
    assert len(numbers) == len(rows[0].values) - 1


def test_many_runs_in_a_terminal_have_what_they_learned_and_the_settings_in_which_they_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [
        write_run(tmp_path, [make_step(step) for step in range(2)], name=f"r{limit}", limit=limit)
        for limit in range(1, 10)
    ]
    result = runner.invoke(app, ["compare", *map(str, paths)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    head = " ".join(result.output.partition("\nr1 ")[0].split())
    assert "max_versions" in head
    assert max(map(len, result.output.splitlines())) <= 80
    assert re.search(r"^r7 .* 7 ", result.output, re.MULTILINE)


def test_runs_that_differ_only_in_the_seed_are_a_group_with_a_mean_and_an_interval(seeds: list[Path]) -> None:
    groups = read(*seeds, by=["run.seed"])
    assert [group.label for group in groups] == ["max_versions=2", "max_versions=3"]
    assert [run.seed for run in groups[1].runs] == [("run.seed=0",), ("run.seed=1",), ("run.seed=2",)]
    head, rows = group_table(groups)
    found = {row.name: dict(zip(head[1:], row.values, strict=True)) for row in rows}
    assert found["max_versions=2"]["runs"] == "3"
    half = 4.30265 * 0.1 / 3**0.5
    assert found["max_versions=2"]["reward, last steps"] == f"0.1 ± {half:.3g}"
    assert groups[0].note is not None
    assert "limit2-s0 8, limit2-s1 8, limit2-s2 6" in groups[0].note
    assert groups[1].note is None
    assert len(read(*seeds)) == 6
    assert len(read(*seeds, by=["run", "staleness.max_versions"])) == 1, "a section, and several keys"


SNIS = {"name": "mine.snis:SNIS", "cap": 1.5}
AXES = {"surrogate": {"kind": "linear"}, "anchor": "behaviour", "level": "token"}


def of_losses(folder: Path, losses: Sequence[object], **settings: object) -> list[Path]:
    """Writes a run of two seeds for each loss, with names as `asyncrl sweep` gives them."""
    return [
        write_run(
            folder,
            [make_step(0), make_step(1)],
            name=run_name({"algorithm.loss": loss}, seed=seed),
            seed=seed,
            settings={"algorithm.loss": loss, "metrics.learner_port": 9000 + seed, **settings},
        )
        for loss in losses
        for seed in range(2)
    ]


def test_the_label_of_a_group_says_in_which_settings_it_differs_from_the_others_of_all_sweeps(tmp_path: Path) -> None:
    paths = of_losses(tmp_path / "losses", ["aipo", SNIS, AXES])
    paths += of_losses(tmp_path / "overrides", ["aipo"], **{"algorithm.overrides": {"surrogate": {"hi": 1.2}}})
    groups = read(*paths, by=["run.seed"])
    axes = run_name({"algorithm.loss": AXES}, seed=None).removeprefix("loss-")
    assert [group.label for group in groups] == [
        "loss=aipo, overrides={}",
        "loss=mine.snis:SNIS cap=1.5, overrides={}",
        f"loss={axes}, overrides={{}}",
        'loss=aipo, overrides=surrogate={"hi": 1.2}',
    ]
    assert list(groups[2].settings) == [f"algorithm.loss={json.dumps(AXES)}", "algorithm.overrides={}"]
    assert [group.label for group in read(*paths[:4], by=["run.seed"])] == [
        "loss=aipo", "loss=mine.snis:SNIS cap=1.5"
    ]  # fmt: skip
    assert [group.label for group in read(paths[0], paths[3], by=["run.seed"])] == [
        "loss=aipo", "loss=mine.snis:SNIS cap=1.5"
    ], "groups of one run"  # fmt: skip


def test_the_label_of_an_objective_has_the_hash_in_the_names_of_its_runs(tmp_path: Path) -> None:
    """Also where all groups have axes. The terminal says for what such a label stands."""
    gate = {"stat": "ratio", "pool": "sequence", "lo": 0.5, "hi": 2.0}
    losses = [AXES, AXES | {"gates": [gate]}, AXES | {"gates": [gate, gate | {"stat": "k3", "lo": -math.inf}]}]
    groups = read(*of_losses(tmp_path, losses), by=["run.seed"])
    names = [run_name({"algorithm.loss": loss}, seed=None).replace("loss-", "loss=") for loss in losses]
    assert [group.label for group in groups] == names
    _, first, *_ = settings_in_words(groups, by=["run.seed"])
    assert first == f"{names[0]}: algorithm.loss={json.dumps(AXES)}"
    near = read(*of_losses(tmp_path / "near", [SNIS, SNIS | {"cap": 2.0}]), by=["run.seed"])
    assert [group.label for group in near] == ["cap=1.5", "cap=2.0"], "short values need no hash"
    assert len(settings_in_words(near, by=["run.seed"])) == 1


def test_the_csv_has_the_full_settings_of_groups_and_runs(tmp_path: Path) -> None:
    paths = of_losses(tmp_path, ["aipo", AXES])
    rows = list(csv.DictReader(io.StringIO(compare_csv(read(*paths, by=["run.seed"])))))
    full = f"algorithm.loss={json.dumps(AXES)}"
    of_kind = {kind: {row["settings"] for row in rows if row["kind"] == kind} for kind in ("group", "difference")}
    assert of_kind == {"group": {"algorithm.loss=aipo", full}, "difference": {full}}
    assert rows[-1]["name"] == run_name({"algorithm.loss": AXES}, seed=None).replace("loss-", "loss=")
    assert {row["settings"] for row in rows if row["name"] == paths[3].name} == {f"{full}, run.seed=1"}


def test_a_label_of_many_settings_has_the_first_ones_and_a_hash_of_all(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path, [make_step(0)], name=f"r{n}", seed=n % 2, settings={
            "data.system_prompt": "x" * 20, "algorithm.loss": "aipo" if n < 2 else SNIS,
            "learner.total_steps": 10 + n // 2, "generator.max_completion_tokens": 8 + n // 2,
        })
        for n in range(4)
    ]  # fmt: skip
    first, second = (group.label for group in read(*paths, by=["run.seed"]))
    assert first == "max_completion_tokens=8, total_steps=10, loss=aipo"
    assert re.fullmatch(r"max_completion_tokens=9, total_steps=11, … [0-9a-f]{6}", second)


def test_the_curve_of_a_group_is_the_mean_with_its_interval_where_all_runs_have_values(seeds: list[Path]) -> None:
    groups = read(*seeds, by=["run.seed"])
    first, second = drawn(curves(groups, Axis.STEP))["Reward"]["series"]
    assert (first["xs"], second["xs"]) == (list(range(6)), list(range(8)))
    assert first["ys"] == pytest.approx([0.1] * 6)
    assert second["ys"] == pytest.approx([0.22] * 8)
    by_time = drawn(curves(groups, Axis.TIME))["Reward"]["series"][0]["xs"]
    assert (min(by_time), max(by_time)) == (0, 7), "the run of seed 0 ends 7 s after its first step"
    by_tokens = drawn(curves(groups, Axis.TOKENS))["Reward"]
    assert (by_tokens["x"], by_tokens["series"][0]["xs"][:2]) == ("trained tokens", [600, 1200])
    figure = next(iter(curves(groups, Axis.STEP))).markup
    assert figure.count('class="band"') == 2
    assert next(iter(curves(read(*seeds), Axis.STEP))).markup.count('class="band"') == 0


def test_a_start_that_takes_longer_than_another_run_leaves_no_group_without_a_curve_over_time(tmp_path: Path) -> None:
    """As in a sweep, whose first run starts the engines: its steps end after all those of the later runs."""
    paths = []
    for seed, start_s in enumerate((100.0, 10.0)):
        evals = [EvalRecord(version=n, wall_s=start_s + n, prompts=4, reward_mean=n / 4) for n in (0, 3)]
        steps = [make_step(step, wall_s=start_s + step) for step in range(8)]
        paths.append(write_run(tmp_path, steps, name=f"s{seed}", seed=seed, evals=evals))
    for path in paths:
        steps = [make_step(step, wall_s=50.0 + step) for step in range(8)]
        write_run(tmp_path, steps, name=f"b{path.name}", seed=int(path.name[1]), limit=3, evals=False)
    groups = read(*paths, tmp_path / "bs0", tmp_path / "bs1", by=["run.seed"])
    by_time = drawn(curves(groups, Axis.TIME))
    assert [line["xs"] for line in by_time["Reward"]["series"]] == [list(range(8))] * 2
    assert by_time["Held-out reward"]["series"][0]["xs"] == [0, 3]
    assert not notes_on(groups, EVERYTHING, by=["run.seed"])


def test_restarts_are_not_in_the_time_of_a_curve(tmp_path: Path) -> None:
    starting_s = [10.0, 10.0, 40.0, 40.0]
    steps = [
        make_step(step, wall_s=starting_s[step] + step, learner_state_s={"starting": starting_s[step], "other": 1.0})
        for step in range(4)
    ]
    evals = [EvalRecord(version=n, wall_s=wall_s, prompts=4, reward_mean=0.5) for n, wall_s in enumerate((5.0, 30, 43))]
    run = write_run(tmp_path, steps, name="a", evals=evals)
    by_time = drawn(curves(read(run, write_run(tmp_path, steps, name="b")), Axis.TIME))
    assert by_time["Reward"]["series"][0]["xs"] == [0, 1, 2, 3]
    assert by_time["Held-out reward"]["series"][0]["xs"] == [0, 2, 3]


def test_a_group_without_a_common_part_of_the_axis_is_named(seeds: list[Path], tmp_path: Path) -> None:
    late = [make_step(step, wall_s=float(step)) for step in range(20, 24)]
    groups = read(*seeds[3:], *seeds[:2], write_run(tmp_path, late, name="late", seed=9), by=["run.seed"])
    assert [note.partition(",")[0] for note in notes_on(groups, EVERYTHING, by=["run.seed"])][1:3] == [
        "Reward", "Trained samples"
    ]  # fmt: skip
    assert "by step: no line for max_versions=2, because" in notes_on(groups, EVERYTHING, by=["run.seed"])[1]
    assert len(drawn(curves(groups, Axis.STEP))["Reward"]["series"]) == 1


def test_a_band_has_no_values_that_the_number_cannot_have(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path, [make_step(step, ess_ratio=share) for step in range(3)], name=f"s{seed}", seed=seed)
        for seed, share in enumerate((0.99, 0.6))
    ]
    [group] = read(*paths, by=["run.seed"])
    lines = {figure.chart.title: figure.lines[0] for figure in curves([group], Axis.STEP)}
    assert [edges[1] for edges in lines["Effective sample size"].band if edges] == [1.0] * 3
    assert all(edges[0] >= 0 for edges in lines["Effective sample size"].band if edges)


def test_a_figure_has_the_numbers_and_the_axes_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the user's own objective are on the page of their own accord, and other numbers of a step by name."""
    monkeypatch.chdir(tmp_path)
    steps = [make_step(step, diagnostics={"a_share": step / 4, "clipped_ratio": 0.1}) for step in range(4)]
    runs = [write_run(tmp_path, steps, name=name) for name in ("a", "b")]
    assert list(drawn(curves(read(*runs), Axis.STEP)))[-2:] == ["Entropy", "a_share"]
    command = ["compare", *map(str, runs), "--svg", "a.svg", "--over", "step"]
    result = runner.invoke(app, [*command, "--chart", "a_share", "--chart", "clipped_ratio", "--chart", "heldout"])
    assert result.exit_code == 0, result.output
    root = ElementTree.fromstring(Path("a.svg").read_text())
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}svg")) == 3
    page = Page(Path("compare.html").read_text())
    assert "By step" in page.text
    assert "By time" not in page.text
    assert page.tags.count("svg") == 3
    result = runner.invoke(app, [*command, "--chart", "a_shere"])
    assert result.exit_code == 2
    assert "--chart a_shere: no run has this number; did you mean a_share?" in result.stderr
    assert runner.invoke(app, [*command, "--over", "days"]).exit_code == 2


def test_groups_have_the_labels_that_the_user_gives_them(seeds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(seeds[0].parent)
    command = ["compare", "--by", "run.seed", *map(str, seeds), "--label", "near"]
    result = runner.invoke(app, [*command, "--label", "far"])
    assert result.exit_code == 0, result.output
    assert "minus near" in result.stdout
    assert "\nfar: staleness.max_versions=3\n" in result.stdout
    for labels in ([], ["--label", "near"], ["--label", "far", "--label", "other"]):
        result = runner.invoke(app, [*command, *labels])
        assert result.exit_code == 2, labels
        assert "in this order: max_versions=2; max_versions=3" in result.stderr


def test_the_folder_of_a_sweep_stands_for_its_runs_in_the_order_in_which_they_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for minute, name in enumerate(("b", "c", "a")):
        path = write_run(tmp_path / "runs" / "mine", [make_step(0), make_step(1)], name=name, limit=minute + 1)
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(info | {"started": f"2026-01-01T00:0{minute}:00+00:00"}))
    (tmp_path / "runs" / "mine" / "b.log").touch()
    (tmp_path / "linked").symlink_to("runs/mine")
    for argument in ("mine", "runs/mine", "runs/mine/", "linked"):
        result = runner.invoke(app, ["compare", argument])
        assert result.exit_code == 0, result.output
        assert result.stdout.split()[:3] == ["b", "c", "a"]


def test_runs_that_are_one_group_are_a_warning(seeds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(seeds[0].parent)
    by = ["--by", "run.seed", "--by", "staleness.max_versions"]
    result = runner.invoke(app, ["compare", *by, *map(str, seeds)])
    assert "all 6 runs are one group" in result.stderr
    assert "one group" not in runner.invoke(app, ["compare", "--by", "run.seed", *map(str, seeds[:3])]).stderr
    assert "differ between groups: none; within groups: run.seed, staleness.max_versions" in result.stdout


def test_a_table_in_a_pipe_has_all_columns_and_each_row_on_one_line(
    seeds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    result = runner.invoke(app, ["compare", "--by", "run.seed", *map(str, seeds)])
    [row] = [line for line in result.stdout.splitlines() if line.startswith("max_versions=2")]
    _, rows = group_table(read(*seeds, by=["run.seed"]))
    assert re.split(r"  +", row.strip()) == [rows[0].name, *rows[0].values]
    assert "do not fit" not in result.stdout


def test_curves_are_averaged_at_common_places_on_straight_lines_between_points() -> None:
    one, other = [(0.0, 1.0), (4.0, 3.0)], [(1.0, 0.0), (3.0, 1.0), (5.0, 1.0)]
    assert common_places([one, other]) == [1, 3, 4]
    assert [value_at(one, x) for x in (0, 1, 3, 4)] == [1, 1.5, 2.5, 3]
    assert common_places([one, [(5.0, 1.0)]]) == []
    many = [(float(x), 0.0) for x in range(1000)]
    assert len(common_places([many, many])) <= 300
    assert common_places([many, many])[-1] == 999


def test_the_page_of_groups_has_their_numbers_and_the_tests_of_their_differences(seeds: list[Path]) -> None:
    page = Page(compare_html(read(*seeds, by=["run.seed"]), by=["run.seed"]))
    for words in (
        "6 runs compared, in 2 groups", "Differences to max_versions=2", "paired, n = 3", "arXiv:1904.06979",
        "limit2-s2 6", "Settings that differ between groups", "run.seed=2",
    ):  # fmt: skip
        assert words in page.text, words
    assert "run.seed" not in page.text.partition("Settings that differ between groups")[2].partition("Runs")[0]


def test_the_csv_has_a_line_for_each_run_group_and_difference_and_number(seeds: list[Path]) -> None:
    rows = list(csv.DictReader(io.StringIO(compare_csv(read(*seeds, by=["run.seed"])))))
    assert tuple(rows[0]) == CSV_COLUMNS
    rewards = [row for row in rows if row["number"] == "reward, last steps"]
    assert [row["kind"] for row in rewards] == ["run"] * 6 + ["group"] * 2 + ["difference"]
    assert [float(row["value"]) for row in rewards] == pytest.approx([0, 0.1, 0.2, 0.1, 0.22, 0.34, 0.1, 0.22, 0.12])
    last = rewards[-1]
    assert (last["name"], last["compared_with"], last["n"], last["test"]) == (
        "max_versions=3", "max_versions=2", "3", "paired"
    )  # fmt: skip
    half = t_quantile(2) * 0.02 / 3**0.5
    assert (float(last["low"]), float(last["high"])) == pytest.approx((0.12 - half, 0.12 + half))
    assert float(last["p"]) == pytest.approx(0.0091, abs=1e-4)
    single = csv.DictReader(io.StringIO(compare_csv(read(*seeds))))
    assert {row["kind"] for row in single} == {"run"}


def test_a_section_with_the_names_of_the_runs_has_pairs_too(seeds: list[Path]) -> None:
    groups = read(*seeds, by=["run"])
    assert [run.seed for run in groups[0].runs] == [run.seed for run in groups[1].runs]
    rows = csv.DictReader(io.StringIO(compare_csv(groups)))
    assert {(row["test"], row["n"]) for row in rows if row["number"] == "reward, last steps" and row["test"]} == {
        ("paired", "3")
    }


def test_the_svg_has_all_charts_and_needs_no_style_of_a_page(seeds: list[Path]) -> None:
    groups = read(*seeds, by=["run.seed"])
    groups[0] = dataclasses.replace(groups[0], label="a <b> & \x07")
    text = compare_svg(groups)
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert len(root.findall(f"{space}svg")) == 3 * 7
    assert len(root.findall(f".//{space}path[@class='band']")) >= 3 * 2
    assert "var(" not in text
    assert text.count("max_versions=3") == 1
    assert "a &lt;b&gt; &amp; \ufffd" in text


def test_the_png_has_a_line_and_a_band_in_the_colour_of_each_group(seeds: list[Path]) -> None:
    """A name with dollar signs is no formula, and a run whose numbers are not finite has gaps."""
    groups = read(*seeds, by=["run.seed"])
    groups[0] = dataclasses.replace(groups[0], label="$\\frac{ \x07")
    choice = Choice(names=("reward_mean", "ess_ratio"))  # drawing all charts takes some seconds
    image = imread(io.BytesIO(compare_png(groups, choice, colors=light_colors())))
    height, width, _ = image.shape
    assert width == pytest.approx(3 * 630, abs=2)
    assert 2 * 390 < height < 3 * 390
    for group in groups:
        line = to_rgb(light_colors()[group.color])
        band = [BAND_OPACITY * each + 1 - BAND_OPACITY for each in line]
        for color in (line, band):
            assert (np.abs(image[..., :3] - np.array(color)).max(-1) < 0.02).sum() > 1000, group.label


def test_more_runs_than_colours_are_lines_of_other_patterns(tmp_path: Path) -> None:
    groups = read(*[write_run(tmp_path, [make_step(0), make_step(1)], name=f"r{n}", evals=False) for n in range(10)])
    assert [(group.color, group.dash) for group in groups[7:]] == [("gray", 0), ("blue", 1), ("amber", 1)]
    page = compare_html(groups)
    assert 'class="line dash-1"' in page
    assert page.count('<i class="dash-1"') == 2 * (3 * 6 + 1)


def test_the_command_writes_the_files_of_groups(
    seeds: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "--by", "run.seed", *map(str, seeds), "--svg", "a.svg", "--png", "a.png", "--csv", "a.csv"]
    arguments[1:1] = ["--chart", "reward_mean"]  # drawing all charts takes some seconds
    result = runner.invoke(app, arguments, env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output
    assert "paired, n = 3" in result.output
    assert "limit2-s2 6" in result.stderr
    lines = result.stdout.splitlines()
    files = ["compare.html", "a.svg", "a.png", "a.csv"]
    differ = "settings that differ between groups: staleness.max_versions; within groups: run.seed"
    assert lines[-5:] == [differ, *files]
    assert "in 2 groups" in Page(Path("compare.html").read_text()).text
    result = runner.invoke(app, [*arguments[:-1], "absent/a.csv"])
    assert "--csv absent/a.csv: cannot be written" in result.stderr
