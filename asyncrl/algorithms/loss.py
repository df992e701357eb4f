"""Computes any `Objective` on tensors: a `LossFunction` that sums the losses of the tokens.

Legend: B rows, S tokens, V vocabulary, T = S − 1. The first token of a row has no prefix and is never trained.

Invariants, in addition to those of `token_terms.py`:

- Importance weights and gates never change a denominator.
- Values at masked positions have no effect, even if they are NaN.
- Sequences that are packed into one row give the same loss and gradient as sequences that are padded rows.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
import torch

from asyncrl.algorithms.calibration import objective_statistics
from asyncrl.algorithms.interfaces import (
    LOSS_ARGUMENTS,
    MODEL_OUTPUTS,
    LossFunction,
    LossInputType,
    LossType,
    MetricNormalization,
    input_type_of,
    masked_mean,
    misfit,
    with_arguments,
)
from asyncrl.algorithms.objective import Aggregation, Objective, centered_kernel, pooled_sources
from asyncrl.algorithms.presets import own_loss, resolve_objective
from asyncrl.algorithms.step_statistics import StepStatistic, statistics_of
from asyncrl.algorithms.token_terms import Segments, TokenTerms, centering_slopes, is_half, token_terms, wide
from asyncrl.config.import_path import OwnCallable, fitting_options, resolve
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import TOP_IDS, TOP_LOGPROBS
from asyncrl.errors import ConfigError, ImpreciseColumns, RunError
from asyncrl.user_code import describe_error

KEY = "algorithm.loss"
SOURCE_COLUMNS: Mapping[str, str] = {
    "proximal": "prev_logprobs",
    "behaviour": "generation_logprobs",
    "reference": "reference_policy_logprobs",
}
"""The column [B, S] that contains each policy's log-probs."""


def _divisor(count: torch.Tensor) -> torch.Tensor:
    """Returns the count, or 1 if it is 0, so that a sum of no tokens divided by it is 0 and not NaN (F24 in
    docs/faults.md)."""
    return torch.where(count > 0, count, 1)


class ObjectiveLoss:
    """An `Objective` as a `LossFunction`.

    It reads the columns `advantages` and `token_mask` [B, S], `sample_mask` [B], and the columns in `columns`. If it
    gets logits, it also reads `input_ids` [B, S]. The columns in `columns` are [B, S], except `top_ids` and
    `top_logprobs`, which are [B, S, L], and `group_ids` and `rewards`, which are [B]. If one of the last two is needed,
    it also reads the column that `asyncrl.algorithms.shares` makes of it. The optional column `segment_ids` [B, S]
    gives the sequence of each token in a packed row. Raises RunError with the names of missing columns in `columns`, or
    with the name of a missing column that `shares` makes.

    Its metrics are shares of the trained tokens of the global batch. A micro-batch returns its part of each share, and
    the parts are added.

    With an entropy penalty, it needs logits, or log-probs and entropies. With `centering` it needs logits, or log-probs
    and the centering of each token (`asyncrl.policy.logprobs`).
    """

    metric_normalizations: Mapping[str, MetricNormalization] = {
        "clipped_ratio": MetricNormalization.TOKENS,
        "gated_ratio": MetricNormalization.TOKENS,
    }

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        by_sequence = objective.aggregation not in (Aggregation.TOKEN_MEAN, Aggregation.SUM)
        self.loss_type = LossType.SEQUENCE_LEVEL if by_sequence else LossType.TOKEN_LEVEL
        self.needs_entropy = any(penalty.kind == "entropy" for penalty in objective.penalties)
        self.needs_centering = objective.centering is not None
        self.columns = _columns(objective)
        pooled = pooled_sources(objective)
        self._pooled_columns = {SOURCE_COLUMNS[source] for source in pooled - {"current"}} | (
            {"next_token_logits", "next_token_logprobs"} if "current" in pooled else set()
        )
        needs_logits = self.needs_entropy or self.needs_centering
        self.input_type = LossInputType.LOGIT if needs_logits else LossInputType.LOGPROB

    @property
    def statistics(self) -> Mapping[str, StepStatistic]:
        """The numbers of the whole step on which parts of the objective depend. `calibrated` puts them into the
        objective, so that the call needs no argument `statistics`."""
        return objective_statistics(self.objective)

    def __call__(
        self,
        next_token_logits: torch.Tensor | None = None,
        data: BatchedDataDict | None = None,
        global_valid_seqs: torch.Tensor | None = None,
        global_valid_toks: torch.Tensor | None = None,
        *,
        next_token_logprobs: torch.Tensor | None = None,
        next_token_entropies: torch.Tensor | None = None,
        next_token_centering: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if data is None or global_valid_seqs is None or global_valid_toks is None:
            raise TypeError(
                "a loss was called without data, global_valid_seqs or global_valid_toks: pass all three, as "
                "asyncrl.algorithms.interfaces.LossFunction describes"
            )
        self._check_columns(data)
        given = {"next_token_logits": next_token_logits, "next_token_logprobs": next_token_logprobs}
        self.check_precision({**data, **{name: value for name, value in given.items() if value is not None}})
        if next_token_logits is not None:
            next_token_logprobs = gather_logprobs(next_token_logits, input_ids_BS=data["input_ids"])
            next_token_entropies = entropy(next_token_logits) if self.needs_entropy else None
            if self.needs_centering:
                next_token_centering = centering(self.objective, next_token_logits, data)
        lacks = ["next_token_entropies"] if self.needs_entropy and next_token_entropies is None else []
        lacks += ["next_token_centering"] if self.needs_centering and next_token_centering is None else []
        if next_token_logprobs is None:
            lacks = [f"next_token_{self.input_type.value}s"]
        if next_token_logprobs is None or lacks:
            raise TypeError(
                f"this loss was called without {' and '.join(lacks)}: pass what is missing, or logits, as "
                "asyncrl.algorithms.interfaces.LossFunction describes"
            )
        # converted once here: if each use converted it, the gradients of the uses would be added in half precision
        next_token_logprobs = wide(next_token_logprobs)
        terms = self.terms(
            data,
            logprobs_BT=next_token_logprobs,
            entropy_BT=next_token_entropies,
            centering_BT=next_token_centering,
        )
        segments = _segments(data)
        sequences, tokens = _divisor(global_valid_seqs), _divisor(global_valid_toks)
        a_BT = self._coefficients(data, segments, sequences=sequences, tokens=tokens)
        weight_BT = data["token_mask"][:, 1:].float() * data["sample_mask"].float().unsqueeze(1)
        loss = (a_BT * terms.loss_BT).sum()
        for penalty in self.objective.penalties:
            if penalty.kind == "positive_nll":
                lp_BT = torch.where(segments.mask_BT, next_token_logprobs, 0.0)
                loss = loss - penalty.beta * (_share(data, "positive_share") * weight_BT * lp_BT).sum()
        return loss, {
            "clipped_ratio": float(masked_mean(terms.clipped_BT, weight_BT, global_valid_toks)),
            "gated_ratio": float(masked_mean(terms.gated_BT, weight_BT, global_valid_toks)),
        }

    def _coefficients(
        self, data: BatchedDataDict, segments: Segments, *, sequences: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Returns a_t [B, T], the coefficient by which each token's loss is multiplied before the sum; zero at masked
        tokens.

        Masks are weights: the global counts `sequences` and `tokens` are their sums, and a row whose sample mask is ½
        counts half.
        """
        objective = self.objective
        token_BT = torch.where(segments.mask_BT, data["token_mask"][:, 1:].float(), 0.0)
        share_BT: torch.Tensor = token_BT * data["sample_mask"].unsqueeze(1).float()
        if objective.aggregation is Aggregation.PROMPT_MEAN:
            return share_BT * _share(data, "prompt_share")
        if objective.aggregation is Aggregation.TOKEN_MEAN:
            return share_BT / tokens
        if objective.aggregation is Aggregation.SEQUENCE_MEAN:
            return share_BT / _divisor(segments.pool(token_BT, "sum")) / sequences
        if objective.aggregation is Aggregation.SEQUENCE_SUM:
            return share_BT / sequences
        if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT:
            assert objective.constant is not None, "build_loss sets it"
            return share_BT / (sequences * objective.constant)
        return share_BT

    def check_precision(self, columns: Mapping[str, Any]) -> None:
        """Raises ImpreciseColumns if a column in half precision is used in a ratio, weight or gate of whole sequences.

        The rounding errors of a sequence's tokens add up. With log-probs rounded to bfloat16, the gradient of a
        product of 4,096 ratios has an error of 0.4 of its norm. Converting the rounded values to float32 does not
        remove the error. A column that is only used in ratios of single tokens is converted and accepted.
        """
        for name in sorted(self._pooled_columns & set(columns)):
            if is_half(columns[name].dtype):
                raise ImpreciseColumns(
                    f"{name} is {str(columns[name].dtype).removeprefix('torch.')}: this loss combines log-probs over "
                    "whole sequences, where the rounding errors of half precision add up; compute the column in "
                    "float32 (logits.float() before log_softmax), or choose a loss whose level and pools are `token`"
                )

    def _check_columns(self, data: BatchedDataDict) -> None:
        if missing := sorted(self.columns - set(data)):
            hints = [hint for name, hint in _HINTS.items() if name in missing]
            raise RunError(
                f"algorithm.loss reads {', '.join(missing)}, but the rows do not have them; add these columns"
                f"{''.join(hints)}"
            )

    def terms(
        self,
        data: BatchedDataDict,
        *,
        logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor | None = None,
        centering_BT: torch.Tensor | None = None,
    ) -> TokenTerms:
        """Returns the loss of every token before the aggregation, all penalties but `positive_nll` included. Also
        returns the part of it that the advantage multiplies, and which tokens are clipped or gated."""
        self._check_columns(data)
        return token_terms(
            self.objective,
            logprobs_BT=logprobs_BT,
            sources=self.sources(lambda name: data[name][:, 1:], logprobs=logprobs_BT),
            advantages_BT=data["advantages"][:, 1:],
            segments=_segments(data),
            entropy_BT=entropy_BT,
            centering_BT=centering_BT,
        )

    def sources(self, column: Callable[[str], torch.Tensor], *, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the log-probs of the other policies that the objective reads, by the policy's name. `column` returns
        a column of some tokens by its name, and `logprobs` are the current log-probs of these tokens."""
        found = {name: column(source) for name, source in SOURCE_COLUMNS.items() if source in self.columns}
        if self.objective.proximal == "interpolated":
            found["proximal"] = interpolated_policy(
                logprobs, behaviour=found["behaviour"], staleness=column("staleness")
            )
        return found


def interpolated_policy(logprobs: torch.Tensor, *, behaviour: torch.Tensor, staleness: torch.Tensor) -> torch.Tensor:
    """Returns proximal log-probs without a forward pass (A-3PO, 2512.06547).

    For a token that is d versions old, the result is behaviour + (1 − 1/d) · (sg lp − behaviour), where sg is
    stop-gradient. For d = 0 it is sg lp, the current log-probs.
    """
    current = logprobs.detach()
    between = behaviour + (1 - 1 / staleness.clamp(min=1)) * (current - behaviour)
    # for d = 0, behaviour + (current − behaviour) would differ from current by a rounding error, and a gate on the sign
    # of current − proximal would drop tokens
    return torch.where(staleness > 0, between, current)


def _segments(data: BatchedDataDict) -> Segments:
    mask_BT = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)) > 0
    return Segments(mask_BT, data["segment_ids"][:, 1:] if "segment_ids" in data else None)


def _share(data: BatchedDataDict, name: str) -> torch.Tensor:
    """Returns the column `name`, [B, 1] or [B, T]: coefficients that `asyncrl.algorithms.shares` adds to the rows.
    Raises RunError if the rows do not have it."""
    if name not in data:
        raise RunError(
            f"the loss reads {name}, a coefficient that depends on counts of the whole update, but the rows do not "
            "have it: call Policy.train, which adds it, or call asyncrl.algorithms.shares.with_shares on the global "
            "batch in your own loop"
        )
    column: torch.Tensor = data[name]
    return column.unsqueeze(1) if column.ndim == 1 else column[:, 1:]


def _columns(objective: Objective) -> frozenset[str]:
    """Returns the columns that an objective reads besides advantages and masks.

    These are the log-probs of other policies, the columns from which its proximal policy is interpolated, the sampler's
    most likely tokens for `centering`, and the columns by which `asyncrl.algorithms.shares` counts.
    """
    counted = {"group_ids"} if objective.aggregation is Aggregation.PROMPT_MEAN else set()
    if any(penalty.kind == "positive_nll" for penalty in objective.penalties):
        counted.add("rewards")
    if objective.centering is not None:
        counted |= {TOP_IDS, TOP_LOGPROBS}
    sources = objective.sources()
    if objective.proximal == "interpolated":
        counted.add("staleness")
        sources = sources - {"proximal"} | {"behaviour"}
    return frozenset({SOURCE_COLUMNS[name] for name in sources} | counted)


_HINTS = {
    "staleness": "; `staleness` is computed from `weight_versions` if a step is passed to train",
    "group_ids": "; `group_ids` has one int for each row [B], equal for the rows of one prompt",
    "rewards": "; `rewards` has one number for each row [B]",
    TOP_IDS: "; `top_ids` and `top_logprobs` [B, S, L] are columns of a run with generator.logprobs = L",
}


def gather_logprobs(logits_BSV: torch.Tensor, *, input_ids_BS: torch.Tensor) -> torch.Tensor:
    """Returns the log-probs [B, T] of the tokens 1 to S − 1, float32."""
    logits_BTV = logits_BSV[:, :-1].float()
    chosen_BT = logits_BTV.gather(-1, input_ids_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen_BT - logits_BTV.logsumexp(dim=-1)


def centering(objective: Objective, logits_BSV: torch.Tensor, data: BatchedDataDict) -> torch.Tensor:
    """Returns the centering of the tokens 1 to S − 1 (`Objective.centering`), [B, T]. Differentiable. Reads `top_ids`
    and `top_logprobs` [B, S, L]. The softmax is over all logits: the column `support_ids` is not read."""
    logits_BTV = wide(logits_BSV[:, :-1])
    ids_BTL, log_q_BTL = data[TOP_IDS][:, 1:].long(), data[TOP_LOGPROBS][:, 1:]
    listed_BTL = ids_BTL >= 0
    log_p_BTL = logits_BTV.gather(-1, ids_BTL.clamp(min=0)) - logits_BTV.logsumexp(dim=-1, keepdim=True)
    slopes_BTL = centering_slopes(
        log_p=log_p_BTL,
        log_q=log_q_BTL,
        listed=listed_BTL,
        has_rest=listed_BTL.sum(-1) < logits_BTV.shape[-1],
        kernel=centered_kernel(objective),
    )
    return (slopes_BTL * log_p_BTL).sum(-1)


def entropy(logits_BSV: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of each next token's distribution, in nats, [B, T]. Differentiable."""
    logits_BTV = logits_BSV[:, :-1].float()
    # row by row, because the probabilities of a whole micro-batch would need as much memory again as its logits
    rows = [logits_TV.logsumexp(-1) - (logits_TV.softmax(-1) * logits_TV).sum(-1) for logits_TV in logits_BTV]
    return torch.stack(rows) if rows else logits_BTV.new_zeros(logits_BTV.shape[:2])


def build_loss(config: Config) -> LossFunction:
    """Returns the loss that the config names: a preset with its overrides, axes that the user wrote, or an import path.

    An import path must name either a LossFunction, or a class or factory that returns one.
    """
    section = config.algorithm
    own = own_loss(section)
    if own is None:
        objective = resolve_objective(section.loss, section.overrides)
        if objective.aggregation is Aggregation.SEQUENCE_SUM_CONSTANT and objective.constant is None:
            objective = msgspec.structs.replace(objective, constant=float(config.generator.max_completion_tokens))
        return ObjectiveLoss(objective)
    if section.overrides:
        raise ConfigError(
            f"algorithm.overrides: {sorted(section.overrides)} replace axes of a preset, but algorithm.loss is the "
            f"import path {own.path!r}, which has no axes: remove algorithm.overrides"
        )
    loss = load_loss(own)
    if config.has_supports and input_type_of(loss) != LossInputType.LOGPROB:
        raise ConfigError(
            f"generator.top_k = {config.generator.top_k}: each token is sampled among the most probable tokens only, "
            f"but the loss {own.path!r} reads the logits of all tokens. Use a loss with the input_type "
            f"{LossInputType.LOGPROB.value}, or remove generator.top_k"
        )
    return loss


# Loads a loss that the user wrote and that `algorithm.loss` names by import path.


def load_loss(own: OwnCallable) -> LossFunction:
    """Returns the loss at the import path.

    The path must name either a LossFunction, or a class or factory that returns a LossFunction. The options are keyword
    arguments: of the class or factory, or of every call of the LossFunction. Raises ConfigError if the path cannot be
    imported, if the options do not fit, if the class or factory fails, or if the loss cannot be called as the policy
    calls one.
    """
    found = resolve(own.path, key=KEY)
    if _is_loss(found, has_options=bool(own.options)):
        loss: Any = _with_options(found, own)
    else:
        options = fitting_options(found, own.options, key=KEY, name=own.path)
        try:
            loss = found(**options)
        except Exception as error:  # a factory that the user wrote may raise anything
            given = f"with the options {', '.join(options)}" if options else "without arguments"
            raise ConfigError(
                f"algorithm.loss: {own.path!r} was called {given} to make a loss, and it raised "
                f"{describe_error(error)}; fix it, or name a LossFunction"
            ) from error
    if not _is_loss(loss):
        raise ConfigError(
            f"algorithm.loss: {own.path!r} gives a {type(loss).__name__}, which is not a LossFunction; it must be "
            f"callable with logits or log-probs, data and the global counts (see asyncrl.algorithms.interfaces)"
        )
    if problem := _call_problem(loss):
        raise ConfigError(f"algorithm.loss: {own.path!r} cannot be called as a loss: {problem}")
    return cast(LossFunction, loss)


def _with_options(loss: Callable[..., Any], own: OwnCallable) -> Callable[..., Any]:
    """Returns the loss with its options as keyword arguments of every call, and with its optional attributes. A loss
    whose signature names neither logits nor log-probs gets logits and data as positional arguments."""
    if not own.options:
        return loss
    try:
        named = {*inspect.signature(loss).parameters}
    except (TypeError, ValueError):  # written in C
        named = set()
    values = 0 if named & {*MODEL_OUTPUTS} else 2
    options = fitting_options(loss, own.options, key=KEY, name=own.path, values=values, given=LOSS_ARGUMENTS)
    bound: Callable[..., Any] = with_arguments(loss, **options)
    return bound


def _call_problem(loss: Any) -> str | None:
    """Returns why the loss's signature fits none of the calls that the policy may make, or why an attribute of the loss
    is wrong; None if it fits one call, or if a loss that is written in C has no signature."""
    try:
        kind, has_statistics = input_type_of(loss), bool(statistics_of(loss))
        signature = inspect.signature(loss)
    except TypeError as error:
        return str(error)
    except ValueError as error:
        # `input_type` of the loss is unknown: an error. Or the loss is written in C and has no signature: not checked.
        return str(error) if hasattr(loss, "input_type") else None
    counts: dict[str, None] = dict.fromkeys(("global_valid_seqs", "global_valid_toks"))
    counts |= {"statistics": None} if has_statistics else {}
    logits = (["next_token_logits"], ["logits"], ["next_token_logits", "logits"])
    calls: list[tuple[list[None], dict[str, None]]] = [([], {"data": None, **dict.fromkeys(names)}) for names in logits]
    calls.append(([None, None], {}))
    if kind == LossInputType.LOGPROB:
        calls = [([], {"data": None, "next_token_logprobs": None})]
    problems = [misfit(signature, *values, **keywords, **counts) for values, keywords in calls]
    if None in problems:
        return None
    takes = "data, global_valid_seqs, global_valid_toks, next_token_logprobs"
    if kind == LossInputType.LOGIT:
        takes = "next_token_logits, data, global_valid_seqs, global_valid_toks"
    takes += ", statistics" if has_statistics else ""
    return (
        f"{problems[-1]}; it must take ({takes}); other parameters are options, which algorithm.loss sets as in "
        f"`{{name: …, cap: 3.0}}`; its parameters are {signature}"
    )


def _is_loss(value: Any, *, has_options: bool = False) -> bool:
    """Returns whether a callable is a LossFunction, and not a class or a factory of one.

    A callable with an attribute `input_type`, or with a parameter in `LOSS_ARGUMENTS`, is a loss. Any other function is
    a loss if it has a parameter without a default. With `has_options`, it must also take any keyword, because the
    policy passes the global counts by name; else it is a factory.
    """
    if isinstance(value, type) or not callable(value):
        return False
    if hasattr(value, "input_type"):
        return True
    arguments = inspect.signature(value).parameters
    if {*arguments} & LOSS_ARGUMENTS:
        return True
    takes_any = any(each.kind is each.VAR_KEYWORD for each in arguments.values())
    needed = [a for a in arguments.values() if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    return bool(needed) and (takes_any or not has_options)
