"""The checks of `asyncrl doctor` for machines with NVIDIA GPUs. Each check returns one finding about the machine, from
`nvidia-smi`, from torch or from its files."""

import ctypes
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# Findings about a machine, and code that runs in a process of its own to make them.


class Level(StrEnum):
    """Severity of a finding. With FAIL a run cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis. `fix` says how to fix the problem; it is empty if there is no problem."""

    level: Level
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    return Finding(level=Level.OK, what=what)


def warn(what: str, *, fix: str) -> Finding:
    return Finding(level=Level.WARN, what=what, fix=fix)


def fail(what: str, *, fix: str) -> Finding:
    return Finding(level=Level.FAIL, what=what, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of Python code in a separate process: the last line of stdout if it succeeded, else that of stderr. If
    there is no such line, the exit status or the time limit in words."""

    succeeded: bool
    last_line: str
    late: bool = False
    """Whether the process exceeded its time limit."""


def run_probe(code: str, *, timeout_s: float) -> Probe:
    """Runs Python code in a separate process and returns the result. The process is killed after `timeout_s`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(succeeded=False, last_line=f"took longer than {timeout_s:g} s (--timeout-s)", late=True)
    succeeded = done.returncode == 0
    lines = (done.stdout if succeeded else done.stderr).strip().splitlines()
    return Probe(succeeded=succeeded, last_line=lines[-1] if lines else f"exit status {done.returncode}")


NVIDIA_SMI_S = 60.0
"""Time limit of `nvidia-smi`. The first call may take half a minute, if no other program keeps the driver loaded."""
TORCH_CODE = (
    "import torch; n = torch.cuda.device_count(); "
    "peers = all(torch.cuda.can_device_access_peer(a, b) for a in range(n) for b in range(n) if a != b); "
    "print(torch.__version__, n, torch.version.cuda, peers)"
)
"""Prints torch's version, the number of GPUs that it sees, the CUDA version of its build, and whether each GPU can read
the memory of each other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as `nvidia-smi` describes it. Memory is in MiB."""

    name: str
    memory_mib: int
    used_mib: int
    compute_mode: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of a machine, the version of the driver, and the newest CUDA version that the driver supports."""

    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The build of torch that `TORCH_CODE` prints. `cuda` is None in a build for CPUs."""

    version: str
    devices: int
    cuda: str | None
    peers: bool

    @classmethod
    def of(cls, probe: Probe) -> "TorchBuild":
        version, devices, cuda, peers = probe.last_line.split()
        return cls(version=version, devices=int(devices), cuda=None if cuda == "None" else cuda, peers=peers == "True")


def query_gpus() -> Gpus | str | None:
    """Returns the GPUs that `nvidia-smi` reports, or its error as text if it fails. None if this machine does not have
    the program."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {NVIDIA_SMI_S:g} s"
    if done.returncode:
        return (done.stdout + done.stderr).strip() or f"exit status {done.returncode}"
    try:
        return parse(done.stdout)
    except (ElementTree.ParseError, ValueError) as error:
        return f"its answer cannot be read: {error}"


def parse(xml: str) -> Gpus:
    """Reads the answer of `nvidia-smi -q -x`. Raises ParseError or ValueError."""
    root = ElementTree.fromstring(xml)

    def text(element: ElementTree.Element, path: str) -> str:
        found = element.findtext(path)
        if found is None:
            raise ValueError(f"it has no {path}")
        return found.strip()

    return Gpus(
        driver=text(root, "driver_version"),
        cuda=text(root, "cuda_version"),
        gpus=tuple(
            Gpu(
                name=text(gpu, "product_name"),
                memory_mib=int(text(gpu, "fb_memory_usage/total").split()[0]),
                used_mib=int(text(gpu, "fb_memory_usage/used").split()[0]),
                compute_mode=text(gpu, "compute_mode"),
            )
            for gpu in root.findall("gpu")
        ),
    )


def check_driver(found: Gpus | str, build: TorchBuild | None) -> Finding:
    """Checks that the driver answers, and that it supports the CUDA version of torch's build. Only major versions are
    compared: a driver supports all minor versions of the newest major version of CUDA that it supports (CUDA
    compatibility guide, "minor version compatibility")."""
    if isinstance(found, str):
        return fail(
            f"nvidia-smi fails: {found.splitlines()[0]}",
            fix="install NVIDIA's driver, or load it (`sudo modprobe nvidia`); in a container: docker run --gpus all",
        )
    names = ", ".join(sorted({f"{gpu.name} ({gpu.memory_mib / 1024:.0f} GiB)" for gpu in found.gpus}))
    what = f"{len(found.gpus)} GPUs: {names}; driver {found.driver} for CUDA {found.cuda}"
    if build is None or build.cuda is None:
        return ok(what)
    if int(found.cuda.partition(".")[0]) < int(build.cuda.partition(".")[0]):
        return fail(
            f"the NVIDIA driver {found.driver} supports CUDA {found.cuda}, but torch was built for CUDA {build.cuda}",
            fix=f"update the driver to one for CUDA {build.cuda.partition('.')[0]} or newer",
        )
    return ok(f"{what}, torch for CUDA {build.cuda}")


def check_nvml(loads: bool) -> Finding:
    """Checks that NVML, the library of `nvidia-smi`, can be loaded: vLLM finds the GPUs with it."""
    if loads:
        return ok("NVML can be loaded")
    return fail(
        "libnvidia-ml.so.1 cannot be loaded, so vLLM finds no GPU",
        fix="in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility; else reinstall NVIDIA's driver",
    )


def check_compiler(compiler: str | None, header: Path) -> Finding:
    """Checks the compiler and the header with which Triton builds a launcher for each kernel when it is first used."""
    missing = [] if compiler else ["a C compiler (gcc)"]
    missing += [] if header.is_file() else [f"{header} (Python's headers)"]
    if not missing:
        return ok(f"Triton can compile: {compiler}, {header}")
    return fail(
        f"Triton cannot compile kernels without {' and '.join(missing)}",
        fix="on Debian and Ubuntu: apt install gcc python3-dev; or use uv's Python, which has its headers",
    )


def check_compute_mode(gpus: Sequence[Gpu]) -> Finding:
    """Checks that two processes may use a GPU: an engine and a rank that share it, or an engine and its worker."""
    modes = sorted({gpu.compute_mode for gpu in gpus} - {"Default"})
    if not modes:
        return ok("compute mode Default")
    return warn(
        f"the compute mode of a GPU is {', '.join(modes)}: only one process at a time can use it, so engine and "
        "learner cannot share it",
        fix="sudo nvidia-smi -c DEFAULT, or give each pool GPUs of its own",
    )


def check_free_memory(gpus: Sequence[Gpu]) -> Finding:
    """Checks that at most 1 GiB of the memory of each GPU is in use, so that no other program occupies it."""
    taken = [f"GPU {i} has {gpu.used_mib / 1024:.1f} GiB in use" for i, gpu in enumerate(gpus) if gpu.used_mib > 1024]
    if not taken:
        return ok("the memory of the GPUs is free")
    return warn("; ".join(taken), fix="`nvidia-smi` lists the programs; end them, or set CUDA_VISIBLE_DEVICES")


def check_peers(build: TorchBuild) -> Finding:
    """Checks that GPUs can read each other's memory."""
    if build.peers:
        return ok("each GPU can read the memory of the others")
    return warn(
        "some GPUs cannot read the memory of others, so NCCL sends through the host's memory, which is slower",
        fix="usual for GeForce cards; on servers, switch off ACS in the BIOS (NCCL's troubleshooting guide)",
    )


def examine_gpus(found: Gpus | str, torch: Probe) -> Iterator[Finding]:
    """Yields the findings about the GPUs of this machine. `torch` is the result of `TORCH_CODE`."""
    build = TorchBuild.of(torch) if torch.succeeded else None
    yield check_driver(found, build)
    if isinstance(found, str):
        return
    yield check_nvml(_loads("libnvidia-ml.so.1"))
    yield check_compiler(
        shutil.which("gcc") or shutil.which("cc") or shutil.which("clang"),
        Path(sysconfig.get_path("include"), "Python.h"),
    )
    yield check_compute_mode(found.gpus)
    yield check_free_memory(found.gpus)
    if build is not None and build.devices > 1:
        yield check_peers(build)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
