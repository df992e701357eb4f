"""Resumes one run of the quickstart from each of its checkpoints, and writes a table with the results.

    python benchmarks/quickstart_resumes.py --out docs/quickstart-resumes.md

Each resumed run trains to the same last step as the first one, and its held-out reward should be within the spread of
the seeds in docs/quickstart-seeds.md. The audit of each resumed run must pass.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quickstart_seeds import REPOSITORY, run

HEADER = (
    "| resumed from step | held-out after the last step | staleness | ledger closed | audit |\n|---|---|---|---|---|\n"
)


def asyncrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "asyncrl", *words], cwd=REPOSITORY, check=True, stdout=sys.stderr)


def row(name: str, directory: Path) -> str:
    """Audits the run in `directory` and returns its line of the table. Raises CalledProcessError if it fails."""
    asyncrl("audit", str(directory))
    summary = json.loads((directory / "summary.json").read_bytes())
    text = "| {name} | {heldout_last:.3f} | {max_token_staleness} of {staleness_limit} | {ledger_closed} | passed |\n"
    return text.format(name=name, **summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-steps", type=int, default=19)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs")
    arguments = parser.parse_args()
    saves = [f"checkpoint.every_steps={arguments.every_steps}", "checkpoint.keep=1000"]
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary) / "whole" / "quickstart"
        last = run(arguments.seed, whole.parent, [*arguments.overrides, *saves])["steps"]
        rows = [row("not resumed", whole)]
        for step in range(arguments.every_steps, last, arguments.every_steps):
            resumed = Path(temporary) / f"from-{step}" / "quickstart"
            shutil.copytree(whole, resumed)
            asyncrl("resume", str(resumed), "--at", f"step-{step}")
            rows.append(row(str(step), resumed))
            print(rows[-1], end="", flush=True)
            shutil.rmtree(resumed)
    if arguments.out is not None:
        arguments.out.write_text(
            f"# Results of the quickstart after a resume\n\n`{' '.join(sys.argv)}`\n\n"
            "One run of the quickstart was resumed from each of its checkpoints (`asyncrl resume RUN --at step-N`)\n"
            "and trained to its last step again. The spread of the held-out reward over the seeds is in\n"
            "[quickstart-seeds.md](quickstart-seeds.md). *staleness* is the largest staleness of a trained token, and\n"
            f"the limit, in versions.\n\n{HEADER}{''.join(rows)}"
        )


if __name__ == "__main__":
    main()
