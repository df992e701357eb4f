"""Trains a sweep of two losses, two staleness limits and three seeds. Its command is killed twice and given again.

    python benchmarks/sweep_study.py --write

Each of the twelve runs trains 40 steps of the quickstart. The command gets SIGKILL when all runs together have trained
a number of steps that `KILLS` has, so each kill hits a run in its middle. The study fails if a run is not complete in
the end, or if its steps have a hole. It writes the comparison to docs/benchmarks.md, all numbers to sweep_study.csv,
and the charts of the comparison's page to docs/sweep-study.svg.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.deployment.known_runs import as_it_is
from asyncrl.views.compare_numbers import DIFFERENCE_HEAD, difference_rows, group_table
from asyncrl.views.compared_runs import Row, read_compared

BENCHMARK = "sweep_study.py"
NAME = "sweep-study"
LOSSES, LIMITS, SEEDS, STEPS = ("decoupled_icepop", "dppo_tv"), (1, 4), 3, 40
KILLS = (95, 270)
"""Steps of all runs together at which the command is killed."""
SWEEP_TIMEOUT_S = 7200.0
CSV = REPOSITORY / "benchmarks" / "sweep_study.csv"
PICTURE = REPOSITORY / "docs" / "sweep-study.svg"
BY = ["run.seed"]


def command(folder: Path) -> list[str]:
    overrides = [
        f"run.dir={folder}",
        f"algorithm.loss={','.join(LOSSES)}",
        f"staleness.max_versions={','.join(map(str, LIMITS))}",
        f"learner.total_steps={STEPS}",
        "checkpoint.every_steps=5",
    ]
    return [
        sys.executable, "-m", "asyncrl", "sweep", "-c", "quickstart", "--name", NAME, "--seeds", str(SEEDS), *overrides
    ]  # fmt: skip


def trained(sweep: Path) -> dict[str, list[int]]:
    """Returns the numbers of the steps that each run has recorded, by the run's name."""
    return {
        path.parent.name: [json.loads(line)["step"] for line in path.read_text().split("\n")[:-1]]
        for path in sorted(sweep.glob("*/steps.jsonl"))
    }


def train(folder: Path) -> list[str]:
    """Gives the command until the sweep has ended. Returns a sentence about each kill."""
    said = []
    for at in (*KILLS, None):
        with subprocess.Popen(command(folder), cwd=REPOSITORY) as process:
            deadline_s = time.monotonic() + SWEEP_TIMEOUT_S
            while process.poll() is None:
                steps = trained(folder / NAME)
                if at is not None and sum(map(len, steps.values())) >= at:
                    process.kill()
                    said.append(f"after {sum(map(len, steps.values()))} steps, in run {len(steps)}")
                    break
                if time.monotonic() > deadline_s:
                    process.terminate()
                    raise TimeoutError(f"the sweep has not ended within {SWEEP_TIMEOUT_S:.0f} s")
                time.sleep(0.5)  # polls the files of other processes
            code = process.wait()
        if code != (0 if at is None else -signal.SIGKILL):
            raise RuntimeError(f"the command of the sweep ended with exit code {code}")
    return said


def check(sweep: Path) -> list[Path]:
    """Returns the directories of the runs, all of them complete."""
    steps = trained(sweep)
    if len(steps) != len(LOSSES) * len(LIMITS) * SEEDS:
        raise RuntimeError(f"the sweep has {len(steps)} runs: {', '.join(steps)}")
    for name, numbers in steps.items():
        info = as_it_is(sweep / name)
        if info is None or info.state != "finished" or numbers != [*range(STEPS)]:
            raise RuntimeError(f"{name} is {info and info.state}, with the steps {numbers}")
    return [sweep / name for name in steps]


def table(head: Sequence[str], rows: Sequence[Row]) -> list[str]:
    lines = [[*head], ["---"] * len(head), *([row.name, *row.values] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def page(runs: Sequence[Path], kills: Sequence[str], *, busy: float) -> list[str]:
    groups = read_compared(runs, info_of=as_it_is, by=BY)
    return [
        provenance(BENCHMARK, busy_percent=busy),
        "",
        f"The command was killed {len(kills)} times: {'; '.join(kills)}. All {len(runs)} runs have the steps 0 to "
        f"{STEPS - 1}, each once.",
        "",
        *table(*group_table(groups)),
        "",
        *table(DIFFERENCE_HEAD, difference_rows(groups)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs", help="folder of the sweep (default: runs)")
    parser.add_argument("--write", action="store_true", help="write the results to docs/benchmarks.md")
    arguments = parser.parse_args()
    busy, folder = busy_percent(), arguments.folder.absolute()
    if (folder / NAME).exists():
        parser.error(f"{folder / NAME} exists: remove it, or give another --folder")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    kills = train(folder)
    runs = check(folder / NAME)
    lines = page(runs, kills, busy=busy)
    print("\n".join(lines))
    if arguments.write:
        files = [word for option, path in (("--svg", PICTURE), ("--csv", CSV)) for word in (option, str(path))]
        compared = [sys.executable, "-m", "asyncrl", "compare", "--by", *BY, *map(str, runs), *files]
        subprocess.run([*compared, "-o", str(folder / NAME / "compare.html")], check=True, stdout=subprocess.DEVNULL)
        write_section(BENCHMARK, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
