"""The YAML dialect: numbers and text are read as a person would read them, and dumped data is read back the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.plain_yaml import dump_yaml, parse_yaml
from asyncrl.errors import ConfigError

_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
# Strings that YAML 1.1 or 1.2 might read as another type.
_TRAPS = st.sampled_from(
    ["1e-3", "1E5", "2026-01-31", "on", "~", "0x1f", "1_000", "1:30", ".5e3", "<<", "=", "1.e+3", "\x85"]
)
_DATA = st.recursive(
    _SCALARS | _TRAPS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")) | _TRAPS, inner),
    max_leaves=10,
)


@given(_DATA)
def test_dumped_data_reads_back_equal_and_of_the_same_types(data: object) -> None:
    read = parse_yaml(dump_yaml(data), source="dump")
    assert repr(read) == repr(data)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("2.5E4", 2.5e4), ("-.5e1", -5.0), (".inf", float("inf")), ("2026-01-31", "2026-01-31")],
)
def test_numbers_with_exponents_are_numbers_and_dates_are_text(text: str, value: object) -> None:
    assert parse_yaml(text, source="t") == value


def test_repeated_key_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml, line 3, column 3: the key 'seed' stands twice"):
        parse_yaml("run:\n  seed: 1\n  seed: 2\n", source="f.yaml")


def test_merge_keys_may_be_overridden() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n", source="f")["b"] == {"x": 3, "y": 2}  # type: ignore[index]


@pytest.mark.parametrize("text", ["1: x", "on: x", "? [a]\n: x"])
def test_keys_that_are_not_text_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not text"):
        parse_yaml(text, source="f")


@pytest.mark.parametrize("text", ["a: [1", "a: *nowhere", "!!python/object:os.system {}", "a: b: c", "\x00"])
def test_text_that_is_not_plain_yaml_is_refused_with_its_source(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml"):
        parse_yaml(text, source="f.yaml")
