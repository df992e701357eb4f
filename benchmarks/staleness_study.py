"""Measures the cost of staleness: runs the quickstart with several staleness limits and several objectives.

    python benchmarks/staleness_study.py run --results benchmarks/staleness_study.jsonl
    python benchmarks/staleness_study.py report --results benchmarks/staleness_study.jsonl

`run` makes every run that is not yet in the results, one after the other; each takes some minutes. It can be ended at
any time and started again later. Weights are published every η steps, so that the data are as old as the limit allows.
`report` writes the table in docs/tuning-staleness.md, between its two marks, and the picture of that page.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from asyncrl.algorithms.interfaces import LossFunction

REPOSITORY = Path(__file__).parents[1]
STEPS = 64
LIMITS = (0, 1, 4, 16)
SEEDS = (0, 1, 2)
PAGE = REPOSITORY / "docs" / "tuning-staleness.md"
PICTURE = REPOSITORY / "docs" / "staleness-study.svg"
MARKS = ("<!-- the study's table: benchmarks/staleness_study.py report -->", "<!-- end of the table -->")
OBJECTIVES = {
    "clipped": f"{Path(__file__).stem}:uncorrected",
    "decoupled_icepop": "decoupled_icepop",
    "dppo_tv": "dppo_tv",
}
"""Maps a title to a value of `algorithm.loss`.

The first objective has no correction. The configuration refuses its preset for η > 0, so it is given by import path.
"""


def uncorrected() -> LossFunction:
    """Returns the plain clipped objective (dapo), which does not correct for the policy that sampled the data."""
    from asyncrl.algorithms.loss import ObjectiveLoss
    from asyncrl.algorithms.presets import PRESETS

    return ObjectiveLoss(PRESETS["dapo"].objective)


def one_run(title: str, *, limit: int, seed: int, directory: Path) -> dict[str, Any]:
    """Makes one run and returns its results. The tiny models stay in `directory`, one per seed."""
    with tempfile.TemporaryDirectory() as runs:
        overrides = {
            "run.seed": seed,
            "run.dir": runs,
            "model.tiny.seed": seed,
            "model.path": directory / f"model-{seed}",
            "algorithm.loss": OBJECTIVES[title],
            "staleness.max_versions": limit,
            "weights.publish_every_steps": max(1, limit),
            "learner.total_steps": STEPS,
        }
        command = [sys.executable, "-m", "asyncrl", "up", "-c", "configs/quickstart.yaml"]
        command += [f"{key}={value}" for key, value in overrides.items()]
        # Ray's workers must import asyncrl from this checkout too, and not an installed version.
        environment = {"PYTHONPATH": f"{Path(__file__).parent}:{REPOSITORY}"}
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr, env=os.environ | environment)
        folder = Path(runs, "quickstart")
        summary = json.loads((folder / "summary.json").read_bytes())
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    ages = [(int(age), count) for step in steps for age, count in step["token_staleness"].items()]
    return {
        "objective": title,
        "limit": limit,
        "seed": seed,
        "heldout_first": summary["heldout_first"],
        "heldout_last": summary["heldout_last"],
        "staleness_mean": sum(age * count for age, count in ages) / sum(count for _, count in ages),
        "staleness_max": max(age for age, _ in ages),
        "ess_mean": statistics.fmean(step["ess_ratio"] for step in steps),
        "ess_min": min(step["ess_ratio"] for step in steps),
        "silent_mean": statistics.fmean(step["diagnostics"]["silent_ratio"] for step in steps),
        "wall_s": summary["wall_s"],
    }


def run(results: Path, *, models: Path) -> None:
    """Makes the missing runs. Each result is written to disk before the next run starts."""
    done = {(row["objective"], row["limit"], row["seed"]) for row in read(results)}
    wanted = [(title, limit, seed) for seed in SEEDS for limit in LIMITS for title in OBJECTIVES]
    for title, limit, seed in wanted:
        if (title, limit, seed) in done:
            continue
        row = one_run(title, limit=limit, seed=seed, directory=models)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    """Returns the results of the runs so far."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def report(results: Path) -> None:
    """Writes the table into its page, and draws the picture."""
    rows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in read(results):
        rows[row["objective"], row["limit"]].append(row)
    lines = [
        "| η | objective | seeds | held-out, mean | lowest | mean staleness | mean ESS | lowest ESS | silent tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for limit in LIMITS:
        for title in OBJECTIVES:
            runs = rows[title, limit]
            if runs:
                lines.append(
                    f"| {limit} | {title} | {len(runs)} | {mean(runs, 'heldout_last'):.3f} | "
                    f"{min(run['heldout_last'] for run in runs):.3f} | {mean(runs, 'staleness_mean'):.2f} | "
                    f"{mean(runs, 'ess_mean'):.3f} | {min(run['ess_min'] for run in runs):.3f} | "
                    f"{mean(runs, 'silent_mean'):.3f} |"
                )
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text("\n".join([f"{before}{MARKS[0]}\n", *lines, f"\n{MARKS[1]}{after}"]))
    draw(rows, PICTURE)


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """Returns the mean of a result over the seeds."""
    return statistics.fmean(run[key] for run in runs)


def draw(rows: dict[tuple[str, int], list[dict[str, Any]]], path: Path) -> None:
    """Draws held-out accuracy and ESS over the limit, with a line per objective and a dot per run."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for panel, key, label in ((axes[0], "heldout_last", "held-out accuracy"), (axes[1], "ess_mean", "ESS")):
        for title in OBJECTIVES:
            limits = [limit for limit in LIMITS if rows[title, limit]]
            [line] = panel.plot(limits, [mean(rows[title, limit], key) for limit in limits], label=title)
            for limit in limits:
                values = [run[key] for run in rows[title, limit]]
                panel.plot([limit] * len(values), values, ".", color=line.get_color(), alpha=0.5)
        panel.set(xscale="symlog", xticks=LIMITS, xticklabels=LIMITS, xlabel="staleness.max_versions", ylabel=label)
    axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("--results", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    parser.add_argument("--models", type=Path, default=Path("models/study"), help="folder for the tiny models")
    arguments = parser.parse_args()
    if arguments.action == "run":
        arguments.models.mkdir(parents=True, exist_ok=True)
        run(arguments.results, models=arguments.models.absolute())
    report(arguments.results)


if __name__ == "__main__":
    main()
