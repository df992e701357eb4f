"""The YAML dialect: numbers and text are read as a person would read them, and dumped data is read back the same."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import dump_yaml, parse_yaml
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


CORE = {
    "1e-3": 1e-3, "1e3": 1e3, "2.5E4": 2.5e4, "-.5e1": -5.0, "1.": 1.0, ".inf": float("inf"), "-.Inf": float("-inf"),
    "010": 10, "0o17": 15, "0x1F": 31, "+3": 3, "-0": 0, "true": True, "False": False, "~": None,
    "Null": None, "": None,
}  # fmt: skip
TEXTS = [
    "on", "On", "off", "OFF", "yes", "Yes", "no", "NO", "y", "n", "2026-01-31", "2026-01-31 10:00:00", "1:30",
    "190:20:30", "1_000", "0b11", "=", "nan", "inf", "tRue", "1e", "e3", "0o8", "-0x1", ".", "1.2.3",
]  # fmt: skip


@pytest.mark.parametrize("text", CORE)
def test_numbers_truth_values_and_null_are_those_of_the_core_schema(text: str) -> None:
    read = parse_yaml(f"a: {text}", source="t")
    assert repr(read) == repr({"a": CORE[text]})


@pytest.mark.parametrize("text", TEXTS)
def test_every_other_plain_scalar_is_text(text: str) -> None:
    assert parse_yaml(f"a: {text}", source="t") == {"a": text}
    assert parse_yaml(f"[{text}]", source="t") == [text]
    assert parse_yaml(f"{text}: 1", source="t") == {text: 1}


@pytest.mark.parametrize("text", [*TEXTS, *CORE])
def test_dumped_text_is_text_for_readers_of_both_versions(text: str) -> None:
    dumped = dump_yaml({"a": text})
    assert parse_yaml(dumped, source="t") == yaml.safe_load(dumped) == {"a": text}


def test_repeated_key_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml, line 3, column 3: the key 'seed' stands twice"):
        parse_yaml("run:\n  seed: 1\n  seed: 2\n", source="f.yaml")


def test_merge_keys_may_be_overridden() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n", source="f")["b"] == {"x": 3, "y": 2}  # type: ignore[index]


@pytest.mark.parametrize("text", ["1: x", "true: x", "? [a]\n: x"])
def test_keys_that_are_not_text_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not text"):
        parse_yaml(text, source="f")


@pytest.mark.parametrize("text", ["a: [1", "a: *nowhere", "!!python/object:os.system {}", "a: b: c", "\x00"])
def test_text_that_is_not_plain_yaml_is_refused_with_its_source(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.yaml"):
        parse_yaml(text, source="f.yaml")
