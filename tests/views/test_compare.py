"""Several runs on one page: every run in every chart, their totals, and the settings in which they differ."""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from html_page import Page
from made_up_run import make_step
from typer.testing import CliRunner
from written_runs import write_run

from asyncrl.cli.main import app
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import EvalRecord, heldout_ends
from asyncrl.views.compare import Compared, compare_html, curves, differences, read_compared, totals

pytestmark = pytest.mark.slow

runner = CliRunner()


def read(*paths: Path) -> list[Compared]:
    return read_compared(paths, info_of=lambda _: None)


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: `short` has 4 steps of a second and a limit of 2, `long` has 8 steps of two minutes."""
    short = write_run(tmp_path, [make_step(step) for step in range(4)], name="short")
    slow = [make_step(step, wall_s=120.0 * (step + 1), token_staleness={3: 10}) for step in range(8)]
    return short, write_run(tmp_path, slow, name="long", limit=3, evals=False, end="finished")


def drawn(figures: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the numbers of each chart by its title."""
    found = {}
    for figure in figures:
        title = re.search(r"<figcaption>([^<]*)", figure)
        data = re.search(r'<script type="application/json">(.*?)</script>', figure)
        assert title is not None
        assert data is not None
        found[title[1]] = json.loads(data[1])
    return found


def test_the_page_has_every_run_in_every_chart_and_needs_nothing_from_outside(two: tuple[Path, Path]) -> None:
    text = compare_html(read(*two))
    page = Page(text)
    for words in ("2 runs compared", "By step", "By time", "Settings that differ", "staleness.max_versions", "Entropy"):
        assert words in page.text, words
    assert page.tags.count("svg") == 2 * 7
    assert page.words.count("short") == page.words.count("long") + 2, "the run long has no evaluation"
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset")]
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def test_each_run_is_drawn_at_its_own_steps_and_times(two: tuple[Path, Path]) -> None:
    runs = read(*two)
    by_step, by_time = drawn(curves(runs, over_time=False)), drawn(curves(runs, over_time=True))
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
    assert by_time["Reward"]["x"] == "minutes"
    assert short["xs"] == pytest.approx([10 / 60, 11 / 60, 12 / 60, 13 / 60], rel=1e-3)
    assert long["xs"] == [2, 4, 6, 8, 10, 12, 14, 16]
    speeds = {one["name"]: one["ys"] for one in by_step["Trained samples"]["series"]}
    assert speeds == {"short": [128.0] * 3, "long": pytest.approx([128 / 120] * 7, rel=1e-3)}
    ages = {one["name"]: one["ys"][0] for one in by_step["Age of trained tokens"]["series"]}
    assert ages == {"short": pytest.approx(100 / 600, rel=1e-3), "long": 3}
    [heldout] = by_step["Held-out reward"]["series"]
    assert (heldout["name"], heldout["xs"], heldout["ys"]) == ("short", [0], [0.25])


def test_each_held_out_set_has_its_own_curve_and_its_own_total(two: tuple[Path, Path]) -> None:
    runs = read(*two)
    hard = [EvalRecord(name="hard", version=n, wall_s=20 + n, prompts=4, reward_mean=n / 4) for n in range(3)]
    records = dataclasses.replace(runs[1].records, evals=hard)
    summary = msgspec.structs.replace(runs[1].summary, heldout_sets=heldout_ends(hard))
    runs = [runs[0], dataclasses.replace(runs[1], records=records, summary=summary)]
    figures = drawn(curves(runs, over_time=False))
    assert list(figures)[:3] == ["Reward", "Held-out reward", "Held-out reward: hard"]
    [line] = figures["Held-out reward: hard"]["series"]
    assert (line["name"], line["xs"], line["ys"]) == ("long", [0, 1, 2], [0, 0.25, 0.5])
    rows = {row.name: list(row.values) for row in totals(runs)}
    assert rows["held-out reward: hard"] == ["–", "0.00 → 0.50"]


def test_totals_are_those_of_the_runs_and_rows_without_news_are_left_out(two: tuple[Path, Path]) -> None:
    rows = {row.name: list(row.values) for row in totals(read(*two))}
    assert rows["state"] == ["failed", "finished"]
    assert rows["steps"] == ["4", "8"]
    assert rows["held-out reward"] == ["0.25 at the start", "–"]
    assert rows["oldest trained token, versions"] == ["1 of 2", "3 of 3"]
    assert rows["effective sample size, mean"] == ["0.95", "0.95"]
    assert "restarts" not in rows


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
    with pytest.raises(ConfigError, match="got 1 run, but it compares 2 to 8"):
        read(good)
    with pytest.raises(ConfigError, match="got 9 runs, but it compares 2 to 8"):
        read(*[good] * 9)
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
