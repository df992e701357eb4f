"""Writes invented runs to disk, as a run directory writes them, with or without an end."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from made_up_run import TOTALS, make_process, make_step

from asyncrl.config.load import load_config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import (
    LOST_STEPS,
    EvalRecord,
    Resumption,
    RunInfo,
    SampleRecord,
    StepRecord,
    build_summary,
    read_info,
)

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def lively_step(step: int, **changed: Any) -> StepRecord:
    """Returns the record of a step in which all numbers change from step to step."""
    chance = random.Random(step)
    fields: dict[str, Any] = {
        "reward_mean": 1 - math.exp(-step / 60) + chance.uniform(-0.05, 0.05),
        "loss": chance.gauss(-0.004, 0.01),
        "entropy_nats": 1 - step / 100 if step < 90 else 0.1,
        "grad_norm": chance.expovariate(1.0),
        "ess_ratio": 1 - chance.expovariate(50.0),
        "learning_rate": 1e-3 / (1 + step),
        "parity_nats": chance.choice([0.0, 3e-7, 8e-6]),
        "group_staleness": {0: 1, 1: 4 + step % 5, 2: 9},
        "token_staleness": {0: 50, 1: 300 + 40 * (step % 7), 2: 200},
        "diagnostics": {
            f"abs_log_rho_nats_staleness_{age}": chance.uniform(0, 0.1) for age in ("0", "1", "2_to_3", "16_to_more")
        },
        "learner_state_s": {
            state: (10 + step) * share
            for state, share in {
                "waiting_for_groups": 0.2, "log_probs": 0.1, "forward_backward": 0.4, "optimizer": 0.1,
                "publish": 0.05, "checkpoint": 0.05, "other": 0.1,
            }.items()
        },
        "generator_state_s": {
            state: (10 + step) * share
            for state, share in {
                "generating": 0.5, "paused_for_weights": 0.1, "starved_of_prompts": 0.1, "blocked_on_capacity": 0.1,
                "blocked_on_staleness": 0.1, "idle": 0.1,
            }.items()
        },
    }  # fmt: skip
    return make_step(step, **(fields | changed))


def critic_step(step: int) -> StepRecord:
    learned = {"value_loss": 2.0 / (1 + step), "explained_variance": 0.02 * step - 0.5, "value_clipped_ratio": 0.0}
    return lively_step(step, diagnostics=learned | lively_step(step).diagnostics)


def far_behind(step: int) -> StepRecord:
    """Returns a step with ages up to 20, which is more ages than the charts have colours."""
    ages = {age: 1 + (age + step) % 5 for age in range(21)}
    return lively_step(step, group_staleness=ages, token_staleness=ages, wall_s=100.0 + 20 * step)


def write_run(
    folder: Path,
    steps: Sequence[StepRecord],
    *,
    finish: bool = True,
    evals: bool | Sequence[EvalRecord] = True,
    end: Literal["finished", "failed"] | None = "failed",
    name: str = "quick",
    limit: int = 2,
    seed: int = 0,
    settings: Mapping[str, object] | None = None,
) -> Path:
    """Writes a run with these steps, each with a sample, and returns its path.

    `settings` are further ones by dotted key. `finish` writes the summary. With `end=None` the run still goes on.
    """
    own = {"run": {"name": name, "dir": str(folder), "seed": seed}, "staleness": {"max_versions": limit}}
    config = load_config([own, settings or {}])
    run = RunDir.create(config)
    for record in steps:
        run.append_step(record)
        run.write_samples(
            record.step,
            [
                SampleRecord(
                    step=record.step,
                    group=record.step,
                    prompt=f"prompt of step {record.step}",
                    rendered_prompt=f"<user>prompt of step {record.step}",
                    completion=HOSTILE,
                    tokens=(HOSTILE[:5], HOSTILE[5:9], HOSTILE[9:20], HOSTILE[20:]),
                    answer="tac",
                    reward=1.0,
                    advantage=None,
                    version_spans=((record.step - 3, 1), (record.step - 2, 1), (record.step - 1, 1), (record.step, 1)),
                    trained_spans=((False, 1), (True, 3)),
                    staleness_versions=3,
                    truncated=True,
                    generation_logprobs=(-0.5, -0.5, -0.5, -2.5),
                    prev_logprobs=(-0.5, -0.75, -1.25, -0.5),
                )
            ],
        )
    evaluations = [EvalRecord(version=0, wall_s=9, prompts=8, reward_mean=0.25)] if evals is True else evals or []
    for evaluation in evaluations:
        run.append_eval(evaluation)
    if finish:
        run.write_summary(build_summary(steps, evaluations, TOTALS, staleness_limit=limit))
    if end is not None:
        run.close(state=end, reason="done" if end == "finished" else HOSTILE)
    return run.path


def killed_and_resumed(folder: Path) -> tuple[Path, RunInfo]:
    """Writes a run of 670 s that was killed after step 27 and resumed from step 20, and returns its path and run.json.

    The first learner trains for 198 s those steps that count, and the second one too. They start for 100 s and 60 s.
    7 steps that took 68 s were trained again.
    """
    first = make_process(range(27), start_s=100.0)
    second = make_process(range(20, 40), start_s=60.0, before=first[19])
    path = write_run(folder, [*first[:20], *second], name="killed")
    (path / LOST_STEPS).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in first[20:]))
    info = msgspec.structs.replace(
        read_info(path),
        started="2026-11-30T08:00:00+00:00",
        resumed=[Resumption(at="2026-11-30T08:06:40+00:00", step=20, incarnation=2)],
        finished="2026-11-30T08:11:10+00:00",
    )
    return path, info
