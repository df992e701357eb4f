"""docs/faults.py finds promises without a test and marks without a fault."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROMISED = {"id": "F1", "event": "e", "promise": "p", "status": "promised"}
PLANNED = {"id": "F2", "event": "e", "promise": "p", "status": "planned"}


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", Path(__file__).parents[1] / "docs" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_promise_without_a_test_and_a_mark_without_a_fault_are_found(faults: ModuleType) -> None:
    assert faults.problems([PROMISED, PLANNED], {"F1": ["a.py::test_a"]}) == []
    assert faults.problems([PROMISED, PLANNED], {}) == ["F1 is promised, but no test is marked with it"]
    [unknown] = faults.problems([PLANNED], {"F9": ["a.py::test_a"]})
    assert unknown == "a.py::test_a is marked with F9, which docs/faults.yaml does not have"


def test_the_tests_of_a_fault_are_found_by_their_marks(faults: ModuleType) -> None:
    found = faults.marked_tests()
    assert "data/test_rows.py::test_a_missing_file_names_the_file_and_the_knob" in found["F33"]
    both = "integration/test_drivers_over_ray.py::test_two_ranks_name_lost_rows_go_on_and_end_together"
    assert both in found["F34"]
    assert both in found["F37"]
