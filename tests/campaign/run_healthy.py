"""Trains recipes without a fault, and witnesses every step: the witness must not give an alarm.

    python tests/campaign/run_healthy.py [--only NAME ...] [--steps 200] [--write]

Each run is one line of `healthy.jsonl`, in place of the line of an earlier run of this recipe: its steps, the alarms,
the largest difference of each check as a share of what is accepted, and the seconds of the witness. `--write` also
writes the table in docs/guarantees.md. Exits with status 1 if a run ended with an error or gave an alarm.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from run_faults import CHECKS, MODEL, SETTINGS, called, commit_of_tree, copied, write_table

RESULTS = Path(__file__).parent / "healthy.jsonl"
MARKS = ("<!-- the table of healthy runs: tests/campaign/run_healthy.py --write -->", "<!-- end of healthy runs -->")
RUN_S = 1800.0
SPELLER = (f"model.path={MODEL}", "model.tiny.warmup_steps=300")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe of `configs/`, and the overrides of its run."""

    what: str
    config: str
    settings: tuple[str, ...] = ()


RECIPES: Mapping[str, Recipe] = {
    "quickstart": Recipe(what="the quickstart", config="quickstart", settings=SPELLER),
    "bfloat16": Recipe(what="in bfloat16", config="quickstart", settings=(*SPELLER, "model.dtype=bfloat16")),
    "two_ranks": Recipe(
        what="two ranks, padded micro-batches, two updates a step",
        config="quickstart",
        settings=(
            *SPELLER,
            "learner.ranks=2",
            "learner.batching=padded",
            "learner.micro_batch_size=16",
            "learner.updates_per_step=2",
            "algorithm.loss=decoupled_ppo",
        ),
    ),
    "lora": Recipe(what="an adapter (LoRA)", config="lora", settings=SPELLER),
    "lora_two_ranks": Recipe(
        what="an adapter on two ranks in bfloat16",
        config="lora",
        settings=(*SPELLER, "learner.ranks=2", "model.dtype=bfloat16"),
    ),
    "ppo": Recipe(what="PPO with a critic", config="ppo", settings=(*SPELLER, "critic.warmup_steps=2")),
    "reinforce_pp": Recipe(
        what="REINFORCE++ with a reference model, whitened over tokens",
        config="quickstart",
        settings=(*SPELLER, "algorithm.loss=reinforce_pp", "staleness.max_versions=0"),
    ),
    "gspo": Recipe(
        what="GSPO with sampling from the likeliest tokens, at temperature 0.8",
        config="quickstart",
        settings=(
            *SPELLER,
            "algorithm.loss=gspo",
            "staleness.max_versions=0",
            "generator.temperature=0.8",
            "generator.top_k=8",
        ),
    ),
    "p3o": Recipe(
        what="P3O, with bounds of the whole step", config="quickstart", settings=(*SPELLER, "algorithm.loss=p3o")
    ),
    "mixture": Recipe(what="two tasks in a mixture", config="mixture"),
    "calculator": Recipe(what="an agent with a tool", config="agents/calculator"),
    "guess_the_number": Recipe(what="an agent in several turns", config="agents/guess_the_number"),
    "key_value_store": Recipe(what="an agent whose conversations have branches", config="agents/key_value_store"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run. `largest` has the largest difference of each check, as a share of what is accepted, over all steps."""

    recipe: str
    steps: int
    alarms: int
    error: str
    largest: Mapping[str, float]
    witness_s: float
    seconds: float
    version: str


def ran(name: str, recipe: Recipe, *, steps: int, copy: Path, version: str) -> Result:
    """Trains a recipe with every step witnessed."""
    folder, started_s = copy / "runs" / name, time.monotonic()
    settings = [
        *(each for each in SETTINGS if not each.startswith(("learner.total_steps", "model.tiny"))),
        f"learner.total_steps={steps}",
        "learner.optimizer.warmup_steps=20",
        "witness.on_failure=warn",
        f"run.dir={folder.parent}",
        f"run.name={name}",
        *recipe.settings,
    ]
    command = ["up", "-c", str(copy / "configs" / f"{recipe.config}.yaml"), *settings]
    path = ":".join(str(copy / each) for each in (".", "configs", "configs/agents"))
    status, log = called(command, cwd=copy, limit_s=RUN_S, path=path)
    lines = (folder / "steps.jsonl").read_text().splitlines() if (folder / "steps.jsonl").is_file() else []
    records = [json.loads(line) for line in lines]
    found = [
        {check: numbers[key] for check in CHECKS if (key := f"witness_{check}_ratio") in numbers}
        for numbers in (record["diagnostics"] for record in records)
    ]
    largest = {
        check: max(own[check] for own in found if check in own)
        for check in CHECKS
        if any(check in own for own in found)
    }
    return Result(
        recipe=name,
        steps=len(records),
        alarms=sum(max(own.values(), default=0.0) > 1 for own in found),
        error=log.splitlines()[-1] if status and log else "",
        largest={check: float(f"{value:.3g}") for check, value in largest.items()},
        witness_s=round(sum(record["diagnostics"].get("witness_s", 0.0) for record in records), 1),
        seconds=round(time.monotonic() - started_s, 1),
        version=version,
    )


def recorded() -> dict[str, Result]:
    """Returns the results of earlier runs by recipe."""
    lines = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    return {result.recipe: result for result in (Result(**json.loads(line)) for line in lines)}


def table(results: Mapping[str, Result]) -> list[str]:
    """Returns the lines of the table in docs/guarantees.md."""
    lines = ["| run | steps | alarms | largest difference, as a share of what is accepted |", "|---|---|---|---|"]
    for name, recipe in RECIPES.items():
        if (result := results.get(name)) is not None:
            check, largest = max(result.largest.items(), key=lambda each: each[1], default=("none", 0.0))
            lines.append(f"| {recipe.what} | {result.steps} | {result.alarms} | {largest:.2g} ({check}) |")
    known = [result for name, result in results.items() if name in RECIPES]
    total, alarms = sum(result.steps for result in known), sum(result.alarms for result in known)
    return [*lines, "", f"{total} witnessed steps, {alarms} alarms."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*RECIPES], default=[*RECIPES], metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="write the table in docs/guarantees.md")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="asyncrl-healthy-") as folder:
        copy, version = copied(Path(folder)), commit_of_tree(RESULTS)
        for name in options.only:
            result = ran(name, RECIPES[name], steps=options.steps, copy=copy, version=version)
            results = recorded() | {name: result}
            RESULTS.write_text("".join(f"{json.dumps(asdict(results[each]))}\n" for each in sorted(results)))
            wrong += bool(result.error or result.alarms)
            print(f"{name}: {result.steps} steps, {result.alarms} alarms, {result.largest}, {result.error}")
            sys.stdout.flush()
    if options.write:
        write_table(table(recorded()), marks=MARKS)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
