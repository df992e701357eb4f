"""Writes the result of a benchmark into docs/benchmarks.md, between the two marks of the benchmark."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "benchmarks.md"


def write_section(mark: str, text: str) -> None:
    """Replaces the text between the marks of the benchmark `mark`, and says when and with which commit it was
    measured."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    page = PAGE.read_text()
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise RuntimeError(f"{PAGE} does not have the lines {begin} and {end}")
    PAGE.write_text(f"{before}{begin}\n\n{provenance(mark)}\n\n{text}\n\n{end}{after}")


def provenance(mark: str) -> str:
    """Returns one line: the command, the date, the commit and the processor."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor()
    machine = f"{len(names)} cores of {processor}"
    return f"`{mark}` on {datetime.now(UTC):%Y-%m-%d}, commit {described.stdout.strip()}, {machine}."
