"""Some datasets of the campaign that compares what the reward gets with what a file has."""

from pathlib import Path

import pytest
from data_campaign import Wanted, compared, same, wanted
from random_datasets import KINDS

pytest.importorskip("datasets")

pytestmark = pytest.mark.slow


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.fault("F33")
def test_the_reward_gets_what_the_file_has(seed: int, tmp_path: Path) -> None:
    finding = compared(seed, tmp_path)
    assert finding.differences == []
    assert finding.kind == KINDS[seed % len(KINDS)]
    assert finding.refused or finding.tasks


@pytest.mark.parametrize(
    ("left", "right"), [(1, 1.0), (True, 1), (0.0, -0.0), ({"a": None}, {}), ([1], [1.0]), ("7", 7), ("007", "7")]
)
def test_values_of_other_types_are_differences(left: object, right: object) -> None:
    assert not same(left, right)
    assert same(left, left)


def test_the_rules_of_rows_are_those_of_the_page() -> None:
    assert wanted({"prompt": "a", "answer": 7, "b": None}, {}) == Wanted(
        question="a", prompt="a", answer="7", metadata={"b": None}
    )
    for row in ({"answer": "7"}, {"prompt": "", "answer": "7"}, {"prompt": "a", "answer": True}, "text"):
        assert wanted(row, {}).bad
