"""Compares runs with the limit that their two pools set: the slower one of a generator and a learner alone.

    python benchmarks/overlap.py --write
    python benchmarks/overlap.py --workload answers --seconds 60

Each pool has one core, which stands for a device. For each workload the script measures four things, one after the
other: a plain vLLM engine with the requests of the run, a plain torch loop that trains rows of the same lengths
(`bare_loops.py`), an asynchronous run, and the same run with `staleness.max_versions: 0`. All ratios are within one run
of the script. `--write` puts the tables into docs/benchmarks.md.

Workloads: `quickstart` has answers of 5 tokens; `answers` has answers of 1 to 128 tokens; `long` has a
model of 30 million parameters and answers of up to 256 tokens, 4 groups of 4 samples a step.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measured_run import GENERATOR_CORE, LEARNER_CORE, REPOSITORY, MeasuredRun, Window
from report_page import busy_percent, provenance, write_section

RANDOM_MODEL = ["model.tiny.warmup_steps=0", "environment.reward=rewards:by_checksum"]
"""A model that has not learned anything ends an answer with probability 1/98 at each token, and the learning rate is so
small that it stays so: the lengths do not change while it is measured."""
NO_LEARNING = ["learner.optimizer.learning_rate=1.0e-9", "learner.optimizer.warmup_steps=0"]
WORKLOADS = {
    "quickstart": [
        "model.path=models/benchmark-quickstart",
        "model.tiny.warmup_steps=300",
        "learner.micro_batch_size=384",
    ],
    "answers": [
        "model.path=models/benchmark-answers",
        "model.max_length=136",
        "generator.max_completion_tokens=128",
        "generator.max_concurrent_groups=16",
        "learner.groups_per_step=16",
        "learner.group_size=8",
        "learner.micro_batch_size=128",
        *RANDOM_MODEL,
        *NO_LEARNING,
    ],
    "long": [
        "model.path=models/benchmark-long",
        "model.max_length=264",
        "model.tiny.hidden_size=640",
        "model.tiny.layers=10",
        "model.tiny.heads=10",
        "model.tiny.head_dim=64",
        "generator.max_completion_tokens=256",
        "generator.max_concurrent_groups=4",
        "learner.groups_per_step=4",
        "learner.group_size=4",
        "learner.micro_batch_size=16",
        *RANDOM_MODEL,
        *NO_LEARNING,
    ],
}
ALL = ["eval.prompts=0", "checkpoint.every_steps=0"]
CONFIG = "quickstart.yaml"
STEPS = {"quickstart": (20, 60), "answers": (5, 30), "long": (3, 10)}
"""Number of the first measured step, and number of measured steps."""
LONGER = {"long": 3}
"""How many times as long as for the other workloads the bare loops run, because a group takes eight seconds."""
BENCHMARK = "overlap.py"


def bare(loop: str, overrides: list[str], *, core: int, seconds: float, lengths: Path | None = None) -> dict[str, Any]:
    """Runs one bare loop in a process of its own on one core."""
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "bare_loops.py"), loop, *overrides]
    command += ["--config", str(REPOSITORY / "configs" / CONFIG), "--seconds", str(seconds)]
    command += [] if lengths is None else ["--lengths", str(lengths)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "benchmarks"]))}
    done = subprocess.run(
        command,
        cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=600 + 4 * seconds,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(overrides: list[str], *, first: int, steps: int) -> Window:
    with tempfile.TemporaryDirectory() as folder:
        started = MeasuredRun(CONFIG, overrides, folder=Path(folder))
        try:
            return started.window(first=first, steps=steps)
        finally:
            started.end()


def measure(workload: str, *, seconds: float, extra: list[str]) -> dict[str, Any]:
    """Measures one workload. Returns its figures."""
    overrides = [*WORKLOADS[workload], *ALL, *extra]
    subprocess.run(
        [sys.executable, "-m", "asyncrl", "model", "-c", f"configs/{CONFIG}", *overrides],
        cwd=REPOSITORY, check=True, stdout=sys.stderr,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "benchmarks"]))},
    )  # fmt: skip
    first, steps = STEPS[workload]
    seconds *= LONGER.get(workload, 1)
    generator = bare("generator", overrides, core=GENERATOR_CORE, seconds=seconds)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as lengths:
        json.dump(generator.pop("lengths"), lengths)
        lengths.flush()
        learner = bare("learner", overrides, core=LEARNER_CORE, seconds=seconds, lengths=Path(lengths.name))
    windows = {
        "asynchronous": run(overrides, first=first, steps=steps),
        "η = 0": run([*overrides, "staleness.max_versions=0"], first=first, steps=steps),
    }
    return {"generator": generator, "learner": learner, **{name: figures(window) for name, window in windows.items()}}


def figures(window: Window) -> dict[str, Any]:
    learner_s, tokens = window.state_s("learner"), window.tokens
    generator_s = window.state_s("generator")
    return {
        "tokens_per_s": tokens / window.seconds,
        "samples_per_s": window.samples / window.seconds,
        "us_per_token": {role: seconds / tokens * 1e6 for role, seconds in sorted(window.cpu_s.items())},
        "training_us_per_token": sum(learner_s.get(s, 0) for s in ("forward_backward", "optimizer")) / tokens * 1e6,
        "learner_shares": {state: seconds / window.seconds for state, seconds in learner_s.items()},
        "generator_shares": {state: s / sum(generator_s.values()) for state, s in generator_s.items()},
    }


def rows(workload: str, found: dict[str, Any]) -> tuple[str, str]:
    """Returns the row of the first table and the row of the second one."""
    generator, learner = found["generator"], found["learner"]
    runs = found["asynchronous"], found["η = 0"]
    # The ranks of a run may be faster than the bare loop, because they pack the rows and share prompts.
    fastest_learner = max(learner["tokens_per_s"], 1e6 / runs[0]["training_us_per_token"])
    limit = min(generator["tokens_per_s"], fastest_learner)
    bare_us = sum(generator["us_per_token"].values()) + learner["us_per_token"]["learner"]
    us = runs[0]["us_per_token"]
    pool_us = us.get("engine", 0) + us.get("generator", 0) + us.get("scoring", 0)
    table = [
        workload,
        f"{generator['tokens_per_s']:.0f}",
        f"{learner['tokens_per_s']:.0f}",
        *(f"{each['tokens_per_s']:.0f} ({each['samples_per_s']:.0f})" for each in runs),
        f"{runs[0]['tokens_per_s'] / limit:.2f}",
        f"{runs[0]['tokens_per_s'] / runs[1]['tokens_per_s']:.2f}",
        f"{sum(us.values()) / bare_us:.2f}",
        f"{sum(generator['us_per_token'].values()) / pool_us:.2f}",
        f"{1e6 / learner['tokens_per_s'] / runs[0]['training_us_per_token']:.2f}",
        f"{runs[0]['learner_shares'].get('other', 0):.1%}",
    ]
    parts = [f"{role} {value:.0f}" for role, value in sorted(us.items(), key=lambda item: -item[1])]
    bare_parts = {**generator["us_per_token"], **learner["us_per_token"]}
    cpu = [workload, ", ".join(f"{role} {value:.0f}" for role, value in bare_parts.items()), ", ".join(parts)]
    shares = [
        ", ".join(f"{state} {share:.0%}" for state, share in runs[0][f"{side}_shares"].items() if share >= 0.005)
        for side in ("generator", "learner")
    ]
    return f"| {' | '.join(table)} |", f"| {' | '.join([*cpu, *shares])} |"


COLUMNS = [
    "workload", "bare generator", "bare learner", "asynchronous", "η = 0", "of the limit", "over η = 0",
    "CPU over bare", "generator", "learner", "other",
]  # fmt: skip
CPU_COLUMNS = [
    "workload",
    "CPU of the bare loops, µs a token",
    "CPU of the asynchronous run",
    "generator's time",
    "learner's time",
]
LEGEND = """\
Speeds are completion tokens per second, and samples per second in brackets. *Of the limit* is the speed of the
asynchronous run divided by the limit: the speed of the bare generator, or of the faster one of the bare learner and
the run's own forward, backward and optimizer, whichever is lower. *CPU over bare* is the CPU time of all processes of
the run for a token, divided by that of both bare loops. *Generator* is the CPU time of a token of the bare engine
divided by that of engine, generator and scoring in the run: the share of the bare engine's speed that a busy generator
reaches. *Learner* is the share of the bare loop's speed that forward, backward and optimizer reach. *Other* is the
share of the learner's time that is none of the named states."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS], action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of each bare loop")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs and bare loops")
    arguments = parser.parse_args()
    found, busy = {}, busy_percent()
    tables = [[f"| {' | '.join(c)} |", "|" + "---|" * len(c)] for c in (COLUMNS, CPU_COLUMNS)]
    for workload in arguments.workload or WORKLOADS:
        found[workload] = measure(workload, seconds=arguments.seconds, extra=arguments.overrides)
        for table, row in zip(tables, rows(workload, found[workload]), strict=True):
            table.append(row)
            print(row, flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))
    lines = [provenance(BENCHMARK, busy_percent=busy), "", LEGEND]
    for table in tables:
        lines += ["", *table]
    print("\n".join(lines))
    if arguments.write:
        write_section(BENCHMARK, lines)


if __name__ == "__main__":
    main()
