"""Writes `constraints-cpu.txt` and `constraints-gpu.txt`: the versions of all packages that an installation takes.

    make constraints                         # adds what pyproject.toml newly requires, and keeps all other versions
    make constraints ARGS="--upgrade"        # takes the newest versions

uv computes both files from `pyproject.toml` on any machine, for Linux on x86-64 and ARM64, and for each version of
Python that asyncrl supports. Before a file is written, it is tried: uv must find an installation within it for each
Python and processor. A digest of what was tried stands in the file, so that a test knows it without trying again. A
lock file of uv is not committed, because it has the addresses of all files.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {extra: ROOT / f"constraints-{extra}.txt" for extra in ("cpu", "gpu")}
SETTINGS = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet")
BELOW = "python_full_version < '3.14'"
"""A condition of `tool.uv.environments` in pyproject.toml."""
HEADER = """\
# The versions of all packages that an installation with the extra `{extra}` takes. `make constraints` writes this file.
# Tried with pyproject.toml: {digest}
"""
EXTRAS = ("dev", "campaign", "gs", "az")
"""All extras of pyproject.toml are in these, except for those of an installation and transfer-queue."""
PYTHONS = ("3.11", "3.12", "3.13")
PROCESSORS = {"cpu": ("x86_64", "aarch64"), "gpu": ("x86_64",)}
PINNED_BY_OTHERS = {"intel-cmplr-lib-ur"}
"""intel-openmp requires an exact version. Its wheel for Windows does not, and uv reads the metadata of one wheel."""


def constraints(extra: str, *, kept: Path, upgrade: bool = False) -> str:
    """Returns the text of the constraints of `extra`. Takes the versions of the file `kept` where they are possible.

    Raises subprocess.CalledProcessError if uv finds no versions that fit together, or reaches no package registry.
    """
    extras = [argument for name in (extra, *EXTRAS, "transfer-queue") for argument in ("--extra", name)]
    command = ["uv", "pip", "compile", "pyproject.toml", *SETTINGS, *extras, "--output-file", str(kept)]
    subprocess.run([sys.executable, "-m", *command, *["--upgrade"] * upgrade], cwd=ROOT, check=True)
    lines = (shortened(line) for line in kept.read_text().splitlines() if not line.startswith("#"))
    return "".join(f"{line}\n" for line in lines)


def digest(extra: str, versions: str) -> str:
    """Returns a digest of the versions together with the parts of pyproject.toml that decide about an installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = [project["project"][key] for key in ("requires-python", "dependencies", "optional-dependencies")]
    tried = json.dumps([parts, project["tool"]["uv"], PYTHONS, PROCESSORS[extra], versions], sort_keys=True)
    return hashlib.sha256(tried.encode()).hexdigest()[:32]


def written(extra: str) -> tuple[str, str]:
    """Returns the digest in the file of `extra`, and its versions."""
    lines = FILES[extra].read_text().splitlines(keepends=True)
    [tried] = [line.rpartition(" ")[2].strip() for line in lines if line.startswith("# Tried")]
    return tried, "".join(line for line in lines if not line.startswith("#"))


def try_installations(extra: str, versions: str) -> None:
    """Finds an installation for each Python and processor. This reads only metadata of packages.

    Raises subprocess.CalledProcessError if there is none, and ValueError if it has a package without a version in
    `versions`.
    """
    known = {line.partition("==")[0] for line in versions.splitlines()} | PINNED_BY_OTHERS
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "constraints.txt").write_text(versions)
        for python in PYTHONS:
            for processor in PROCESSORS[extra]:
                found = Path(folder) / f"{python}-{processor}.txt"
                extras = [argument for name in (extra, *EXTRAS) for argument in ("--extra", name)]
                command = ["uv", "pip", "compile", "pyproject.toml", *extras, "--quiet"]
                command += ["--constraint", str(file), "--python-version", python, "--no-header", "--no-annotate"]
                command += ["--python-platform", f"{processor}-manylinux_2_28", "--output-file", str(found)]
                subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                names = {line.partition("==")[0] for line in found.read_text().splitlines() if "==" in line}
                if missing := sorted(names - known):
                    raise ValueError(f"Python {python} on {processor}: no version of {', '.join(missing)}")


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
        with tempfile.TemporaryDirectory() as folder:  # uv writes into the file from which it takes versions
            kept = Path(shutil.copy(path, folder))
            versions = constraints(extra, kept=kept, upgrade=upgrade)
        try_installations(extra, versions)
        path.write_text(HEADER.format(extra=extra, digest=digest(extra, versions)) + versions)


if __name__ == "__main__":
    main()
