"""The quickstart for several seeds, each with a model of its own: what came out, as a table.

    python benchmarks/quickstart_seeds.py --seeds 0 1 2 --out docs/quickstart-seeds.md

A seed decides the tiny model, its warm-up, the order of the prompts and every sampled token. The runs follow each
other; each takes minutes.
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
    """The summary of one run."""
    command = [sys.executable, "-m", "asyncrl", "up", "-c", "configs/quickstart.yaml", f"run.seed={seed}"]
    command += [f"model.tiny.seed={seed}", f"run.dir={directory}", f"model.path={directory / 'model'}", *overrides]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
    summary: dict[str, Any] = json.loads((directory / "quickstart" / "summary.json").read_bytes())
    return {"seed": seed, **summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="write the table here too")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for every run")
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
        arguments.out.write_text(f"# The quickstart, seed by seed\n\n`{' '.join(sys.argv)}`\n\n{table}")


if __name__ == "__main__":
    main()
