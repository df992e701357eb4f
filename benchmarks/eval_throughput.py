"""Measures what evaluations beside training cost: trained samples per second with and without them, in one run.

    python benchmarks/eval_throughput.py --windows 8

In every other window of steps, 128 held-out prompts are evaluated every 10 steps (`eval.every_steps`); in the windows
between, no evaluation begins. The first 10 steps of a window are not measured, because an evaluation of the window
before it may still run. The weights hardly change (the learning rate is 1e-9), so all windows have equal work. The
ratio is the mean over pairs of neighbouring windows, with its standard error.
"""

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence

from overlap import NO_LEARNING, WORKLOADS
from report_page import REPOSITORY, busy_percent, provenance

import asyncrl
from asyncrl.common.version import Version
from asyncrl.learner.heldout import HeldoutEvaluation

BENCHMARK = "eval_throughput.py"
PROMPTS, EVERY_STEPS = 128, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="quickstart")
    parser.add_argument("--windows", type=int, default=8, help="Number of windows, half of them with evaluations.")
    parser.add_argument("--steps", type=int, default=40, help="Steps of a window.")
    parser.add_argument("overrides", nargs="*", help="Overrides of the configuration.")
    arguments = parser.parse_args()
    if arguments.windows % 2 or arguments.steps <= EVERY_STEPS or arguments.steps % EVERY_STEPS:
        parser.error(f"--windows must be even, and --steps a multiple of {EVERY_STEPS} above it")
    busy = busy_percent()
    only_in_odd_windows(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        total = arguments.windows * arguments.steps
        result = asyncrl.run(configuration(arguments.workload, folder, total=total, more=arguments.overrides))
    evaluated = [record for record in result.evals if record.step % arguments.steps >= EVERY_STEPS]
    speeds = [speed(result.steps, window, steps=arguments.steps) for window in range(arguments.windows)]
    ratios = [beside / without for without, beside in zip(speeds[::2], speeds[1::2], strict=True)]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan
    print(provenance(BENCHMARK, busy_percent=busy))
    print(f"samples per second without evaluations: {', '.join(f'{each:.0f}' for each in speeds[::2])}")
    print(f"samples per second beside evaluations:  {', '.join(f'{each:.0f}' for each in speeds[1::2])}")
    print(f"{len(evaluated)} evaluations of {PROMPTS} prompts in the measured steps")
    print(f"ratio {statistics.fmean(ratios):.3f} ± {error:.3f} ({len(ratios)} pairs of windows)")


def only_in_odd_windows(steps: int) -> None:
    """Lets evaluations begin only in the windows of `steps` steps with an odd number."""
    begin = HeldoutEvaluation.begin

    def begin_in_odd_windows(self: HeldoutEvaluation, version: Version) -> None:
        if version.step // steps % 2:
            begin(self, version)

    HeldoutEvaluation.begin = begin_in_odd_windows  # type: ignore[method-assign]


def configuration(workload: str, folder: str, *, total: int, more: Sequence[str]) -> asyncrl.Config:
    words = [
        *WORKLOADS[workload],
        *NO_LEARNING,
        f"run.dir={folder}",
        "run.name=evaluated",
        f"learner.total_steps={total}",
        f"eval.prompts={PROMPTS}",
        f"eval.every_steps={EVERY_STEPS}",
        "checkpoint.every_steps=0",
        *more,
    ]
    return asyncrl.load_config([REPOSITORY / "configs" / "quickstart.yaml"], words)


def speed(records: Sequence[asyncrl.StepRecord], window: int, *, steps: int) -> float:
    """Returns the trained samples per second of a window after its first `EVERY_STEPS` steps."""
    first, end = window * steps + EVERY_STEPS, (window + 1) * steps
    measured = [record for record in records if record.trained and first < record.version_after <= end]
    [before] = [record for record in records if record.trained and record.version_after == first]
    samples = sum(record.trained_samples for record in measured)
    return samples / (measured[-1].wall_s - before.wall_s)


if __name__ == "__main__":
    main()
