"""Compares asyncrl with TRL's synchronous GRPOTrainer on the quickstart, and writes the table in docs/benchmarks.md.

    python benchmarks/against_trl.py --seeds 0 1 2
    python benchmarks/against_trl.py --workload long

With `--workload`, a workload of `overlap.py` that does not learn: then only the speeds are compared.

Both sides start from the same model directory and train the same questions in the same order, with the same batch,
learning rates, optimizer and number of steps. They may use the same cores. TRL runs with as many threads as there are
cores, and with one thread. The runs are made one after the other. The first call makes TRL's environment in
`.bench/trl`, which takes minutes and 1.5 GB.

Both sides save their weights every `SAVE_EVERY` steps. Afterwards this file evaluates all of them in the same way, so
the time to a held-out reward does not depend on how a side measures its own reward.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from overlap import WORKLOADS
from report_page import busy_percent, provenance, write_section
from trl_run import Settings

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.environments.interfaces import build_environment, build_tasks
from asyncrl.ranks.schedule import learning_rate

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / ".bench"
CONFIG = Path("configs") / "quickstart.yaml"
BENCHMARK = "against_trl.py"
REQUIREMENTS = ("trl==1.16.*", "torch")
"""`constraints-cpu.txt` pins torch, transformers and all others that asyncrl has too, so both have equal versions."""
SAVE_EVERY = 10
STEADY_FROM = 20
"""Number of steps before the window of samples/s. Both sides are slower in their first steps."""
TARGETS = (0.80, 0.85)
SPEED_STEPS = {"answers": 40, "long": 16}
"""Steps of the workloads of which only the speed is measured."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """What a run recorded. Times are seconds since its command was started."""

    begun_s: float
    """When the generation of the first step began."""
    ends_s: list[float]
    """The end of each step."""
    samples: list[int]
    """The samples of each step."""
    weights: dict[int, Path]
    """Directories of saved weights by the number of steps behind them."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The row of one run. A time is infinite if the run did not reach the reward."""

    samples_per_s: float
    first_step_s: float
    """Start of the command to the end of the first step."""
    to_first_target_s: float
    """Beginning of the first step to the held-out reward of TARGETS[0]."""
    to_second_target_s: float
    heldout: float
    """Held-out reward of the last weights."""


# --- TRL's environment and the common files ----------------------------------------------------------------------


def trl_python() -> Path:
    """Returns the Python of TRL's environment, and makes the environment if it does not exist or has other pins."""
    folder = FOLDER / "trl"
    python, made = folder / "bin" / "python", folder / "made.txt"
    pins = "\n".join(REQUIREMENTS)
    if not made.exists() or made.read_text() != pins:
        print(f"making TRL's environment in {folder}: this takes minutes, and is needed once", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip"]
        constraints = ["--constraint", str(REPOSITORY / "constraints-cpu.txt")]
        subprocess.run([*pip, "install", "--quiet", *REQUIREMENTS, *constraints], check=True, stdout=sys.stderr)
        # Their wheels may be CUDA builds, which cannot be imported with a CPU build of torch. transformers imports
        # torchvision if it is there.
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"], check=True)
        made.write_text(pins)
    return python


def write_questions(config: Config, tasks: Sequence[Task], path: Path) -> None:
    """Writes the questions of all steps in the order in which asyncrl issues them."""
    source = PromptSource(tasks, seed=config.run.seed, shuffle=config.data.shuffle)
    with path.open("w") as file:
        for _ in range(config.learner.total_steps * config.learner.groups_per_step):
            task = source.next()
            assert task is not None, "a source without a limit of epochs does not end"
            file.write(json.dumps({"prompt": task.prompt, "answer": task.answer}) + "\n")


def trl_settings(config: Config, *, questions: Path, output: Path, threads: int) -> Settings:
    """Returns the settings of TRL's run. All numbers are those of asyncrl's configuration."""
    learner, optimizer = config.learner, config.learner.optimizer
    steps = range(learner.total_steps)
    return Settings(
        model=str(config.model.path),
        questions=str(questions),
        output=str(output),
        threads=threads,
        seed=config.run.seed,
        groups_per_step=learner.groups_per_step,
        group_size=learner.group_size,
        max_completion_tokens=config.generator.max_completion_tokens,
        learning_rates=[learning_rate(optimizer, step=step, total_steps=len(steps)) for step in steps],
        betas=list(optimizer.betas),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        save_every_steps=SAVE_EVERY,
        reward="exact_match" if config.environment.reward is None else config.environment.reward.partition(":")[2],
    )


# --- the runs ----------------------------------------------------------------------------------------------------


def call(command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str]) -> float:
    """Runs a command and writes its output into `log`. Returns the Unix time of its start.

    Raises RuntimeError with the end of the output if the command fails.
    """
    started_unix_s = time.time()
    with log.open("wb") as file:
        code = subprocess.call(
            list(map(str, command)), cwd=REPOSITORY, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    if code != 0:
        raise RuntimeError(f"exit code {code}; {log} ends with:\n{log.read_text(errors='replace')[-2000:]}")
    return started_unix_s


def asyncrl(command: str, overrides: Sequence[str], *, log: Path) -> float:
    """Runs a command of asyncrl with the quickstart's configuration. Returns the Unix time of its start."""
    # Ray's workers must import asyncrl from this checkout, and not an installed version.
    words = [sys.executable, "-m", "asyncrl", command, "-c", str(CONFIG), *overrides]
    folders = os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "benchmarks"]))
    return call(words, log=log, environment={"PYTHONPATH": folders})


def asyncrl_run(overrides: Sequence[str], directory: Path, *, eta: int) -> Series:
    """Trains with asyncrl."""
    own = [
        f"run.dir={directory.parent}",
        f"run.name={directory.name}",
        "run.max_restarts=0",
        f"staleness.max_versions={eta}",
        f"checkpoint.every_steps={SAVE_EVERY}",
        "checkpoint.keep=1000",
        # The first evaluation ends when the engine has the first weights. So `waiting_for_groups` begins when the
        # engine can generate, and one prompt takes no time.
        "eval.prompts=1",
    ]
    started_unix_s = asyncrl("up", [*overrides, *own], log=directory.with_suffix(".log"))
    steps = directory / "steps.jsonl"
    records = [record for record in read_lines(steps) if record["trained"]]
    # `wall_s` counts from the start of a process that the command forks, which psutil knows to a second only. The file
    # was written last when its last record was made, so its time says where on the clock `wall_s` begins.
    lead_s = steps.stat().st_mtime - records[-1]["wall_s"] - started_unix_s
    first = records[0]
    return Series(
        begun_s=lead_s + first["wall_s"] - first["duration_s"] - first["learner_state_s"]["waiting_for_groups"],
        ends_s=[lead_s + record["wall_s"] for record in records],
        samples=[record["trained_samples"] for record in records],
        weights=saved_weights(directory / "checkpoints", below="hf"),
    )


def trl_run(config: Config, directory: Path, *, questions: Path, threads: int) -> Series:
    """Trains with TRL."""
    directory.mkdir()
    settings = directory / "settings.json"
    settings.write_text(
        json.dumps(asdict(trl_settings(config, questions=questions, output=directory, threads=threads)))
    )
    command = [trl_python(), REPOSITORY / "benchmarks" / "trl_run.py", settings]
    # The model is a directory, so nothing needs to be asked of the Hugging Face Hub.
    started_unix_s = call(command, log=directory.with_suffix(".log"), environment={"HF_HUB_OFFLINE": "1"})
    records = read_lines(directory / "steps.jsonl")
    return Series(
        begun_s=json.loads((directory / "begun.json").read_bytes())["unix_s"] - started_unix_s,
        ends_s=[record["unix_s"] - started_unix_s for record in records],
        samples=[record["samples"] for record in records],
        weights=saved_weights(directory),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved_weights(folder: Path, *, below: str = "") -> dict[int, Path]:
    """Returns the directories `step-N/BELOW` by N, in ascending order."""
    found = {int(path.name.removeprefix("step-")): path / below for path in folder.glob("step-*")}
    return dict(sorted(found.items()))


# --- the evaluation ----------------------------------------------------------------------------------------------


def heldout_reward(
    weights: Path, *, config: Config, tasks: Sequence[Task], score: Callable[[Task, str], float]
) -> float:
    """Returns the mean reward of greedy completions of `tasks`, generated by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one for each of some sixty directories
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    prompts = tokenizer([task.prompt for task in tasks], return_tensors="pt", padding=True)
    ids_BT = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=False,
        max_new_tokens=config.generator.max_completion_tokens,
    )
    texts = tokenizer.batch_decode(ids_BT[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(score(task, text) for task, text in zip(tasks, texts, strict=True)) / len(tasks)


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> float:
    """Returns when a curve of (seconds, reward) first reaches `target`, on the line between two points; infinity if it
    never does.

    >>> time_to(0.5, [(0.0, 0.2), (10.0, 0.4), (20.0, 0.6)])
    15.0
    """
    before_s, before = curve[0]
    for seconds, reward in curve:
        if reward >= target:
            share = (target - before) / (reward - before) if reward > before else 1.0
            return before_s + share * (seconds - before_s)
        before_s, before = seconds, reward
    return math.inf


def samples_per_s(series: Series) -> float:
    """Returns the speed after the first `STEADY_FROM` steps. A run with fewer than twice as many has it from its half
    on."""
    first = min(STEADY_FROM, len(series.ends_s) // 2)
    return sum(series.samples[first:]) / (series.ends_s[-1] - series.ends_s[first - 1])


def result_of(series: Series, *, evaluate: Callable[[Path], float] | None, model: Path) -> Result:
    """Evaluates all weights of a run. Without `evaluate`, its held-out reward is unknown (NaN)."""
    saved = [] if evaluate is None else [*series.weights.items()]
    curve = [(0.0, math.nan if evaluate is None else evaluate(model))]
    curve += [(series.ends_s[steps - 1] - series.begun_s, evaluate(path)) for steps, path in saved]
    first, second = (time_to(target, curve) for target in TARGETS)
    return Result(
        samples_per_s=samples_per_s(series),
        first_step_s=series.ends_s[0],
        to_first_target_s=first,
        to_second_target_s=second,
        heldout=curve[-1][1],
    )


# --- the table ---------------------------------------------------------------------------------------------------


def results_of(
    seed: int, *, workload: str, etas: Sequence[int], threads: Sequence[int], overrides: Sequence[str]
) -> dict[str, Result]:
    """Makes the runs of one seed. Returns their results by the name of the side, TRL's first."""
    folder = FOLDER / "against_trl" / f"{workload}-seed-{seed}"
    model = folder / "model"
    for old in folder.glob("*"):
        if old.is_dir() and old != model:  # asyncrl builds the model again if its settings have changed
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    own = [f"run.seed={seed}", f"model.tiny.seed={seed}", f"model.path={model}"]
    if learns := workload not in SPEED_STEPS:
        overrides = [*own, *overrides]
    else:
        overrides = [*WORKLOADS[workload], *own, f"learner.total_steps={SPEED_STEPS[workload]}", *overrides]
    config = load_config([REPOSITORY / CONFIG], overrides)
    asyncrl("model", overrides, log=folder / "model.log")
    train, heldout = build_tasks(config)
    write_questions(config, train, folder / "questions.jsonl")
    runs: dict[str, Callable[[], Series]] = {
        **{
            f"TRL, {count} thread{'s' if count > 1 else ''}": partial(
                trl_run, config, folder / f"trl-{count}", questions=folder / "questions.jsonl", threads=count
            )
            for count in threads
        },
        **{f"asyncrl, η = {eta}": partial(asyncrl_run, overrides, folder / f"asyncrl-{eta}", eta=eta) for eta in etas},
    }
    score = build_environment(config.environment).score
    evaluate = partial(heldout_reward, config=config, tasks=heldout, score=score) if learns else None
    results = {}
    for side, run in runs.items():
        results[side] = result_of(run(), evaluate=evaluate, model=model)
        print(f"seed {seed}, {side}: {results[side]}", file=sys.stderr, flush=True)
    return results


def medians(results: Sequence[Mapping[str, Result]]) -> dict[str, Result]:
    """Returns for each side the medians over the seeds."""
    return {
        side: Result(**{
            field.name: median(getattr(result[side], field.name) for result in results) for field in fields(Result)
        })
        for side in results[0]
    }  # fmt: skip


def table(by_seed: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Returns the lines of the table. The ratios are over the first side of the same seed."""
    reference = next(iter(next(iter(by_seed.values()))))
    low, high = (f"{target:.2f}" for target in TARGETS)
    header = [
        "seed", "", "samples/s", f"over {reference}", "start to first step, s", f"first step to held-out {low}, s",
        f"to {high}, s", f"time over {reference}", "held-out at the end",
    ]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for seed, results in by_seed.items():
        base = results[reference]
        for side, result in results.items():
            cells = [
                seed, side, f"{result.samples_per_s:.4g}", number(result.samples_per_s / base.samples_per_s, ".2f"),
                number(result.first_step_s, ".1f"), number(result.to_first_target_s, ".1f"),
                number(result.to_second_target_s, ".1f"),
                number(result.to_second_target_s / base.to_second_target_s, ".2f"), number(result.heldout, ".3f"),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def number(value: float, form: str) -> str:
    """Returns the number as text; a dash for a reward that was not reached."""
    return format(value, form) if math.isfinite(value) else "–"


def trl_versions() -> str:
    """Returns the versions of TRL's environment."""
    asked = "from importlib.metadata import version as v; print(v('trl'), 'with torch', v('torch'))"
    return subprocess.check_output([trl_python(), "-c", asked], text=True).strip()


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["quickstart", *SPEED_STEPS], default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--eta", type=int, nargs="+", default=[3], help="asyncrl's staleness limits; 0 is synchronous")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({cores, 1}, reverse=True), help="of TRL")
    parser.add_argument("overrides", nargs="*", help="section.key=value, for both sides, after --")
    arguments = parser.parse_args()
    trl_python()
    busy = busy_percent()
    by_seed = {
        str(seed): results_of(
            seed,
            workload=arguments.workload,
            etas=arguments.eta,
            threads=arguments.threads,
            overrides=arguments.overrides,
        )
        for seed in arguments.seeds
    }
    if len(by_seed) > 1:
        by_seed["median"] = medians(list(by_seed.values()))
    lines = [provenance(BENCHMARK, busy_percent=busy, also=f"; TRL {trl_versions()}"), "", *table(by_seed)]
    print("\n".join(lines))
    write_section(BENCHMARK if arguments.workload == "quickstart" else f"{BENCHMARK} {arguments.workload}", lines)


if __name__ == "__main__":
    main()
