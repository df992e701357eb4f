"""docs/configuration.md has every key of the schema, and agrees with the schema."""

from pathlib import Path

import pytest

from asyncrl.config import docs
from asyncrl.config.load import load_config, shared_config
from asyncrl.config.schema import Config


def _keys(tree: dict[str, object], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, value in tree.items():
        keys |= _keys(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}"}
    return keys


def _rows() -> dict[str, str]:
    """Returns the row of each key. The keys of the mappings in a list, or in a mapping by names, are left out, because
    no configuration has a default for them."""
    lists = ("data.few_shot.", "data.mixture.", "environment.mcp_servers.", "environment.rewards.", "eval.sets.")
    rows = {line.split("`")[1]: line for line in docs.page().splitlines() if line.startswith("| `")}
    assert all(any(key.startswith(each) for key in rows) for each in lists)
    return {key: line for key, line in rows.items() if not key.startswith(lists)}


OPTIONAL = ["model.tiny={}", "model.lora={}", "critic={}", "run.stop_when.reward=1", "generator.autoscale.max=1"]
"""Overrides that set each section which is unset by default."""


def test_the_page_on_disk_is_what_the_schema_says() -> None:
    assert docs.main(["--check"]) == 0


def test_every_key_has_a_row_with_a_meaning() -> None:
    rows = _rows()
    everything = load_config([], OPTIONAL)
    assert rows.keys() == _keys(everything.model_dump(mode="json"))
    assert all(len(row.split(" | ")[3]) > 10 for row in rows.values())


def test_bounds_defaults_and_unset_are_in_the_row() -> None:
    page = docs.page()
    assert "| `learner.ranks` | integer ≥ 1 | `1` |" in page
    assert "| `buffer.capacity_groups` | integer ≥ 1 or unset | unset |" in page
    assert "| `learner.optimizer.betas` | list of 2 × number ≥ 0, < 1 | `[0.9, 0.95]` |" in page
    assert '| `model.dtype` | `float32` or `bfloat16` | `"float32"` |' in page


def test_an_outdated_page_fails_the_check_and_writing_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs, "PAGE", tmp_path / "docs" / "configuration.md")
    assert docs.main(["--check"]) == 1
    assert "python -m asyncrl.config.docs" in capsys.readouterr().err
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    docs.PAGE.write_text(docs.PAGE.read_text() + "x")
    assert docs.main(["--check"]) == 1


def test_unknown_arguments_are_refused() -> None:
    assert docs.main(["--chek"]) == 2


def test_the_schema_documents_every_section() -> None:
    schema = Config.model_json_schema()
    assert all(section["description"] for section in schema["$defs"].values())


def test_a_star_marks_what_each_deployment_of_a_run_may_have_of_its_own() -> None:
    keys = {key: "` ★ |" in line for key, line in _rows().items()}
    config = load_config([], OPTIONAL)
    assert {key for key, starred in keys.items() if not starred} == shared_config(config).keys()
    assert keys["generator.tensor_parallel_size"]
    assert not keys["learner.group_size"]
