"""Checks the report in a real browser: Debian's chromium, headless, which opens the page from its file.

All parts of the page must be visible and readable on wide and narrow screens, in light and dark mode, and on paper, and
the page must make no network request. `report_audit.js` lists what is not readable.

`python tests/views/test_report_in_chromium.py RUN PNG` makes the picture in the README.
"""

import itertools
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pypdfium2
import pytest
from hostile_run import hostile_texts, write_texts_run
from made_up_run import make_step
from playwright.sync_api import Browser, Page, sync_playwright
from written_runs import HOSTILE, critic_step, far_behind, lively_step, write_run

from asyncrl.views.compare import compare_html, write_output
from asyncrl.views.compared_runs import read_compared
from asyncrl.views.report import write_report

pytestmark = pytest.mark.campaign

PROGRAM = "chromium"
AUDIT = (Path(__file__).parent / "report_audit.js").read_text()

WIDE, NARROW, SHEET = 1240, 420, 688
"""Widths of a desktop's window, of a phone, and of A4 paper between the margins, in CSS pixels."""
VIEWS: dict[str, tuple[int, Literal["light", "dark"], Literal["screen", "print"]]] = {
    "light": (WIDE, "light", "screen"),
    "dark": (WIDE, "dark", "screen"),
    "narrow and light": (NARROW, "light", "screen"),
    "narrow and dark": (NARROW, "dark", "screen"),
    "printed": (SHEET, "light", "print"),
    "printed from a dark screen": (SHEET, "dark", "print"),
}


SCENES: dict[str, Callable[[Path], Path]] = {
    "finished": lambda folder: write_run(folder, [lively_step(step) for step in range(60)], end="finished"),
    "critic": lambda folder: write_run(folder, [critic_step(step) for step in range(40)], end="finished"),
    "failed": lambda folder: write_run(folder, [lively_step(step) for step in range(3)], finish=False, evals=False),
    "all alike": lambda folder: write_run(folder, [make_step(step, loss=-1.25e-4 * step) for step in range(5)]),
    "going on": lambda folder: write_run(folder, [], finish=False, evals=False, end=None, name="x" * 64),
    "long": lambda folder: write_run(folder, [far_behind(step) for step in range(3000)], limit=20),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    runs = {scene: write(folder / scene) for scene, write in SCENES.items()}
    slow = write_run(folder / "slow", [lively_step(step, wall_s=10 + 1.5 * step) for step in range(90)], limit=3)
    compared = read_compared([runs["finished"], runs["critic"], slow], info_of=lambda _: None)
    write_output("--output", folder / "compare.html", compare_html(compared))
    return {scene: write_report(run) for scene, run in runs.items()} | {"compared": folder / "compare.html"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which(PROGRAM)
    if path is None:
        pytest.fail("chromium is not installed: `apt-get install chromium fonts-dejavu-core`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, timeout=60_000)
        yield started
        started.close()


@pytest.fixture(scope="module")
def only_page(browser: Browser) -> Page:
    """Returns the page that all tests share. A new page would be a new window, which takes a second of a core."""
    page = browser.new_page()
    page.set_default_timeout(20_000)
    return page


@pytest.fixture
def open_page(only_page: Page) -> Iterator[Callable[[Path, str], Page]]:
    """Opens a report in a view, instead of the report that is open.

    At the end of the test, the page must have requested only the opened files, and there must be no console message,
    dialog or error.
    """
    asked: list[str] = []
    said: list[str] = []
    opened: list[str] = []
    watched: dict[str, Callable[[Any], object]] = {
        "request": lambda request: asked.append(request.url),
        "console": lambda message: said.append(message.text),
        "pageerror": lambda error: said.append(str(error)),
        "dialog": lambda dialog: (said.append(dialog.message), dialog.dismiss()),
    }

    def open_(report: Path, view: str) -> Page:
        width, scheme, media = VIEWS[view]
        only_page.mouse.move(0, 0)
        only_page.set_viewport_size({"width": width, "height": 900})
        # "null" and not "screen", because a PDF must have the styles of paper.
        only_page.emulate_media(color_scheme=scheme, media="print" if media == "print" else "null")
        opened.append(report.as_uri())
        only_page.goto(report.as_uri())
        height = only_page.evaluate("document.documentElement.scrollHeight")
        only_page.set_viewport_size({"width": width, "height": height})
        return only_page

    for event, handler in watched.items():
        only_page.on(event, handler)  # type: ignore[call-overload]
    yield open_
    for event, handler in watched.items():
        only_page.remove_listener(event, handler)
    only_page.goto("about:blank")
    assert asked == opened
    assert said == []


@pytest.mark.parametrize(("scene", "view"), list(itertools.product([*SCENES, "compared"], VIEWS)))
def test_all_of_it_can_be_seen_and_read(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path], scene: str, view: str
) -> None:
    page = open_page(reports[scene], view)
    assert not (problems := page.evaluate(AUDIT)), "\n".join(problems)
    assert page.locator("figure").count() == {"going on": 0, "critic": 23, "all alike": 20, "compared": 14}.get(
        scene, 21
    )


def test_each_scheme_has_its_own_paper_and_a_sheet_is_white(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path]
) -> None:
    papers = {
        view: open_page(reports["finished"], view).evaluate("getComputedStyle(document.body).backgroundColor")
        for view in VIEWS
    }
    white, black = "rgb(255, 255, 255)", "rgb(20, 22, 26)"
    assert papers == {view: black if view.endswith("dark") else white for view in VIEWS}


@pytest.mark.parametrize("view", ["light", "narrow and dark"])
@pytest.mark.parametrize("step", [0, 20, 59])
def test_the_pointer_shows_the_numbers_of_the_step_under_it(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path], view: str, step: int
) -> None:
    page = open_page(reports["finished"], view)
    figure = page.locator("figure", has_text="Entropy")
    tip = figure.locator(".tip")
    assert tip.count() == 0
    frame = figure.bounding_box()
    grid = figure.locator("line.grid").first.bounding_box()
    assert frame is not None
    assert grid is not None
    page.mouse.move(grid["x"] + grid["width"] * step / 59, grid["y"] - 20)
    assert tip.inner_text().split("\n") == [f"step {step}", f"entropy  {1 - step / 100:.4g}"]
    shown = tip.bounding_box()
    assert shown is not None
    assert frame["x"] <= shown["x"] <= shown["x"] + shown["width"] <= frame["x"] + frame["width"]
    page.mouse.move(0, 0)
    assert tip.count() == 0


def test_the_pointer_shows_every_state_in_its_color_and_moments_in_their_unit(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path]
) -> None:
    page = open_page(reports["finished"], "light")
    learner = page.locator("figure", has_text="Learner").first
    learner.locator("svg").hover()
    lines = learner.locator(".tip").inner_text().split("\n")
    assert {"forward backward  40.0 %", "waiting for groups  20.0 %"} <= set(lines)
    legend, tip = (
        learner.locator(f"{part} i").evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
        for part in (".legend", ".tip")
    )
    assert legend == tip
    assert len(set(tip)) == 7
    over_time = page.locator("figure", has_text="Age of tokens over time")
    over_time.locator("svg").hover()
    assert over_time.locator(".tip").inner_text().split("\n")[0].endswith(" seconds")


def test_the_pointer_shows_each_run_at_its_own_place(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path]
) -> None:
    """The runs have 60, 40 and 90 steps."""
    page = open_page(reports["compared"], "light")
    figure = page.locator("figure", has_text="Entropy").first
    grid = figure.locator("line.grid").first.bounding_box()
    assert grid is not None
    for step, runs in ((0, 3), (39, 3), (50, 2), (80, 1)):
        page.mouse.move(grid["x"] + grid["width"] * step / 89, grid["y"] - 20)
        first, *entries = figure.locator(".tip").inner_text().split("\n")
        assert first == f"step {step}"
        assert [entry.split()[-1] for entry in entries] == [f"{1 - step / 100:.4g}"] * runs


def test_a_reader_opens_a_step_and_chooses_what_colours_its_tokens(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path]
) -> None:
    page = open_page(reports["finished"], "light")
    steps = page.locator(".samples > details")
    opened = "all => all.map((one, place) => one.open ? place : -1).filter((place) => place >= 0)"
    assert steps.count() == 12
    assert steps.evaluate_all(opened) == [11]
    steps.first.locator("summary").first.click()
    assert steps.evaluate_all(opened) == [0], "one step is open at a time"
    tokens = steps.first.locator(".tokens:not(.prompt) b")
    colors = {}
    for by in ("age", "difference", "mask"):
        page.check(f"input[value={by}]")
        colors[by] = tokens.evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
        legend = page.locator(f".legend.of-{by}")
        assert legend.is_visible()
        assert page.locator(".samples > .legend:visible").count() == 1
        swatches = legend.locator("i").evaluate_all("all => all.map((one) => getComputedStyle(one).backgroundColor)")
        assert set(colors[by]) == set(swatches)
    assert colors["age"] == list(reversed(colors["difference"])), "the oldest token differs least"
    assert len(set(colors["mask"])) == 2
    assert colors["mask"][1:] == [colors["mask"][1]] * 3


def test_what_a_model_wrote_stays_text(open_page: Callable[[Path, str], Page], reports: dict[str, Path]) -> None:
    page = open_page(reports["failed"], "light")
    assert page.locator("img").count() == 0
    assert page.get_by_text(HOSTILE).count() == 1 + 3, "the reason of the run's end, and each completion"


@pytest.mark.parametrize("page_of", ["report", "comparison"])
def test_the_texts_of_a_run_change_neither_the_title_nor_the_elements_of_its_page(
    open_page: Callable[[Path, str], Page], tmp_path: Path, page_of: str
) -> None:
    of_texts = {"plain": [f"text {number}" for number in range(500)], "hostile": hostile_texts(500)}
    pages = {}
    for kind, texts in of_texts.items():
        runs = [write_texts_run(tmp_path / kind, texts[start::2], name=f"run{start}") for start in range(2)]
        if page_of == "report":
            files = [write_report(run) for run in runs]
        else:
            files = [tmp_path / f"{kind}.html"]
            write_output("--output", files[0], compare_html(read_compared(runs, info_of=lambda _: None)))
        pages[kind] = [
            open_page(file, "light").evaluate(
                """() => [document.title, ...[...document.querySelectorAll("*")].map((one) =>
                    `${one.tagName} ${one.getAttributeNames().join(" ")} ${one.getAttribute("class")}`)]"""
            )
            for file in files
        ]
    assert pages["hostile"] == pages["plain"]


@pytest.mark.parametrize("scene", ["finished", "critic", "going on"])
@pytest.mark.parametrize("view", ["light", "dark"])
def test_on_paper_no_chart_is_cut_and_no_sheet_is_blank_or_black(
    open_page: Callable[[Path, str], Page], reports: dict[str, Path], scene: str, view: str
) -> None:
    page = open_page(reports[scene], view)
    page.evaluate(
        """() => document.querySelectorAll("figure").forEach((figure, index) => ["top", "bottom"].forEach((side) => {
            const mark = document.createElement("b");
            mark.textContent = `${side}${index}.`;
            mark.style = `position: absolute; right: 0; ${side}: 0; font-size: 6px`;
            figure.append(mark);
        }))"""
    )
    document = pypdfium2.PdfDocument(page.pdf(format="A4"))
    sheets = [sheet.get_textpage().get_text_range() for sheet in document]
    for index in range(page.locator("figure").count()):
        both = [
            [number for number, words in enumerate(sheets) if f"{side}{index}." in words] for side in ("top", "bottom")
        ]
        assert both[0] == both[1], f"chart {index} is cut"
        assert len(both[0]) == 1
    for sheet, words in zip(document, sheets, strict=True):
        assert words.strip()
        picture = sheet.render(scale=1).to_pil().convert("L")
        shades = picture.histogram()
        ink = sum(shades[:200]) / sum(shades)
        assert 0.0005 < ink < 0.5, f"{ink:.2%} of a sheet is dark"
        assert picture.getpixel((2, 2)) == 255
    whole = "".join(sheets)
    assert "max_versions: 2" in whole, "the configuration, which is folded on the screen, is printed"
    assert "config.yaml" not in whole, "there is nothing to unfold on paper"


def test_a_legend_keeps_its_colors_on_paper(open_page: Callable[[Path, str], Page], reports: dict[str, Path]) -> None:
    """By default, browsers do not print backgrounds, and the swatches of a legend are backgrounds."""
    document = pypdfium2.PdfDocument(open_page(reports["finished"], "light").pdf(format="A4"))
    for sheet in document:
        words = sheet.get_textpage()
        if found := words.search("held out").get_next():
            left, bottom, _, top = words.get_charbox(found[0])
            middle = (int(left - 7), int(sheet.get_height() - (bottom + top) / 2))
            assert sheet.render(scale=1).to_pil().convert("RGB").getpixel(middle) == (226, 148, 31)
            return
    pytest.fail("no sheet has the legend")


def take_picture(run: Path, png: Path) -> None:
    """Writes a picture of the report from its title to the first charts, with 256 colours to keep the file small."""
    from PIL import Image

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which(PROGRAM))
        page = chromium.new_page(viewport={"width": WIDE, "height": 900}, color_scheme="light")
        page.goto(write_report(run).absolute().as_uri())
        second_row = page.locator("figure").nth(3).bounding_box()
        assert second_row is not None
        page.screenshot(path=png, full_page=True, clip={"x": 0, "y": 0, "width": WIDE, "height": second_row["y"] - 12})
        chromium.close()
    Image.open(png).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(png, optimize=True)


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]), Path(sys.argv[2]))
