"""The request of the learner to the witness in a step: the drawn group, and how many tokens of the step's lease must be
trained. The witness checks an update by a second, plain computation. The drawn group is one group of the lease, chosen
at random, whose samples the witness computes a second time.

`asyncrl.witness` has the formulas, and `asyncrl.ranks.witnessed` the second pass.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import torch

from asyncrl.algorithms.advantages import Estimator, Samples, compute_advantages
from asyncrl.algorithms.baselines import CriticBased, Outcome, OwnEstimator, has_token_advantages, resolve_advantage
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import advantage_of, own_loss, resolve_objective
from asyncrl.algorithms.token_estimators import DiscountedReturns, TokenEstimator
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import RunError
from asyncrl.learner.records import StepRecord
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace
from asyncrl.witness.advantages import TokenColumns, of_tokens, unlike
from asyncrl.witness.bounds import next_beta
from asyncrl.witness.judge import EQUAL, FORMULA, Finding, Request, counts_finding
from asyncrl.witness.objective import Axes, Counts
from asyncrl.witness.optimizer import rate_of_step
from asyncrl.witness.step import Completion, advantages, counts, scored, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """The drawn group of a step. `numbers_B` has for each row of the step its index within the drawn group, −1 for rows
    of other groups. `rows` has the indices of the drawn rows in the step. `outcomes` are their advantages; for an
    estimator of token advantages, its input for each row: the reward less its baseline. `outcomes` is None if the
    user's own estimator fails when it is called again, or then gives other advantages."""

    numbers_B: torch.Tensor
    request: Request
    rows: tuple[int, ...]
    outcomes: tuple[float, ...] | None


def is_witnessed(step: int, *, first: bool, config: Config) -> bool:
    """Returns whether a step is witnessed. `first` is true until a step has trained the policy after a start of the
    learner."""
    every = config.witness.every_steps
    return every > 0 and (first or step % every == 0)


def witnessed(
    lease: Lease, *, every_part: bool, estimator: Estimator | None, config: Config, rows_per_update: int
) -> Witnessed:
    """Draws a group of the lease, and returns the advantages that its samples must have: by the plain formulas, or for
    the user's own estimator by `with_groups_exchanged`. Also returns the numbers of tokens and sequences that each
    update of the step must train. With `every_part`, the ranks also compute the gradient of each micro-batch alone, and
    compare the sum with the step's gradient. `estimator` is the one that the step uses for its samples; it is called
    only if the user wrote it."""
    axes, completions = sample_axes(config), completions_of(lease)
    kept = trained(completions, axes=axes, config=config)
    draw = random.Random(f"{config.run.seed} {lease.incarnation} {lease.step}")
    found: Sequence[float] | None
    if axes is not None:
        found, by = advantages(completions, axes=axes, config=config), FORMULA
    else:
        assert estimator is not None, "only a run with a critic has no estimator, and then `axes` is not None"
        found, by = with_groups_exchanged(estimator, completions, config=config, draw=draw), GROUPS_EXCHANGED
    teaches = [is_kept and (found is None or found[n] != 0) for n, is_kept in enumerate(kept)]
    drawn = _drawn(lease, teaches, draw=draw, most_tokens=config.witness.group_tokens)
    numbers_B = torch.full((len(completions),), -1)
    numbers_B[drawn] = torch.arange(len(drawn))
    outcomes = None if found is None else tuple(found[n] for n in drawn)
    by_token = has_token_advantages(resolve_advantage(advantage_of(config.algorithm)))
    compared = not by_token and (axes is not None or any(teaches[n] for n in drawn))
    of_updates = counts(completions, kept, rows_per_update=rows_per_update, config=config)
    largest = max(map(abs, found or [0.0]))
    request = Request(
        counts=of_updates,
        advantages=outcomes if compared else None,
        advantages_by=by,
        largest_advantage=largest,
        every_part=every_part,
        rewards=tuple(filtered_reward(completions[n], config) for n in drawn),
    )
    return Witnessed(numbers_B=numbers_B, request=request, rows=tuple(drawn), outcomes=outcomes)


def filtered_reward(completion: Completion, config: Config) -> float:
    """Returns the reward after the filters of `algorithm`; 0 for a reward that failed."""
    return 0.0 if completion.reward is None else scored(completion, config).reward


def with_groups_exchanged(
    estimator: Estimator, completions: Sequence[Completion], *, config: Config, draw: random.Random
) -> list[float] | None:
    """Returns the advantage that an estimator of the user's own gives each sample of a step, if the groups change their
    places and ids: an advantage may depend on all samples of the step, but not on the order of the groups. None if the
    estimator fails, or if a second call gives other advantages.

    The samples of a group stay in their order, because equal rewards of a group may be ranked by it. A group of equal
    rewards gets 0, because an estimator that divides by their deviation gives it rounding errors. A sample that is
    alone in its group gets 0 if all rewards of the step are equal.
    """
    members: dict[int, list[int]] = {}
    for n, completion in enumerate(completions):
        if completion.reward is not None:
            members.setdefault(completion.group, []).append(n)
    order = draw.sample([*members], len(members))
    rows = [n for group in order for n in members[group]]
    of_rows = [scored(completions[n], config) for n in rows]
    names = dict.fromkeys(name for sample in of_rows for name in sample.components)
    samples = Samples(
        rewards_N=torch.tensor([sample.reward for sample in of_rows]),
        group_ids_N=torch.tensor([id for id, group in zip(members, order, strict=True) for _ in members[group]]),
        completion_tokens_N=torch.tensor([sample.tokens for sample in of_rows]),
        components={name: torch.tensor([each.components.get(name, 0.0) for each in of_rows]) for name in names} or None,
    )
    try:
        first, second = compute_advantages(estimator, samples), compute_advantages(estimator, samples)
    except RunError:
        return None
    if not torch.allclose(first, second, rtol=EQUAL, atol=EQUAL * float(first.abs().max())):
        return None
    found, compared = [0.0] * len(completions), defaultdict[int, set[float]](set)
    for sample in of_rows:
        compared[sample.group].add(sample.reward)
    all_rewards = {sample.reward for sample in of_rows}
    for n, sample, advantage in zip(rows, of_rows, first.tolist(), strict=True):
        is_alone = len(members[sample.group]) == 1
        if len(all_rewards if is_alone else compared[sample.group]) > 1:
            found[n] = advantage
    return found


def without_formula(loss: object, config: Config) -> list[str]:
    """Returns a text for a loss, an estimator and each optimizer that the user wrote: what the witness checks of it,
    and what it does not check."""
    found = []
    if not isinstance(loss, ObjectiveLoss):
        found.append(
            f"the witness has no formula for algorithm.loss = {config.algorithm.loss_name}. It checks that the "
            "derivatives of a drawn group are the same without other groups, and 0 for tokens that are masked. It does "
            "not check that the loss is the one that you mean"
        )
    if isinstance(axes := resolve_advantage(advantage_of(config.algorithm)), OwnEstimator):
        found.append(
            f"the witness has no formula for algorithm.advantage = {axes.path}. It checks that the advantages of a "
            "drawn group do not depend on the order and the ids of the groups. It does not check that they are those "
            "that you mean"
        )
    for name, pool in config.rank_pools().items():
        if pool.optimizer.own is not None:
            found.append(
                f"the witness has no formula for {name}.optimizer.name = {pool.optimizer.name}. It checks the learning "
                "rate and the norm of the gradients. It does not check the new weights"
            )
    return found


def token_columns(estimator: TokenEstimator) -> list[str]:
    """Returns the columns that `token_findings` reads."""
    made = ["advantages", "returns"] if isinstance(estimator, GAE | VTrace) else ["advantages"]
    return ["token_mask", "sample_mask", *sorted({*estimator.reads} & set(_COLUMNS.values())), *made]


def read_token_findings(
    drawn: Witnessed | None,
    meta: KVBatchMeta,
    estimator: TokenEstimator | None,
    *,
    read: Callable[..., BatchedDataDict],
) -> list[Finding]:
    """Reads the drawn rows of a step with `read` (`TQPolicy.read_from_dataplane`), and returns `token_findings`.
    Returns an empty list if the advantages are not per token, or if no row was drawn."""
    if drawn is None or not drawn.rows or estimator is None:
        return []
    return token_findings(drawn, read(meta.subset(drawn.rows), select_fields=token_columns(estimator)), estimator)


def token_findings(drawn: Witnessed, rows: BatchedDataDict, estimator: TokenEstimator) -> list[Finding]:
    """Compares the advantages and returns that the ranks computed for each token of the drawn rows with those of the
    plain formulas. `rows` are the drawn rows with `token_columns`."""
    rule = _rule(estimator)
    if rule is None or drawn.outcomes is None:
        return []
    expected: dict[str, list[float]] = {"advantages": [], "returns": []}
    found: dict[str, list[float]] = {name: [] for name in expected if name in rows}
    for row, outcome in enumerate(drawn.outcomes):
        mask_S = rows["token_mask"][row] * rows["sample_mask"][row] > 0
        mask_S[0] = False
        columns = {
            name: rows[column][row][mask_S].double().tolist() for name, column in _COLUMNS.items() if column in rows
        }
        columns.setdefault("policy", [0.0] * int(mask_S.sum()))
        advantages, returns = of_tokens(rule, outcome, TokenColumns(**columns))
        expected["advantages"] += advantages
        expected["returns"] += returns
        for name, column in found.items():
            column += rows[name][row][mask_S].double().tolist()
    return [
        Finding(
            check="advantages",
            ratio=unlike(expected[name], values, whitened=name == "advantages" and estimator.whitening.whiten != "none")
            / EQUAL_TOKENS,
            words=f"the {name} of the drawn tokens are not those of the formula of {rule['name']}",
        )
        for name, values in found.items()
    ]


GROUPS_EXCHANGED = "own function, groups exchanged"
"""The kind of a finding that compares advantages with those of the user's estimator for groups in another order."""
EQUAL_TOKENS = 1e-4
"""Largest accepted difference of advantages and returns of tokens, as a share of the largest one: they are float32
sums over a row."""
_COLUMNS = {
    "policy": "prev_logprobs",
    "reference": "reference_policy_logprobs",
    "behaviour": "generation_logprobs",
    "values": "values",
}


def _rule(estimator: TokenEstimator) -> Axes | None:
    """Returns the name and the parameters of an estimator of token advantages, for the plain formulas; None if there is
    no plain formula for it."""
    kl = None if estimator.kl is None else msgspec.to_builtins(estimator.kl)
    match estimator:
        case GAE(gamma=gamma, lam=lam, value_lam=value_lam, length_alpha=alpha):
            own = {"name": "gae", "lam": lam, "value_lam": value_lam, "length_alpha": alpha}
        case VTrace(gamma=gamma):
            own = {"name": "vtrace"}
        case DiscountedReturns(gamma=gamma):
            own = {"name": "discounted"}
        case _:
            return None
    return {**own, "gamma": gamma, "kl": kl}


def rate_of_lease(lease: Lease, report: StepReport, *, config: Config) -> Finding:
    """Compares the learning rate of a step with the schedule. The schedule counts from the first step after
    `critic.warmup_steps`. For an earlier step, the rate of the schedule's step 0 is expected."""
    learner, only_critic = config.learner, 0 if config.critic is None else config.critic.warmup_steps
    number = max(0, lease.step - only_critic)
    expected = rate_of_step(learner.optimizer, step=number, total_steps=learner.total_steps)
    return Finding(
        check="optimizer",
        ratio=abs(report.learning_rate - expected) / (EQUAL * expected) if expected else report.learning_rate,
        words=f"the step had the learning rate {report.learning_rate:.9g}, and its schedule gives {expected:.9g}",
    )


class ExpectedBeta:
    """Computes the β of the penalty with `control` by the plain formula, from the KL of the steps before. `before` is
    the last record of a resumed run. `value` is the β of the next step; None if no penalty has `control`."""

    def __init__(self, config: Config, before: StepRecord | None = None) -> None:
        self._penalty = controlled_penalty(config)
        self._only_critic = 0 if config.critic is None else config.critic.warmup_steps
        self.value: float | None = None if self._penalty is None else self._penalty["beta"]
        known = None if before is None else before.number("penalty_beta")
        if before is not None and known is not None and self._penalty is not None:
            self.value = known
            self.advance(before.step, before.kl_nats)

    def advance(self, step: int, kl_nats: Mapping[str, float]) -> None:
        """Computes the β of the next step. `kl_nats` has the recorded KL of `step`, by the name of the other policy."""
        if self.value is not None and self._penalty is not None and step >= self._only_critic:
            kl = kl_nats.get(self._penalty["q"])
            self.value = self.value if kl is None else next_beta(self.value, self._penalty["control"], kl)

    def finding(self, lease: Lease, report: StepReport) -> Finding | None:
        """Compares the β with which the ranks have trained a step with the expected one, and goes on to the next
        step. Returns None if no penalty has `control`."""
        if (expected := self.value) is None:
            return None
        self.advance(lease.step, report.kl_nats)
        found = report.diagnostics.get("penalty_beta", math.nan)
        words = f"a penalty had β = {found:.9g}, and the KL of the steps before gives {expected:.9g}"
        return Finding(check="bounds", ratio=abs(found - expected) / (EQUAL * expected), words=words)


def controlled_penalty(config: Config) -> Axes | None:
    """Returns the axes (the settings) of the penalty with `control`, whose β follows from the KL of the steps before.
    Returns None if the objective has no such penalty, or for a loss of the user's own."""
    if own_loss(config.algorithm) is not None:
        return None
    penalty = resolve_objective(config.algorithm.loss, config.algorithm.overrides).controlled()
    axes: Axes | None = None if penalty is None else msgspec.to_builtins(penalty)
    return axes


def counts_of_step(lease: Lease, report: StepReport, *, config: Config) -> Finding:
    """Compares how many samples and tokens the ranks trained with how many of the lease are not masked."""
    completions = completions_of(lease)
    kept = trained(completions, axes=sample_axes(config), config=config)
    [whole] = counts(completions, kept, rows_per_update=len(completions), config=config)
    left_out = report.diagnostics.get("nonfinite_tokens", 0.0)
    without = Counts(tokens=whole.tokens - left_out, sequences=whole.sequences)
    return counts_finding(without, tokens=report.trained_tokens, sequences=report.trained_samples)


def sample_axes(config: Config) -> Axes | None:
    """Returns the axes (the settings of the plain formulas) that give each sample its advantage. For an estimator of
    token advantages, they give its input for each sample; with a critic, that is the reward itself. Returns None for an
    estimator of the user's own."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    if isinstance(axes, OwnEstimator):
        return None
    outcome = Outcome() if isinstance(axes, CriticBased) else axes
    if has_token_advantages(axes):  # whitening is for the token advantages, not for their input
        outcome = msgspec.structs.replace(outcome, whiten="none", keep_mean=False)
    found: Axes = msgspec.to_builtins(outcome)
    return found


def completions_of(lease: Lease) -> list[Completion]:
    return [completion for group in lease.groups for completion in _of_group(group, step=lease.step)]


def _of_group(group: LeasedGroup, *, step: int) -> Sequence[Completion]:
    meta, stale = group.meta, group.stale_tokens(step)
    return [
        Completion(
            group=meta.group,
            reward=reward,
            tokens=meta.completion_tokens[i],
            stale=stale[i],
            truncated=meta.truncated[i],
            components={name: values[i] or 0.0 for name, values in meta.components.items()},
        )
        for i, reward in enumerate(meta.rewards)
    ]


def _drawn(lease: Lease, teaches: Sequence[bool], *, draw: random.Random, most_tokens: int) -> list[int]:
    """Draws a group, and returns the indices of its first rows: as many as have at most `most_tokens` tokens together.
    `teaches` says for each sample of the step whether it has a gradient. A group without such a sample is drawn only if
    there is no other group. Returns an empty list if no row fits."""
    fit = list[list[int]]()
    end = 0
    for group in lease.groups:
        start, end = end, end + len(group.meta.rewards)
        lengths = accumulate(group.meta.row_tokens)
        fit.append([n for n, tokens in zip(range(start, end), lengths, strict=True) if tokens <= most_tokens])
    teach = [rows for rows in fit if any(teaches[n] for n in rows)]
    return draw.choice(teach or fit)
