"""What the learner asks the witness in a step: which group is drawn, and what its lease leaves to train.

`asyncrl.witness` has the formulas, and `asyncrl.ranks.witnessed` the second pass.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import torch

from asyncrl.algorithms.baselines import CriticBased, Outcome, OwnEstimator, has_token_advantages, resolve_advantage
from asyncrl.algorithms.presets import advantage_of
from asyncrl.algorithms.token_estimators import DiscountedReturns, TokenEstimator
from asyncrl.buffer.records import Lease, LeasedGroup
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.ranks.report import StepReport
from asyncrl.value.estimators import GAE, VTrace
from asyncrl.witness.advantages import TokenColumns, of_tokens, unlike
from asyncrl.witness.judge import Finding, Request, counts_finding
from asyncrl.witness.objective import Axes, Counts
from asyncrl.witness.step import Completion, advantages, counts, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """What is witnessed in a step. `numbers_B` has the number of each row in the drawn group, −1 for other rows; `rows`
    are the drawn rows in order. `outcomes` are their advantages, or what an estimator of tokens begins with: the reward
    less its baseline. None with an estimator of the user's own."""

    numbers_B: torch.Tensor
    request: Request
    rows: tuple[int, ...]
    outcomes: tuple[float, ...] | None


def is_witnessed(step: int, *, first: bool, config: Config) -> bool:
    """Returns whether a step is witnessed. `first` is true for the first step after a start of the learner."""
    every = config.witness.every_steps
    return every > 0 and (first or step % every == 0)


def witnessed(lease: Lease, *, first: bool, config: Config, rows_per_update: int) -> Witnessed:
    """Draws a group of the lease, and returns what its samples must be trained with by the plain formulas. `first` is
    true for the first step after a start of the learner."""
    axes, completions = _sample_axes(config), _completions(lease)
    kept = trained(completions, axes=axes, config=config)
    found = None if axes is None else advantages(completions, axes=axes, config=config)
    teaches = [is_kept and (found is None or found[n] != 0) for n, is_kept in enumerate(kept)]
    drawn = _drawn(lease, teaches, seed=config.run.seed, most_tokens=config.witness.group_tokens)
    numbers_B = torch.full((len(completions),), -1)
    numbers_B[drawn] = torch.arange(len(drawn))
    outcomes = None if found is None else tuple(found[n] for n in drawn)
    by_token = has_token_advantages(resolve_advantage(advantage_of(config.algorithm)))
    of_updates = counts(completions, kept, rows_per_update=rows_per_update, config=config)
    largest = max(map(abs, found or [0.0]))
    request = Request(
        counts=of_updates,
        advantages=None if by_token else outcomes,
        largest_advantage=largest,
        every_part=first,
    )
    return Witnessed(numbers_B=numbers_B, request=request, rows=tuple(drawn), outcomes=outcomes)


def token_columns(estimator: TokenEstimator) -> list[str]:
    """Returns the columns that `token_findings` reads."""
    made = ["advantages", "returns"] if isinstance(estimator, GAE | VTrace) else ["advantages"]
    return ["token_mask", "sample_mask", *sorted({*estimator.reads} & set(_COLUMNS.values())), *made]


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


EQUAL_TOKENS = 1e-4
"""Largest accepted difference of advantages of tokens, as a share of the largest: they are float32 sums over a row."""
_COLUMNS = {
    "policy": "prev_logprobs",
    "reference": "reference_policy_logprobs",
    "behaviour": "generation_logprobs",
    "values": "values",
}


def _rule(estimator: TokenEstimator) -> Axes | None:
    """Returns the numbers of an estimator of tokens with its name; None for one of another kind."""
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


def counts_of_step(lease: Lease, report: StepReport, *, config: Config) -> Finding:
    """Compares the samples and tokens that the ranks trained with those that the lease and its masks leave."""
    completions = _completions(lease)
    kept = trained(completions, axes=_sample_axes(config), config=config)
    [whole] = counts(completions, kept, rows_per_update=len(completions), config=config)
    left_out = report.diagnostics.get("nonfinite_tokens", 0.0)
    without = Counts(tokens=whole.tokens - left_out, sequences=whole.sequences)
    return counts_finding(without, tokens=report.trained_tokens, sequences=report.trained_samples)


def _sample_axes(config: Config) -> Axes | None:
    """Returns the axes that give each sample its advantage, or the outcome with which an estimator of tokens begins:
    that is the reward itself with a critic. None for an estimator of the user's own."""
    axes = resolve_advantage(advantage_of(config.algorithm))
    if isinstance(axes, OwnEstimator):
        return None
    outcome = Outcome() if isinstance(axes, CriticBased) else axes
    if has_token_advantages(axes):  # the tokens are whitened, and not the samples
        outcome = msgspec.structs.replace(outcome, whiten="none", keep_mean=False)
    found: Axes = msgspec.to_builtins(outcome)
    return found


def _completions(lease: Lease) -> list[Completion]:
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


def _drawn(lease: Lease, teaches: Sequence[bool], *, seed: int, most_tokens: int) -> list[int]:
    """Returns the rows of the drawn group, as many as have at most `witness.group_tokens` tokens together. A group of
    which no sample teaches has no gradient, so it is drawn only if there is no other. Returns none if no row fits."""
    fit = list[list[int]]()
    end = 0
    for group in lease.groups:
        start, end = end, end + len(group.meta.rewards)
        lengths = accumulate(group.meta.row_tokens)
        fit.append([n for n, tokens in zip(range(start, end), lengths, strict=True) if tokens <= most_tokens])
    teach = [rows for rows in fit if any(teaches[n] for n in rows)]
    draw = random.Random(f"{seed} {lease.incarnation} {lease.step}")
    return draw.choice(teach or fit)
