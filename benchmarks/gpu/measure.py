"""Measures on one NVIDIA GPU what needs neither vLLM nor Ray, and writes the table of docs/gpu.md.

    python benchmarks/gpu/measure.py --size gpu --write
    python benchmarks/gpu/measure.py --size gpu --part attention --part sharing
    python benchmarks/gpu/measure.py --size cpu-check

It needs torch, transformers, numpy, msgspec, xxhash and psutil. asyncrl need not be installed. `cpu-check` runs the
same code with small sizes on a CPU in less than a minute, with gloo instead of NCCL and a memory file instead of CUDA
IPC. It only shows that the command works.

Each part runs in a process of its own. A part that fails has its error in the table, the other parts run all the same,
and the command ends with 1.

Parts:
  machine            the device and the versions of the libraries
  sharding           FSDP2 with one rank: gradients and weights against the unsharded model; NCCL's collectives
  attention          packed attention in bfloat16 against float32 on the CPU; its speed against padded rows
  grouped_attention  the same for a model with fewer heads of keys than of queries, such as Qwen
  head               the chunked output head: speed, memory and error against full logits
  utilisation        steps of models with 0.5 and 1.5 billion parameters: tokens per second and MFU
  deltas             the encoder of weight deltas: size of a delta, GB/s
  sharing            weights that a second process takes over through CUDA IPC: GB/s, and whether all bytes arrive
"""

import argparse
import importlib
import multiprocessing
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # asyncrl need not be installed
sys.path.insert(0, str(Path(__file__).parents[1]))

from report_page import REPOSITORY, busy_percent, commit_of_tree, provenance, write_section

BENCHMARK = "gpu/measure.py"
PAGE = REPOSITORY / "docs" / "gpu.md"
SLOW_IMPORTS = ["torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2"]
"""One process imports these, and the processes of all parts are forked from it. It does not start CUDA."""


class Part(NamedTuple):
    """A generator of rows: the function `name` of `module`."""

    name: str
    module: str


class Line(NamedTuple):
    """A line of the table. `failed` is True if the part ended with this error."""

    part: str
    what: str
    figure: str
    failed: bool = False


PARTS = [
    Part("machine", "gpu.machine"),
    Part("sharding", "gpu.sharding"),
    Part("attention", "gpu.attention"),
    Part("grouped_attention", "gpu.attention"),
    Part("head", "gpu.head"),
    Part("utilisation", "gpu.utilisation"),
    Part("deltas", "gpu.deltas"),
    Part("sharing", "gpu.sharing"),
]


def measured(parts: Iterable[Part], *, size: str, timeout_s: float) -> Iterator[Line]:
    """Runs one part after the other, each in a process of its own. `timeout_s` is the longest time without a row."""
    context = multiprocessing.get_context("forkserver")
    for part in parts:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(part, size, theirs))
        process.start()
        theirs.close()
        try:
            yield from _lines(part, ours, timeout_s=timeout_s)
        finally:
            process.kill()  # it has nothing left to do
            process.join()


def _lines(part: Part, connection: Connection, *, timeout_s: float) -> Iterator[Line]:
    while True:
        try:
            if not connection.poll(timeout_s):
                yield Line(part.name, "failed", f"no row within {timeout_s:.0f} s", failed=True)
                return
            line: Line | None = connection.recv()
        except EOFError:
            yield Line(part.name, "failed", "its process ended without a result", failed=True)
            return
        if line is None:
            return
        yield line


def _run(part: Part, size: str, connection: Connection) -> None:
    """Sends the lines of a part, and then None."""
    try:
        sizes: dict[str, Any] = importlib.import_module("gpu.sizes").SIZES
        function: Callable[[Any], Iterator[tuple[str, str]]]
        function = getattr(importlib.import_module(part.module), part.name)
        for what, figure in function(sizes[size]):
            connection.send(Line(part.name, what, figure))
    except BaseException as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "\\|")
        connection.send(Line(part.name, "failed", message[:300], failed=True))
    connection.send(None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["cpu-check", "gpu"], required=True)
    parser.add_argument("--part", choices=[part.name for part in PARTS], action="append", help="default: all parts")
    parser.add_argument("--write", action="store_true", help="write the table into docs/gpu.md; only with --size gpu")
    parser.add_argument("--commit", help="the commit of a copy that has no git directory")
    parser.add_argument("--timeout", type=float, default=180.0, help="the longest time without a row, in seconds")
    arguments = parser.parse_args()
    if arguments.write and (arguments.size != "gpu" or arguments.part):
        parser.error("--write needs --size gpu and all parts: docs/gpu.md has one table, of one GPU")
    head = _provenance(arguments.commit) if arguments.write else []
    multiprocessing.get_context("forkserver").set_forkserver_preload(SLOW_IMPORTS)
    chosen = [part for part in PARTS if not arguments.part or part.name in arguments.part]
    table = ["| part | measured | figure |", "|---|---|---|"]
    failed = []
    for line in measured(chosen, size=arguments.size, timeout_s=arguments.timeout):
        table.append(f"| {line.part} | {'**failed**' if line.failed else line.what} | {line.figure} |")
        print(table[-1], flush=True)
        failed += [line.part] if line.failed else []
    if arguments.write:
        write_section(BENCHMARK, [*head, *table], page=PAGE)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _provenance(commit: str | None) -> list[str]:
    try:
        commit = commit or commit_of_tree(PAGE)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"the commit of this directory is not known ({error}); name it with --commit") from None
    line = provenance(BENCHMARK, busy_percent=busy_percent(), commit=commit)
    print(line)
    return [line, ""]


if __name__ == "__main__":
    sys.exit(main())
