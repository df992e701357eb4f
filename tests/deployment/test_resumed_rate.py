"""A jump of the learning rate at a resume is announced with both rates, its reason, and how to avoid it."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.records import Version
from asyncrl.checkpoints.directory import RunManifest
from asyncrl.common.version import Lineage
from asyncrl.config.load import load_config, shared_config
from asyncrl.deployment.resuming import Resumed, rate_changes
from asyncrl.ranks.schedule import learning_rate

PEAK = 1e-3


def lines(step: int, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns the lines of a run that is resumed after `step` steps, with the settings before and now."""
    settings = dict(shared_config(load_config([before])))
    manifest = RunManifest(nonce="n", version=Version(0, step), lineage=Lineage(), settings=settings, packages={})
    info: Any = None
    return rate_changes(Resumed(Path("step"), manifest, info), load_config([{**before, **now}]))


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "total": ({}, {"learner.total_steps": 200}),
    "cosine": ({"learner.optimizer.schedule": "cosine"}, {"learner.total_steps": 160}),
    "shorter": ({}, {"learner.total_steps": 90}),
    "final": ({}, {"learner.optimizer.final_fraction": 0.5}),
    "schedule": ({}, {"learner.optimizer.schedule": "constant"}),
    "warm-up": ({}, {"learner.optimizer.warmup_steps": 95}),
    "peak": ({}, {"learner.optimizer.learning_rate": 2 * PEAK}),
}
"""The settings of a run of 100 steps, and a change of them."""


@pytest.mark.parametrize("name", CHANGES)
def test_both_rates_the_reason_and_the_remedy_are_named(name: str) -> None:
    before, now = CHANGES[name]
    before = {"learner.total_steps": 100, "learner.optimizer.learning_rate": PEAK, **before}
    step = 100 if name in ("total", "cosine") else 89
    [line] = lines(step, before, now)
    old_config, new_config = load_config([before]), load_config([{**before, **now}])
    old, new = (
        learning_rate(config.learner.optimizer, step=step, total_steps=config.learner.total_steps)
        for config in (old_config, new_config)
    )
    assert f"goes from {old:.4g} to {new:.4g} at step {step + 1}," in line
    [(key, value)] = now.items()
    assert re.search(rf"because {re.escape(key)} was \S+ and is {re.escape(str(value))};", line)
    found = re.search(r"learner\.optimizer\.learning_rate=(\S+) continues from", line)
    assert found is not None
    mended = load_config([{**before, **now, "learner.optimizer.learning_rate": float(found[1])}]).learner
    assert learning_rate(mended.optimizer, step=step, total_steps=mended.total_steps) == pytest.approx(old, rel=1e-3)


def test_the_rates_of_a_run_of_a_hundred_steps_that_gets_a_hundred_more() -> None:
    [line] = lines(
        100, {"learner.total_steps": 100, "learner.optimizer.learning_rate": 1.0}, {"learner.total_steps": 200}
    )
    # linear from 1.0 at step 0 to 0.1 at step 199: 1 − 0.9 · 100 / 199
    assert "goes from 0.1 to 0.5477 at step 101, because learner.total_steps was 100 and is 200" in line
    assert line.endswith("learner.optimizer.learning_rate=0.1826 continues from 0.1")


@pytest.mark.parametrize(
    ("step", "before", "now"),
    [
        (50, {}, {}),
        (50, {"learner.optimizer.schedule": "constant"}, {"learner.total_steps": 400}),
        (5, {"learner.optimizer.warmup_steps": 10}, {"learner.total_steps": 400}),
        (50, {}, {"learner.optimizer.weight_decay": 0.1, "staleness.max_versions": 4}),
        (
            100,
            {"learner.optimizer.learning_rate": 1.0},
            {
                "learner.total_steps": 400,
                "learner.optimizer.learning_rate": 0.1,
                "learner.optimizer.schedule": "constant",
            },
        ),
    ],
    ids=["nothing", "constant", "in the warm-up", "other settings", "the last rate stays"],
)
def test_a_rate_that_does_not_jump_has_no_line(step: int, before: dict[str, Any], now: dict[str, Any]) -> None:
    assert lines(step, {"learner.total_steps": 100, **before}, now) == []


def test_no_remedy_is_named_where_the_old_rate_was_zero() -> None:
    [line] = lines(
        100, {"learner.total_steps": 100, "learner.optimizer.final_fraction": 0}, {"learner.total_steps": 200}
    )
    assert line.endswith("learner.total_steps was 100 and is 200")


def test_the_critic_has_its_own_line_and_the_policy_waits_for_its_warm_up() -> None:
    before = {
        "learner.total_steps": 100,
        "learner.optimizer.schedule": "constant",
        "critic.optimizer.learning_rate": 1.0,
        "critic.warmup_steps": 20,
        "algorithm.loss": "ppo",
    }
    [line] = lines(50, before, {"learner.total_steps": 200})
    assert line.startswith("the learning rate of the critic goes from 0.5455 to 0.7739 at step 51")
    assert "critic.optimizer.learning_rate=0.7048" in line
    waiting = {**before, "learner.optimizer.schedule": "linear", "critic.optimizer.schedule": "constant"}
    assert lines(15, waiting, {"learner.total_steps": 200}) == [], "the policy has trained no step yet"
    [line] = lines(60, waiting, {"critic.warmup_steps": 50})
    assert line.startswith("the learning rate of the learner goes from")
    assert "because critic.warmup_steps was 20 and is 50" in line
