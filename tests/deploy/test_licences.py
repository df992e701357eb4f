"""The licences of installed packages are what their metadata states."""

import doctest
import sys
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
import install
import licences


def package(*fields: tuple[str, str]) -> Message:
    made = Message()
    for name, value in fields:
        made[name] = value
    return made


EXPRESSION = ("License-Expression", "Apache-2.0 OR MIT")
OSI = ("Classifier", "License :: OSI Approved")
BSD = ("Classifier", "License :: OSI Approved :: BSD License")
MIT = ("Classifier", "License :: OSI Approved :: MIT License")
OTHER = ("Classifier", "Programming Language :: Python :: 3")


@pytest.mark.parametrize(
    ("stated", "shown"),
    [
        ([BSD, EXPRESSION, ("License", "BSD")], "Apache-2.0 OR MIT"),
        ([OTHER, MIT, OSI, BSD, MIT, ("License", "see LICENSE")], "BSD License, MIT License"),
        ([OSI, OTHER, ("License", "MIT License\n\nPermission is hereby granted, free of charge")], "MIT License"),
        ([("License", "x" * 1000)], "x" * 80),
        (
            [("License", "UNKNOWN"), ("License-File", "NOTICE"), ("License-File", "LICENSE")],
            "not stated; see LICENSE, NOTICE",
        ),
        ([OTHER], "not stated"),
    ],
)
def test_a_licence_is_read_from_the_first_field_that_states_one(stated: list[tuple[str, str]], shown: str) -> None:
    assert licences.licence(package(*stated)) == shown


def test_the_table_has_each_installed_package_of_the_constraints_and_no_other(tmp_path: Path) -> None:
    assert licences.main(["--output", str(tmp_path / "licences.md")]) == 0
    rows = [line.strip("| ").split(" | ") for line in (tmp_path / "licences.md").read_text().splitlines()]
    shown = {row[0]: row[1] for row in rows if len(row) == 3 and row[0] not in ("package", "---")}
    wanted = {name for extra in ("cpu", "gpu") for name in install.pinned(extra)}
    assert shown.keys() <= wanted
    assert {"torch", "ray", "msgspec"} <= shown.keys()
    for name, version in shown.items():  # other tests may have made the search path longer
        assert version in {each.version for each in metadata.distributions(name=name)}, name
    counted = sum(int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal())
    assert counted == len(shown)


def test_a_python_without_the_packages_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "distributions", lambda: [])
    assert licences.main([]) == 1
    assert "has no package of constraints-*.txt: use the Python of .venv" in capsys.readouterr().err


def test_the_examples_of_licences_hold() -> None:
    assert doctest.testmod(licences).failed == 0
