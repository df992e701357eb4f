"""Published objectives as rows of data, and the functions that build an objective from the user's configuration. Does
not import torch."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.algorithms.axis_errors import problems
from asyncrl.algorithms.baselines import CriticBased, OwnEstimator, advantage_name, resolve_advantage
from asyncrl.algorithms.objective import (
    Aggregation,
    ByCovariance,
    Clamp,
    Clipped,
    Gamma,
    Gate,
    Inverse,
    Linear,
    Objective,
    Penalty,
    PreClip,
    Quadratic,
    Regression,
    Reinforce,
    SoftGate,
    Weight,
    Weighted,
)
from asyncrl.config.import_path import OwnCallable, is_import_path, suggest
from asyncrl.config.schema import AlgorithmSection
from asyncrl.errors import ConfigError

DEFAULT_BASELINE = "group_norm"
"""The advantage estimator for an objective that was published without one, or with several."""

SEQUENCE_MEAN, SEQUENCE_SUM = Aggregation.SEQUENCE_MEAN, Aggregation.SEQUENCE_SUM


class PublishedCritic(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the section `critic` for which a paper gives values. A value applies if the user does not set the field
    and the run has the paper's advantage estimator."""

    value_lam: float
    length_alpha: float


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A published objective: its source, when to use it, and its choice on each axis."""

    source: str
    """Papers, by arXiv number if they have one."""
    use: str
    objective: Objective
    baseline: str | None = None
    """The advantage estimator that the objective was published with, if asyncrl has it."""
    critic: PublishedCritic | None = None
    """The settings of the critic that the objective was published with."""


def _same(kernel: Clamp | Inverse | Gamma) -> Weighted:
    return Weighted(positive=kernel, negative=kernel)


_ICEPOP = Weight(lo=0.5, hi=5.0, outside="zero")

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "decoupled_icepop": Preset(
            source="2110.00641, 2510.18855, 2503.14476, 1912.09729",
            use="The default of asynchronous runs: a wide clip; tokens that drifted too far are left out.",
            objective=Objective(surrogate=Clipped(hi=1.28, dual=3.0), weight=_ICEPOP),
        ),
        "decoupled_ppo": Preset(
            source="2110.00641, 2505.24298",
            use="Several updates a step on stale data: the clip bounds the change since the step's start, and the "
            "weight corrects for staleness.",
            objective=Objective(surrogate=Clipped(), weight=Weight(), gates=(Gate(stat="ratio", hi=5.0),)),
        ),
        "a3po": Preset(
            source="2512.06547",
            use="Like decoupled_ppo without its extra forward pass: the proximal policy is interpolated.",
            objective=Objective(
                surrogate=Clipped(), weight=Weight(), gates=(Gate(stat="ratio", hi=5.0),), proximal="interpolated"
            ),
        ),
        "tis": Preset(
            source="Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training",
            use="Sampler and trainer disagree a little: their ratio is a weight, truncated at 2.",
            objective=Objective(surrogate=Clipped(), weight=Weight(hi=2.0)),
        ),
        "icepop": Preset(
            source="2510.18855",
            use="Sampler and trainer disagree on a few tokens, e.g. in mixtures of experts: these tokens are left out.",
            objective=Objective(surrogate=Clipped(), weight=_ICEPOP),
            baseline="group_norm",
        ),
        "seq_tis": Preset(
            source="Liu et al. 2025, When Speed Kills Stability",
            use="Short sequences with one reward for the whole sequence: the unbiased weight, truncated at 2.",
            objective=Objective(surrogate=Clipped(), weight=Weight(pool="sum", hi=2.0)),
        ),
        "geometric_rejection": Preset(
            source="Liu et al. 2025, When Speed Kills Stability",
            use="A whole sequence is left out if sampler and trainer disagree on it on average.",
            objective=Objective(surrogate=Clipped(), gates=(Gate(stat="ratio", pool="mean", lo=0.999, hi=1.001),)),
        ),
        "opsm": Preset(
            source="2512.02556",
            use="A bad sample is left out as a whole if the policy has already moved away from it.",
            objective=Objective(
                surrogate=Clipped(),
                gates=(Gate(stat="k1", pool="mean", hi=0.02, p="current", q="behaviour", when="negative_advantage"),),
                aggregation=SEQUENCE_MEAN,
            ),
        ),
        "m2po": Preset(
            source="2510.01161",
            use="Very stale data: leaves out just enough outliers to bound the second moment of log ρ.",
            objective=Objective(
                surrogate=Linear(),
                anchor="behaviour",
                gates=(Gate(stat="k2", p="current", q="behaviour", when="moving_away", budget=0.02),),
            ),
        ),
        "aipo": Preset(
            source="2505.24034",
            use="Asynchronous runs with one update a step: one truncated weight against the sampler, no clip.",
            objective=Objective(surrogate=_same(Clamp(hi=5.0)), anchor="behaviour"),
        ),
        "dppo_tv": Preset(
            source="2602.04879",
            use="Rare tokens move freely; a token stops after its probability has moved by 0.2 from the sampler's.",
            objective=Objective(
                surrogate=_same(Clamp(hi=20.0)),
                anchor="behaviour",
                gates=(Gate(stat="probability", lo=-0.2, hi=0.2, p="current", when="moving_away"),),
            ),
        ),
        "dppo_kl": Preset(
            source="2602.04879",
            use="Like dppo_tv, with a bound on the binary KL divergence of the token.",
            objective=Objective(
                surrogate=_same(Clamp(hi=20.0)),
                anchor="behaviour",
                gates=(Gate(stat="binary_kl", hi=0.05, p="current", when="moving_away"),),
            ),
        ),
        "dppo_tv_k2": Preset(
            source="2602.04879, 2602.02276",
            use="Like dppo_tv, but without a bound on the ratio: a squared penalty pulls each token to the sampler.",
            objective=Objective(
                surrogate=Linear(),
                anchor="behaviour",
                gates=(Gate(stat="probability", lo=-0.2, hi=0.2, p="current", when="moving_away"),),
                penalties=(Penalty(beta=2e-3, kind="k2", q="behaviour"),),
            ),
        ),
        "glm5": Preset(
            # the first paper has the objective without numbers; the bounds are the second paper's, for reasoning
            source="2602.15763, 2607.07508",
            use="Long agentic rollouts: one weight against the sampler; tokens outside [0.7, 6] are left out.",
            objective=Objective(
                surrogate=_same(Clamp()),
                anchor="behaviour",
                gates=(Gate(stat="ratio", lo=0.7, hi=6.0, p="current"),),
            ),
            baseline="group_mean",
        ),
        "p3o": Preset(
            source="2605.12380",
            use="No bound to tune: the effective share of the step's tokens caps the weight and sets the pull to the "
            "sampler.",
            objective=Objective(
                surrogate=_same(Clamp(ess=True)),
                anchor="behaviour",
                penalties=(Penalty(beta=1.0, kind="k3", q="behaviour", ess=True),),
            ),
            baseline="group_norm",
        ),
        "oapl": Preset(
            source="2602.19362",
            use="For very stale data. Without importance weights: a squared error draws β log ρ to the advantage.",
            objective=Objective(
                surrogate=Regression(beta=1e-3),
                anchor="behaviour",
                level="sequence_sum",
                aggregation=SEQUENCE_MEAN,
            ),
            baseline="oapl",
        ),
        "score_centering": Preset(
            # the bound 2, the mean over tokens and the advantage are those of TorchTitan's documentation; they were not
            # compared with the paper
            source="2609.20807, as TorchTitan's documentation of its loss restates it",
            use="Stale data: truncated importance sampling, without the drift of the sampler's mean score; needs "
            "generator.logprobs.",
            objective=Objective(surrogate=_same(Clamp(hi=2.0)), anchor="behaviour", centering="score"),
            baseline="group_mean",
        ),
        "topr": Preset(
            source="2503.14286",
            use="Much stale data: imitates good samples at full weight, pushes bad ones only while they are likely.",
            objective=Objective(
                surrogate=Weighted(positive=Clamp(lo=1.0, hi=1.0), negative=Clamp(hi=1.0)),
                anchor="behaviour",
                level="sequence_sum",
            ),
        ),
        "vtrace": Preset(
            source="1802.01561",
            use="With a critic: V-trace targets and advantages, weight truncated at 1. Without one: aipo with hi 1.",
            objective=Objective(surrogate=_same(Clamp(hi=1.0)), anchor="behaviour"),
            baseline="vtrace",
        ),
        "vespo": Preset(
            source="2602.10693",
            use="Stale sequences, with a smooth kernel of the whole sequence's weight that falls to 0 on both sides.",
            objective=Objective(
                surrogate=Weighted(positive=Gamma(shape=2.0, rate=3.0), negative=Gamma(shape=3.0, rate=2.0)),
                anchor="behaviour",
                level="sequence_sum",
            ),
        ),
        "flash_reinforce": Preset(
            source="Hu et al. 2026, FlashREINFORCE: Critic-Free Single-Rollout Asynchronous RL for Agentic Language "
            "Models",
            use="Agents with learner.group_size 1: one weight against the sampler; a sequence that drifted on average "
            "is left out.",
            objective=Objective(
                surrogate=_same(Clamp()),
                anchor="behaviour",
                gates=(Gate(stat="binary_kl", pool="mean", hi=3e-3, p="current"),),
                aggregation=SEQUENCE_MEAN,
            ),
            baseline="batch_mean",
        ),
        "reinforce": Preset(
            source="Williams 1992, 2402.14740",
            use="On-policy (staleness.max_versions: 0), one update a step: the plain policy gradient.",
            objective=Objective(surrogate=Reinforce()),
        ),
        "rloo": Preset(
            source="2402.14740",
            use="On-policy, with rewards of whole sequences and the leave-one-out baseline.",
            objective=Objective(surrogate=Reinforce(), aggregation=SEQUENCE_SUM),
            baseline="leave_one_out",
        ),
        "reinforce_pp": Preset(
            source="2501.03262",
            use="On-policy, with one baseline for the whole batch and a k2 penalty against a reference in the loss. "
            "The paper has this penalty only with its group baseline, and else a k1 penalty in the reward.",
            objective=Objective(surrogate=Clipped(), penalties=(Penalty(beta=0.01, kind="k2"),)),
            baseline="reinforce_pp",
        ),
        "grpo": Preset(
            source="2402.03300",
            use="On-policy, near a reference model; every sequence has the same weight at any length.",
            objective=Objective(
                surrogate=Clipped(), penalties=(Penalty(beta=0.04, kind="k3"),), aggregation=SEQUENCE_MEAN
            ),
            baseline="group_norm",
        ),
        "dr_grpo": Preset(
            source="2503.20783",
            use="On-policy, without the biases of dividing by lengths and by the rewards' standard deviation.",
            objective=Objective(surrogate=Clipped(), aggregation=Aggregation.SEQUENCE_SUM_CONSTANT),
            baseline="group_mean",
        ),
        "dapo": Preset(
            source="2503.14476",
            use="On-policy, long answers: rare tokens may grow further, and every token has the same weight.",
            objective=Objective(surrogate=Clipped(hi=1.28)),
            baseline="group_norm",
        ),
        "ppo": Preset(
            source="1707.06347",
            use="On-policy, with a critic and GAE.",
            objective=Objective(surrogate=Clipped()),
            baseline="gae",
        ),
        "vapo": Preset(
            source="2504.05118",
            use="On-policy, with a critic, length-adaptive GAE and long answers; good answers are imitated as well.",
            objective=Objective(surrogate=Clipped(hi=1.28), penalties=(Penalty(beta=0.1, kind="positive_nll"),)),
            baseline="gae",
            critic=PublishedCritic(value_lam=1.0, length_alpha=0.05),  # sections 4.1 and 5.1
        ),
        "dual_clip": Preset(
            source="1912.09729",
            use="Bad samples that have become much more likely must not dominate a step.",
            objective=Objective(surrogate=Clipped(dual=3.0)),
        ),
        "two_sided": Preset(
            source="2505.07291",
            use="Like dual_clip, with bound 4: the ratio itself is capped, which is the same function.",
            objective=Objective(surrogate=Clipped(dual=4.0)),
            baseline="group_norm",
        ),
        "gspo": Preset(
            source="2507.18071",
            use="Mixtures of experts, on-policy: the clip acts on the ratio of a whole sequence, which varies less.",
            objective=Objective(
                surrogate=Clipped(lo=1 - 3e-4, hi=1 + 4e-4), level="sequence_mean", aggregation=SEQUENCE_MEAN
            ),
            baseline="group_norm",
        ),
        "gspo_token": Preset(
            source="2507.18071",
            use="Like gspo, for advantages that differ between the tokens of a sequence (a critic, rewards of turns).",
            objective=Objective(
                surrogate=Clipped(lo=1 - 3e-4, hi=1 + 4e-4), level="sequence_mean_token", aggregation=SEQUENCE_MEAN
            ),
            baseline="group_norm",
        ),
        "luspo": Preset(
            source="2602.05261",
            use="Like gspo, without its preference for short answers.",
            objective=Objective(
                surrogate=Clipped(lo=1 - 2e-3, hi=1 + 2.5e-3), level="sequence_mean", aggregation=SEQUENCE_SUM
            ),
            baseline="group_norm",
        ),
        "gmpo": Preset(
            source="2507.20673",
            use="On-policy, with outlier tokens: a sequence's ratio is the geometric mean of bounded token ratios.",
            objective=Objective(
                surrogate=Linear(),
                level="sequence_mean",
                pre_clip=PreClip(lo=math.exp(-0.4), hi=math.exp(0.4)),
                aggregation=SEQUENCE_MEAN,
            ),
            baseline="group_norm",
        ),
        "cispo": Preset(
            source="2506.13585",
            use="Several updates a step: rare tokens that a clip would silence keep a bounded gradient.",
            objective=Objective(surrogate=_same(Clamp(hi=5.0))),
            baseline="group_norm",
        ),
        "aspo": Preset(
            source="2510.06062",
            use="Several updates a step without collapse: good tokens that have become likelier have less weight.",
            objective=Objective(
                surrogate=Weighted(positive=Inverse(hi=3.0), negative=Clamp(hi=3.0)),
                gates=(Gate(stat="ratio", lo=0.8, hi=1.2, p="current", q="proximal", when="moving_away"),),
            ),
            baseline="group_norm",
        ),
        "sapo": Preset(
            source="2511.20347",
            use="Several updates a step: the edge of the clip is smooth, and stricter for bad samples.",
            objective=Objective(surrogate=SoftGate(), aggregation=SEQUENCE_MEAN),
            baseline="group_norm",
        ),
        "cfpo": Preset(
            source="2601.22801",
            use="Several updates a step: a parabola instead of the clip, so that no token loses its gradient.",
            objective=Objective(surrogate=Quadratic(width=0.2), aggregation=SEQUENCE_MEAN),
            baseline="group_norm",
        ),
        "kl_cov": Preset(
            source="2505.22617",
            use="Several updates a step: a penalty holds the few tokens that lower the entropy most near their "
            "log-probs at the step's start.",
            objective=Objective(
                surrogate=Linear(),
                penalties=(Penalty(beta=1.0, kind="abs", q="proximal", tokens=ByCovariance(share=2e-3)),),
            ),
            baseline="group_norm",
        ),
        "clip_cov": Preset(
            source="2505.22617",
            use="Several updates a step: keeps the entropy by leaving out a few of the tokens that lower it most.",
            objective=Objective(surrogate=Clipped(), dropped=ByCovariance(share=2e-4, order="random", lo=1.0, hi=5.0)),
            baseline="group_norm",
        ),
        "kimi": Preset(
            source="2501.12599",
            use="Several updates a step: no ratio; a squared penalty pulls each token to the step's start.",
            objective=Objective(surrogate=Reinforce(), penalties=(Penalty(beta=0.1, kind="k2", q="proximal"),)),
            baseline="group_mean",
        ),
        "maxrl": Preset(
            source="2602.02710",
            use="On-policy, rewards of 0 and 1: maximises the likelihood of right answers, so hard prompts weigh more.",
            objective=Objective(surrogate=Clipped()),
            baseline="maxrl",
        ),
        "gdpo": Preset(
            source="2601.05242",
            use="On-policy, several rewards, each normalised in its group before the sum; needs environment.rewards.",
            objective=Objective(surrogate=Clipped()),
            baseline="gdpo",
        ),
        "opo": Preset(
            source="2505.23585",
            use="On-policy, one update a step: the policy gradient, with a baseline in which long answers weigh more.",
            objective=Objective(surrogate=Reinforce()),
            baseline="opo",
        ),
        "gpg": Preset(
            source="2504.02546",
            use="On-policy, one update a step: the policy gradient, scaled as if groups of equal rewards were absent.",
            objective=Objective(surrogate=Reinforce()),
            baseline="gpg",
        ),
    }
)


def resolve_objective(loss: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Objective:
    """Returns the preset that `loss` names, or the objective that `loss` describes axis by axis, in both cases with the
    axes of `overrides` replaced.

    A mapping replaces the fields that it names, at any depth, and keeps all other fields. If it names another `kind` of
    surrogate or kernel, the other fields get the defaults of that kind. `weight: null` removes the weight. The lists
    `gates` and `penalties` are replaced as a whole. An entry of the new list takes the fields that it does not name
    from the preset's entry with the same stat or kind. Raises ConfigError with a line for each wrong axis or value,
    with the key, the value and the choices.

    >>> resolve_objective("tis", {"weight": {"hi": 4.0}}).weight.hi
    4.0
    >>> resolve_objective({"surrogate": {"kind": "linear"}, "anchor": "behaviour"}, {}).level
    'token'
    """
    if isinstance(loss, str) and loss not in PRESETS:
        raise ConfigError(
            f"algorithm.loss: {loss!r} is neither one of {', '.join(PRESETS)} nor an import path like "
            f"'package.module:callable'{suggest(loss, list(PRESETS))}"
        )
    if not isinstance(loss, str) and "name" in loss:
        raise ConfigError(
            f"algorithm.loss.name = {loss['name']}: only a loss of your own, an import path like "
            "'package.module:callable', has a name and options; write a preset as `loss: NAME`, and replace its axes "
            "with algorithm.overrides"
        )
    axes: dict[str, Any] = msgspec.to_builtins(PRESETS[loss].objective) if isinstance(loss, str) else dict(loss)
    known, lines = list(Objective.__struct_fields__), list[str]()
    for axis, value in overrides.items():
        if axis in known:
            axes[axis] = _replaced(axes.get(axis), value)
        else:
            lines.append(
                f"algorithm.overrides.{axis}: there is no such axis; the axes are {', '.join(known)}"
                f"{suggest(axis, known)}"
            )
    lines += problems(
        axes,
        struct=Objective,
        key="algorithm.overrides" if isinstance(loss, str) else "algorithm.loss",
        beside=AlgorithmSection.model_fields,
    )
    if lines:
        raise ConfigError("\n".join(lines))
    return msgspec.convert(axes, Objective)


def own_loss(section: AlgorithmSection) -> OwnCallable | None:
    """Returns the import path and the options of the user's own loss that `algorithm.loss` names; None if it describes
    an objective, or if its name is a preset or no import path."""
    if section.loss_name in PRESETS or not is_import_path(section.loss_name):
        return None
    options = {} if isinstance(section.loss, str) else {k: value for k, value in section.loss.items() if k != "name"}
    return OwnCallable(path=section.loss_name, options=options)


def advantage_of(section: AlgorithmSection) -> str | Mapping[str, Any]:
    """Returns `algorithm.advantage`. If it is not set, returns the preset's own estimator, or else
    `DEFAULT_BASELINE`."""
    return section.advantage or published_baseline(section) or DEFAULT_BASELINE


def compares_groups(section: AlgorithmSection) -> bool:
    """Returns True if the advantage estimator compares the samples of a group, so that a sample which is alone in its
    group has an advantage of 0. Returns True also for a user's own estimator, which may do so."""
    advantage = resolve_advantage(advantage_of(section))
    if isinstance(advantage, OwnEstimator):
        return True
    return not isinstance(advantage, CriticBased) and advantage.compares_a_group


def baseline_of(section: AlgorithmSection) -> str:
    """Returns the name of the advantage estimator, or "" if the mapping in `algorithm.advantage` has no name."""
    name = advantage_name(advantage_of(section))
    return name if isinstance(name, str) else ""


def published_baseline(section: AlgorithmSection) -> str | None:
    """Returns the estimator that the preset was published with; None if there is none, or if the loss is not a
    preset."""
    preset = _preset_of(section)
    return None if preset is None else preset.baseline


def published_critic(section: AlgorithmSection) -> PublishedCritic | None:
    """Returns the published fields of `critic`, if the loss is a preset that has them and runs with the advantage
    estimator of its paper; else None."""
    preset = _preset_of(section)
    return None if preset is None or baseline_of(section) != preset.baseline else preset.critic


def _preset_of(section: AlgorithmSection) -> Preset | None:
    return PRESETS.get(section.loss) if isinstance(section.loss, str) else None


def _replaced(current: object, value: object) -> object:
    if isinstance(value, list | tuple) and isinstance(current, list | tuple):
        return [_replaced(_alike(current, entry), entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if not isinstance(current, Mapping) or value.get("kind", current.get("kind")) != current.get("kind"):
        return dict(value)
    return {**current, **{key: _replaced(current.get(key), part) for key, part in value.items()}}


def _alike(entries: Sequence[object], entry: object) -> object:
    """Returns the preset's first gate or penalty with the stat or kind of `entry`, or None if there is none."""
    if isinstance(entry, Mapping):
        for other in entries:
            if isinstance(other, Mapping) and all(entry.get(tag) == other.get(tag) for tag in ("stat", "kind")):
                return other
    return None
