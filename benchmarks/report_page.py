"""Writes the result of a benchmark into a page, by default docs/benchmarks.md, between the two marks of the
benchmark."""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "benchmarks.md"


def marks(benchmark: str) -> tuple[str, str]:
    """Returns the lines before and after the result of a benchmark."""
    return f"<!-- benchmarks/{benchmark} -->", f"<!-- end of benchmarks/{benchmark} -->"


def write_section(benchmark: str, lines: Sequence[str], *, page: Path = PAGE) -> None:
    """Replaces the text between the marks of the benchmark. Raises RuntimeError if the page does not have them."""
    begin, end = marks(benchmark)
    before, begun, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise RuntimeError(f"{page} does not have the lines {begin} and {end}")
    page.write_text("\n".join([f"{before}{begin}\n", *lines, f"\n{end}{after}"]))


def provenance(benchmark: str, *, busy_percent: float, also: str = "", commit: str | None = None) -> str:
    """Returns the line above a result: command, commit (by default that of this directory), date, machine, and `also`.

    `busy_percent` is the share of the machine's cores that other work used before the first measurement.
    """
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(": ")[2] if models else "an unknown processor"
    return (
        f"`{' '.join([benchmark, *sys.argv[1:]])}`: commit {commit or commit_of_tree()}, {datetime.now(UTC):%Y-%m-%d}, "
        f"{len(models)} cores of {processor} ({busy_percent:.0f} % busy before the first run){also}."
    )


def commit_of_tree(page: Path = PAGE) -> str:
    """Returns the commit of this directory, and says whether a tracked file other than `page` has changes."""
    commit = subprocess.check_output(["git", "describe", "--always"], cwd=REPOSITORY, text=True).strip()
    others = ["git", "status", "--porcelain", "--untracked-files=no", "--", f":!{page.relative_to(REPOSITORY)}"]
    return commit + (" with changes" if subprocess.check_output(others, cwd=REPOSITORY) else "")


def busy_percent() -> float:
    """Measures for ten seconds which share of the cores is busy."""
    return psutil.cpu_percent(interval=10.0)
