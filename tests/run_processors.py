"""Runs the tests that compare computed numbers with settings that change the order of sums on a CPU.

    python tests/run_processors.py [part of a setting's name …]

Processors with different vector instructions add numbers in different orders. These settings produce some of these
orders on one machine: PyTorch's own kernels, MKL's products and oneDNN's kernels without AVX, NumPy without AVX2, and
two threads. Processes that the tests start inherit the variables. The script prints pytest's last line for each
setting, and exits with status 1 if a test fails with any setting. A setting takes about five minutes on two idle cores.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
INTEGRATION = ("checkpoints", "rank_faults", "rank_sharding", "value_ranks", "worker_ranks")
NUMERIC = [
    *(f"tests/{folder}" for folder in ("algorithms", "data", "data_plane", "learner", "policy", "value", "weights")),
    *(f"tests/integration/test_{name}.py" for name in INTEGRATION),
]
SETTINGS = {
    "as it is": {},
    "two threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
    "PyTorch without AVX": {"ATEN_CPU_CAPABILITY": "default"},
    "PyTorch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL without AVX": {"MKL_CBWR": "COMPATIBLE"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oneDNN without AVX": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "nothing with AVX": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "AVX2,FMA3",
    },
}


def main(wanted: list[str]) -> int:
    failed = []
    for name, variables in SETTINGS.items():
        if all(part in name for part in wanted):
            start_s = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--dist=loadfile", *NUMERIC],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
                cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            lines = done.stdout.splitlines()
            failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
            last = lines[-1] if lines else f"no output, exit status {done.returncode}"
            print(*failures, f"{name}: {last}, {time.monotonic() - start_s:.0f} s", sep="\n", flush=True)
            failed += [name] * (done.returncode != 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
