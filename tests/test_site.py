"""The documentation site: it is built without a warning, and loads nothing from other machines."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import asyncrl

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_has_every_page_and_loads_nothing_from_other_machines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    docs, site = REPOSITORY / "docs", tmp_path / "docs"
    pages = {page.relative_to(docs).with_suffix(".html") for page in docs.rglob("*.md")}
    assert {page.relative_to(site) for page in site.rglob("*.html")} == pages
    assert {"index.html", "CONTRIBUTING.html", "deploy/index.html", "configs/ppo.yaml"} <= {
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()
    }
    loaded = re.compile(r"<(?:script|img|iframe|source)[^>]+src=\"?(https?:)?//|<link[^>]+href=\"?(https?:)?//")
    styled = re.compile(r"(?:url\(|@import )[\"']?(https?:)?//")
    for file in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        text = file.read_text()
        assert not loaded.search(text), file
        assert not styled.search(text), file


def test_the_reference_has_every_public_name() -> None:
    names = re.findall(r"^::: asyncrl\.(\w+)$", (REPOSITORY / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*asyncrl.__all__} - {"__version__"})
