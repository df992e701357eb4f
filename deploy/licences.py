"""Prints the licences of the installed packages that asyncrl requires, as a table in Markdown.

    .venv/bin/python deploy/licences.py                       # of this environment
    .venv/bin/python deploy/licences.py --output licences.md

The packages are those of `constraints-cpu.txt` and `constraints-gpu.txt` that are installed for the Python that runs
this file. Each licence is what the package states in its metadata, and is not compared with the files of the package.
The table is not committed, because the packages differ between builds, processors and versions of Python: the release
workflow makes it. pip-licenses would do the same, but it is one more package.
"""

import argparse
import platform
import re
import sys
from collections import Counter
from collections.abc import Mapping
from email.message import Message
from importlib import metadata
from pathlib import Path

from install import pinned

NOT_STATED = "not stated"
MOST_CHARS = 80
"""Longest licence that is shown. In some packages, the field `License` has the whole text, whose first line is the
name."""


def licence(package: Message) -> str:
    """Returns what the metadata of a package says about its licence: the SPDX expression, else the classifiers, else
    the first line of the field `License`, else the names of its licence files."""
    if expression := package.get("License-Expression"):
        return str(expression)
    classifiers = [text.split(" :: ") for text in package.get_all("Classifier", []) if text.startswith("License ::")]
    if named := sorted({parts[-1] for parts in classifiers if parts[-1] != "OSI Approved"}):
        return ", ".join(named)
    field = (package.get("License") or "").strip().partition("\n")[0].strip()
    if field and field.upper() != "UNKNOWN":
        return field[:MOST_CHARS]
    files = sorted(package.get_all("License-File", []))
    return f"{NOT_STATED}; see {', '.join(files)}" if files else NOT_STATED


def normal(name: str) -> str:
    """Returns the normal form of a package's name (PEP 503), which the constraints have.

    >>> normal("Antlr4_python3.runtime")
    'antlr4-python3-runtime'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, Message]:
    """Returns the metadata of each installed package of the constraints, by its name."""
    wanted = {normal(name) for extra in ("cpu", "gpu") for name in pinned(extra)}
    found: dict[str, Message] = {}
    for each in metadata.distributions():  # Python imports the first one of a name
        found.setdefault(normal(each.name), each.metadata)  # type: ignore[arg-type]
    return {name: found[name] for name in sorted(wanted & found.keys())}


def table(packages: Mapping[str, Message]) -> str:
    """Returns the number of packages by licence, and the licence of each package."""
    licences = {name: licence(package).replace("|", "/") for name, package in packages.items()}
    counts = Counter(licences.values())
    return "\n".join(
        [
            f"# Licences of the {len(packages)} packages that asyncrl uses here",
            "",
            f"Python {platform.python_version()} on {platform.machine()}. The licences are what the packages state.",
            "",
            "| licence | packages |",
            "|---|---|",
            *(
                f"| {name} | {number} |"
                for name, number in sorted(counts.items(), key=lambda each: (-each[1], each[0]))
            ),
            "",
            "| package | version | licence |",
            "|---|---|---|",
            *(f"| {name} | {packages[name]['Version']} | {found} |" for name, found in licences.items()),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 if no package is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write; default: standard output")
    output: Path | None = parser.parse_args(arguments).output
    if not (packages := installed()):
        print(f"{sys.executable} has no package of constraints-*.txt: use the Python of .venv", file=sys.stderr)
        return 1
    if output is None:
        print(table(packages), end="")
    else:
        output.write_text(table(packages), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
