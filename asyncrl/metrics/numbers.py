"""Declares the scalars of a step, each once: its name, unit and meaning, and where it is shown.

The records (steps.jsonl), the trackers, the gauges of Prometheus, the charts of the report, the panels of the dashboard
Learning, and docs/metrics.md read this table. A new number therefore needs two changes: `learner/recording.py` (or
`learner/step.py`, or a step report) computes it under its name, and this table declares it.

A number of a step report that is not declared here, such as a metric of a user's loss, is written to steps.jsonl and to
the trackers only.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart in the report's section Learning. Its y axis contains the values `include`. Its numbers have values from
    `least` to `most`, so that the interval around a mean is cut there."""

    title: str
    unit: str = ""
    include: tuple[float, ...] = ()
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel in the row `row` of the dashboard Learning, with Grafana's name of its unit.

    A panel of one number needs no description: the number's `help` is shown.
    """

    row: str
    title: str
    description: str = ""
    unit: str = "none"


@dataclass(frozen=True, slots=True)
class Line:
    """The line of a number in a chart of the report. `color` is a colour of the page, see views/report.css."""

    chart: Chart
    legend: str
    color: str = "blue"


SAME = ""

WITNESSED = {
    "counts": "the trained samples and tokens against those of the step's groups",
    "prompts": "how often a prompt was trained in its epoch against its rows in the data",
    "rows": "log-probs of rows against those of each row alone",
    "advantages": "advantages against those that follow from the rewards",
    "bounds": "bounds of the objective that depend on the whole step, and a β that is set from the steps before, "
    "against their definitions",
    "coefficients": "derivatives of the loss by each log-prob against the objective's formula",
    "gradient": "the gradient of a drawn group against that of a plain pass",
    "optimizer": "new values of single weights against the optimizer's formula",
    "frozen": "whether weights stayed although the optimizer's moments predict a change",
}
"""The subject of each check of the witness, by the name of the check in `asyncrl.witness.judge`. Each check builds on
those before it."""
KEPT = frozenset(f"witness_{check}_ratio" for check in WITNESSED)
"""Numbers whose gauges keep the value of the last step that had them, because only some steps are witnessed, and a
scrape may miss these steps."""
WITNESS_PANEL = "Differences that the witness found"
WITNESS_HELP = (
    "The largest difference of each check of the witness, as a share of what is accepted, in the last step that was "
    "witnessed (`witness.every_steps`). Above 1, the update is not the one that the configuration describes."
)


@dataclass(frozen=True, slots=True)
class Number:
    """A scalar of a step.

    `name` is its key in steps.jsonl, either of the record or of its `diagnostics`. `tracker` is its section in
    experiment trackers, or `section/name` if its name there is another one. `line` is its line in the report, `panel`
    its panel of the dashboard Learning, with the legend of its line there. `gauge` is the end of its gauge's name, by
    default `name`; None if there is no gauge.
    """

    name: str
    unit: str
    help: str
    tracker: str
    line: Line | None = None
    panel: tuple[Panel, str] | None = None
    gauge: str | None = SAME


LEARNS, HARMS, SOUND, CRITIC = "Does it learn?", "Does staleness do harm?", "Are the numbers sound?", "Critic"
"""The rows of the dashboard Learning."""

SPREAD = Chart("Spread of rewards", "reward; share of groups", (0,))
LENGTHS = Chart("Completion length", "tokens", (0,))
EPISODES = Chart("Episodes of agents", "per episode", (0,))
CUT = Chart("Truncated and failed completions", "share of samples", (0, 1))

NO_GRADIENT = Panel(
    LEARNS,
    "Groups without a gradient",
    "Share of groups whose rewards are all equal. With a group baseline they have no gradient, because their question "
    "is too easy or too hard. Empty when a group has one sample.",
    "percentunit",
)
EFFECTIVE = Panel(
    HARMS,
    "Effective sample size",
    "Effective sample size as a share of the tokens: by the untruncated importance weights, and by the strength with "
    "which the objective pushes each token. If it falls, lower staleness.max_versions.",
    "percentunit",
)
WEIGHTS = Panel(
    HARMS,
    "Importance weights",
    "Proximal probability divided by behaviour probability: the mean, the largest, and the mean distance (the mean of "
    "the ratio or its inverse, whichever is larger).",
)
DIFFERENCES = Panel(
    HARMS,
    "Differences of log-probs",
    "KL divergence between behaviour and proximal policy, and the largest difference of a token's log-prob.",
    "suffix: nats",
)
REMOVED = Panel(
    HARMS,
    "Tokens without gradient",
    "Share of tokens that the clip removes, share that a gate or a zeroed weight removes, and share of tokens with an "
    "advantage but without a gradient for any reason (silent).",
    "percentunit",
)
BY_SIGN = Panel(
    HARMS,
    "Removed tokens by sign",
    "Shares of clipped and gated tokens, among tokens with a positive and with a negative advantage.",
    "percentunit",
)
MASKED = Panel(
    HARMS,
    "Masked stale tokens",
    "Tokens of a step that are masked from the loss because they are older than staleness.max_versions, and samples "
    "without any other token. Only staleness.on_deadline: mask has such tokens.",
)
PLAYED = Panel(
    SOUND,
    "Episodes of agents",
    "Mean number of turns, of calls of tools, and of failed calls of tools in an episode. Only agents and tools have "
    "them.",
)
LEFT_OUT = Panel(
    SOUND,
    "Samples left out",
    "Share of samples that were truncated at their length limit, share that is left out of the loss, and share that is "
    "left out because its reward failed.",
    "percentunit",
)


def _by_sign(name: str, sign: str, why: str) -> Number:
    """Declares the share of the tokens with a positive or a negative advantage that the objective removes. `why` says
    in words how it removes them."""
    key = f"{name}_{sign}_ratio"
    return Number(
        key,
        "ratio",
        f"Share of the tokens with a {sign} advantage that {why}. NaN for a loss of your own.",
        "diagnostics",
        panel=(BY_SIGN, f"{name}, {sign}"),
    )


_CLIPPED, _GATED = "have no gradient because of the clip", "a gate or an importance weight of 0 removes from the loss"

NUMBERS: tuple[Number, ...] = (
    Number(
        "reward_mean",
        "reward",
        "Mean reward of the last step's samples and of those of the groups in `filtered_groups`.",
        "reward/mean",
    ),
    Number(
        "reward_std",
        "reward",
        "Population standard deviation of the rewards of which `reward_mean` is the mean.",
        "reward/std",
        Line(SPREAD, "standard deviation"),
        gauge=None,
    ),
    Number(
        "reward_min", "reward", "Smallest of the rewards of which `reward_mean` is the mean.", "reward/min", gauge=None
    ),
    Number(
        "reward_max", "reward", "Largest of the rewards of which `reward_mean` is the mean.", "reward/max", gauge=None
    ),
    Number(
        "zero_variance_ratio",
        "ratio",
        "Share of groups whose rewards, as the advantage estimator compares them, are all equal. Their advantages are "
        "0 and they have no gradient. 0 for estimators that do not compare the samples of a group. NaN when every "
        "group has one sample.",
        "reward",
        Line(SPREAD, "groups with equal rewards", "rose"),
        (NO_GRADIENT, "equal"),
    ),
    Number(
        "all_right_ratio",
        "ratio",
        "Share of groups whose rewards are all equal and above 0.",
        "reward",
        panel=(NO_GRADIENT, "all right"),
    ),
    Number(
        "all_wrong_ratio",
        "ratio",
        "Share of groups whose rewards are all equal and not above 0.",
        "reward",
        panel=(NO_GRADIENT, "all wrong"),
    ),
    Number(
        "completion_tokens_mean",
        "tokens",
        "Mean number of generated tokens of a sample.",
        "length",
        Line(LENGTHS, "mean"),
        gauge=None,
    ),
    Number(
        "completion_tokens_max",
        "tokens",
        "Largest number of generated tokens of a sample.",
        "length",
        Line(LENGTHS, "longest", "gray"),
        gauge=None,
    ),
    Number(
        "truncated_ratio",
        "ratio",
        "Share of samples that were truncated at their length limit.",
        "length",
        Line(CUT, "truncated", "rose"),
        (LEFT_OUT, "truncated"),
        gauge="overlong_ratio",
    ),
    Number(
        "masked_samples_ratio",
        "ratio",
        "Share of samples that are left out of the loss: a filter masks them, they have no token that may be trained, "
        "or their reward failed.",
        "length/masked_ratio",
        panel=(LEFT_OUT, "masked"),
    ),
    Number(
        "failed_samples_ratio",
        "ratio",
        "Share of samples that are left out because their reward failed (environment.on_error: mask).",
        "reward",
        Line(CUT, "without a reward", "amber"),
        (LEFT_OUT, "without a reward"),
    ),
    Number(
        "turns_mean",
        "turns",
        "Mean number of turns of an agent's episode: calls of the model.",
        "agents",
        Line(EPISODES, "turns"),
        (PLAYED, "turns"),
        gauge="episode_turns_mean",
    ),
    Number(
        "tool_calls_mean",
        "calls",
        "Mean number of the model's tool calls in an agent's episode.",
        "agents",
        Line(EPISODES, "calls of tools", "gray"),
        (PLAYED, "calls of tools"),
        gauge="episode_tool_calls_mean",
    ),
    Number(
        "failed_tool_calls_mean",
        "calls",
        "Mean number of calls in an agent's episode in which the tool raised an error or was late.",
        "agents",
        Line(EPISODES, "failed calls", "rose"),
        (PLAYED, "failed calls"),
        gauge="episode_failed_tool_calls_mean",
    ),
    Number(
        "ess_ratio",
        "ratio",
        "Effective sample size of the untruncated importance weights divided by the number of tokens.",
        "staleness",
        Line(Chart("Effective sample size", "share of tokens", (0, 1), least=0, most=1), "effective sample size"),
        (EFFECTIVE, "importance weights"),
    ),
    Number(
        "kernel_ess_ratio",
        "ratio",
        "Effective share of the tokens, (Σκ)² / (N · Σκ²), where κ is the strength with which the objective pushes a "
        "token along its advantage. 0 when it pushes no token, NaN when it was not measured.",
        "diagnostics",
        panel=(EFFECTIVE, "objective"),
    ),
    Number(
        "loss",
        "",
        "Loss of the last step. With policy gradients, its value says little about progress.",
        "train",
        Line(Chart("Loss"), "loss"),
        (Panel(LEARNS, "Loss"), "loss"),
    ),
    Number(
        "entropy_nats",
        "nats",
        "Mean entropy of the policy at the last step's tokens. Near 0, the policy no longer explores.",
        "train",
        Line(Chart("Entropy", "nats per token", least=0), "entropy"),
        (Panel(LEARNS, "Entropy", unit="suffix: nats"), "entropy"),
    ),
    Number(
        "grad_norm",
        "",
        "Global gradient norm of the last step, before it is clipped to learner.optimizer.max_grad_norm.",
        "train",
        Line(Chart("Gradient norm", "before clipping"), "gradient norm"),
        (Panel(LEARNS, "Gradient"), "norm"),
    ),
    Number(
        "learning_rate",
        "",
        "Learning rate of the last step, by the schedule of learner.optimizer.",
        "train",
        Line(Chart("Learning rate"), "learning rate"),
        (Panel(LEARNS, "Learning rate"), "rate"),
    ),
    Number(
        "kl_to_reference_nats",
        "nats",
        "KL divergence between the proximal policy and the reference policy (the weights at model.path), by the "
        "estimator k3. NaN when the objective does not use the reference policy.",
        "train",
        Line(Chart("KL to the reference", "nats"), "kl to the reference"),
        (Panel(LEARNS, "KL to the reference", unit="suffix: nats"), "KL"),
    ),
    Number(
        "penalty_beta",
        "",
        "Coefficient β of a penalty, if it is set from the KL of the steps before (`control` in docs/losses.md). NaN "
        "when no penalty of the loss has control.",
        "train",
        Line(Chart("Penalty's β"), "β"),
        (Panel(LEARNS, "Penalty's β"), "β"),
    ),
    Number("trained_tokens", "tokens", "Completion tokens that the step trained.", "train/tokens", gauge=None),
    Number("trained_samples", "samples", "Samples that the step trained.", "train/samples", gauge=None),
    Number(
        "importance_weight_mean",
        "ratio",
        "Mean over tokens of the proximal probability divided by the behaviour probability.",
        "staleness",
        panel=(WEIGHTS, "mean"),
    ),
    Number(
        "importance_weight_max",
        "ratio",
        "Largest proximal probability of a token divided by its behaviour probability.",
        "staleness",
        panel=(WEIGHTS, "largest"),
    ),
    Number(
        "exp_abs_log_rho_mean",
        "ratio",
        "Mean of e^|log proximal − log behaviour probability| over tokens: 1 when the two agree, more when either is "
        "larger.",
        "diagnostics",
        panel=(WEIGHTS, "mean distance"),
    ),
    Number(
        "kl_to_behaviour_nats",
        "nats",
        "KL divergence between the behaviour and the proximal policy, by the estimator k3.",
        "staleness",
        panel=(DIFFERENCES, "KL"),
    ),
    Number(
        "abs_log_rho_max_nats",
        "nats",
        "Largest |log proximal − log behaviour probability| of a token.",
        "diagnostics",
        panel=(DIFFERENCES, "largest"),
    ),
    Number(
        "clipped_ratio",
        "ratio",
        "Share of tokens without a gradient because of the objective's clip.",
        "diagnostics",
        panel=(REMOVED, "clipped"),
    ),
    Number(
        "gated_ratio",
        "ratio",
        "Share of tokens that a gate or an importance weight of 0 removes from the loss.",
        "diagnostics",
        panel=(REMOVED, "gated"),
    ),
    Number(
        "silent_ratio",
        "ratio",
        "Share of the tokens with an advantage other than 0 at which the objective has no gradient. NaN when no token "
        "of the step has such an advantage, for example if all rewards are 0, and when it was not measured.",
        "diagnostics",
        panel=(REMOVED, "silent"),
    ),
    _by_sign("clipped", "positive", _CLIPPED),
    _by_sign("clipped", "negative", _CLIPPED),
    _by_sign("gated", "positive", _GATED),
    _by_sign("gated", "negative", _GATED),
    Number(
        "length_ratio",
        "ratio",
        "Mean completion length of all samples trained so far divided by that of all samples generated so far, without "
        "those of failed groups. Below 1, long completions are lost more often. A group that is dropped at its "
        "deadline (`staleness.on_deadline: drop`) counts with the tokens that it had. NaN before the first "
        "trained sample.",
        "length/trained_to_generated_ratio",
        Line(Chart("Length of trained completions", "share of the length of all completions", (1,)), "trained / all"),
        (Panel(HARMS, "Length ratio"), "trained / generated"),
    ),
    Number(
        "cached_prompt_ratio",
        "ratio",
        "Share of the prompt tokens so far that came from the prefix caches of the engines. Each sample of a group "
        "counts its prompt. With G samples a group it is up to (G − 1) / G. If it is near 0 although prompts are "
        "longer than a block of the cache (`block_size` in docs/tasks.md), each sample computes its prompt again. NaN "
        "before the first prompt.",
        "speed",
        Line(Chart("Prompt tokens from the cache", "share of prompt tokens", (0, 1)), "from the cache"),
        gauge=None,  # Prometheus has vLLM's own counters, which the dashboard Flow shows
    ),
    Number(
        "stale_tokens",
        "tokens",
        "Tokens of the step's groups that are masked from the loss because they are older than staleness.max_versions "
        "(staleness.on_deadline: mask).",
        "staleness",
        panel=(MASKED, "tokens"),
    ),
    Number(
        "stale_samples",
        "samples",
        "Samples of the step that are left out of the loss because all of their tokens are older than "
        "staleness.max_versions (staleness.on_deadline: mask). They still count in the advantages.",
        "staleness",
        panel=(MASKED, "whole samples"),
    ),
    Number(
        "filtered_groups",
        "groups",
        "Groups that were left out since the step before because all of their rewards are equal "
        "(algorithm.zero_variance: resample). Other prompts took their places.",
        "reward",
        panel=(Panel(LEARNS, "Filtered groups", unit="suffix: groups"), "groups"),
    ),
    Number(
        "nonfinite_tokens",
        "tokens",
        "Tokens of the last step that were left out because a log-prob or an advantage was not finite.",
        "diagnostics",
        panel=(Panel(SOUND, "Tokens left out", unit="suffix: tokens"), "tokens"),
    ),
    Number(
        "parity_nats",
        "nats",
        "Largest difference between the engine's and the learner's log-prob of a token, over the step's on-policy "
        "tokens.",
        "staleness",
        gauge=None,
    ),
    Number(
        "parity_mean_nats",
        "nats",
        "Mean size of the difference between the engine's and the learner's log-prob of a token, over the step's "
        "on-policy tokens.",
        "staleness",
    ),
    Number(
        "parity_tokens",
        "tokens",
        "On-policy tokens of the step, whose log-probs were compared. If there are none, `parity_nats` and "
        "`parity_mean_nats` are null, and `parity_ratio` is missing.",
        "staleness",
        gauge=None,
    ),
    Number(
        "parity_probe_nats",
        "nats",
        "Largest difference between the engine's and the learner's log-prob of a token in the probes of all weight "
        "updates so far. A probe is a few token sequences that both score after an update, so it is compared also in "
        "steps without on-policy tokens.",
        "staleness",
        gauge=None,
    ),
    Number(
        "parity_ratio",
        "ratio",
        "How much the log-probs of engine and learner differ, as a share of what `weights.parity_*` accept. Above 1 "
        "they do not agree.",
        "staleness",
        gauge=None,
    ),
    *(
        Number(
            f"witness_{check}_ratio",
            "ratio",
            f"The witness computes some steps a second time, and checks {what}. The number is the largest difference "
            "of the step, as a share of what is accepted; above 1 the update is not the one that the configuration "
            "describes.",
            "witness",
            panel=(Panel(SOUND, WITNESS_PANEL, description=WITNESS_HELP), check),
        )
        for check, what in WITNESSED.items()
    ),
    Number(
        "witness_s",
        "seconds",
        "Time that the first rank spent in the second, plain passes of a step that is witnessed.",
        "witness",
        gauge=None,
    ),
    Number(
        "published_bits_ratio",
        "ratio",
        "Share of the published elements whose bits are not those of the publication before, estimated from 1,024 "
        "elements of each shard. Almost 0 in bfloat16 if the learning rate is too small for this precision. Steps that "
        "publish nothing have no such number.",
        "diagnostics",
        gauge=None,
    ),
    Number(
        "packing_efficiency_ratio",
        "ratio",
        "Tokens of the rows divided by the tokens that went through the models of the ranks. Padding makes it smaller "
        "than 1; packed rows that share a prompt make it larger than 1.",
        "diagnostics",
    ),
    Number(
        "duration_s",
        "seconds",
        "Time of the step from its lease, with which the learner gets the groups, to its ack or skip.",
        "speed/step_duration_s",
        gauge=None,
    ),
    Number(
        "model_flops",
        "FLOPs",
        "FLOPs of the policy's training passes, also in a skipped step. Null when they cannot be counted.",
        "speed",
        gauge=None,
    ),
    Number(
        "mfu_ratio",
        "ratio",
        "`model_flops` divided by what the devices can do in `duration_s`. Null when one of them is not known.",
        "speed",
        gauge=None,
    ),
    Number(
        "gpu_memory_allocated_max_gib",
        "GiB",
        "Most memory that tensors took on a GPU of the learner's ranks since the step before: the fullest GPU counts. "
        "Near the size of the card, lower learner.micro_batch_tokens. A run on CPUs has no such number.",
        "speed",
        Line(Chart("Memory of the learner's fullest GPU", "GiB", (0,)), "tensors"),
        (Panel(SOUND, "Memory of the learner's fullest GPU", unit="gbytes"), "tensors"),
    ),
    Number(
        "explained_variance",
        "ratio",
        "Share of the returns' variance that the critic's values explain. 1 is perfect; below 0, the values are worse "
        "than the mean of the returns.",
        "critic",
        Line(Chart("Critic: explained variance", "share of the returns' variance", (0, 1)), "explained variance"),
        (Panel(CRITIC, "Explained variance"), "explained"),
    ),
    Number(
        "value_loss",
        "",
        "Loss of the critic in the last step. A run without a critic has no such numbers.",
        "critic",
        Line(Chart("Critic: loss"), "critic: loss"),
        (Panel(CRITIC, "Value loss"), "loss"),
    ),
    Number(
        "value_clipped_ratio",
        "ratio",
        "Share of tokens whose value has no gradient because of critic.value_clip.",
        "critic",
        panel=(Panel(CRITIC, "Clipped values", unit="percentunit"), "clipped"),
    ),
)

LEAST_PUBLISHED_BITS = 0.001
"""Smallest share of the published elements that should have other bits after a step (`published_bits_ratio`). In
bfloat16, a rate of 1e-6 changes about 1 % of them (PULSE, arXiv:2602.03839)."""

TRACKERS = {
    number.name: number.tracker if "/" in number.tracker else f"{number.tracker}/{number.name}" for number in NUMBERS
}
"""Maps the name of a number in steps.jsonl to its name in experiment trackers."""

AGENT_NUMBERS = ("turns_mean", "tool_calls_mean", "failed_tool_calls_mean")
"""The numbers about the episodes of agents, which other runs do not have."""

GAUGES = {
    number.name: f"asyncrl_learner_{number.gauge or number.name}" for number in NUMBERS if number.gauge is not None
}
"""Maps the name of a number in steps.jsonl to the name of its gauge."""


def tracker_name(name: str) -> str:
    """Returns the name of a recorded number in experiment trackers; the part before the slash is the section there.

    >>> [tracker_name(name) for name in ("value_loss", "abs_log_rho_nats_staleness_1", "a_metric_of_a_loss")]
    ['critic/value_loss', 'staleness/abs_log_rho_nats_staleness_1', 'diagnostics/a_metric_of_a_loss']
    """
    return TRACKERS.get(name) or f"{'staleness' if 'staleness' in name else 'diagnostics'}/{name}"


def charts() -> dict[Chart, list[tuple[Number, Line]]]:
    """Returns the charts of the report's section Learning that `NUMBERS` declares, with the numbers and lines of each.
    The charts of rewards are not declared there (`asyncrl.views.report_panels`)."""
    found: dict[Chart, list[tuple[Number, Line]]] = {}
    for number in NUMBERS:
        if number.line is not None:
            found.setdefault(number.line.chart, []).append((number, number.line))
    return found


def panels(row: str) -> dict[Panel, list[tuple[Number, str]]]:
    """Returns the panels of a row of the dashboard Learning, with the numbers and legends of each."""
    found: dict[Panel, list[tuple[Number, str]]] = {}
    for number in NUMBERS:
        if number.panel is not None and number.panel[0].row == row:
            found.setdefault(number.panel[0], []).append((number, number.panel[1]))
    return found
