"""An error that leaves vLLM's processes as text keeps its type and its message."""

import doctest

import pytest

from asyncrl import errors
from asyncrl.errors import WeightError
from asyncrl.weights import remote_errors
from asyncrl.weights.remote_errors import as_text, from_text

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WeightError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_weight_error_survives_being_wrapped(kind: type[WeightError]) -> None:
    error = kind("weights 1.3: a is missing;\nnothing was applied: see asyncrl.WeightError")
    found = from_text(f"Call to collective_rpc method failed: RuntimeError: {as_text(error)}")
    assert type(found) is kind
    assert str(found) == str(error)


@pytest.mark.parametrize("text", ["", "asyncrl.Exception: no", "asyncrl.WeightErrors: no", "ManifestMismatch: no"])
def test_another_text_is_no_weight_error(text: str) -> None:
    assert from_text(text) is None


def test_examples_in_docstrings_are_true() -> None:
    results = doctest.testmod(remote_errors)
    assert results.attempted > 0
    assert results.failed == 0
