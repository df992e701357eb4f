"""From a run's records, and from its configuration and machine, to the facts that choose its headline."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncrl.algorithms.baselines import GROUP_BASELINES, Outcome, resolve_advantage
from asyncrl.algorithms.presets import advantage_of
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.records import RunInfo, StepRecord, mean, state_shares
from asyncrl.views.headline import RunFacts
from asyncrl.weights.parity import parity_tolerance_nats

RECENT_STEPS = 20
"""A live view is of so many last steps, and so is the share of groups with equal rewards everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What does not change while a run goes on. Without a configuration: a run that compares the samples of a group,
    on a machine that is not known."""

    equal_rewards_teach: bool = False
    parity_limit_nats: float | None = None
    room: bool | None = None


def setting_of(config: Config, *, cores: int | None) -> Setting:
    """`cores` are those of the run's machines, None when they are not known."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    compares = config.critic is None and isinstance(axes, Outcome) and axes.baseline in GROUP_BASELINES
    return Setting(
        equal_rewards_teach=not compares,
        parity_limit_nats=parity_tolerance_nats(config),
        room=_room(config, cores=cores),
    )


def setting_at(run_dir: Path) -> Setting:
    """The setting of the run that wrote `run_dir`. Its cores are known when it has a Ray of its own on this host."""
    try:
        config = load_config([run_dir / "config.yaml"], [])
        info = msgspec.json.decode((run_dir / "run.json").read_bytes(), type=RunInfo)
    except (ConfigError, OSError, msgspec.MsgspecError):
        return Setting()
    here = config.ray.address is None and info.host == socket.gethostname()
    return setting_of(config, cores=usable_cores() if here else None)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def facts_of_steps(
    steps: Sequence[StepRecord], *, setting: Setting, failures: Mapping[str, float], recent: bool
) -> RunFacts:
    """What the records know: of the last `RECENT_STEPS` steps if `recent`, else of the whole run. Equal rewards are
    always those of the last steps: a run that has learned its task ends with them."""
    if not steps:
        return RunFacts(failures=failures, room=setting.room)
    last = steps[-RECENT_STEPS:]
    looked_at = last if recent else steps
    before = steps[-len(looked_at) - 1].ledger_groups if len(looked_at) < len(steps) else {}
    trained = [record for record in last if record.trained]
    equal = None if setting.equal_rewards_teach else mean([record.zero_variance_ratio for record in trained])
    parities = [record.parity_nats for record in looked_at if record.parity_nats is not None]
    return RunFacts(
        steps_trained=sum(record.trained for record in steps),
        steps_skipped=sum(not record.trained for record in steps),
        equal_rewards_ratio=equal,
        equal_above_zero_ratio=mean([record.diagnostics.get("all_right_ratio") for record in trained]),
        equal_rewards_steps=len(trained),
        groups={fate: number - before.get(fate, 0) for fate, number in looked_at[-1].ledger_groups.items()},
        failures=failures,
        parity_nats=max(parities, default=None),
        parity_limit_nats=setting.parity_limit_nats,
        ess_ratio=mean([record.ess_ratio for record in trained]),
        learner_shares=state_shares(looked_at, "learner_state_s"),
        generator_shares=state_shares(looked_at, "generator_state_s"),
        room=setting.room,
    )


def _room(config: Config, *, cores: int | None) -> bool | None:
    """Whether a core is free for another rank or replica; None when it is not known, or when the run needs GPUs."""
    if cores is None or config.learner.gpus or config.generator.gpus:
        return None
    processes = config.learner.ranks + config.generator.replicas * config.generator.tensor_parallel_size
    processes += config.critic.ranks if config.critic is not None else 0
    return cores > processes
