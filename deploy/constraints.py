"""Writes `constraints-cpu.txt` and `constraints-gpu.txt`: the versions of all packages that an installation takes.

    make constraints                         # adds what pyproject.toml newly requires, and keeps all other versions
    make constraints ARGS="--upgrade"        # takes the newest versions

uv computes both files from `pyproject.toml` on any machine, for Linux on x86-64 and ARM64, and for each version of
Python that asyncrl supports. A lock file of uv is not committed, because it has the addresses of all files.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {extra: ROOT / f"constraints-{extra}.txt" for extra in ("cpu", "gpu")}
SETTINGS = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet")
BELOW = "python_full_version < '3.14'"
"""A condition of `tool.uv.environments` in pyproject.toml."""
HEADER = """\
# The versions of all packages that an installation with the extra `{extra}` takes. `make constraints` writes this file.
"""


def constraints(extra: str, *, kept: Path, upgrade: bool = False) -> str:
    """Returns the text of the constraints of `extra`. Takes the versions of the file `kept` where they are possible.

    Raises subprocess.CalledProcessError if uv finds no versions that fit together, or reaches no package registry.
    """
    extras = [argument for name in (extra, "dev", "transfer-queue") for argument in ("--extra", name)]
    command = ["uv", "pip", "compile", "pyproject.toml", *SETTINGS, *extras, "--output-file", str(kept)]
    subprocess.run([sys.executable, "-m", *command, *["--upgrade"] * upgrade], cwd=ROOT, check=True)
    lines = (shortened(line) for line in kept.read_text().splitlines() if not line.startswith("#"))
    return HEADER.format(extra=extra) + "".join(f"{line}\n" for line in lines)


def shortened(line: str) -> str:
    """Shortens the markers of a line to the versions of Python, and to the processor if it is for one only. All lines
    have the other conditions of `tool.uv.environments`.

    >>> in_all = "python_full_version < '3.14' and implementation_name == 'cpython'"
    >>> shortened(f"ray==2.60.0 ; {in_all}")
    'ray==2.60.0'
    >>> shortened(f"numpy==2.4.6 ; python_full_version >= '3.13' and {in_all} and platform_machine == 'x86_64'")
    "numpy==2.4.6 ; python_full_version >= '3.13' and platform_machine == 'x86_64'"
    """
    package, _, markers = line.rstrip().partition(" ; ")
    kept = [found for found in re.findall(r"python_full_version [<>=!]+ '[\d.*]+'", markers) if found != BELOW]
    machines = sorted(set(re.findall(r"platform_machine == '\w+'", markers)))
    kept += machines if len(machines) == 1 else []
    return f"{package} ; {' and '.join(kept)}" if kept else package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade: bool = parser.parse_args().upgrade
    for extra, path in FILES.items():
        path.write_text(constraints(extra, kept=path, upgrade=upgrade))


if __name__ == "__main__":
    main()
