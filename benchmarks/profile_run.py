"""Profiles the processes of a run under load: µs of CPU time for each token and sample, by process and function.

    python benchmarks/profile_run.py --write
    python benchmarks/profile_run.py --workload answers --seconds 60

py-spy reads the stacks of engine, generator, scoring, ranks, coordinator, stores and command at the same time. It does
not stop them, so it misreads some stacks. Stacks of threads that wait are left out, and the table has the number of the
others: a share of few stacks is rough. For engine, scoring and ranks, the shares of the others are multiplied with the
CPU time that the process took in the same seconds, divided by the trained tokens. Of the other processes, only threads
that run Python are read, and the rest of their CPU time is that of Ray's own threads. A function's time includes the
functions that it calls, so the rows of a process do not add up. A function that does little more than call another one
of the table is left out. `--write` puts the table into docs/benchmarks.md.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from measured_run import MeasuredRun, Window
from overlap import ALL, CONFIG, STEPS, WORKLOADS
from report_page import busy_percent, provenance, write_section

ROLES = ("engine", "generator", "scoring", "rank", "coordinator", "stores", "command")
PYTHON_ROLES = ("generator", "coordinator", "stores", "command")
"""Processes that spend much time in Ray's own threads. Of these, only threads that hold Python's lock are read."""
STACKS_PER_S = 100
WAITS = (
    "wait (", "select (", "poll (", "main_loop (", "_worker (", "run (zmq", "_run (asyncrl/metrics/trackers",
    "_read_while_alive (", "listen_error_messages (", "receive (", "accept (", "sigwait (", "_serve (",
    "get_objects (", "readinto (", "_bootstrap_inner (",
)  # fmt: skip
"""Parts of the innermost functions of threads that wait."""
HIDDEN = (
    "threading.py", "<module>", "<string>", "runpy", "asyncio/", "concurrent/", "typer/", "multiprocessing/", "click/",
    "auto_init_hook", "client_mode_hook", "tracing_helper", "function_manager", "fault_tolerance/", "v1/executor/",
    "v1/serial_utils", "_contextlib", "modules/module.py", "worker_base", "gpu_worker", "contextlib.py", "cli/",
)  # fmt: skip
"""Functions that only call others."""
ROWS = 10
CALLS_ONLY = 0.9
"""A function is left out if another one, which it calls, has this share of its stacks."""
BENCHMARK = "profile_run.py"


def profile(workload: str, *, seconds: float, extra: list[str]) -> list[str]:
    """Returns the lines of the table of one workload."""
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        raise FileNotFoundError(f"{spy} is missing: install the extra `dev`, which has py-spy")
    folder = Path(tempfile.mkdtemp())
    run = MeasuredRun(CONFIG, [*WORKLOADS[workload], *ALL, *extra], folder=folder)
    try:
        begin = run.warm_up(STEPS[workload][0])
        before, cpu_before = run.records(), run.cpu_s()
        spies = {}
        for process, role in run.processes():
            if role in ROLES:
                out = folder / f"{role}-{process.pid}"
                command = [str(spy), "record", "-d", str(seconds), "-r", str(STACKS_PER_S), "-f", "raw"]
                command += ["--nonblocking", *(["--gil"] if role in PYTHON_ROLES else []), "-o", str(out)]
                command += ["-p", str(process.pid)]
                spies[out] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in spies.values():
            each.wait(seconds + 60)
        records, cpu = run.records(), run.cpu_s()
    finally:
        run.end()
    window = Window(records=records[begin:], before=before[-1])
    tokens_a_sample = window.tokens / window.samples
    lines = [f"| {workload}: process, function | µs a token | µs a sample | share |", "|---|---|---|---|"]

    def add(name: str, us_a_token: float, share: str) -> None:
        lines.append(f"| {name} | {us_a_token:.1f} | {us_a_token * tokens_a_sample:.0f} | {share} |")

    for role in ROLES:
        stacks = [stack for path in spies if path.name.startswith(f"{role}-") for stack in working(path)]
        us_a_token = (cpu.get(role, 0.0) - cpu_before.get(role, 0.0)) / window.tokens * 1e6
        taken = sum(count for _, count in stacks)
        add(f"**{role}**, {taken} stacks", us_a_token, "")
        us_a_stack = us_a_token / max(1, taken)
        if role in PYTHON_ROLES:  # sampling misreads some stacks, so Python could come to more than the whole
            us_a_stack = min(us_a_stack, 1e6 / STACKS_PER_S / window.tokens)
            add("Python, all functions", us_a_stack * taken, f"{us_a_stack * taken / us_a_token:.0%}")
        for name, count in functions(stacks):
            add(name, us_a_stack * count, f"{us_a_stack * count / us_a_token:.0%}")
    shutil.rmtree(folder)
    return lines


def functions(stacks: list[tuple[list[str], int]]) -> list[tuple[str, int]]:
    """Returns the functions that are in the most stacks, and their numbers of stacks."""
    inside: Counter[str] = Counter()
    below: dict[str, Counter[str]] = defaultdict(Counter)
    for names, count in stacks:
        inside.update(dict.fromkeys(names, count))
        for place, name in enumerate(names):
            below[name].update(dict.fromkeys(set(names[place + 1 :]) - {name}, count))
    only_calls = {
        name for name, count in inside.items() if below[name] and max(below[name].values()) >= CALLS_ONLY * count
    }
    return [(name, count) for name, count in inside.most_common() if name not in only_calls][:ROWS]


def working(path: Path) -> Iterator[tuple[list[str], int]]:
    """Yields (functions of a stack from outside to inside, how often it was read), for the threads that work."""
    for line in path.read_text().splitlines() if path.exists() else []:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] + ")" for frame in stack.split(";") if ":" in frame]
        if frames and not any(wait in frames[-1] for wait in WAITS):
            names = [_short(frame) for frame in frames if not any(part in frame for part in HIDDEN)]
            yield list(dict.fromkeys(names)), int(count)


def _short(frame: str) -> str:
    function, _, path = frame.partition(" (")
    return f"`{function}` ({'/'.join(Path(path).parts[-2:])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS], action="append", help="default: quickstart and answers")
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    lines = [provenance(BENCHMARK, busy_percent=busy_percent())]
    for workload in arguments.workload or ["quickstart", "answers"]:
        lines += ["", *profile(workload, seconds=arguments.seconds, extra=arguments.overrides)]
        print("\n".join(lines), flush=True)
    if arguments.write:
        write_section(BENCHMARK, lines)


if __name__ == "__main__":
    main()
