"""Writes `constraints-cpu.txt` and `constraints-gpu.txt`: the versions of all packages that an installation takes. Also
writes `deploy/docker/hashes-*.txt`: the checksums of the files that an image takes.

    make constraints                         # adds what pyproject.toml newly requires, and keeps all other versions
    make constraints ARGS="--upgrade"        # takes the newest versions

uv computes both files from `pyproject.toml` on any machine, for Linux on x86-64 and ARM64, and for each version of
Python that asyncrl supports. Before a file is written, it is tried: uv must find an installation within it for each
Python and processor. A digest of what was tried stands in the file, so that a test knows it without trying again. A
lock file of uv is not committed, because it has the addresses of all files.

Only the images compare checksums. In a clone, torch may come from several places, and its builds differ.
"""

import argparse
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
FILES = {extra: ROOT / f"constraints-{extra}.txt" for extra in ("cpu", "gpu")}
HASHES = {extra: ROOT / "deploy" / "docker" / f"hashes-{extra}.txt" for extra in FILES}
SETTINGS = ("--universal", "--python-version", "3.11", "--no-annotate", "--no-header", "--quiet")
BELOW = "python_full_version < '3.14'"
"""A condition of `tool.uv.environments` in pyproject.toml."""
HEADER = """\
# The versions of all packages that an installation with the extra `{extra}` takes. `make constraints` writes this file.
# Tried with pyproject.toml: {digest}
"""
HASHES_HEADER = """\
# The packages of the image for `{extra}`, with the sha256 of each of their files that fits it. `make constraints`
# writes this file, and the image's build refuses other files (deploy/install.py --hashes).
# Made for the versions: {digest}
"""
OF_IMAGES = ("hf", "s3", "gs", "az")
"""The extras that an image has besides `cpu` or `gpu`."""
IMAGE_PYTHON = "3.11"
EXTRAS = ("dev", "campaign", "gs", "az")
"""All extras of pyproject.toml are in these, except for those of an installation and transfer-queue."""
PYTHONS = ("3.11", "3.12", "3.13")
PROCESSORS = {"cpu": ("x86_64", "aarch64"), "gpu": ("x86_64",)}
PINNED_BY_OTHERS = {"intel-cmplr-lib-ur": "intel-openmp"}
"""intel-openmp requires exactly its own version. Its wheel for Windows does not, and uv reads the metadata of one
wheel."""


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


def written(path: Path) -> tuple[str, str]:
    """Returns the digest in a file of constraints or of hashes, and its other lines without comments."""
    lines = path.read_text().splitlines(keepends=True)
    [tried] = [line.rpartition(" ")[2].strip() for line in lines if line.startswith(("# Tried", "# Made"))]
    return tried, "".join(line for line in lines if not line.startswith("#"))


def try_installations(extra: str, versions: str) -> None:
    """Finds an installation for each Python and processor. This reads only metadata of packages.

    Raises subprocess.CalledProcessError if there is none, and ValueError if it has a package without a version in
    `versions`.
    """
    known = {line.partition("==")[0] for line in versions.splitlines()} | PINNED_BY_OTHERS.keys()
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


def hashes(extra: str, versions: str) -> str:
    """Returns a line for each package that the image of `extra` takes, with the sha256 of each file for its Python and
    its processors. torch and torchvision have none for CPUs, because their builds for CPUs are not on PyPI.

    Raises subprocess.CalledProcessError if uv finds no installation, and ValueError for a package without a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "constraints.txt").write_text(versions)
        same = {f"{other}==": f"{name}==" for name, other in PINNED_BY_OTHERS.items()}
        lines = [line.replace(a, b) for line in versions.splitlines() for a, b in same.items() if line.startswith(a)]
        (others := Path(folder) / "requirements.txt").write_text("\n".join(lines))
        extras = [argument for name in (extra, *OF_IMAGES) for argument in ("--extra", name)]
        command = ["uv", "pip", "compile", "pyproject.toml", str(others), *extras, "--constraint", str(file)]
        command += ["--universal", "--python-version", IMAGE_PYTHON, "--format", "pylock.toml", "--quiet"]
        command += ["--output-file", str(lock := Path(folder) / "pylock.toml")]
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        packages = tomllib.loads(lock.read_text())["packages"]
    without = {"torch", "torchvision"} if extra == "cpu" else set()
    lines = [_with_hashes(each, extra) for each in packages if each["name"] not in without and _in_image(each, extra)]
    return "".join(f"{line}\n" for line in lines)


def _in_image(package: dict[str, Any], extra: str) -> bool:
    """Returns whether the package is installed on one of the processors of the image."""
    machines = [{"platform_machine": machine} for machine in PROCESSORS[extra]]
    image = {
        "python_version": IMAGE_PYTHON, "python_full_version": f"{IMAGE_PYTHON}.0", "implementation_name": "cpython",
        "platform_python_implementation": "CPython", "sys_platform": "linux",
    }  # fmt: skip
    marker = package.get("marker")
    return marker is None or any(Marker(marker).evaluate(image | machine) for machine in machines)


def _with_hashes(package: dict[str, Any], extra: str) -> str:
    """Returns the line of a package of `pylock.toml`. A package without a wheel for the image has its source."""
    wheels = [each for each in package.get("wheels", ()) if _tags(each) & _fitting_tags(extra)]
    found = sorted(each["hashes"]["sha256"] for each in wheels or filter(None, [package.get("sdist")]))
    if not found:
        raise ValueError(f"{package['name']} {package['version']} has no file for the image of {extra}")
    return " ".join([f"{package['name']}=={package['version']}", *[f"--hash=sha256:{each}" for each in found]])


def _tags(wheel: dict[str, Any]) -> frozenset[Tag]:
    *_, tags = parse_wheel_filename(unquote(wheel["url"].rpartition("/")[2]))
    return tags


@functools.cache
def _fitting_tags(extra: str) -> frozenset[Tag]:
    """Returns the tags of the wheels that fit the image's Python and its C library (glibc 2.36)."""
    kinds = [
        *(f"manylinux_2_{minor}" for minor in range(5, 37)),
        "manylinux1",
        "manylinux2010",
        "manylinux2014",
        "linux",
    ]
    platforms = [f"{kind}_{processor}" for processor in PROCESSORS[extra] for kind in kinds]
    major, minor = map(int, IMAGE_PYTHON.split("."))
    interpreter = f"cp{major}{minor}"
    return frozenset(
        [
            *cpython_tags((major, minor), abis=[interpreter], platforms=platforms),
            *compatible_tags((major, minor), interpreter=interpreter, platforms=platforms),
        ]
    )


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
        of_image = hashes(extra, versions)
        path.write_text(HEADER.format(extra=extra, digest=digest(extra, versions)) + versions)
        HASHES[extra].write_text(HASHES_HEADER.format(extra=extra, digest=digest(extra, versions)) + of_image)


if __name__ == "__main__":
    main()
