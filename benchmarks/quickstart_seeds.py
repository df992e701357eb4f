"""Runs the quickstart with several seeds and writes a table with the results.

    python benchmarks/quickstart_seeds.py --seeds 0 1 2 --out docs/quickstart-seeds.md

A seed determines the tiny model, its warm-up, the order of the prompts and every sampled token. The runs are made one
after the other; each takes some minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
COLUMNS = {
    "seed": "{seed}",
    "held-out": "{heldout_first:.3f} → {heldout_last:.3f}",
    "wall s": "{wall_s:.0f}",
    "first step s": "{time_to_first_step_s:.1f}",
    "staleness": "{max_token_staleness} of {staleness_limit}",
    "busy, generator": "{generator_busy_ratio:.3f}",
    "busy, learner": "{learner_busy_ratio:.3f}",
    "discarded": "{groups_discarded}",
    "ledger closed": "{ledger_closed}",
    "parity nats": "{parity_max_nats:.1e}",
    "updates": "{weight_updates}",
    "mid-sequence": "{mid_sequence_updates}",
    "generated = trained tokens": "{generated_tokens} = {trained_tokens}",
}


def run(seed: int, directory: Path, overrides: list[str]) -> dict[str, Any]:
    """Runs the quickstart with one seed and returns its summary."""
    command = [sys.executable, "-m", "asyncrl", "up", "-c", "configs/quickstart.yaml", f"run.seed={seed}"]
    command += [
        f"model.tiny.seed={seed}",
        f"run.dir={directory}",
        f"model.path={directory.parent / f'model-{seed}'}",
        *overrides,
    ]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((directory / "quickstart" / "summary.json").read_bytes())
    return {"seed": seed, **summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for all runs")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in arguments.seeds:
            summary = run(seed, Path(temporary) / str(seed), arguments.overrides)
            rows.append(" | ".join(text.format(**summary) for text in COLUMNS.values()))
            print(f"| {rows[-1]} |", flush=True)
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    if arguments.out is not None:
        table = header + "".join(f"| {row} |\n" for row in rows)
        arguments.out.write_text(
            f"# Results of the quickstart by seed\n\n`{' '.join(sys.argv)}`\n\n"
            "Each row is one run. *held-out* is the reward on held-out questions before the first and after the\n"
            "last step; *first step* is the time until the first step was trained; *staleness* is the largest\n"
            "staleness of a trained token, and the limit, in versions; *busy* is a share of time; *discarded* is a\n"
            "number of groups; *parity* is the largest difference between the engine's and the learner's log-probs;\n"
            "*updates* are the weight updates of all replicas; *mid-sequence* counts, over all sequences, the updates\n"
            f"during their generation.\n\n{table}"
        )


if __name__ == "__main__":
    main()
