"""Profiles the processes of a run under load: µs of CPU time for each token, by process and function.

    python benchmarks/profile_run.py --write
    python benchmarks/profile_run.py --workload answers --seconds 60

py-spy samples the stacks of engine, generator, scoring, ranks, coordinator, stores and command at the same time.
Samples of threads that wait are left out. The shares of the others are multiplied with the CPU time that the process
took in the same seconds, divided by the trained tokens. A function's time includes the functions that it calls, so the
rows of a process do not add up. `--write` puts the table into docs/benchmarks.md.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from measured_run import MeasuredRun, Window
from overlap import ALL, CONFIG, STEPS, WORKLOADS
from report_page import busy_percent, provenance, write_section

ROLES = ("engine", "generator", "scoring", "rank", "coordinator", "stores", "command")
SAMPLES_PER_S = 100
WAITS = (
    "wait (", "select (", "poll (", "main_loop (", "_worker (", "run (zmq", "_run (asyncrl/metrics/trackers",
    "_read_while_alive (", "listen_error_messages (", "receive (", "accept (", "sigwait (", "_serve (",
)  # fmt: skip
"""Parts of the innermost functions of threads that wait."""
HIDDEN = ("threading.py", "<module>", "<string>", "runpy", "asyncio/", "concurrent/", "typer/", "multiprocessing/")
"""Functions that only call others."""
ROWS = 8
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
                command = [str(spy), "record", "-d", str(seconds), "-r", str(SAMPLES_PER_S), "-f", "raw"]
                command += ["-o", str(out), "-p", str(process.pid)]
                spies[out] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in spies.values():
            each.wait(seconds + 60)
        records, cpu = run.records(), run.cpu_s()
    finally:
        run.end()
    window = Window(records=records[begin:], before=before[-1])
    lines = [f"| {workload}: process, function | µs a token | share |", "|---|---|---|"]
    for role in ROLES:
        stacks = [stack for path in spies if path.name.startswith(f"{role}-") for stack in working(path)]
        us_a_token = (cpu.get(role, 0.0) - cpu_before.get(role, 0.0)) / window.tokens * 1e6
        lines.append(f"| **{role}** | {us_a_token:.1f} | |")
        total = sum(count for _, count in stacks)
        inside: Counter[str] = Counter()
        for names, count in stacks:
            inside.update(dict.fromkeys(names, count))
        for name, count in inside.most_common(ROWS if total else 0):
            lines.append(f"| {name} | {us_a_token * count / total:.1f} | {count / total:.0%} |")
    shutil.rmtree(folder)
    return lines


def working(path: Path) -> Iterator[tuple[set[str], int]]:
    """Yields (functions of the stack, number of samples) of the threads that work."""
    for line in path.read_text().splitlines() if path.exists() else []:
        stack, _, count = line.rpartition(" ")
        frames = [frame.rpartition(":")[0] + ")" for frame in stack.split(";") if ":" in frame]
        if frames and not any(wait in frames[-1] for wait in WAITS):
            names = {_short(frame) for frame in frames if not any(part in frame for part in HIDDEN)}
            yield names, int(count)


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
