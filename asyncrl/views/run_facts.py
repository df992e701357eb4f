"""Collects the facts for a run's headline from its records, its configuration and its machine."""

import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.algorithms.baselines import GROUP_BASELINES, Outcome, resolve_advantage
from asyncrl.algorithms.presets import advantage_of
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import ConfigError, RunError
from asyncrl.learner.records import (
    StepRecord,
    groups_by_reason,
    known_data,
    largest,
    mean,
    read_config,
    read_info,
    state_shares,
)
from asyncrl.views.headline import RunFacts

RECENT_STEPS = 20
"""The live view covers this many last steps. In all views, the share of groups with equal rewards covers them too."""
NEAR_HIGHEST = 0.1
"""A mean reward that is below the highest one by at most this share of the range of rewards counts as the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Facts about a run that do not change.

    `equal_rewards_teach` is whether the algorithm has a gradient when all rewards of a group are equal. `room` is
    whether a core is free for another process. `hidden_tags` are tags that answers never have. The defaults are for a
    run whose configuration is not known: a group baseline, on an unknown machine.
    """

    equal_rewards_teach: bool = False
    room: bool | None = None
    hidden_tags: tuple[str, ...] = ()


def setting_of(config: Config, *, cores: int | None, hidden_tags: tuple[str, ...] = ()) -> Setting:
    """Returns the setting for a configuration. `cores` is the number of cores of the run's machine; None if unknown."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    compares = config.critic is None and isinstance(axes, Outcome) and axes.baseline in GROUP_BASELINES
    return Setting(
        equal_rewards_teach=not compares,
        room=_room(config, cores=cores),
        hidden_tags=hidden_tags,
    )


def setting_at(run_dir: Path) -> Setting:
    """Returns the setting of the run that wrote `run_dir`, or the default when the directory cannot be read.

    The number of cores is known only when the run started its own Ray on this host.
    """
    try:
        config = read_config(run_dir)
        info = read_info(run_dir)
    except (ConfigError, RunError):
        return Setting()
    here = config.ray.address is None and info.host == socket.gethostname()
    data = known_data(run_dir)
    return setting_of(
        config, cores=usable_cores() if here else None, hidden_tags=() if data is None else data.hidden_tags
    )


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def facts_of_steps(
    steps: Sequence[StepRecord], *, setting: Setting, failures: Mapping[str, int], recent: bool
) -> RunFacts:
    """Returns the facts from the records of the last `RECENT_STEPS` steps if `recent`, else of all steps.

    The share of groups with equal rewards always covers the last steps only. It changes during a run: a run that has
    learned its task ends with equal rewards.
    """
    if not steps:
        return RunFacts(failures=failures, room=setting.room)
    last = steps[-RECENT_STEPS:]
    looked_at = last if recent else steps
    before = steps[-len(looked_at) - 1].ledger_groups if len(looked_at) < len(steps) else {}
    trained = [record for record in last if record.trained]
    equal = None if setting.equal_rewards_teach else mean([record.zero_variance_ratio for record in trained])
    all_trained = steps[-1].version_after - steps[0].step
    return RunFacts(
        steps_trained=all_trained,
        steps_skipped=len(steps) - all_trained,
        equal_rewards_ratio=equal,
        at_highest_reward=_at_highest(steps, trained),
        equal_rewards_steps=len(trained),
        hidden_tags=setting.hidden_tags,
        truncated_ratio=mean([record.truncated_ratio for record in trained]),
        truncated_at_first=steps[0].truncated_ratio,
        groups={fate: number - before.get(fate, 0) for fate, number in looked_at[-1].ledger_groups.items()},
        failures=failures,
        failed_samples_ratio=mean([record.diagnostics.get("failed_samples_ratio") for record in trained]),
        parity_ratio=largest([record.diagnostics.get("parity_ratio") for record in looked_at]),
        parity_nats=largest([record.parity_nats for record in looked_at]),
        ess_ratio=mean([record.ess_ratio for record in trained]),
        learner_shares=state_shares(looked_at, "learner_state_s"),
        generator_shares=state_shares(looked_at, "generator_state_s"),
        room=setting.room,
    )


def _at_highest(steps: Sequence[StepRecord], last: Sequence[StepRecord]) -> float | None:
    """Returns the highest reward of `steps` if the mean reward of the `last` of them is within `NEAR_HIGHEST` of it.
    Returns None for a run in which all rewards were equal: then no reward is known to be lower than others."""
    highest = largest([record.reward_max for record in steps])
    lowest = min((record.reward_min for record in steps if record.reward_min is not None), default=math.nan)
    now = mean([record.reward_mean for record in last])
    if highest is None or now is None or not highest > lowest:
        return None
    return highest if highest - now <= NEAR_HIGHEST * (highest - lowest) else None


def with_status(facts: RunFacts, status: RunStatus, *, recent: bool) -> RunFacts:
    """Returns the facts with what only the buffer knows: failures by reason, and, unless `recent`, the groups since the
    start of the run."""
    groups = {fate.value: amount.groups for fate, amount in status.account.fates.items()}
    return replace(
        facts,
        groups=facts.groups if recent else groups,
        failures=groups_by_reason(status.failures),
    )


def _room(config: Config, *, cores: int | None) -> bool | None:
    """Returns whether a core is free for another rank or replica; None when `cores` is unknown or the run uses GPUs."""
    if cores is None or config.learner.gpus or config.generator.gpus:
        return None
    processes = config.learner.ranks + config.generator.replicas * config.generator.tensor_parallel_size
    processes += config.critic.ranks if config.critic is not None else 0
    return cores > processes
