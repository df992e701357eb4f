"""The pages that benchmarks write."""

from pathlib import Path

import pytest
from report_page import PAGE, REPOSITORY, marks, write_section

BENCHMARKS = (
    "against_trl.py",
    "chat_models.py",
    "coordinator.py",
    "health_study.py",
    "overlap.py",
    "plan_check.py",
    "profile_run.py",
    "simulated_fleet.py",
    "simulated_pools.py",
    "sweep_study.py",
)


def test_only_the_text_between_the_marks_is_replaced(tmp_path: Path) -> None:
    begin, end = marks("mine.py")
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n")
    write_section("mine.py", ["new", "lines"], page=page)
    assert page.read_text() == f"before\n\n{begin}\n\nnew\nlines\n\n{end}\n\nafter\n"
    page.write_text("no marks")
    with pytest.raises(RuntimeError, match="does not have the lines"):
        write_section("mine.py", ["new"], page=page)
    assert page.read_text() == "no marks"


@pytest.mark.parametrize(
    ("benchmark", "page"),
    [
        *((name, PAGE) for name in BENCHMARKS),
        ("kv_cache.py", PAGE.with_name("weights.md")),
        ("agents.py", PAGE.with_name("agents.md")),
        ("agent_clients.py", PAGE.with_name("agents.md")),
    ],
)
def test_the_page_has_the_marks(benchmark: str, page: Path) -> None:
    text = page.read_text()
    assert [text.count(mark) for mark in marks(benchmark)] == [1, 1]


def test_the_page_of_the_gpu_has_its_marks() -> None:
    text = (REPOSITORY / "docs" / "gpu.md").read_text()
    assert [text.count(mark) for mark in marks("gpu/measure.py")] == [1, 1]
